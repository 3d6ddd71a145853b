"""Engines in separate processes that die, freeze and return."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import aiohttp
import pytest

from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, read, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway, mock_engine

BODY = request(Api.CHAT, stream=True, max_tokens=2000)
QUESTION = request(Api.CHAT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_answer_survives_a_decoder_that_is(site: Site, number: signal.Signals) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("decode", "--decode-step-ms", "2"))
        engines = ("--prefill", site.prefiller.url, "--decode", mortal.url, "--decode", site.decoder.url)
        program = await stack.enter_async_context(gateway(*engines, PROXY_TIMEOUTS__IDLE_SECONDS="2"))
        async with site.session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            mortal.signal(number)
            answer = await read(response)
        assert answer.is_done
        assert answer.text == await answer_alone(BODY)
        if number == signal.SIGSTOP:
            mortal.signal(signal.SIGCONT)  # and what it says now is not heard
        for _ in range(4):
            assert (await ask(site.session, program.url, QUESTION)).text == await answer_alone(QUESTION)


async def test_answer_without_resume_breaks_off_with_its_decoder(site: Site) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("decode", "--decode-step-ms", "2"))
        engines = ("--prefill", site.prefiller.url, "--decode", mortal.url, "--decode", site.decoder.url)
        program = await stack.enter_async_context(gateway(*engines, PROXY_RESUME__MODE="restart-only"))
        async with site.session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            mortal.signal(signal.SIGKILL)
            answer = await read(response)
        assert not answer.is_whole
        assert answer.error["code"] == "decode_broken"


async def test_killed_prefiller_costs_a_request_nothing_while_there_is_another(site: Site) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(mock_engine("prefill", "--prefill-ms-per-1k-tokens", "3600000"))
        engines = ("--prefill", mortal.url, *site.engines)
        program = await stack.enter_async_context(gateway(*engines))
        asking = asyncio.create_task(ask(site.session, program.url, QUESTION))
        await has_a_request(site.session, mortal.url)
        mortal.signal(signal.SIGKILL)
        assert (await asking).text == await answer_alone(QUESTION)
    assert site.prefiller.state.finished == 1


async def has_a_request(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until an engine works on something."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(url + "/_mock/state") as response:
                if (await response.json())["live"]:
                    return
