"""What becomes of the KV that is handed over, read from the engines' `/metrics`.

One worker does that for all, and only while there are hand-overs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.handoff_verdicts import CounterWatch, HandoffVerdict, PairWatch, culprits
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.shared.scoreboard import LANES
from proxy.common.backend import Role
from proxy.fleet.inspector.expiries import Expiries
from proxy.fleet.inspector.scraping import scrape
from proxy.fleet.inspector.telling import EXPIRES, NOT_FETCHED, NOT_STORED, log_pair
from proxy.wire.exposition import parse_prompt_tokens

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

# To render its counters costs an engine some milliseconds, in which it streams nothing.
_SELDOM: Final = 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InspectorParts:
    """One worker's parts that an Inspector and its Transfers work with."""

    pools: Mapping[Role, Pool]
    """Instances to compare, by role."""
    scoreboard: Scoreboard
    """KV handoffs of each decode instance."""
    health: Health
    """Tells which instances are up."""
    fitness: CompatibilityMonitor
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
class _Decoder:
    """What is known of one decoder since it came up."""

    watch: CounterWatch
    pair_watch: PairWatch
    pairs: dict[Backend, HandoffVerdict] = field(default_factory=dict)
    """By prefillers, without those of which nothing is known."""
    looked_at: HandoffCount | None = None
    """The hand-overs before the last reading; None: there was none."""
    due: float = 0.0
    """Loop time before which it is not read again."""
    is_being_read: bool = False


