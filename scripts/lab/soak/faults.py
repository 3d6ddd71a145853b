"""What goes wrong. Each fault is done to one backend and undone again; then the gateway has some time to find out."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.common.toxics import Direction, Latency, Slicer
from lab.soak.cluster import STALL_SECONDS, until
from lab.soak.evidence import KILL_WORKER, Absence, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.soak.cluster import Cluster, Engine

Damage = Callable[["Cluster", "Engine"], Awaitable[None]]

_DEAD_SECONDS = 0.5
_STOPPED_SECONDS = STALL_SECONDS + 2.0
_LOST_SECONDS = 3.0
_SLOW_SECONDS = 2.0
_INJECTED_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""Between a fault that is over and the next."""


async def kill(cluster: Cluster, engine: Engine) -> None:
    """`kill -9`, and a new process soon after."""
    with engine.network.refusing():
        engine.program.send(signal.SIGKILL)
        await asyncio.sleep(_DEAD_SECONDS)
        await engine.program.end()
        await cluster.start(engine)


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
DRAIN = "drain"
_SPOIL = "spoil the list"


class FaultInjector:
    """One fault after the other, in an order that depends on the seed alone. Owns the notes of them."""

    def __init__(self, cluster: Cluster, seed: int, *, kills_workers: bool) -> None:
        self.faults: list[Fault] = []
        self.absences: list[Absence] = []
        self._cluster = cluster
        self._kills_workers = kills_workers
        self._draw = random.Random(seed)

    async def run_for(self, seconds: float, tell: Callable[[Fault], None]) -> None:
        """One fault at a time until then; the last one is undone, too."""
        until = time.monotonic() + seconds
        for kind, role in self._deck():
            if time.monotonic() >= until:
                return
            began = time.time()
            target = await self._do(kind, role)
            is_healed = await self._cluster.is_well_soon()
            fault = Fault(kind=kind, target=target, began=began, ended=time.time(), is_healed=is_healed)
            self.faults.append(fault)
            tell(fault)
            await asyncio.sleep(GRACE_SECONDS)

    def _deck(self) -> Iterator[tuple[str, str]]:
        """Kinds and roles: what is worst, in some order, then what engines do wrong by themselves; and again."""
        worst = [(kind, role) for role in _ONE_ROLE for kind in ("kill", *_DAMAGES, DRAIN)]
        if self._cluster.listed is not None:
            worst += [(_SPOIL, "")] * 2
        if self._kills_workers:
            worst += [(KILL_WORKER, "")] * 3
        others = [(kind, role) for role, rules in _ONE_ROLE.items() for kind in rules]
        while True:
            for cards in (worst, others):
                yield from self._draw.sample(cards, len(cards))

    async def _do(self, kind: str, role: str) -> str:
        """Do it to somebody, and tell to whom."""
        if kind == KILL_WORKER:
            pid = self._draw.choice(self._cluster.workers())
            os.kill(pid, signal.SIGKILL)
            return str(pid)
        if kind == _SPOIL:
            return await self._spoil()
        engine = self._draw.choice([engine for engine in self._cluster.engines if engine.role == role])
        if kind == DRAIN:
            await self._drain(engine)
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

    async def _drain(self, engine: Engine) -> None:
        """As an operator restarts an engine: taken out, waited for, started again, put back."""
        cluster = self._cluster
        await cluster.change("remove", engine)
        removed_at = time.time()
        await until(partial(cluster.lacks, engine))
        await engine.program.end()
        await cluster.start(engine)
        self.absences.append(Absence(instance=engine.instance, began=removed_at, ended=time.time(), why="was removed"))
        await cluster.change("add", engine)
        await until(partial(cluster.has, engine))
