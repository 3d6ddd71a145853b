"""Exchanges loads with the other gateways of the group, and writes theirs to the guest rows of shared memory.

One worker exchanges for all workers. No request waits for the store: choices read the scoreboard, in which the other
gateways are one more row.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.fleet.replicas.peers import Peers
from proxy.fleet.replicas.state import LocalState, PeerRows, decode_news, encode_news, encode_state
from proxy.fleet.replicas.store import StoreCommandRefused, StoreError, StorePort

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings

logger = logging.getLogger("proxy.replicas.exchange")

_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeParts:
    """Parts of a StateExchange."""

    store: StorePort
    own_name: str
    """Name of this gateway among the others."""
    local_state: LocalState
    peer_rows: PeerRows
    """Rows in the same shared memory as `local_state`."""
    get_key_slots: Callable[[], Mapping[str, int]]
    """Returns the slots of the client keys whose use is exchanged, by name."""
    settings: Settings
    metrics: Metrics
    on_new_verdict: Callable[[], None] = lambda: None
    """Called when there is a new verdict on an instance."""
    on_leader_roles: Callable[[Mapping[str, str] | None], None] = lambda roles: None
    """Called after each exchange with the roles that the leading gateway gives to elastic instances, by name.

    None: this gateway leads. Empty: the store does not answer."""
    clock: Callable[[], float] = time.monotonic
    """The clock of the journal's records and of the ApiKeys."""
    random_source: random.Random = field(default_factory=random.Random)


