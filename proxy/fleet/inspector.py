"""Finds instances that do not fit each other or the gateway, and reports each change once.

Health probes do not see such instances, which are healthy, and neither do answers. The inspector compares the reports
of engines. One worker also reads the engines' counters of transferred KV, for all workers and only while there are
handoffs. All tasks end with the `async with` block.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.handoff_verdicts import (
    CounterWatch,
    ExpiryTotals,
    ExpiryWatch,
    HandoffVerdict,
    PairWatch,
    find_culprits,
)
from proxy.balancer.incompatibilities import CACHE_FLAGS, CompatibilityMonitor, IncompatibilityKind
from proxy.balancer.models import ServedModels, minority_instances
from proxy.balancer.recognition import EngineReport, find_connector_mismatch
from proxy.balancer.shared.scoreboard import LANES, HandoffCount, Scoreboard
from proxy.common.backend import Backend, Role
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.observe import logs
from proxy.settings import CONNECTOR_TRAITS, ConnectorTraits
from proxy.upstream import EngineClient, EngineRequestError
from proxy.wire.exposition import (
    parse_completed_work,
    parse_expired_leases,
    parse_failed_transfers,
    parse_prompt_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.balancer.engines import EngineIdentity, EngineKeys
    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pool
    from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.inspector.inspector")
_log_logger = logging.getLogger("proxy.inspector.telling")

_COMPARISON_SECONDS: Final = 1.0
_METRICS_PATH: Final = "/metrics"
_METRICS_TIMEOUT_SECONDS: Final = 5.0
_MAX_METRICS_BYTES: Final = 4 * 1024 * 1024
# Healthy instances are read once in this number of intervals: an engine streams nothing while it renders its metrics,
# which takes some milliseconds.
_HEALTHY_INTERVALS: Final = 4
# The first handoffs of an instance are judged soon. Each reading without a verdict doubles the time to the next one.
_FIRST_READING_SECONDS: Final = 0.1

# Hints for the operator

NOT_FETCHED: Final[Mapping[Role, str]] = {
    Role.DECODE: (
        "does not fetch the KV cache that prefillers offer: it computes these prompts again, and KV stays pinned on "
        "the prefillers. Check that --kv-transfer-config is set, with the connector of the prefillers"
    ),
    Role.PREFILL: (
        "keeps KV that no decoder fetches, while decoders fetch the KV of others: they compute its prompts again. "
        "Check that decoders reach the address in its kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), and "
        "that its --kv-transfer-config equals that of the others"
    ),
}
"""Hints for instances between which no KV is transferred, by role."""
EXPIRES: Final = (
    "frees KV that no decoder has fetched in time (vllm:nixl_num_kv_expired_reqs_total or "
    "vllm:mooncake_num_kv_expired_reqs_total grows). Check that decoders reach the address in its kv_transfer_params "
    "(VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT) or its bootstrap server, and look for failed handshakes and transfers in "
    "their logs"
)
"""Hint for a prefiller whose leases expire."""
NOT_STORED: Final[Mapping[Role, str]] = {
    Role.DECODE: (
        "finds nothing in the KV store: it computes the prompts of prefilled requests again. Check that it uses the "
        "store of the prefillers, and that block size and PYTHONHASHSEED are equal"
    ),
    Role.PREFILL: (
        "stores nothing that decoders find, while they find the KV of others: they compute its prompts again. Check "
        "that it uses the same store, and that block size and PYTHONHASHSEED are equal"
    ),
}
"""Hints for instances that do not exchange KV through the store, by role."""
_FITS_AGAIN: Final[Mapping[IncompatibilityKind, str]] = {
    IncompatibilityKind.KV_NOT_FETCHED: "it fetches the KV cache that prefillers offer",
    IncompatibilityKind.NO_KV_PARAMS: "its answers have KV parameters for decoders",
    IncompatibilityKind.CONNECTOR: "it runs what this gateway's connector serves",
    IncompatibilityKind.ROLE: "it has its configured role",
    IncompatibilityKind.BOOTSTRAP: "its bootstrap server answers",
    IncompatibilityKind.MODEL: "it serves a model that others serve, too",
    IncompatibilityKind.ENGINE_KEY: "it accepts the key",
    IncompatibilityKind.GATEWAY: "it is an engine",
}


def log_incompatibility(backend: Backend, kind: IncompatibilityKind, problem_text: str | None) -> None:
    """Log one line for an instance that does not fit. `problem_text` None: it fits again."""
    if problem_text is not None:
        _log_logger.warning("inspector: %s instance %s %s", backend.role, backend.name, problem_text, extra=logs.ALWAYS)
        return
    why = _FITS_AGAIN[kind]
    if kind is IncompatibilityKind.KV_NOT_FETCHED and backend.role is Role.PREFILL:
        why = "decoders fetch its KV"
    _log_logger.info("inspector: %s instance %s fits again: %s", backend.role, backend.name, why, extra=logs.ALWAYS)


def log_missing_cache_report(prefiller: Backend) -> None:
    """Log one line for a prefiller that does not report cached tokens."""
    line = (
        "inspector: cached_tokens is not reported, so pdproxy cannot learn which prompts are in the prefix cache: "
        f"start the engine with {CACHE_FLAGS}; prefill instance %s"
    )
    _log_logger.warning(line, prefiller.name, extra=logs.ALWAYS)


def log_pair(prefiller: Backend, decoder: Backend, *, has_recovered: bool) -> None:
    """Log one line for a pair that transfers no KV, although both instances do with others, or that does again."""
    if has_recovered:
        line = "inspector: prefill instance %s and decode instance %s fit again: KV is fetched"
        level = logging.INFO
    else:
        line = (
            "inspector: prefill instance %s and decode instance %s do not fit each other: the decoder computes this "
            "prefiller's prompts again. Check that it reaches the address in the prefiller's kv_transfer_params"
        )
        level = logging.WARNING
    _log_logger.log(level, line, prefiller.name, decoder.name, extra=logs.ALWAYS)


async def fetch_metrics(engine_client: EngineClient, engine_keys: EngineKeys, backend: Backend) -> bytes | None:
    """Return an engine's metrics as text, or None if it does not answer with status 200."""
    try:
        answer = await engine_client.get_body(
            backend.url,
            _METRICS_PATH,
            _METRICS_TIMEOUT_SECONDS,
            engine_keys.credential_headers(backend),
            _MAX_METRICS_BYTES,
        )
    except EngineRequestError:
        return None
    return answer.body if answer.status == 200 else None


