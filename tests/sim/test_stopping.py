"""Simulated engines that are stopped end their answers as vLLM does, and nobody listens from then on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"model": "sim", "prompt": "once upon ", "max_tokens": 1000}
SLOW: dict[str, Any] = {"role": "both", "protocol": "none", "decode_step_ms": 2.0}


async def is_deaf(client: Client, engine: SimulatedEngine) -> bool:
    try:
        async with client.session.get(engine.url + "/health"):
            return False
    except aiohttp.ClientConnectorError:
        return True


@pytest.mark.parametrize("profile", ["v0.33", "sglang"])
async def test_abort_ends_answers_with_their_finish_reason(client: Client, profile: str) -> None:
    async with SimulatedEngine(profile_name=profile, **SLOW) as engine:
        streaming = asyncio.create_task(client.stream(engine, TEXT, LONG))
        waiting = asyncio.create_task(client.post(engine, TEXT, LONG))
        await engine.wait_until(lambda state: state.live == 2 and state.tokens_generated > 10)
        await engine.stop("abort")
        *events, done = await streaming
        assert done == "[DONE]"
        assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "abort"
        assert (await waiting)[1]["choices"][0]["finish_reason"] == "abort"
        assert await is_deaf(client, engine)


async def test_dead_core_ends_answers_with_an_error(client: Client) -> None:
    async with SimulatedEngine(**SLOW) as engine:
        streaming = asyncio.create_task(client.stream(engine, TEXT, LONG))
        waiting = asyncio.create_task(client.post(engine, TEXT, LONG))
        await engine.wait_until(lambda state: state.live == 2 and state.tokens_generated > 10)
        await engine.stop("core-dead")
        *_, error, done = await streaming
        assert (error["error"]["code"], done) == (500, "[DONE]")
        status, told = await waiting
        assert (status, told["error"]["type"]) == (500, "InternalServerError")
        assert await is_deaf(client, engine)


async def test_silent_stop_leaves_answers_open(client: Client) -> None:
    async with SimulatedEngine(**SLOW) as engine:
        async with client.session.post(engine.url + TEXT, json=LONG | {"stream": True}) as response:
            await response.content.readany()
            await engine.stop("silent")
            assert await is_deaf(client, engine)
            assert engine.state.live == 1
            assert engine.core.scheduler.running == 0
        await engine.restart()
        assert not await is_deaf(client, engine)


async def test_program_stops_at_sigterm_as_its_flag_says(client: Client) -> None:
    words = ("-m", "proxy", "mock-engine", "--decode-step-ms", "5", "--at-sigterm", "abort")
    program = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=subprocess.PIPE)
    try:
        assert program.stdout is not None
        url = (await program.stdout.readline()).decode().split()[-1]
        async with client.session.post(url + TEXT, json=LONG | {"stream": True}) as response:
            await response.content.readany()
            program.terminate()
            assert b'"finish_reason":"abort"' in await response.read()
        assert await program.wait() == 0
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