class StateExchange(BackgroundOwner):
    """Exchanges loads inside `async with`, in one worker. Leaving deletes this gateway's message."""

    def __init__(self, parts: ExchangeParts) -> None:
        self._store = parts.store
        self._local_state = parts.local_state
        self._peer_rows = parts.peer_rows
        self._on_new_verdict = parts.on_new_verdict
        self._on_leader_roles = parts.on_leader_roles
        self._get_key_slots = parts.get_key_slots
        self._replica_options = parts.settings.replicas
        self._peers = Peers(parts.own_name, parts.settings.replicas.ttl_seconds)
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._rng = parts.random_source
        self._answered_at = parts.clock()
        self._is_gone = False
        self._background = BackgroundTasks(logger, "the exchange with other gateways")

    def _begin(self) -> None:
        self._peer_rows.erase_all()  # a worker that died may have left rows
        restarts = self._metrics.background_restarts_total
        self._background.keep_running(self._keep_exchanging, "replica_exchange", restarts)
        if self._replica_options.news_seconds is not None:
            self._background.keep_running(self._keep_publishing, "replica_publishing", restarts)
            self._background.keep_running(self._keep_listening, "replica_listening", restarts)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._peer_rows.erase_all()  # also if no exchange began
        if not self._is_gone:
            with suppress(StoreError):
                await self._store.delete_own_message()

    # The whole state, at intervals

    async def _keep_exchanging(self) -> None:
        try:
            await self._exchange_once()
        finally:  # from now on nothing is known of the others
            self._peer_rows.erase_all()

    async def _exchange_once(self) -> None:
        failures = 0  # one after the other
        interval_seconds, ttl_seconds = self._replica_options.interval_seconds, self._replica_options.ttl_seconds
        while True:
            now = self._clock()
            try:
                message = encode_state(self._local_state.make_full_state(now))
                self._apply_messages(await self._store.exchange_messages(message, self._peers.silent_names(now)))
                failures = 0
                self._on_leader_roles(self._peers.leader_roles(self._clock()))
            except StoreError as error:
                failures += 1
                self._record_failure(error)
                self._on_leader_roles({})
            self._charge_peer_loads()
            pause_seconds = interval_seconds
            if failures:  # a single failed retry must not let this gateway's loads expire at the others
                pause_seconds = min(pause_seconds * 2 ** min(failures, 10), max(pause_seconds, _RETRY_SECONDS))
                pause_seconds = min(pause_seconds, ttl_seconds / 3)
            await asyncio.sleep(self._rng.uniform(0.9, 1.1) * pause_seconds)

    def _apply_messages(self, messages: dict[str, bytes]) -> None:
        self._answered_at = self._clock()
        self._peers.apply_messages(messages, self._answered_at)
        self._metrics.replicas_exchanges_total.labels("ok").inc()
        self._metrics.replicas_last_exchange_timestamp_seconds.set_to_current_time()
        if self._is_gone:
            self._is_gone = False
            logger.info("replicas: the store answers again: loads of other gateways are used again")

    def _record_failure(self, error: StoreError) -> None:
        self._metrics.replicas_exchanges_total.labels("failed").inc()
        if not self._is_gone and self._clock() - self._answered_at >= self._replica_options.ttl_seconds:
            self._is_gone = True
            logger.warning("replicas: the store does not answer: only loads of this gateway are used: %s", error)

    def _charge_peer_loads(self) -> None:
        now = self._clock()
        self._metrics.replicas_peers.set(self._peers.count_current(now))
        charges, used = self._peers.charges_by_instance(now), self._peers.usage_by_key(now)
        slots = self._slots_by_name()
        self._peer_rows.replace_all_loads({slots[key]: charge for key, charge in charges.items() if key in slots})
        self._apply_verdicts(slots, now)
        if self._replica_options.news_seconds is not None:  # otherwise it is too old: the gateway may be gone
            self._peer_rows.write_first_head(self._peers.first_head(now))
        self._peer_rows.replace_key_usage(
            {slot: used[name] for name, slot in self._get_key_slots().items() if name in used}, now
        )

    # Changes, at once

    async def _keep_publishing(self) -> None:
        interval_seconds = self._replica_options.news_seconds
        assert interval_seconds is not None
        while True:
            await asyncio.sleep(interval_seconds)
            now = self._clock()
            news = self._local_state.take_news(now)
            if news is None or not self._peers.count_current(now):
                continue
            message = encode_news(news)
            try:
                await self._store.publish_news(message)
            except StoreError:  # the next exchange has the same facts
                await self._pause_until_next()
            else:
                self._count_message("told", message)

    async def _keep_listening(self) -> None:
        was_refused = False
        while True:
            try:
                await self._store.listen_for_news(self._apply_news)
            except StoreCommandRefused as error:
                if not was_refused:
                    logger.warning(
                        "replicas: the store refuses subscriptions: changes arrive with the next exchange: %s", error
                    )
                was_refused = True
            except StoreError:
                was_refused = False
            await self._pause_until_next()

    async def _pause_until_next(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.9, 1.1) * _RETRY_SECONDS)

    def _apply_news(self, message: bytes) -> None:
        self._count_message("heard", message)
        news, now = decode_news(message), self._clock()
        if news is None or not self._peers.apply_news(news, now):
            return
        slots = self._slots_by_name()
        charges = self._peers.charges_on(news.instances.keys() & slots.keys(), now)
        self._peer_rows.replace_loads({slots[key]: charge for key, charge in charges.items()})
        self._peer_rows.write_first_head(self._peers.first_head(now))
        if news.verdicts:
            self._apply_verdicts(slots, now)
        prompts = {slots[key]: records for key, records in news.prompts.items() if key in slots}
        self._peer_rows.write_prompt_records(prompts, now - news.now)

    def _apply_verdicts(self, slots: Mapping[str, int], now: float) -> None:
        verdicts = self._peers.current_verdicts(now)
        if self._peer_rows.replace_verdicts(
            {(slots[key], name, number) for key, name, number in verdicts if key in slots}
        ):
            self._on_new_verdict()

    def _slots_by_name(self) -> dict[str, int]:
        return {backend.key: backend.slot for backend in self._local_state.all_members()}

    def _count_message(self, direction: str, message: bytes) -> None:
        self._metrics.replicas_news_total.labels(direction).inc()
        self._metrics.replicas_news_bytes_total.labels(direction).inc(len(message))