async def do_counters_grow(
    engine_client: EngineClient, engine_keys: EngineKeys, backend: Backend, pause_seconds: float
) -> bool:
    """Return whether an engine's counters of tokens grow within `pause_seconds`. False if it has no such counters."""
    before = await fetch_metrics(engine_client, engine_keys, backend)
    work_before = None if before is None else parse_completed_work(before)
    if work_before is None:
        return False
    await asyncio.sleep(pause_seconds)
    after = await fetch_metrics(engine_client, engine_keys, backend)
    work_after = None if after is None else parse_completed_work(after)
    return work_after is not None and work_after > work_before


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InspectorParts:
    """Parts of one worker that an Inspector and its Transfers use."""

    pools: Mapping[Role, Pool]
    """Instances to compare, by role."""
    scoreboard: Scoreboard
    """KV handoffs of each decode instance."""
    health: Health
    """Health and facts of instances."""
    compatibility_monitor: CompatibilityMonitor
    """Takes the verdicts on instances and pairs."""
    served_models: ServedModels
    """Models that instances serve."""
    engine_client: EngineClient
    """Connections for reading the counters of engines."""
    engine_keys: EngineKeys
    """Credentials for engines."""
    metrics: Metrics
    """Metrics of this worker."""
    lease_seconds_of: Callable[[Backend], float]
    """Returns how long a prefill instance keeps KV that no decode instance fetches, where it has leases."""


