"""Faults of one backend at a time. Each is undone, and the gateways get time to recover.

Planned changes (`Changes`) count as faults, too: instances are removed, restarted and added again.
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
from lab.soak.cluster import STALL_SECONDS, Cluster, Engine, wait_until
from lab.soak.evidence import KILL_WORKER, Absence, Fault
from proxy.common.backend import Role
from proxy.tools.roll import GatewayGroup, GatewayProblem, RestartWalk, RollLimits, RollProgress, RollStopped

FaultAction = Callable[["Cluster", "Engine"], Awaitable[None]]
Change = Callable[["Engine"], Awaitable[None]]

_DEAD_SECONDS = 0.5
_STOPPED_SECONDS = STALL_SECONDS + 2.0
_LOST_SECONDS = 3.0
_SLOW_SECONDS = 2.0
_MOVED_SECONDS = 2.0
_INJECTED_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""Time between two faults."""
EVACUATE_AFTER_SECONDS = 0.2
"""Time after which answers of a removed instance are evacuated."""
_ROLL_LIMITS = RollLimits(evacuate_after_seconds=EVACUATE_AFTER_SECONDS, ready_seconds=20.0, settle_seconds=0.5)


async def kill(cluster: Cluster, engine: Engine) -> None:
    """Kill an engine with SIGKILL, and start a new process soon after."""
    with engine.network.refusing():
        engine.program.send(signal.SIGKILL)
        await asyncio.sleep(_DEAD_SECONDS)
        await asyncio.to_thread(engine.program.end)
        await asyncio.to_thread(engine.program.restart)


async def stop(cluster: Cluster, engine: Engine) -> None:
    """Stop an engine for longer than the stall limit, and continue it."""
    engine.program.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(_STOPPED_SECONDS)
    finally:
        engine.program.send(signal.SIGCONT)


async def partition(cluster: Cluster, engine: Engine) -> None:
    """Lose all packets silently for a time, then reset the open connections."""
    with engine.network.lost():
        await asyncio.sleep(_LOST_SECONDS)
        engine.network.reset_all()


async def slow_down(cluster: Cluster, engine: Engine) -> None:
    """Delay and slice all bytes. That is not a failure."""
    with ExitStack() as stack:
        for direction in Direction:
            stack.enter_context(engine.network.toxic(Latency(0.05), direction))
            stack.enter_context(engine.network.toxic(Slicer(100), direction))
        await asyncio.sleep(_SLOW_SECONDS)


async def inject(rule: dict[str, Any], cluster: Cluster, engine: Engine) -> None:
    """Let the engine fail some requests."""
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

_FAULTS: dict[str, FaultAction] = {"kill": kill, "stop": stop, "partition": partition, "slow down": slow_down}
_ROLL = "roll"
_CORRUPT_LIST = "corrupt the list"
_LOSE_STORE = "lose the store"


class Changes:
    """Planned changes of instances. Records their absences."""

    def __init__(self, cluster: Cluster) -> None:
        self.absences: list[Absence] = []
        self._cluster = cluster

    async def drain(self, engine: Engine) -> None:
        """Drain and restart an instance: remove it, wait, restart it, add it.

        With discovery, the list is changed. Running requests are evacuated if the gateways are set so.
        """
        cluster = self._cluster
        await cluster.change("remove", engine)
        with self._absent(engine, "was removed"):
            await wait_until(partial(cluster.is_unknown, engine))
            await self._restart(engine)
        await cluster.change("add", engine)
        await wait_until(partial(cluster.is_known, engine))

    async def evacuate(self, engine: Engine) -> None:
        """Remove an instance with immediate evacuation, and restart it.

        A removal by the admin API holds until the list names the instance again.
        """
        cluster, listed = self._cluster, self._cluster.listed
        await cluster.administer("remove", engine, evacuate_after=0)
        with self._absent(engine, "was removed at once"):
            await wait_until(partial(cluster.is_unknown, engine))
            if listed is not None:
                listed.remove(engine.role, engine.instance)
                await wait_until(partial(cluster.have_discovered, len(cluster.engines) - 1))
            await self._restart(engine)
        await cluster.change("add", engine)
        await wait_until(partial(cluster.is_known, engine))

    async def move(self, engine: Engine) -> None:
        """Move an elastic instance to the other role, and back later. It never gets legs of both roles."""
        first = engine.role
        other = Role(first).counterpart.value
        for role in (other, first):
            left = engine.role
            await self._cluster.move(engine, role)
            with self._absent(engine, f"has moved to {role}", stage=left):
                await asyncio.sleep(_MOVED_SECONDS)

    async def leave(self, engine: Engine) -> None:
        """Leave as SGLang does after SIGTERM: health checks return 503, and running requests finish anywhere."""
        cluster = self._cluster
        await cluster.inject(engine, {"action": "refuse_status", "status": 503, "path": "/health"})
        await wait_until(partial(cluster.is_down, engine))
        with self._absent(engine, "reported that it leaves"):
            await wait_until(partial(cluster.is_idle, engine))
            await self._restart(engine)

    async def roll(self, role: str) -> None:
        """Restart all instances of a role as `pdproxy roll` does. Raises RollStopped."""
        loop = asyncio.get_running_loop()
        engines = {engine.instance: engine for engine in self._cluster.engines}

        def restart(address: str) -> None:
            asyncio.run_coroutine_threadsafe(self._rolled(engines[address]), loop).result()

        gateways = GatewayGroup([gateway.url for gateway in self._cluster.gateways], role, None)
        walk = RestartWalk(gateways, RollProgress(None, role, ""), _ROLL_LIMITS, restart, _print)
        await asyncio.to_thread(lambda: walk.run(walk.plan()))

    async def _rolled(self, engine: Engine) -> None:
        with self._absent(engine, "was disabled"):
            await self._restart(engine)

    async def _restart(self, engine: Engine) -> None:
        await asyncio.to_thread(engine.program.end)
        await asyncio.to_thread(engine.program.restart)

    @contextmanager
    def _absent(self, engine: Engine, why: str, stage: str | None = None) -> Iterator[None]:
        began = time.time()
        yield
        self.absences.append(Absence(instance=engine.instance, began=began, ended=time.time(), why=why, stage=stage))


