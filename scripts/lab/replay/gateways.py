"""Gateways made of the product's balancer and admission queue, and a store by which they share state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from lab.replay.engines import Engine
from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import Health, HealthBoard
from proxy.balancer.pick import PickRequest, Policy, PolicyContext
from proxy.balancer.policies.handoff_times import HandoffTimes, lacks_memory
from proxy.balancer.policies.prefiller import write_cache_count
from proxy.balancer.pool import Pool, PoolLimits, PoolParts, Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.journal import Journal, JournalWriter
from proxy.balancer.shared.memory import QueueHeads, WorkerQueueHead
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Role
from proxy.fleet.kv_events.blocks import RankBlocks
from proxy.fleet.replicas.exchange import ExchangeParts, StateExchange
from proxy.fleet.replicas.state import LocalState, PeerRows, SharedRows
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.api_keys import KeyUsage
from proxy.gateway.engine_room import PoolsRoom
from proxy.observe.metrics import Metrics
from proxy.process.loop_lag import LoopLag
from proxy.settings import Settings
from proxy.settings.model import Admission as AdmissionLimits
from proxy.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, Event

# The interval at which the product's subscriber reports block counts.
_REPORT_SECONDS: Final = 0.1
FIRST_PORT: Final = 7000
"""Port of the first prefiller. The other instances have the next ones, decoders last."""


class KvEventRelay:
    """Reports the number of an engine's cached blocks to all gateways, as KV events do."""

    def __init__(
        self, backend: Backend, block_tokens: int, writers: Sequence[JournalWriter], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._backend = backend
        self._block_tokens = block_tokens
        self._writers = writers
        self._loop = loop
        self._blocks = RankBlocks()
        self._is_due = False

    def stored(self, parent: Hashable | None, names: Sequence[Hashable]) -> None:
        hashes = [cast("int", name) for name in names]
        self._take(BlocksStored(hashes, cast("int | None", parent), self._block_tokens, None, None, True))

    def removed(self, name: Hashable) -> None:
        self._take(BlocksRemoved([cast("int", name)], None, None))

    def cleared(self) -> None:
        self._take(AllBlocksCleared())

    def _take(self, event: Event) -> None:
        self._blocks.apply_events((event,))
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(_REPORT_SECONDS, self._report)

    def _report(self) -> None:
        self._is_due = False
        for writer in self._writers:
            write_cache_count(writer, self._backend.slot, self._blocks.cache_count)


MakePolicy = Callable[[PolicyContext, Mapping[Backend, Engine]], Policy]


@dataclass(slots=True)
class SharedStore:
    """An in-memory Redis between gateways. Each operation takes `seconds` each way."""

    seconds: float = 0.0005
    fields: dict[str, bytes] = field(default_factory=dict)
    listeners: list[Callable[[bytes], None]] = field(default_factory=list)

    def of(self, name: str) -> NamedStore:
        """Return the store as one gateway sees it."""
        return NamedStore(self, name)


@dataclass(slots=True)
class NamedStore:
    """The interface of proxy.fleet.replicas.Store for one gateway."""

    store: SharedStore
    name: str

    async def exchange_messages(self, message: bytes, lost_gateways: Collection[str] = ()) -> dict[str, bytes]:
        await asyncio.sleep(self.store.seconds)
        self.store.fields[self.name] = message
        found = dict(self.store.fields)
        await asyncio.sleep(self.store.seconds)
        return found

    async def publish_news(self, news: bytes) -> None:
        loop = asyncio.get_running_loop()
        for listener in self.store.listeners:
            loop.call_later(2 * self.store.seconds, listener, news)
        await asyncio.sleep(2 * self.store.seconds)

    async def listen_for_news(self, listener: Callable[[bytes], None]) -> None:
        self.store.listeners.append(listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.store.listeners.remove(listener)

    async def delete_own_message(self) -> None:
        self.store.fields.pop(self.name, None)


class Worker:
    """One worker of a gateway: its pools, and the admission queue in front of them."""

    def __init__(self, pools: Pools, clock: Callable[[], float], front: WorkerQueueHead | None) -> None:
        self.pools = pools
        parts = AdmissionParts(
            engine_room=PoolsRoom(pools, (Role.DECODE, Role.PREFILL)),
            metrics=Metrics(),
            clock=clock,
            queue_order=pools.prefill,
            queue_head=front,
            skips_queue=lambda request: self.skips_queue(request),
        )
        self.skips_queue: Callable[[PickRequest], bool] = lambda _: False
        self.admission = AdmissionQueue(parts, AdmissionLimits())


@dataclass(frozen=True, slots=True)
class Plan:
    """Configuration of the gateways of a run."""

    prefillers: int
    decoders: int
    policies: Mapping[Role, MakePolicy]
    max_running: Mapping[Role, int | None]
    facts: Callable[[Backend], EngineFacts | None]
    workers: int = 1
    replicas: Mapping[str, object] | None = None
    """Options by which gateways share state. None: they share nothing."""
    loop_lag: LoopLag | None = None
    """Delays of the gateways' event loop. None: no delays."""
    kv_events: bool = False
    """Prefillers publish KV events, and all gateways receive them."""
    learns_handoffs: bool = True
    """Gateways learn the times of handoffs."""


class Gateway:
    """A gateway on the running loop."""

    def __init__(self, plan: Plan, name: str, engines: Mapping[Backend, Engine], rng: random.Random) -> None:
        self._clock = asyncio.get_running_loop().time
        guests = 0 if plan.replicas is None else 1
        self._name = name
        self._plan = plan
        count = plan.prefillers + plan.decoders
        self.scoreboard = Scoreboard(workers=plan.workers, slots=count + 1, guests=guests)
        self._journal = Journal(plan.workers + guests, write_only_rings=int(plan.kv_events))
        self.events = self._journal.writer_for(self._journal.worker_count) if plan.kv_events else None
        """Writer of received KV events. None: the gateway receives none."""
        addresses = [("10.0.0.1", FIRST_PORT + number) for number in range(count)]
        places = set(addresses)
        self.roster = Roster(
            addresses[: plan.prefillers], addresses[plan.prefillers :], self.scoreboard, elastic=places
        )
        self.health = Health(None, self._clock, rng)
        self._engines = engines
        self._rng = rng
        self._fronts = QueueHeads(plan.workers, guests)
        self.workers = [self._worker(number) for number in range(plan.workers)]

    def _worker(self, number: int) -> Worker:
        handoffs = HandoffTimes(self._context(number, Role.DECODE, None), self._is_full)
        prefill, decode = (self._pool(number, role, handoffs) for role in (Role.PREFILL, Role.DECODE))
        pools = Pools(prefill=prefill, decode=decode, handoff_times=handoffs)
        return Worker(pools, self._clock, self._fronts.view_of_worker(number))

    def exchange(self, store: SharedStore) -> StateExchange:
        """Return the exchange that shares this gateway's state with the others."""
        sections = {"decode": ["10.0.0.1:1"], "connector": "plain", "replicas": self._plan.replicas}
        workers = self._plan.workers
        board, usage = HealthBoard(workers, self.scoreboard.slot_count), KeyUsage(workers, slots=1, guest_rows=1)
        rows = SharedRows(
            scoreboard=self.scoreboard,
            key_usage=usage,
            health_board=board,
            queue_heads=self._fronts,
            journal_writer=self._journal.writer_for(workers),
        )
        return StateExchange(
            ExchangeParts(
                store=store.of(self._name),
                own_name=self._name,
                local_state=LocalState(self._name, self.roster, dict, rows),
                peer_rows=PeerRows(rows),
                get_key_slots=dict,
                settings=Settings.model_validate(sections),
                metrics=Metrics(),
                clock=self._clock,
                random_source=self._rng,
            )
        )

    def _is_full(self, decoder: Backend) -> bool:
        return lacks_memory(self.scoreboard, decoder, self._plan.facts(decoder))

    def _context(self, worker: int, role: Role, handoffs: HandoffTimes | None) -> PolicyContext:
        return PolicyContext(
            worker,
            random_source=self._rng,
            clock=self._clock,
            facts_of_engine=self._plan.facts,
            journal_writer=self._journal.writer_for(worker) if self._journal.ring_count > 1 else None,
            role=role,
            others_running_requests=self.scoreboard.others_running_requests(self.scoreboard.load_row(worker)),
            loop_lag_within=self._plan.loop_lag.longest_lag_within if self._plan.loop_lag else lambda began, ended: 0.0,
            handoff_predictions=handoffs,
        )

    def _pool(self, worker: int, role: Role, handoffs: HandoffTimes) -> Pool:
        context = self._context(worker, role, handoffs)
        return Pool(
            PoolParts(
                role=role,
                policy=self._plan.policies[role](context, self._engines),
                scoreboard=self.scoreboard,
                load_row=self.scoreboard.load_row(worker),
                roster=self.roster,
                health=self.health,
                pool_limits=PoolLimits(max_running=self._plan.max_running[role]),
                clock=self._clock,
                random_source=self._rng,
            )
        )