class EngineInspector(BackgroundOwner):
    """Compares instances for one worker inside `async with`."""

    def __init__(
        self, parts: InspectorParts, interval_seconds: Callable[[], float], connector: str, *, reads_metrics: bool
    ) -> None:
        """Keep the parts.

        Args:
            parts: The worker's parts.
            interval_seconds: Returns the time between two readings of a decode instance's counters; 0: never read them.
            connector: Name of the connector in the settings.
            reads_metrics: Whether this worker reads the counters.
        """
        self._pools = parts.pools
        self._health = parts.health
        self._compatibility_monitor = parts.compatibility_monitor
        self._engine_keys = parts.engine_keys
        self._metrics = parts.metrics
        self._interval_seconds = interval_seconds
        self._connector = connector
        self._served_models = parts.served_models
        self._compared_roles = [role for role in parts.pools if role is not Role.ENCODE]
        self._identities: dict[Backend, EngineIdentity] = {}
        """Identities at the last comparison."""
        self._models_by_instance: dict[Backend, frozenset[str]] = {}
        """Served models at the last comparison."""
        self._reported_kinds = [IncompatibilityKind.GATEWAY, IncompatibilityKind.CONNECTOR, IncompatibilityKind.ROLE]
        """Kinds that the reports of engines show."""
        traits = CONNECTOR_TRAITS[connector]
        if traits.tells_bootstrap_port:
            self._reported_kinds.append(IncompatibilityKind.BOOTSTRAP)
        self._background = BackgroundTasks(logger, "a comparison of instances")
        self._transfers = None
        if reads_metrics and Role.PREFILL in parts.pools:
            self._transfers = TransferMonitor(parts, self._background, traits)

    def _begin(self) -> None:
        self._background.keep_running(
            self._keep_comparing, "engine_comparison", self._metrics.background_restarts_total
        )

    async def _keep_comparing(self) -> None:
        while True:
            self._compare_engines()
            interval_seconds = self._interval_seconds()
            pause_seconds = min(_COMPARISON_SECONDS, interval_seconds or _COMPARISON_SECONDS)
            if self._transfers is not None and interval_seconds:
                pause_seconds -= await self._read_urgent(self._transfers, interval_seconds, pause_seconds)
            await asyncio.sleep(pause_seconds)

    async def _read_urgent(self, transfers: TransferMonitor, interval_seconds: float, max_seconds: float) -> float:
        """Start the readings that are due, often while they are urgent. Returns the elapsed seconds."""
        for count in range(1 + int(max_seconds / _FIRST_READING_SECONDS)):
            if not transfers.start_due_readings(interval_seconds):
                return count * _FIRST_READING_SECONDS
            await asyncio.sleep(min(_FIRST_READING_SECONDS, max_seconds))
        return max_seconds

    def _compare_engines(self) -> None:
        """Check each engine whose report has changed, and then the models of all."""
        identities = {
            backend: facts.identity
            for role in self._compared_roles
            for backend in self._pools[role].all_backends()
            if (facts := self._health.health_of(backend).engine_facts) is not None
        }
        self._served_models.update_names()
        served = {
            backend: self._served_models.base_models(backend)
            for role in self._compared_roles
            for backend in self._pools[role].all_backends()
        }
        if identities == self._identities and served == self._models_by_instance:
            return
        for backend, identity in identities.items():
            if identity != self._identities.get(backend):
                self._check_engine_report(backend, identity)
        minority = minority_instances(served)
        for backend, models in served.items():
            if models:
                self._compatibility_monitor.set_finding(backend, IncompatibilityKind.MODEL, minority.get(backend))
        self._identities, self._models_by_instance = identities, served

    def _check_engine_report(self, backend: Backend, identity: EngineIdentity) -> None:
        engine = EngineReport(backend.role, backend.name, identity, backend.is_elastic)
        found, hint = find_connector_mismatch(engine, self._connector, backend.bootstrap_port) or (None, "")
        for kind in self._reported_kinds:
            if kind is found:
                self._compatibility_monitor.set_finding(backend, kind, hint)
            elif identity.engine_setup is not None:  # otherwise the report is still incomplete
                self._compatibility_monitor.set_finding(backend, kind, None)
        if not identity.has_refused_key:
            self._compatibility_monitor.set_finding(backend, IncompatibilityKind.ENGINE_KEY, None)
        elif not self._engine_keys.forwards_client_key:
            self._compatibility_monitor.record_rejected_key(backend)


@dataclass(slots=True)
class _DecoderState:
    """Readings of one decoder since it came up."""

    counter_watch: CounterWatch
    pair_watch: PairWatch
    pair_verdicts: dict[Backend, HandoffVerdict] = field(default_factory=dict)
    """Verdicts by prefiller, without unknown ones."""
    handoffs_at_reading: HandoffCount | None = None
    """Handoffs before the last reading; None before the first reading."""
    next_reading_at: float = 0.0
    """Loop time of the next reading."""
    failed_transfer_count: float | None = None
    """Failed transfers that the engine has counted; None before the first reading."""
    pause_seconds: float = _FIRST_READING_SECONDS
    """Time to the next reading if the next one leaves a pair without a verdict."""
    is_being_read: bool = False