class FaultInjector:
    """Runs one fault after the other, in an order that depends only on the seed. Records them."""

    def __init__(self, cluster: Cluster, seed: int, *, kills_workers: bool, evacuates: bool, moves: bool) -> None:
        """Create the injector.

        `evacuates`: instances also leave during their answers. `moves`: they also exchange their roles.
        """
        self.faults: list[Fault] = []
        self.changes = Changes(cluster)
        self._cluster = cluster
        self._kills_workers = kills_workers
        self._draw = random.Random(seed)
        self._planned: dict[str, Change] = {"drain": self.changes.drain}
        self._rolls = evacuates
        if evacuates:
            self._planned |= {"evacuate": self.changes.evacuate, "leave": self.changes.leave}
        if moves:
            self._planned["move"] = self.changes.move

    async def run_for(self, seconds: float, report: Callable[[Fault], None]) -> None:
        """Run one fault at a time for a duration. The last one is undone, too."""
        until = time.monotonic() + seconds
        for kind, role in self._deck():
            if time.monotonic() >= until:
                return
            began = time.time()
            is_done, target = True, role
            try:
                target = await self._run(kind, role)
            except (RollStopped, GatewayProblem, TimeoutError) as error:
                print(f"  {str(error) or 'timed out'}", file=sys.stderr, flush=True)
                is_done = False
            is_healed = await self._cluster.becomes_healthy() and is_done
            fault = Fault(kind=kind, target=target, began=began, ended=time.time(), is_healed=is_healed)
            self.faults.append(fault)
            report(fault)
            await asyncio.sleep(GRACE_SECONDS)

    def _deck(self) -> Iterator[tuple[str, str]]:
        """Yield faults as (kind, role): first each severe fault in random order, then engine errors without end."""
        worst = [(kind, role) for role in _ONE_ROLE for kind in ("kill", *_FAULTS, *self._planned)]
        worst += [("move", role) for role in _ONE_ROLE if "move" in self._planned]  # as often as kills
        if self._rolls:
            worst += [(_ROLL, role) for role in _ONE_ROLE]
        if self._cluster.listed is not None:
            worst += [(_CORRUPT_LIST, "")] * 2
        if self._cluster.store is not None:
            worst += [(_LOSE_STORE, "")] * 2
        if self._kills_workers:
            worst += [(KILL_WORKER, "")] * 3
        others = [(kind, role) for role, rules in _ONE_ROLE.items() for kind in rules]
        while True:
            for cards in (worst, others):
                yield from self._draw.sample(cards, len(cards))

    async def _run(self, kind: str, role: str) -> str:
        """Run a fault on a random target. Return its name. Raises RollStopped and GatewayProblem."""
        if kind == KILL_WORKER:
            pid = self._draw.choice(self._cluster.workers())
            os.kill(pid, signal.SIGKILL)
            return str(pid)
        if kind == _CORRUPT_LIST:
            return await self._corrupt_list()
        if kind == _LOSE_STORE:
            return await self._lose_store()
        if kind == _ROLL:
            await self.changes.roll(role)
            return role
        engine = self._draw.choice([engine for engine in self._cluster.engines if engine.role == role])
        if change := self._planned.get(kind):
            await change(engine)
        else:
            action = _FAULTS.get(kind) or partial(inject, _ONE_ROLE[engine.role][kind])
            await action(self._cluster, engine)
        return engine.name

    async def _corrupt_list(self) -> str:
        """Keep the discovery file invalid for a while."""
        listed = self._cluster.listed
        assert listed is not None
        listed.corrupt()
        try:
            await wait_until(self._cluster.discovery_fails)
            await asyncio.sleep(_INJECTED_SECONDS)
        finally:
            listed.repair()
        return "discovery"

    async def _lose_store(self) -> str:
        """Stop the store, which loses its content, and start it again."""
        store = self._cluster.store
        assert store is not None
        await asyncio.to_thread(store.end)
        try:
            await wait_until(self._cluster.are_alone)
            await asyncio.sleep(_INJECTED_SECONDS)
        finally:
            await asyncio.to_thread(store.restart)
        return "the store"


def _print(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
