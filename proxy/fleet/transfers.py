"""Checks KV transfers by the counters in the engines' `/metrics`.

One worker reads counters for all workers, and only while there are handoffs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.handoff_verdicts import CounterWatch, ExpiryWatch, HandoffVerdict, PairWatch, Totals, culprits
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.shared.scoreboard import LANES
from proxy.common.backend import Role
from proxy.fleet.compatibility_log import EXPIRES, NOT_FETCHED, NOT_STORED, log_pair
from proxy.upstream import EngineRequestError
from proxy.wire.exposition import parse_expired_leases, parse_prompt_tokens, parse_work

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.health import Health
    from proxy.balancer.incompatibilities import CompatibilityMonitor
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.scoreboard import HandoffCount, Scoreboard
    from proxy.common.backend import Backend
    from proxy.common.background import Background
    from proxy.observe.metrics import Metrics
    from proxy.settings import ConnectorTraits
    from proxy.upstream import EngineClient

_METRICS_PATH: Final = "/metrics"
_METRICS_TIMEOUT_SECONDS: Final = 5.0
_MAX_METRICS_BYTES: Final = 4 * 1024 * 1024
# Healthy instances are read once in this number of intervals: an engine streams nothing while it renders its metrics,
# which takes some milliseconds.
_HEALTHY_INTERVALS: Final = 4


async def scrape(client: EngineClient, keys: EngineKeys, backend: Backend) -> bytes | None:
    """Return an engine's metrics as text, or None if it does not answer with status 200."""
    try:
        answer = await client.get(
            backend.url, _METRICS_PATH, _METRICS_TIMEOUT_SECONDS, keys.headers(backend), _MAX_METRICS_BYTES
        )
    except EngineRequestError:
        return None
    return answer.body if answer.status == 200 else None


async def makes_progress(client: EngineClient, keys: EngineKeys, backend: Backend, pause_seconds: float) -> bool:
    """Return whether an engine's counters of tokens grow within `pause_seconds`. False if it has no such counters."""
    before = await scrape(client, keys, backend)
    work_before = None if before is None else parse_work(before)
    if work_before is None:
        return False
    await asyncio.sleep(pause_seconds)
    after = await scrape(client, keys, backend)
    work_after = None if after is None else parse_work(after)
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
    compatibility: CompatibilityMonitor
    """Takes the verdicts on instances and pairs."""
    models: ServedModels
    """Models that instances serve."""
    client: EngineClient
    """Connections for reading the counters of engines."""
    keys: EngineKeys
    """Credentials for engines."""
    metrics: Metrics
    """Metrics of this worker."""
    lease_seconds: Callable[[Backend], float]
    """Returns how long a prefill instance keeps KV that no decode instance fetches, where it has leases."""


@dataclass(slots=True)
class _DecoderState:
    """Readings of one decoder since it came up."""

    watch: CounterWatch
    pair_watch: PairWatch
    pairs: dict[Backend, HandoffVerdict] = field(default_factory=dict)
    """Verdicts by prefiller, without unknown ones."""
    handoffs_read: HandoffCount | None = None
    """Handoffs before the last reading; None before the first reading."""
    due: float = 0.0
    """Loop time of the next reading."""
    is_being_read: bool = False


@dataclass(slots=True)
class _PrefillerState:
    """Readings of one prefiller's leases since it came up."""

    watch: ExpiryWatch = field(default_factory=ExpiryWatch)
    handoffs: int = -1
    """Number of handoffs at the last check."""
    active_until: float = 0.0
    """Loop time when the leases of all handoffs have ended."""
    due: float = 0.0
    """Loop time of the next check."""
    is_being_read: bool = False
    has_counter: bool = True
    """Whether the engine counts expired leases, as far as known."""


