"""What goes wrong. Each fault is done to one backend and undone again; then the gateways have some time to find out.

What is planned (`Changes`) counts as one, too: instances are taken out of service, started again and put back.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lab.common.toxics import Direction, Latency, Slicer
from lab.soak.cluster import STALL_SECONDS, Cluster, Engine, until
from lab.soak.evidence import KILL_WORKER, Absence, Fault
from proxy.tools.roll import Gateways, GatewayTrouble, Limits, RollProgress, RollStopped, Walk

Damage = Callable[["Cluster", "Engine"], Awaitable[None]]
Change = Callable[["Engine"], Awaitable[None]]

_DEAD_SECONDS = 0.5
_STOPPED_SECONDS = STALL_SECONDS + 2.0
_LOST_SECONDS = 3.0
_SLOW_SECONDS = 2.0
_INJECTED_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""Between a fault that is over and the next."""
EVACUATE_AFTER_SECONDS = 0.2
"""So long answers may go on at an instance that leaves, where it is evacuated."""
_ROLL_LIMITS = Limits(evacuate_after_seconds=EVACUATE_AFTER_SECONDS, ready_seconds=20.0, settle_seconds=0.5)


async def kill(cluster: Cluster, engine: Engine) -> None:
    """`kill -9`, and a new process soon after."""
    with engine.network.refusing():
        engine.program.send(signal.SIGKILL)
        await asyncio.sleep(_DEAD_SECONDS)
        await asyncio.to_thread(engine.program.end)
        await asyncio.to_thread(engine.program.restart)


async def stop(cluster: Cluster, engine: Engine) -> None:
    """It stands still for longer than an engine may be silent, and goes on as if nothing had been."""
    engine.program.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(_STOPPED_SECONDS)
    finally:
        engine.program.send(signal.SIGCONT)


async def partition(cluster: Cluster, engine: Engine) -> None:
    """Nothing gets through, and nobody is told; in the end connections that are still open are cut."""
    with engine.network.lost():
        await asyncio.sleep(_LOST_SECONDS)
        engine.network.reset_all()


async def slow_down(cluster: Cluster, engine: Engine) -> None:
    """Everything takes a while and comes in pieces. That is no failure, and nobody should notice."""
    with ExitStack() as stack:
        for direction in Direction:
            stack.enter_context(engine.network.toxic(Latency(0.05), direction))
            stack.enter_context(engine.network.toxic(Slicer(100), direction))
        await asyncio.sleep(_SLOW_SECONDS)


async def inject(rule: dict[str, Any], cluster: Cluster, engine: Engine) -> None:
    """The engine does some requests wrong, by itself."""
    await cluster.inject(engine, rule)
    try:
        await asyncio.sleep(_INJECTED_SECONDS)
    finally:
        await cluster.clear_faults(engine)


_ONE_ROLE: dict[str, dict[str, dict[str, Any]]] = {
    "prefill": {
        "500": {"action": "refuse_status", "status": 500, "times": 2},
        "slow headers": {"action": "slow_headers", "seconds": 0.5, "times": 5},
        "reset before headers": {"action": "reset_before_headers", "times": 2},
        "lost response": {"action": "lost_response", "times": 2},
    },
    "decode": {
        "500": {"action": "refuse_status", "status": 500, "times": 2},
        "503": {"action": "refuse_status", "status": 503, "times": 2},
        "slow headers": {"action": "slow_headers", "seconds": 0.5, "times": 5},
        "recompute": {"action": "recompute", "tokens": 9, "times": 3},
        "reset after tokens": {"action": "reset_after_tokens", "tokens": 9, "times": 3},
        "load failure": {"action": "load_failure", "times": 2},
    },
}

_DAMAGES: dict[str, Damage] = {"kill": kill, "stop": stop, "partition": partition, "slow down": slow_down}
_ROLL = "roll"
_SPOIL = "spoil the list"
_LOSE_STORE = "lose the store"


