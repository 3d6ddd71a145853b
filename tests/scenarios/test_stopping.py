"""The end of the program: running answers are finished, and a second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from yarl import URL

from proxy.wire.openai import Api
from tests.asking import answer_alone, read, request
from tests.scenarios.program import Program, gateway

if TYPE_CHECKING:
    import aiohttp

    from proxy.sim.engine import SimulatedEngine

BODY = request(Api.CHAT, stream=True, max_tokens=300)


async def refuses_connections(program: Program) -> None:
    """Wait until nobody listens."""
    url = URL(program.url)
    with suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.close()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_stream_is_finished(
    prefiller: SimulatedEngine,
    decoder: SimulatedEngine,
    session: aiohttp.ClientSession,
    workers: str,
    number: signal.Signals,
) -> None:
    async with gateway("--prefill", prefiller.url, "--decode", decoder.url, "--workers", workers) as program:
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            program.signal(number)
            await program.says("draining: 1 requests in flight")
            await refuses_connections(program)
            answer = await read(response)
        assert await program.ended() == 0
    assert answer.is_done
    assert (await answer_alone(BODY)).endswith(answer.text)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_second_signal_ends_it_at_once(
    prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession, workers: str
) -> None:
    decoder.faults.add("stall_after_tokens", tokens=3)
    async with gateway("--prefill", prefiller.url, "--decode", decoder.url, "--workers", workers) as program:
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            program.signal(signal.SIGTERM)
            await program.says("draining: 1 requests in flight")
            program.signal(signal.SIGTERM)
            assert not (await read(response)).is_whole
        assert await program.ended() == 0
        await program.says("cut off 1 requests")
    await decoder.wait_until(lambda state: state.live == 0)


async def test_what_does_not_end_in_time_is_cut_off(
    prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    decoder.faults.add("stall_after_tokens", tokens=3)
    engines = ("--prefill", prefiller.url, "--decode", decoder.url)
    async with gateway(*engines, PROXY_DRAIN__STREAMS_SECONDS="0.1") as program:
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            program.signal(signal.SIGTERM)
            assert not (await read(response)).is_whole
        assert await program.ended() == 0


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_an_idle_program_ends_quietly(prefiller: SimulatedEngine, decoder: SimulatedEngine, workers: str) -> None:
    async with gateway("--prefill", prefiller.url, "--decode", decoder.url, "--workers", workers) as program:
        program.signal(signal.SIGTERM)
        assert await program.ended() == 0
    assert "Traceback" not in program.output
