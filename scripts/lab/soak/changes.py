"""What is planned: instances are taken out of service, started again and put back, and nobody may notice."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from lab.soak.cluster import until
from lab.soak.evidence import Absence
from proxy.roll import Gateways, Limits, Progress, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.soak.cluster import Cluster, Engine

EVACUATE_AFTER_SECONDS = 0.2
"""So long answers may go on at an instance that leaves, where it is evacuated."""
_ROLL_LIMITS = Limits(evacuate_after_seconds=EVACUATE_AFTER_SECONDS, ready_seconds=20.0, settle_seconds=0.5)


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
        walk = Walk(gateways, Progress(None, role, ""), _ROLL_LIMITS, restart, _tell)
        await asyncio.to_thread(lambda: walk.run(walk.plan()))

    async def _rolled(self, engine: Engine) -> None:
        with self._noted(engine, "was disabled"):
            await self._restart(engine)

    async def _restart(self, engine: Engine) -> None:
        await engine.program.end()
        await self._cluster.start(engine)

    @contextmanager
    def _noted(self, engine: Engine, why: str) -> Iterator[None]:
        began = time.time()
        yield
        self.absences.append(Absence(instance=engine.instance, began=began, ended=time.time(), why=why))


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
