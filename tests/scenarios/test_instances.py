"""Instances come and go while requests are served, and no request fails for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, ask, request
from tests.deployment import generations
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway

CLIENTS = 8
BODY = request(Api.CHAT, stream=True, max_tokens=20)


class Load:
    """Clients that ask one thing after the other. A task group runs them."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.answers: list[Answer] = []
        self.is_enough = False
        self._session = session
        self._url = url

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client())

    async def _client(self) -> None:
        while not self.is_enough:
            self.answers.append(await ask(self._session, self._url, BODY))


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_instances_are_exchanged_under_load(session: aiohttp.ClientSession, workers: str) -> None:
    async with AsyncExitStack() as stack:
        old = [await stack.enter_async_context(SimulatedEngine(role=role)) for role in ("prefill", "decode")]
        new = [await stack.enter_async_context(SimulatedEngine(role=role)) for role in ("prefill", "decode")]
        program = await stack.enter_async_context(
            gateway("--prefill", old[0].url, "--decode", old[1].url, "--workers", workers)
        )

        async def change(how: str, engine: SimulatedEngine) -> Any:
            instance = {"type": engine.options.role, "instances": [f"127.0.0.1:{engine.port}"]}
            async with session.post(f"{program.url}/instances/{how}", json=instance) as response:
                assert response.status == 200

        load = Load(session, program.url)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await old[1].wait_until(lambda state: state.finished >= CLIENTS)
            for engine in new:
                await change("add", engine)
            for engine in new:
                await engine.wait_until(lambda state: state.finished >= CLIENTS)
            for engine in old:
                await change("remove", engine)
            for engine in old:
                await engine.wait_until(lambda state: not state.live)
            await served_by_now(session, program.url, prefill_instances=1, decode_instances=1)
            seen = [len(generations(engine)) for engine in old]
            for engine in new:
                count = engine.state.finished
                await engine.wait_until(lambda state, count=count: state.finished >= count + CLIENTS)
            load.is_enough = True

        assert [len(generations(engine)) for engine in old] == seen
        assert not any(engine.pins for engine in (*old, *new))
    text = await answer_alone(BODY)
    assert [answer.text for answer in load.answers if answer.is_done] == [text] * len(load.answers)


async def served_by_now(session: aiohttp.ClientSession, url: str, **expected: int) -> None:
    """Wait until `/healthcheck` reports these numbers of instances; removed ones leave after their requests."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(url + "/healthcheck") as response:
                answer = await response.json()
            if {name: answer[name] for name in expected} == expected:
                return


async def test_instance_is_given_up_if_it_never_answers(site: Site) -> None:
    waiting = ("--max-waiting-retries", "2", "--waiting-retry-interval", "0.05")
    async with gateway(*site.engines, *waiting) as program, SimulatedEngine(role="decode") as absent:
        await absent.kill()
        instance = {"type": "decode", "instances": f"127.0.0.1:{absent.port}"}
        async with site.session.post(program.url + "/instances/add", json=instance) as response:
            assert "waiting to be added" in (await response.json())["message"]
        await program.says(f"decode instance 127.0.0.1:{absent.port} is not added")
        await served_by_now(site.session, program.url, decode_instances=1)
