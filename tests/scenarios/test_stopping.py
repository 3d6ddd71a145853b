"""The end of the program: running answers are finished, or get an error after a time limit or a second signal."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import aiohttp
import openai
import orjson
import pytest
from yarl import URL

from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, read, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway

BODY = request(Api.CHAT, stream=True, max_tokens=300)
DRAINING = r'"message":"draining","left":1'


async def is_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the gateway has found its engines well."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(url + "/readyz") as response:
                if response.status == 200:
                    return


async def refuses_connections(program: Program) -> None:
    """Wait until the gateway no longer listens."""
    url = URL(program.url)
    with suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.close()


@pytest.mark.fault(30)
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_stream_is_finished(site: Site, workers: str, number: signal.Signals) -> None:
    async with gateway(*site.engines, "--workers", workers) as program:
        with site.decoder.held():
            response = await site.session.post(program.url + Api.CHAT.path, json=BODY)
            await response.content.readline()
            program.signal(number)
            await program.says(DRAINING)
            await refuses_connections(program)
            program.signal(signal.SIGHUP)  # which is too late to be heard
        answer = await read(response)
        assert await program.ended() == 0
        assert "reload" not in program.output
    assert answer.is_done
    assert (await answer_alone(BODY)).endswith(answer.text)


async def test_lines_of_requests_that_have_just_ended_are_not_lost(site: Site) -> None:
    async with gateway(*site.engines) as program:
        await is_ready(site.session, program.url)
        short = request(Api.CHAT, max_tokens=1)
        before = await asyncio.gather(*(ask(site.session, program.url, short) for _ in range(20)))
        with site.decoder.held():
            running = await asyncio.gather(
                *(site.session.post(program.url + Api.CHAT.path, json=BODY) for _ in range(3))
            )
            program.signal(signal.SIGTERM)
            await program.says('"message":"draining","left":3')
        during = await asyncio.gather(*map(read, running))
        assert await program.ended() == 0
        lines = [orjson.loads(line) for line in program.output.splitlines() if '"proxy.access"' in line]
    assert sorted(line["id"] for line in lines) == sorted(a.headers["x-request-id"] for a in (*before, *during))


@pytest.mark.fault(30)
async def test_stopping_gateway_serves_until_load_balancers_notice(site: Site) -> None:
    async with gateway(*site.engines, PROXY_DRAIN__NOT_READY_SECONDS="3600") as program:
        await is_ready(site.session, program.url)
        program.signal(signal.SIGTERM)
        await program.says('"message":"draining","left":0')
        async with site.session.get(program.url + "/readyz") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
        async with aiohttp.ClientSession() as newcomer:
            answer = await ask(newcomer, program.url, BODY)
        assert answer.is_done
        assert answer.headers["connection"] == "close"
        program.signal(signal.SIGTERM)
        assert await program.ended() == 128 + signal.SIGTERM


@pytest.mark.fault(31)
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_ends_it_at_once(site: Site, workers: str, number: signal.Signals) -> None:
    site.decoder.faults.add("stall_after_tokens", tokens=3)
    async with gateway(*site.engines, "--workers", workers) as program:
        async with site.session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            program.signal(signal.SIGTERM)
            await program.says(DRAINING)
            program.signal(number)
            answer = await read(response)
        assert await program.ended() == 128 + number
        await program.says("drain: 1 requests were cut off")
    assert not answer.is_whole
    assert answer.error["code"] == "draining"
    await site.decoder.wait_until(lambda state: state.live == 0)


@pytest.mark.fault(30)
async def test_answers_above_the_drain_limit_get_an_error(site: Site) -> None:
    site.decoder.faults.add("stall_after_tokens", tokens=3)
    async with gateway(*site.engines, PROXY_DRAIN__STREAMS_SECONDS="0.1") as program:
        async with site.session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            site.prefiller.faults.add("hang_before_headers")
            waiting = [
                asyncio.create_task(ask(site.session, program.url, request(Api.CHAT, stream=stream)))
                for stream in (True, False)
            ]
            await site.prefiller.wait_until(lambda state: state.live == 2)
            program.signal(signal.SIGTERM)
            answer = await read(response)
        assert await program.ended() == 0
    assert not answer.is_whole
    assert answer.error["code"] == "draining"
    for refused in await asyncio.gather(*waiting):
        assert (refused.status, refused.headers["retry-after"], refused.error["code"]) == (503, "1", "draining")
    lines = [orjson.loads(line) for line in program.output.splitlines() if "proxy.access" in line]
    assert sorted((line["term"], line["code"]) for line in lines) == [("KD", 200), ("PF", 503), ("PF", 503)]


async def test_openais_client_hears_of_it(site: Site) -> None:
    site.decoder.faults.add("stall_after_tokens", tokens=3)
    async with (
        gateway(*site.engines, PROXY_DRAIN__STREAMS_SECONDS="0.1") as program,
        openai.AsyncOpenAI(base_url=program.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        await anext(stream)
        program.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_idle_program_ends_quietly(site: Site, workers: str) -> None:
    async with gateway(*site.engines, "--workers", workers) as program:
        program.signal(signal.SIGTERM)
        assert await program.ended() == 0
    assert "Traceback" not in program.output
