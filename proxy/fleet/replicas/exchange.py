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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.common.background import Background, BackgroundOwner
from proxy.fleet.replicas.gateway_state import decode_news, encode, encode_news
from proxy.fleet.replicas.peers import Peers
from proxy.fleet.replicas.port import StoreFailed, StoreRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from proxy.fleet.replicas.local_state import LocalState
    from proxy.fleet.replicas.peer_rows import PeerRows
    from proxy.fleet.replicas.port import StorePort
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings

logger = logging.getLogger("proxy.replicas.exchange")

_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeParts:
    """What an exchange is made of."""

    store: StorePort
    me: str
    """What the others call this gateway."""
    own: LocalState
    guests: PeerRows
    """Of the same shared memory as `own`."""
    key_slots: Callable[[], Mapping[str, int]]
    """By name, the slots of the client keys whose use is reported and heard now."""
    settings: Settings
    metrics: Metrics
    on_verdict: Callable[[], None] = lambda: None
    """Called when there is a new verdict on an instance."""
    clock: Callable[[], float] = time.monotonic
    """That of the journal's records and of the ApiKeys."""
    rng: random.Random = field(default_factory=random.Random)


class StateExchange(BackgroundOwner):
    """For the one worker that exchanges. `async with` it: leaving tells the others that this gateway has nothing."""

    def __init__(self, parts: ExchangeParts) -> None:
        self._store = parts.store
        self._own = parts.own
        self._guests = parts.guests
        self._on_verdict = parts.on_verdict
        self._key_slots = parts.key_slots
        self._options = parts.settings.replicas
        self._peers = Peers(parts.me, parts.settings.replicas.ttl_seconds)
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._rng = parts.rng
        self._answered_at = parts.clock()
        self._is_gone = False
        self._background = Background(logger, "the exchange with other gateways")

    def _begin(self) -> None:
        self._guests.erase()  # a worker that was here before may have left something
        restarts = self._metrics.background_restarts_total
        self._background.keep(self._keep_exchanging, "replica_exchange", restarts)
        if self._options.news_seconds is not None:
            self._background.keep(self._keep_telling, "replica_publishing", restarts)
            self._background.keep(self._keep_hearing, "replica_listening", restarts)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._guests.erase()  # also if it was never begun
        if not self._is_gone:
            with suppress(StoreFailed):
                await self._store.leave()

    # All that there is, every so often

    async def _keep_exchanging(self) -> None:
        try:
            await self._exchange()
        finally:  # whatever ends it: what the others had is not known any more
            self._guests.erase()

    async def _exchange(self) -> None:
        failures = 0  # in a row
        interval_seconds, ttl_seconds = self._options.interval_seconds, self._options.ttl_seconds
        while True:
            now = self._clock()
            try:
                self._hear(await self._store.exchange(encode(self._own.told(now)), self._peers.lost(now)))
                failures = 0
            except StoreFailed as error:
                failures += 1
                self._miss(error)
            self._charge()
            pause_seconds = interval_seconds
            if failures:  # a single failed retry must not let this gateway's loads expire at the others
                pause_seconds = min(pause_seconds * 2 ** min(failures, 10), max(pause_seconds, _RETRY_SECONDS))
                pause_seconds = min(pause_seconds, ttl_seconds / 3)
            await asyncio.sleep(self._rng.uniform(0.9, 1.1) * pause_seconds)

    def _hear(self, messages: dict[str, bytes]) -> None:
        self._answered_at = self._clock()
        self._peers.hear(messages, self._answered_at)
        self._metrics.replicas_exchanges_total.labels("ok").inc()
        self._metrics.replicas_last_exchange_timestamp_seconds.set_to_current_time()
        if self._is_gone:
            self._is_gone = False
            logger.info("replicas: the store answers again, and the loads of other gateways count")

    def _miss(self, error: StoreFailed) -> None:
        self._metrics.replicas_exchanges_total.labels("failed").inc()
        if not self._is_gone and self._clock() - self._answered_at >= self._options.ttl_seconds:
            self._is_gone = True
            logger.warning("replicas: the store does not answer, so only the loads of this gateway count: %s", error)

    def _charge(self) -> None:
        now = self._clock()
        self._metrics.replicas_peers.set(self._peers.telling(now))
        charges, used = self._peers.charges(now), self._peers.used(now)
        slots = self._slots()
        self._guests.charge({slots[key]: charge for key, charge in charges.items() if key in slots})
        self._note_verdicts(slots, now)
        if self._options.news_seconds is not None:  # otherwise it is too old: room would be left to who is gone
            self._guests.put_front(self._peers.front(now))
        self._guests.use({slot: used[name] for name, slot in self._key_slots().items() if name in used}, now)

    # What is new, at once

    async def _keep_telling(self) -> None:
        interval_seconds = self._options.news_seconds
        assert interval_seconds is not None
        while True:
            await asyncio.sleep(interval_seconds)
            now = self._clock()
            news = self._own.news(now)
            if news is None or not self._peers.telling(now):
                continue
            message = encode_news(news)
            try:
                await self._store.tell(message)
            except StoreFailed:  # the next exchange tells as much
                await self._pause()
            else:
                self._count("told", message)

    async def _keep_hearing(self) -> None:
        was_refused = False
        while True:
            try:
                await self._store.listen(self._hear_news)
            except StoreRefused as error:
                if not was_refused:
                    logger.warning("replicas: the store lets nobody listen, so changes are known later: %s", error)
                was_refused = True
            except StoreFailed:
                was_refused = False
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.9, 1.1) * _RETRY_SECONDS)

    def _hear_news(self, message: bytes) -> None:
        self._count("heard", message)
        news, now = decode_news(message), self._clock()
        if news is None or not self._peers.hear_news(news, now):
            return
        slots = self._slots()
        charges = self._peers.charges_on(news.instances.keys() & slots.keys(), now)
        self._guests.charge_some({slots[key]: charge for key, charge in charges.items()})
        self._guests.put_front(self._peers.front(now))
        if news.verdicts:
            self._note_verdicts(slots, now)
        prompts = {slots[key]: records for key, records in news.prompts.items() if key in slots}
        self._guests.note_prompts(prompts, now - news.now)

    def _note_verdicts(self, slots: Mapping[str, int], now: float) -> None:
        verdicts = self._peers.verdicts(now)
        if self._guests.note_verdicts({(slots[key], who, number) for key, who, number in verdicts if key in slots}):
            self._on_verdict()

    def _slots(self) -> dict[str, int]:
        return {backend.key: backend.slot for backend in self._own.members()}

    def _count(self, direction: str, message: bytes) -> None:
        self._metrics.replicas_news_total.labels(direction).inc()
        self._metrics.replicas_news_bytes_total.labels(direction).inc(len(message))