class Transfers:
    """Reads counters of engines and reports instances and pairs that do not transfer KV. Exists in one worker."""

    def __init__(self, parts: InspectorParts, background: Background, traits: ConnectorTraits) -> None:
        """Keep the parts of an Inspector that has prefill instances, and its background tasks."""
        self._parts = parts
        self._prefill_pool = parts.pools[Role.PREFILL]
        self._decode_pool = parts.pools[Role.DECODE]
        self._scoreboard = parts.scoreboard
        self._health = parts.health
        self._compatibility = parts.compatibility
        self._metrics = parts.metrics
        self._background = background
        self._traits = traits
        self._lanes: dict[int, Backend] = {}
        """Prefillers that are up, by lane, if no other prefiller has the same lane."""
        self._decoders: dict[Backend, _DecoderState] = {}
        self._prefillers: dict[Backend, _PrefillerState] = {}
        """Prefillers whose leases are watched."""
        self._loses: dict[Backend, bool] = {}
        """Whether decoders leave a prefiller's KV until its lease expires, by prefiller; missing if not known."""
        self._reported_pairs: set[tuple[Backend, Backend]] = set()
        """Pairs with a warning in the log that still holds."""

    def read_due(self, interval_seconds: float) -> None:
        """Start the readings that are due. `interval_seconds`: time between two readings of the same instance."""
        self._update_lanes()
        now = asyncio.get_running_loop().time()
        decoders = self._decode_pool.backends()
        for removed in self._decoders.keys() - set(decoders):
            del self._decoders[removed]
        for backend in decoders:
            if self._health.of(backend).facts is None:  # it is down, and its counters will begin at 0
                if self._decoders.pop(backend, None) is not None:
                    self._compatibility.incompatibilities.judge(backend, HandoffVerdict.UNKNOWN)
                continue
            from_store = self._traits.is_store
            state = self._decoders.setdefault(backend, _DecoderState(CounterWatch(from_store), PairWatch(from_store)))
            has_handoffs = state.handoffs_read != self._scoreboard.handoffs(backend.slot)
            if has_handoffs and now >= state.due and not state.is_being_read:
                state.is_being_read = True
                self._background.start(self._read_decoder(backend, state, interval_seconds))
        if self._traits.counts_expired_leases:
            self._read_leases(decoders, interval_seconds * _HEALTHY_INTERVALS)

    def _update_lanes(self) -> None:
        """Update the prefillers by lane, and forget the verdicts on prefillers that were replaced or restarted."""
        by_lane: dict[int, list[Backend]] = {}
        for backend in self._prefill_pool.backends():
            by_lane.setdefault(backend.slot % LANES, []).append(backend)
        before = self._lanes
        self._lanes = {
            lane: backends[0]
            for lane, backends in by_lane.items()
            if len(backends) == 1 and self._health.of(backends[0]).facts is not None
        }
        for lane, backend in before.items():
            if self._lanes.get(lane) != backend:
                for state in self._decoders.values():
                    state.pair_watch.forget(lane)
                    state.pairs.pop(backend, None)
                self._reported_pairs = {pair for pair in self._reported_pairs if backend not in pair}

    async def _read_decoder(self, backend: Backend, state: _DecoderState, interval_seconds: float) -> None:
        handoffs = self._scoreboard.handoffs(backend.slot)
        handoffs_by_lane = self._scoreboard.handoffs_by_lane(backend.slot)
        try:
            exposition = await scrape(self._parts.client, self._parts.keys, backend)
        finally:
            state.is_being_read = False
        reading = None if exposition is None else parse_prompt_tokens(exposition)
        state.handoffs_read = handoffs
        found = state.watch.read(reading, handoffs)
        found_of_pairs = state.pair_watch.read(
            reading, handoffs_by_lane, self._scoreboard.handoffs_by_lane(backend.slot)
        )
        if self._decoders.get(backend) is not state:
            return
        if found_of_pairs is None:
            state.pairs.clear()
        else:
            self._take_pairs(
                backend, {self._lanes[lane]: v for lane, v in found_of_pairs.items() if lane in self._lanes}
            )
        is_healthy = all(
            state.pairs.get(prefiller) is HandoffVerdict.TRANSFERRED
            for lane, prefiller in self._lanes.items()
            if lane in handoffs_by_lane
        )
        intervals = _HEALTHY_INTERVALS if is_healthy else 1
        state.due = asyncio.get_running_loop().time() + interval_seconds * intervals
        verdict = self._compatibility.incompatibilities.verdict(backend)
        if found is not None:
            verdict, count = found
            self._metrics.handovers_total.labels(verdict.value).inc(count)
        pairs = {prefiller.name: of_pair for prefiller, of_pair in state.pairs.items()}
        self._compatibility.incompatibilities.judge(backend, verdict, pairs)
        self._report()

    # Leases of prefillers

    def _read_leases(self, decoders: Collection[Backend], interval_seconds: float) -> None:
        """Start the readings of expired leases that are due, of the prefillers that are up."""
        for removed in self._prefillers.keys() - set(self._lanes.values()):
            del self._prefillers[removed]
            self._loses.pop(removed, None)
        now = asyncio.get_running_loop().time()
        due: dict[int, _PrefillerState] = {}
        for lane, backend in self._lanes.items():
            state = self._prefillers.setdefault(backend, _PrefillerState())
            if state.has_counter and now >= state.due and not state.is_being_read:
                due[lane] = state
        if not due:
            return
        by_decoder = {decoder: self._scoreboard.handoffs_by_lane(decoder.slot) for decoder in decoders}
        for lane, state in due.items():
            backend = self._lanes[lane]
            handoffs = {decoder: lanes[lane].count for decoder, lanes in by_decoder.items() if lane in lanes}
            if sum(handoffs.values()) != state.handoffs:
                state.handoffs = sum(handoffs.values())
                state.active_until = now + 3 * self._parts.lease_seconds(backend) + 2 * interval_seconds
            state.due = now + interval_seconds
            if now < state.active_until:
                state.is_being_read = True
                self._background.start(self._read_prefiller(backend, state, handoffs))

    async def _read_prefiller(self, backend: Backend, state: _PrefillerState, handoffs: Mapping[Backend, int]) -> None:
        try:
            exposition = await scrape(self._parts.client, self._parts.keys, backend)
        finally:
            state.is_being_read = False
        if self._prefillers.get(backend) is not state:
            return
        now = asyncio.get_running_loop().time()
        totals = None
        if exposition is not None:
            expired = parse_expired_leases(exposition)
            state.has_counter = expired is not None
            if expired is not None:
                totals = Totals(expired, self._scoreboard.pinned_ever(backend.slot), handoffs)
        fetch_nothing = {
            decoder for decoder, known in self._decoders.items() if known.pairs.get(backend) is HandoffVerdict.COMPUTED
        }
        found = state.watch.read(now, totals, fetch_nothing, self._parts.lease_seconds(backend))
        if found is not None:
            verdict, lost = found
            self._loses[backend] = verdict is HandoffVerdict.COMPUTED
            self._metrics.kv_orphans_total.inc(lost)
            self._report()

    # Conclusions

    def _take_pairs(self, decoder: Backend, found: dict[Backend, HandoffVerdict]) -> None:
        """Take the new verdicts on a decoder's pairs.

        If an instance was to blame for all its pairs and one of them transfers KV now, something has changed, so the
        verdicts on its other pairs are dropped.
        """
        prefillers = self._lanes.values()
        blamed = culprits(self._pairs_with(HandoffVerdict.COMPUTED), prefillers, self._decoders)
        outdated: set[tuple[Backend, Backend]] = set()
        for prefiller in (prefiller for prefiller, verdict in found.items() if verdict is HandoffVerdict.TRANSFERRED):
            if decoder in blamed.decoders:
                outdated.update((other, decoder) for other in prefillers)
            if prefiller in blamed.prefillers:
                outdated.update((prefiller, other) for other in self._decoders)
        for prefiller, other in outdated:
            self._decoders[other].pairs.pop(prefiller, None)
        self._decoders[decoder].pairs.update(found)

    def _pairs_with(self, verdict: HandoffVerdict) -> set[tuple[Backend, Backend]]:
        return {
            (prefiller, decoder)
            for decoder, state in self._decoders.items()
            for prefiller, of_pair in state.pairs.items()
            if of_pair is verdict
        }

    def _report(self) -> None:
        """Report instances to blame and instances that transfer KV. Earlier reports on all others stay."""
        blamed = culprits(self._pairs_with(HandoffVerdict.COMPUTED), self._lanes.values(), self._decoders)
        good = self._pairs_with(HandoffVerdict.TRANSFERRED)
        hints = NOT_STORED if self._traits.is_store else NOT_FETCHED
        for backend in blamed.decoders | blamed.prefillers:
            self._compatibility.report(backend, IncompatibilityKind.KV_NOT_FETCHED, hints[backend.role])
        for backend in {backend for pair in good for backend in pair}.union(self._loses) - blamed.prefillers:
            hint = EXPIRES if self._loses.get(backend) else None
            self._compatibility.report(backend, IncompatibilityKind.KV_NOT_FETCHED, hint)
        for pair in blamed.pairs - self._reported_pairs:
            log_pair(*pair, fits=False)
        for pair in self._reported_pairs & good:
            log_pair(*pair, fits=True)
        explained = {
            pair for pair in self._reported_pairs if pair[0] in blamed.prefillers or pair[1] in blamed.decoders
        }
        self._reported_pairs = (self._reported_pairs | blamed.pairs) - good - explained