class Changes:
    """Owns the notes of who was not there meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self.absences: list[Absence] = []
        self._cluster = cluster

    async def drain(self, engine: Engine) -> None:
        """As an operator restarts an engine: taken out, waited for, started again, put back. With discovery the list
        says so; what runs is evacuated if the gateways are set like that.
        """
        cluster = self._cluster
        await cluster.change("remove", engine)
        with self._noted(engine, "was removed"):
            await until(partial(cluster.lack, engine))
            await self._restart(engine)
        await cluster.change("add", engine)
        await until(partial(cluster.have, engine))

    async def evacuate(self, engine: Engine) -> None:
        """As an operator does who removes it at once. What the list says does not count until it has said otherwise."""
        cluster, listed = self._cluster, self._cluster.listed
        await cluster.administer("remove", engine, evacuate_after=0)
        with self._noted(engine, "was removed at once"):
            await until(partial(cluster.lack, engine))
            if listed is not None:
                listed.remove(engine.role, engine.instance)
                await until(partial(cluster.are_told, len(cluster.engines) - 1))
            await self._restart(engine)
        await cluster.change("add", engine)
        await until(partial(cluster.have, engine))

    async def leave(self, engine: Engine) -> None:
        """As SGLang does after SIGTERM: its health checks turn 503, and what it has goes on, here or there."""
        cluster = self._cluster
        await cluster.inject(engine, {"action": "refuse_status", "status": 503, "path": "/health"})
        await until(partial(cluster.is_down, engine))
        with self._noted(engine, "said that it leaves"):
            await until(partial(cluster.is_idle, engine))
            await self._restart(engine)

    async def roll(self, role: str) -> None:
        """As `pdproxy roll` does with all instances of a role. Raises RollStopped."""
        loop = asyncio.get_running_loop()
        engines = {engine.instance: engine for engine in self._cluster.engines}

        def restart(address: str) -> None:
            asyncio.run_coroutine_threadsafe(self._rolled(engines[address]), loop).result()

        gateways = Gateways([gateway.url for gateway in self._cluster.gateways], role, None)
        walk = Walk(gateways, RollProgress(None, role, ""), _ROLL_LIMITS, restart, _tell)
        await asyncio.to_thread(lambda: walk.run(walk.plan()))

    async def _rolled(self, engine: Engine) -> None:
        with self._noted(engine, "was disabled"):
            await self._restart(engine)

    async def _restart(self, engine: Engine) -> None:
        await asyncio.to_thread(engine.program.end)
        await asyncio.to_thread(engine.program.restart)

    @contextmanager
    def _noted(self, engine: Engine, why: str) -> Iterator[None]:
        began = time.time()
        yield
        self.absences.append(Absence(instance=engine.instance, began=began, ended=time.time(), why=why))


class FaultInjector:
    """One fault after the other, in an order that depends on the seed alone. Owns the notes of them."""

    def __init__(self, cluster: Cluster, seed: int, *, kills_workers: bool, evacuates: bool) -> None:
        """`evacuates`: instances leave under their answers, too."""
        self.faults: list[Fault] = []
        self.changes = Changes(cluster)
        self._cluster = cluster
        self._kills_workers = kills_workers
        self._draw = random.Random(seed)
        self._planned: dict[str, Change] = {"drain": self.changes.drain}
        self._rolls = evacuates
        if evacuates:
            self._planned |= {"evacuate": self.changes.evacuate, "leave": self.changes.leave}

    async def run_for(self, seconds: float, tell: Callable[[Fault], None]) -> None:
        """One fault at a time until then; the last one is undone, too."""
        until = time.monotonic() + seconds
        for kind, role in self._deck():
            if time.monotonic() >= until:
                return
            began = time.time()
            is_done, target = True, role
            try:
                target = await self._do(kind, role)
            except (RollStopped, GatewayTrouble, TimeoutError) as error:
                print(f"  {str(error) or 'this takes too long'}", file=sys.stderr, flush=True)
                is_done = False
            is_healed = await self._cluster.is_well_soon() and is_done
            fault = Fault(kind=kind, target=target, began=began, ended=time.time(), is_healed=is_healed)
            self.faults.append(fault)
            tell(fault)
            await asyncio.sleep(GRACE_SECONDS)

    def _deck(self) -> Iterator[tuple[str, str]]:
        """Kinds and roles: what is worst, in some order, then what engines do wrong by themselves; and again."""
        worst = [(kind, role) for role in _ONE_ROLE for kind in ("kill", *_DAMAGES, *self._planned)]
        if self._rolls:
            worst += [(_ROLL, role) for role in _ONE_ROLE]
        if self._cluster.listed is not None:
            worst += [(_SPOIL, "")] * 2
        if self._cluster.store is not None:
            worst += [(_LOSE_STORE, "")] * 2
        if self._kills_workers:
            worst += [(KILL_WORKER, "")] * 3
        others = [(kind, role) for role, rules in _ONE_ROLE.items() for kind in rules]
        while True:
            for cards in (worst, others):
                yield from self._draw.sample(cards, len(cards))

    async def _do(self, kind: str, role: str) -> str:
        """Do it to somebody, and tell to whom. Raises RollStopped and GatewayTrouble."""
        if kind == KILL_WORKER:
            pid = self._draw.choice(self._cluster.workers())
            os.kill(pid, signal.SIGKILL)
            return str(pid)
        if kind == _SPOIL:
            return await self._spoil()
        if kind == _LOSE_STORE:
            return await self._lose_store()
        if kind == _ROLL:
            await self.changes.roll(role)
            return role
        engine = self._draw.choice([engine for engine in self._cluster.engines if engine.role == role])
        if change := self._planned.get(kind):
            await change(engine)
        else:
            damage = _DAMAGES.get(kind) or partial(inject, _ONE_ROLE[engine.role][kind])
            await damage(self._cluster, engine)
        return engine.name

    async def _spoil(self) -> str:
        """The file with the engines is broken for a while."""
        listed = self._cluster.listed
        assert listed is not None
        listed.spoil()
        try:
            await until(self._cluster.discovery_fails)
            await asyncio.sleep(_INJECTED_SECONDS)
        finally:
            listed.repair()
        return "discovery"

    async def _lose_store(self) -> str:
        """Nobody tells the gateways of each other for a while, and nothing is left of what they have said."""
        store = self._cluster.store
        assert store is not None
        await asyncio.to_thread(store.end)
        try:
            await until(self._cluster.are_alone)
            await asyncio.sleep(_INJECTED_SECONDS)
        finally:
            await asyncio.to_thread(store.restart)
        return "the store"


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