@dataclass(slots=True)
class _PrefillerState:
    """Readings of one prefiller's leases since it came up."""

    expiry_watch: ExpiryWatch = field(default_factory=ExpiryWatch)
    handoff_count: int = -1
    """Number of handoffs at the last check."""
    active_until: float = 0.0
    """Loop time when the leases of all handoffs have ended."""
    next_reading_at: float = 0.0
    """Loop time of the next check."""
    is_being_read: bool = False
    failed_transfer_count: float | None = None
    """Failed transfers that the engine has counted; None before the first reading."""
    has_expiry_counter: bool = True
    """Whether the engine counts expired leases, as far as known."""


class TransferMonitor:
    """Reads counters of engines and reports instances and pairs that do not transfer KV. Exists in one worker."""

    def __init__(self, parts: InspectorParts, background: BackgroundTasks, traits: ConnectorTraits) -> None:
        """Keep the parts of an Inspector that has prefill instances, and its background tasks."""
        self._parts = parts
        self._prefill_pool = parts.pools[Role.PREFILL]
        self._decode_pool = parts.pools[Role.DECODE]
        self._scoreboard = parts.scoreboard
        self._health = parts.health
        self._compatibility_monitor = parts.compatibility_monitor
        self._metrics = parts.metrics
        self._background = background
        self._connector_traits = traits
        self._lanes: dict[int, Backend] = {}
        """Prefillers that are up, by lane, if no other prefiller has the same lane."""
        self._decoders: dict[Backend, _DecoderState] = {}
        self._prefillers: dict[Backend, _PrefillerState] = {}
        """Prefillers whose leases are watched."""
        self._is_kv_left_by_prefiller: dict[Backend, bool] = {}
        """Whether decoders leave a prefiller's KV until its lease expires, by prefiller; missing if not known."""
        self._reported_pairs: set[tuple[Backend, Backend]] = set()
        """Pairs with a warning in the log that still holds."""

    def start_due_readings(self, interval_seconds: float) -> bool:
        """Start the readings that are due. Returns whether a further one is urgent.

        It is urgent while a reading runs, or if the next one is due before the next comparison of engines.

        `interval_seconds`: time between two readings of the same instance.
        """
        self._update_lanes()
        is_urgent = False
        now = asyncio.get_running_loop().time()
        decoders = self._decode_pool.all_backends()
        for removed in self._decoders.keys() - set(decoders):
            del self._decoders[removed]
        for backend in decoders:
            if self._health.health_of(backend).engine_facts is None:  # it is down, and its counters will begin at 0
                if self._decoders.pop(backend, None) is not None:
                    self._compatibility_monitor.incompatibilities.record_handoff_verdict(
                        backend, HandoffVerdict.UNKNOWN
                    )
                continue
            from_store = self._connector_traits.is_store
            state = self._decoders.setdefault(backend, _DecoderState(CounterWatch(from_store), PairWatch(from_store)))
            if not state.is_being_read and now >= state.next_reading_at:
                # Counting takes some time with hundreds of decoders, so it comes last.
                if state.handoffs_at_reading == self._scoreboard.count_handoffs(backend.slot):
                    continue
                state.is_being_read = True
                self._background.start_task(self._read_decoder(backend, state, interval_seconds))
            is_urgent |= state.is_being_read or state.next_reading_at < now + _COMPARISON_SECONDS
        if self._connector_traits.counts_expired_leases:
            self._start_lease_readings(decoders, interval_seconds * _HEALTHY_INTERVALS)
        return is_urgent

    def _update_lanes(self) -> None:
        """Update the prefillers by lane, and forget the verdicts on prefillers that were replaced or restarted."""
        by_lane: dict[int, list[Backend]] = {}
        for backend in self._prefill_pool.all_backends():
            by_lane.setdefault(backend.slot % LANES, []).append(backend)
        before = self._lanes
        self._lanes = {
            lane: backends[0]
            for lane, backends in by_lane.items()
            if len(backends) == 1 and self._health.health_of(backends[0]).engine_facts is not None
        }
        for lane, backend in before.items():
            if self._lanes.get(lane) != backend:
                for state in self._decoders.values():
                    state.pair_watch.forget_lane(lane)
                    state.pair_verdicts.pop(backend, None)
                self._reported_pairs = {pair for pair in self._reported_pairs if backend not in pair}

    async def _read_decoder(self, backend: Backend, state: _DecoderState, interval_seconds: float) -> None:
        handoffs = self._scoreboard.count_handoffs(backend.slot)
        handoffs_by_lane = self._scoreboard.count_handoffs_by_lane(backend.slot)
        try:
            exposition = await fetch_metrics(self._parts.engine_client, self._parts.engine_keys, backend)
        finally:
            state.is_being_read = False
        reading = None if exposition is None else parse_prompt_tokens(exposition)
        if exposition is not None:
            state.failed_transfer_count = self._count_failed_transfers(backend, exposition, state.failed_transfer_count)
        state.handoffs_at_reading = handoffs
        found = state.counter_watch.judge_reading(reading, handoffs)
        found_of_pairs = state.pair_watch.judge_reading(
            reading, handoffs_by_lane, self._scoreboard.count_handoffs_by_lane(backend.slot)
        )
        if self._decoders.get(backend) is not state:
            return
        if found_of_pairs is None:
            state.pair_verdicts.clear()
        else:
            self._apply_pair_verdicts(
                backend, {self._lanes[lane]: v for lane, v in found_of_pairs.items() if lane in self._lanes}
            )
        verdict = self._compatibility_monitor.incompatibilities.handoff_verdict(backend)
        if found is not None:
            verdict, count = found
            self._metrics.handovers_total.labels(verdict.value).inc(count)
        verdicts = {
            state.pair_verdicts.get(prefiller, HandoffVerdict.UNKNOWN)
            for lane, prefiller in self._lanes.items()
            if lane in handoffs_by_lane
        }
        if handoffs_by_lane and not verdicts:
            verdicts = {verdict}  # with more prefillers than lanes, pairs are not judged
        state.next_reading_at = asyncio.get_running_loop().time() + self._seconds_to_next_reading(
            state, verdicts, interval_seconds
        )
        pairs = {prefiller.name: of_pair for prefiller, of_pair in state.pair_verdicts.items()}
        self._compatibility_monitor.incompatibilities.record_handoff_verdict(backend, verdict, pairs)
        self._report_instances()

    def _seconds_to_next_reading(
        self, state: _DecoderState, verdicts: Collection[HandoffVerdict], interval_seconds: float
    ) -> float:
        """Return the time to the next reading of a decoder. `verdicts`: those on its pairs with handoffs."""
        if not verdicts:
            return 0.0  # this reading was the baseline for the first handoffs
        if HandoffVerdict.UNKNOWN not in verdicts:
            state.pause_seconds = _FIRST_READING_SECONDS
            return interval_seconds * (1 if HandoffVerdict.COMPUTED in verdicts else _HEALTHY_INTERVALS)
        pause_seconds = min(state.pause_seconds, interval_seconds)
        state.pause_seconds = min(2 * state.pause_seconds, interval_seconds)
        return pause_seconds

    def _count_failed_transfers(
        self, backend: Backend, exposition: bytes, previous_count: float | None
    ) -> float | None:
        """Count the transfers that failed since the previous reading, and return the count of the engine.

        `previous_count`: its count at the previous reading; None: there was none. After a restart the count begins at
        0.
        """
        count = parse_failed_transfers(exposition)
        if count is not None and previous_count is not None and count > previous_count:
            self._metrics.failed_transfers_total.labels(backend.role.value).inc(count - previous_count)
        return count

    # Leases of prefillers

    def _start_lease_readings(self, decoders: Collection[Backend], interval_seconds: float) -> None:
        """Start the readings of expired leases that are due, of the prefillers that are up."""
        for removed in self._prefillers.keys() - set(self._lanes.values()):
            del self._prefillers[removed]
            self._is_kv_left_by_prefiller.pop(removed, None)
        now = asyncio.get_running_loop().time()
        due: dict[int, _PrefillerState] = {}
        for lane, backend in self._lanes.items():
            state = self._prefillers.setdefault(backend, _PrefillerState())
            if state.has_expiry_counter and now >= state.next_reading_at and not state.is_being_read:
                due[lane] = state
        if not due:
            return
        by_decoder = {decoder: self._scoreboard.count_handoffs_by_lane(decoder.slot) for decoder in decoders}
        for lane, state in due.items():
            backend = self._lanes[lane]
            handoffs = {decoder: lanes[lane].handoff_count for decoder, lanes in by_decoder.items() if lane in lanes}
            if sum(handoffs.values()) != state.handoff_count:
                state.handoff_count = sum(handoffs.values())
                state.active_until = now + 3 * self._parts.lease_seconds_of(backend) + 2 * interval_seconds
            state.next_reading_at = now + interval_seconds
            if now < state.active_until:
                state.is_being_read = True
                self._background.start_task(self._read_prefiller(backend, state, handoffs))

    async def _read_prefiller(self, backend: Backend, state: _PrefillerState, handoffs: Mapping[Backend, int]) -> None:
        try:
            exposition = await fetch_metrics(self._parts.engine_client, self._parts.engine_keys, backend)
        finally:
            state.is_being_read = False
        if self._prefillers.get(backend) is not state:
            return
        now = asyncio.get_running_loop().time()
        totals = None
        if exposition is not None:
            state.failed_transfer_count = self._count_failed_transfers(backend, exposition, state.failed_transfer_count)
            expired = parse_expired_leases(exposition)
            state.has_expiry_counter = expired is not None
            if expired is not None:
                totals = ExpiryTotals(expired, self._scoreboard.count_pinned_ever(backend.slot), handoffs)
        fetch_nothing = {
            decoder
            for decoder, known in self._decoders.items()
            if known.pair_verdicts.get(backend) is HandoffVerdict.COMPUTED
        }
        found = state.expiry_watch.judge_totals(now, totals, fetch_nothing, self._parts.lease_seconds_of(backend))
        if found is not None:
            verdict, lost = found
            self._is_kv_left_by_prefiller[backend] = verdict is HandoffVerdict.COMPUTED
            self._metrics.kv_orphans_total.inc(lost)
            self._report_instances()

    # Conclusions

    def _apply_pair_verdicts(self, decoder: Backend, new_verdicts: dict[Backend, HandoffVerdict]) -> None:
        """Take the new verdicts on a decoder's pairs.

        If an instance was blamed for all its pairs and one of them transfers KV now, something has changed, so the
        verdicts on its other pairs are dropped.
        """
        prefillers = self._lanes.values()
        blamed = find_culprits(self._pairs_of_verdict(HandoffVerdict.COMPUTED), prefillers, self._decoders)
        outdated: set[tuple[Backend, Backend]] = set()
        for prefiller in (
            prefiller for prefiller, verdict in new_verdicts.items() if verdict is HandoffVerdict.TRANSFERRED
        ):
            if decoder in blamed.bad_decoders:
                outdated.update((other, decoder) for other in prefillers)
            if prefiller in blamed.bad_prefillers:
                outdated.update((prefiller, other) for other in self._decoders)
        for prefiller, other in outdated:
            self._decoders[other].pair_verdicts.pop(prefiller, None)
        self._decoders[decoder].pair_verdicts.update(new_verdicts)

    def _pairs_of_verdict(self, verdict: HandoffVerdict) -> set[tuple[Backend, Backend]]:
        return {
            (prefiller, decoder)
            for decoder, state in self._decoders.items()
            for prefiller, of_pair in state.pair_verdicts.items()
            if of_pair is verdict
        }

    def _report_instances(self) -> None:
        """Report blamed instances and instances that transfer KV. Earlier reports on all others stay."""
        blamed = find_culprits(self._pairs_of_verdict(HandoffVerdict.COMPUTED), self._lanes.values(), self._decoders)
        good = self._pairs_of_verdict(HandoffVerdict.TRANSFERRED)
        hints = NOT_STORED if self._connector_traits.is_store else NOT_FETCHED
        for backend in blamed.bad_decoders | blamed.bad_prefillers:
            self._compatibility_monitor.set_finding(backend, IncompatibilityKind.KV_NOT_FETCHED, hints[backend.role])
        for backend in {backend for pair in good for backend in pair}.union(
            self._is_kv_left_by_prefiller
        ) - blamed.bad_prefillers:
            hint = EXPIRES if self._is_kv_left_by_prefiller.get(backend) else None
            self._compatibility_monitor.set_finding(backend, IncompatibilityKind.KV_NOT_FETCHED, hint)
        for pair in blamed.bad_pairs - self._reported_pairs:
            log_pair(*pair, has_recovered=False)
        for pair in self._reported_pairs & good:
            log_pair(*pair, has_recovered=True)
        explained = {
            pair for pair in self._reported_pairs if pair[0] in blamed.bad_prefillers or pair[1] in blamed.bad_decoders
        }
        self._reported_pairs = (self._reported_pairs | blamed.bad_pairs) - good - explained
