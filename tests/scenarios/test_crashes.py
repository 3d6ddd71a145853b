"""Engines in separate processes that die, freeze and return."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, read, request
from tests.scenarios.program import gateway, mock_engine

BODY = request(Api.CHAT, stream=True, max_tokens=2000)
QUESTION = request(Api.CHAT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_answer_survives_a_decoder_that_is(
    number: signal.Signals, prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("decode", "--decode-step-ms", "2"))
        engines = ("--prefill", prefiller.url, "--decode", mortal.url, "--decode", decoder.url)
        program = await stack.enter_async_context(gateway(*engines, PROXY_TIMEOUTS__IDLE_SECONDS="2"))
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            mortal.signal(number)
            answer = await read(response)
        assert answer.is_done
        assert answer.text == await answer_alone(BODY)
        if number == signal.SIGSTOP:
            mortal.signal(signal.SIGCONT)  # and what it says now is not heard
        for _ in range(4):
            assert (await ask(session, program.url, QUESTION)).text == await answer_alone(QUESTION)


async def test_answer_without_resume_breaks_off_with_its_decoder(
    prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("decode", "--decode-step-ms", "2"))
        engines = ("--prefill", prefiller.url, "--decode", mortal.url, "--decode", decoder.url)
        program = await stack.enter_async_context(gateway(*engines, PROXY_RESUME__MODE="restart-only"))
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            mortal.signal(signal.SIGKILL)
            answer = await read(response)
        assert not answer.is_whole
        assert answer.error["code"] == "decode_broken"


async def test_killed_prefiller_costs_a_request_nothing_while_there_is_another(
    prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("prefill", "--prefill-ms-per-1k-tokens", "3600000"))
        engines = ("--prefill", mortal.url, "--prefill", prefiller.url, "--decode", decoder.url)
        program = await stack.enter_async_context(gateway(*engines))
        asking = asyncio.create_task(ask(session, program.url, QUESTION))
        await has_a_request(session, mortal.url)
        mortal.signal(signal.SIGKILL)
        assert (await asking).text == await answer_alone(QUESTION)
    assert prefiller.state.finished == 1


async def has_a_request(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until an engine works on something."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(url + "/_mock/state") as response:
                if (await response.json())["live"]:
                    return
