"""Tells the other gateways of the group what this one has under way, and charges what they have to guests' rows.

One worker does that for all. No request waits for it: whether the store answers or not, a pick reads the scoreboard,
which has one row more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from proxy.api_keys import minute_of
from proxy.backend import Role
from proxy.background import Background, BackgroundOwner
from proxy.replicas.peers import Peers
from proxy.replicas.store import StoreFailed
from proxy.replicas.told import Charge, Told, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from proxy.api_keys import KeyUsage
    from proxy.backend import Backend
    from proxy.balancer.roster import Roster
    from proxy.balancer.scoreboard import Scoreboard
    from proxy.observe.metrics import Metrics
    from proxy.replicas.store import Store
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0


class Exchange(BackgroundOwner):
    """For the one worker that exchanges. `async with` it: leaving tells the others that this gateway has nothing."""

    def __init__(
        self,
        *,
        store: Store,
        me: str,
        scoreboard: Scoreboard,
        roster: Roster,
        key_usage: KeyUsage,
        key_slots: Callable[[], Mapping[str, int]],
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """`me`: what the others call this gateway. `key_slots`: by name, those of the client keys whose use is told and
        heard now. The first guests' rows of `scoreboard` and `key_usage` are written here and nowhere else.
        """
        self._store = store
        self._scoreboard = scoreboard
        self._guest = scoreboard.workers
        self._row = scoreboard.row(self._guest)
        self._roster = roster
        self._interval_seconds = settings.replicas.interval_seconds
        self._ttl_seconds = settings.replicas.ttl_seconds
        self._peers = Peers(me, self._ttl_seconds)
        self._metrics = metrics
        self._charged: set[int] = set()
        self._key_usage = key_usage
        self._key_row = key_usage.row(key_usage.workers)
        self._key_slots = key_slots
        self._keys_charged: set[int] = set()
        self._answered_at = time.monotonic()
        self._is_gone = False
        self._background = Background(logger, "the exchange with other gateways")

    def _begin(self) -> None:
        self._erase()  # a worker that was here before may have left something
        self._background.start(self._keep_exchanging())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._erase()  # also if it was never begun
        if not self._is_gone:
            with suppress(StoreFailed):
                await self._store.leave()

    def _erase(self) -> None:
        self._scoreboard.erase(self._guest)
        self._key_usage.erase(self._key_usage.workers)

    async def _keep_exchanging(self) -> None:
        try:
            await self._exchange()
        finally:  # whatever ends it: what the others had is not known any more
            self._erase()

    async def _exchange(self) -> None:
        failures = 0  # in a row
        while True:
            try:
                self._hear(await self._store.exchange(encode(self._told()), self._peers.lost(time.monotonic())))
                failures = 0
            except StoreFailed as error:
                failures += 1
                self._miss(error)
            self._charge(time.monotonic())
            pause_seconds = self._interval_seconds
            if failures:  # what was told is given up in time all the same
                pause_seconds = min(pause_seconds * 2 ** min(failures, 10), max(pause_seconds, _RETRY_SECONDS))
                pause_seconds = min(pause_seconds, self._ttl_seconds / 2)
            await asyncio.sleep(random.uniform(0.9, 1.1) * pause_seconds)

    def _members(self) -> Iterator[Backend]:
        return (member.backend for role in Role for member in self._roster.members(role))

    def _told(self) -> Told:
        board, instances = self._scoreboard, dict[str, Charge]()
        for backend in self._members():
            running, load = board.own(backend.slot)
            charge = running, load.compute, load.kv + board.pinned(backend.slot).tokens
            if any(charge):
                instances[backend.key] = tuple(max(0, count) for count in charge)  # type: ignore[assignment]
        now, usage = time.monotonic(), self._key_usage
        used = {name: usage.own(slot, now) for name, slot in self._key_slots().items()}
        return Told(time.monotonic_ns(), instances, {name: counts for name, counts in used.items() if any(counts)})

    def _hear(self, messages: dict[str, bytes]) -> None:
        self._answered_at = time.monotonic()
        self._peers.hear(messages, self._answered_at)
        self._metrics.replicas_exchanges_total.labels("ok").inc()
        self._metrics.replicas_last_exchange_timestamp_seconds.set_to_current_time()
        if self._is_gone:
            self._is_gone = False
            logger.info("replicas: the store answers again, and the loads of other gateways count")

    def _miss(self, error: StoreFailed) -> None:
        self._metrics.replicas_exchanges_total.labels("failed").inc()
        if not self._is_gone and time.monotonic() - self._answered_at >= self._ttl_seconds:
            self._is_gone = True
            logger.warning("replicas: the store does not answer, so only the loads of this gateway count: %s", error)

    def _charge(self, now: float) -> None:
        charges = self._peers.charges(now)
        self._metrics.replicas_peers.set(len(self._peers.telling(now)))
        by_slot = {backend.slot: charges[backend.key] for backend in self._members() if backend.key in charges}
        for slot in self._charged - by_slot.keys():
            self._row.charge(slot, 0, 0, 0)
        for slot, charge in by_slot.items():
            self._row.charge(slot, *charge)
        self._charged = set(by_slot)
        used, minute = self._peers.used(now), minute_of(now)[0]
        keys = {slot: used[name] for name, slot in self._key_slots().items() if name in used}
        for slot in self._keys_charged - keys.keys():
            self._key_row.charge(slot, 0, minute, 0)
        for slot, (in_flight, count) in keys.items():
            self._key_row.charge(slot, in_flight, minute, count)
        self._keys_charged = set(keys)
