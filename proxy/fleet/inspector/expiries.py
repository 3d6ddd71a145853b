"""Leases of handed-over KV that expire on prefillers, read from their `/metrics` while there are hand-overs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.balancer.handoff_verdicts import ExpiryWatch, HandoffVerdict, Totals
from proxy.wire.exposition import parse_expired_leases

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.common.background import Background
    from proxy.observe.metrics import Metrics


@dataclass(slots=True)
class _Prefiller:
    """What is known of one prefiller since it came up."""

    watch: ExpiryWatch = field(default_factory=ExpiryWatch)
    sent: int = -1
    """Hand-overs when it was looked at last."""
    active_until: float = 0.0
    """Loop time by when the leases of all hand-overs have ended."""
    due: float = 0.0
    """Loop time before which it is not looked at again."""
    is_being_read: bool = False
    tells: bool = True
    """False: it has no such counter."""


class Expiries:
    """For the one worker that reads counters. `look` every so often; `loses` is what has come of it."""

    def __init__(
        self,
        scoreboard: Scoreboard,
        metrics: Metrics,
        background: Background,
        scrape: Callable[[Backend], Awaitable[bytes | None]],
        lease_seconds: Callable[[Backend], float],
        on_verdict: Callable[[], None],
    ) -> None:
        """`lease_seconds`: how long a prefiller keeps KV that nobody fetches."""
        self._scoreboard = scoreboard
        self._metrics = metrics
        self._background = background
        self._scrape = scrape
        self._lease_seconds = lease_seconds
        self._on_verdict = on_verdict
        self._prefillers: dict[Backend, _Prefiller] = {}
        self.loses: dict[Backend, bool] = {}
        """Whether a prefiller's KV is left to it until its lease expires, of those of which that is known."""

    def look(
        self,
        lanes: Mapping[int, Backend],
        decoders: Collection[Backend],
        fetch_nothing: Callable[[Backend], Collection[Backend]],
        interval_seconds: float,
    ) -> None:
        """Start the readings that are due, of the prefillers that are up, by their lanes. `fetch_nothing`: the decoders
        that are known not to fetch from a prefiller.
        """
        for gone in self._prefillers.keys() - set(lanes.values()):
            del self._prefillers[gone]
            self.loses.pop(gone, None)
        now = asyncio.get_running_loop().time()
        due = {
            lane: known
            for lane, backend in lanes.items()
            if (known := self._prefillers.setdefault(backend, _Prefiller())).tells
            and now >= known.due
            and not known.is_being_read
        }
        if not due:
            return
        by_decoder = {decoder: self._scoreboard.handoffs_by_lane(decoder.slot) for decoder in decoders}
        for lane, known in due.items():
            backend = lanes[lane]
            sent = {decoder: there[lane].count for decoder, there in by_decoder.items() if lane in there}
            if sum(sent.values()) != known.sent:
                known.sent = sum(sent.values())
                known.active_until = now + 3 * self._lease_seconds(backend) + 2 * interval_seconds
            known.due = now + interval_seconds
            if now < known.active_until:
                known.is_being_read = True
                self._background.start(self._read(backend, known, sent, fetch_nothing))

    async def _read(
        self,
        backend: Backend,
        known: _Prefiller,
        sent: Mapping[Backend, int],
        fetch_nothing: Callable[[Backend], Collection[Backend]],
    ) -> None:
        try:
            exposition = await self._scrape(backend)
        finally:
            known.is_being_read = False
        if self._prefillers.get(backend) is not known:
            return
        now = asyncio.get_running_loop().time()
        totals = None
        if exposition is not None:
            expired = parse_expired_leases(exposition)
            known.tells = expired is not None
            if expired is not None:
                totals = Totals(expired, self._scoreboard.pinned_ever(backend.slot), sent)
        found = known.watch.read(now, totals, fetch_nothing(backend), self._lease_seconds(backend))
        if found is not None:
            verdict, lost = found
            self.loses[backend] = verdict is HandoffVerdict.COMPUTED
            self._metrics.kv_orphans_total.inc(lost)
            self._on_verdict()
