"""Every engine is restarted in turn, under load, and no client notices."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.asking import answer_alone
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_instances import BODY, CLIENTS, Load, served_by_now
from tests.scenarios.test_stopping import is_ready


class Operator:
    """Restarts engines as one does: take it out, let it end what it has, restart it, put it in again."""

    def __init__(self, session: aiohttp.ClientSession, program: Program) -> None:
        self._session = session
        self._program = program

    async def restart(self, engine: SimulatedEngine) -> None:
        role = f"{engine.options.role}_instances"
        await self._change("remove", engine)
        await served_by_now(self._session, self._program.url, **{role: 1})
        assert not engine.state.live
        await engine.restart()
        await self._change("add", engine)
        await served_by_now(self._session, self._program.url, **{role: 2})

    async def _change(self, how: str, engine: SimulatedEngine) -> None:
        instance = {"type": engine.options.role, "instances": f"127.0.0.1:{engine.port}"}
        async with self._session.post(f"{self._program.url}/instances/{how}", json=instance) as response:
            assert response.status == 200


@pytest.mark.fault(34)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_rolling_restart_fails_no_request(session: aiohttp.ClientSession, workers: str) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(SimulatedEngine(role=role))
            for role in ("prefill", "prefill", "decode", "decode")
        ]
        words = [word for engine in engines for word in (f"--{engine.options.role}", engine.url)]
        # A restarted engine soon gets as much as the other one.
        environment = {"PROXY_HEALTH__SLOW_START_SECONDS": "0.5"}
        program = await stack.enter_async_context(gateway(*words, "--workers", workers, **environment))
        await is_ready(session, program.url)
        operator = Operator(session, program)
        load = Load(session, program.url)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            for engine in engines:
                await operator.restart(engine)
                count = engine.state.finished
                await engine.wait_until(lambda state, count=count: state.finished >= count + CLIENTS)
            load.is_enough = True
        assert not any(engine.pins for engine in engines)
    text = await answer_alone(BODY)
    assert [answer.status for answer in load.answers] == [200] * len(load.answers)
    assert [answer.text for answer in load.answers if answer.is_done] == [text] * len(load.answers)