class Transfers:
    """For the one worker that reads counters. `look` every so often."""

    def __init__(self, parts: InspectorParts, background: Background, traits: ConnectorTraits) -> None:
        """Keep the parts of an Inspector, which has prefill instances, and its background tasks."""
        client, keys, scoreboard = parts.client, parts.keys, parts.scoreboard
        self._prefill_pool = parts.pools[Role.PREFILL]
        self._decode_pool = parts.pools[Role.DECODE]
        self._scoreboard = scoreboard
        self._health = parts.health
        self._fitness = parts.fitness
        self._client = client
        self._keys = keys
        self._metrics = parts.metrics
        self._background = background
        self._from_store = traits.is_store
        self._lanes: dict[int, Backend] = {}
        """The prefillers that are up, each the only one in its lane."""
        self._decoders: dict[Backend, _Decoder] = {}
        self._told_pairs: set[tuple[Backend, Backend]] = set()
        self._expiries = None
        if traits.counts_expired_leases:
            self._expiries = Expiries(
                scoreboard,
                parts.metrics,
                background,
                lambda backend: scrape(client, keys, backend),
                parts.lease_seconds,
                self._tell,
            )

    def look(self, interval_seconds: float) -> None:
        """Start the readings that are due. `interval_seconds`: between two readings of the same instance."""
        self._see_prefillers()
        now = asyncio.get_running_loop().time()
        decoders = self._decode_pool.backends()
        for gone in self._decoders.keys() - set(decoders):
            del self._decoders[gone]
        for backend in decoders:
            if self._health.of(backend).facts is None:  # it is not up, and will count from 0 when it is again
                if self._decoders.pop(backend, None) is not None:
                    self._fitness.misfits.judge(backend, HandoffVerdict.UNKNOWN)
                continue
            known = self._decoders.setdefault(
                backend, _Decoder(CounterWatch(self._from_store), PairWatch(self._from_store))
            )
            is_new = known.looked_at != self._scoreboard.handoffs(backend.slot)
            if is_new and now >= known.due and not known.is_being_read:
                known.is_being_read = True
                self._background.start(self._read(backend, known, interval_seconds))
        if self._expiries is not None:
            self._expiries.look(self._lanes, decoders, self._that_fetch_nothing_from, interval_seconds * _SELDOM)

    def _see_prefillers(self) -> None:
        """Notice who has come up and gone. Nothing that was known of them holds for what comes up in their place."""
        lanes: dict[int, list[Backend]] = {}
        for backend in self._prefill_pool.backends():
            lanes.setdefault(backend.slot % LANES, []).append(backend)
        before = self._lanes
        self._lanes = {
            lane: there[0]
            for lane, there in lanes.items()
            if len(there) == 1 and self._health.of(there[0]).facts is not None
        }
        for lane, backend in before.items():
            if self._lanes.get(lane) != backend:
                for known in self._decoders.values():
                    known.pair_watch.forget(lane)
                    known.pairs.pop(backend, None)
                self._told_pairs = {pair for pair in self._told_pairs if backend not in pair}

    async def _read(self, backend: Backend, known: _Decoder, interval_seconds: float) -> None:
        sent, before = self._scoreboard.handoffs(backend.slot), self._scoreboard.handoffs_by_lane(backend.slot)
        try:
            exposition = await scrape(self._client, self._keys, backend)
        finally:
            known.is_being_read = False
        told = None if exposition is None else parse_prompt_tokens(exposition)
        known.looked_at = sent
        found = known.watch.read(told, sent)
        found_of_pairs = known.pair_watch.read(told, before, self._scoreboard.handoffs_by_lane(backend.slot))
        if self._decoders.get(backend) is not known:
            return
        if found_of_pairs is None:
            known.pairs.clear()
        else:
            self._keep(backend, {self._lanes[lane]: v for lane, v in found_of_pairs.items() if lane in self._lanes})
        is_well = all(
            known.pairs.get(prefiller) is HandoffVerdict.TRANSFERRED
            for lane, prefiller in self._lanes.items()
            if lane in before
        )
        known.due = asyncio.get_running_loop().time() + interval_seconds * (_SELDOM if is_well else 1)
        verdict = self._fitness.misfits.verdict(backend)
        if found is not None:
            verdict, count = found
            self._metrics.handovers_total.labels(verdict.value).inc(count)
        pairs = {prefiller.name: of_pair for prefiller, of_pair in known.pairs.items()}
        self._fitness.misfits.judge(backend, verdict, pairs)
        self._tell()

    # What follows for pairs

    def _keep(self, decoder: Backend, found: dict[Backend, HandoffVerdict]) -> None:
        """Take what was found of a decoder's pairs. Where an instance was to blame for all its pairs, and one of them
        is well now, something has changed: what was known of the others is out of date.
        """
        blamed = culprits(self._bad_pairs(), self._prefillers, self._decoders)
        outdated: set[tuple[Backend, Backend]] = set()
        for prefiller in (prefiller for prefiller, verdict in found.items() if verdict is HandoffVerdict.TRANSFERRED):
            if decoder in blamed.decoders:
                outdated.update((other, decoder) for other in self._prefillers)
            if prefiller in blamed.prefillers:
                outdated.update((prefiller, other) for other in self._decoders)
        for prefiller, other in outdated:
            self._decoders[other].pairs.pop(prefiller, None)
        self._decoders[decoder].pairs.update(found)

    def _that_fetch_nothing_from(self, prefiller: Backend) -> set[Backend]:
        return {
            decoder
            for decoder, known in self._decoders.items()
            if known.pairs.get(prefiller) is HandoffVerdict.COMPUTED
        }

    @property
    def _prefillers(self) -> Collection[Backend]:
        return self._lanes.values()

    def _bad_pairs(self) -> list[tuple[Backend, Backend]]:
        return [
            (prefiller, decoder)
            for decoder, known in self._decoders.items()
            for prefiller, verdict in known.pairs.items()
            if verdict is HandoffVerdict.COMPUTED
        ]

    def _tell(self) -> None:
        """Report who is to blame, and who is well; of whom nothing is known, what was reported stays."""
        blamed = culprits(self._bad_pairs(), self._prefillers, self._decoders)
        good = {
            (prefiller, decoder)
            for decoder, known in self._decoders.items()
            for prefiller, verdict in known.pairs.items()
            if verdict is HandoffVerdict.TRANSFERRED
        }
        hints = NOT_STORED if self._from_store else NOT_FETCHED
        for backend in blamed.decoders | blamed.prefillers:
            self._fitness.report(backend, IncompatibilityKind.KV_NOT_FETCHED, hints[backend.role])
        loses = {} if self._expiries is None else self._expiries.loses
        for backend in {backend for pair in good for backend in pair}.union(loses) - blamed.prefillers:
            self._fitness.report(backend, IncompatibilityKind.KV_NOT_FETCHED, EXPIRES if loses.get(backend) else None)
        for pair in blamed.pairs - self._told_pairs:
            log_pair(*pair, fits=False)
        for pair in self._told_pairs & good:
            log_pair(*pair, fits=True)
        explained = {pair for pair in self._told_pairs if pair[0] in blamed.prefillers or pair[1] in blamed.decoders}
        self._told_pairs = (self._told_pairs | blamed.pairs) - good - explained
