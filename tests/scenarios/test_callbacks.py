"""Decoders that call back: each worker has its own callback port and keeps it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import aiohttp
import orjson
import pytest

from proxy.settings import SettingsError, load_settings
from proxy.wire.openai import Api
from tests.asking import Answer, ask, request, until
from tests.canned import Received
from tests.connectors.pushing import TEXT, PushDecoder, PushPrefiller, SideChannel, callback, engine_id
from tests.scenarios.program import Program, gateway

URL = r"decoders call this worker back at (http://127\.0\.0\.1:(\d+)/v1/metaserver)"


@pytest.fixture
async def engines() -> AsyncIterator[tuple[PushPrefiller, PushDecoder]]:
    channel = SideChannel()
    async with PushPrefiller(channel, "prefill") as prefiller, PushDecoder(channel, "decode") as decoder:
        yield prefiller, decoder


def two_workers(engines: tuple[PushPrefiller, PushDecoder], **environment: str) -> AbstractAsyncContextManager[Program]:
    prefiller, decoder = engines
    words = ("--prefill", prefiller.url, "--decode", decoder.url, "--connector", "ascend_layerwise", "--workers", "2")
    return gateway(*words, **environment)


async def ask_anyone(program: Program) -> Answer:
    """Ask on a new connection, which any worker may accept."""
    async with aiohttp.ClientSession() as session:
        return await ask(session, program.url, request(Api.CHAT, stream=True))


async def urls(program: Program, times: int = 2) -> list[str]:
    """Return the callback URLs that decoders got, in the order of the requests."""
    await until(lambda: len(re.findall(URL, program.output)) >= times, "all workers")
    return [url for url, _ in re.findall(URL, program.output)]


def told(received: Received) -> str:
    url: str = orjson.loads(received.body)["kv_transfer_params"]["metaserver"]
    return url


def two_free_ports() -> int:
    """Return the first of two consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except (OSError, OverflowError):
                continue


async def test_decoders_call_back_the_worker_that_asked_them(engines: tuple[PushPrefiller, PushDecoder]) -> None:
    _, decoder = engines
    async with two_workers(engines) as program:
        workers = set(await urls(program))
        assert len(workers) == 2
        asked = 0
        async with asyncio.timeout(60):
            while {told(received) for received in decoder.received} != workers:
                answers = await asyncio.gather(*(ask_anyone(program) for _ in range(8)))
                asked += len(answers)
                assert {(answer.is_done, answer.text) for answer in answers} == {(True, TEXT)}
    assert len(decoder.received) == asked
    assert set(decoder.statuses) == {200}


async def test_another_worker_knows_nothing_of_a_request(
    engines: tuple[PushPrefiller, PushDecoder], session: aiohttp.ClientSession
) -> None:
    prefiller, decoder = engines
    decoder.calls = 0
    async with two_workers(engines) as program:
        workers = await urls(program)
        answering = asyncio.create_task(ask_anyone(program))
        await until(lambda: decoder.received, "the decode leg")
        mine = told(decoder.received[0])
        (others,) = set(workers) - {mine}
        for url, status in ((others, 404), (mine, 200)):
            assert not prefiller.received
            async with session.post(url, json=callback(engine_id(decoder.received[0]))) as answer:
                assert answer.status == status
        assert (await answering).text == TEXT


async def test_worker_that_takes_the_place_of_another_is_called_back_at_the_same_port(
    engines: tuple[PushPrefiller, PushDecoder],
) -> None:
    port = two_free_ports()
    async with two_workers(engines, PROXY_LAYERWISE__PORT=str(port)) as program:
        both = {f"http://127.0.0.1:{number}/v1/metaserver" for number in (port, port + 1)}
        assert set(await urls(program)) == both
        for pid in program.children():
            os.kill(pid, signal.SIGKILL)
        assert set((await urls(program, 4))[2:]) == both
        assert (await ask_anyone(program)).text == TEXT


async def test_gateway_that_stops_waits_for_decoders_that_have_not_called_back(
    engines: tuple[PushPrefiller, PushDecoder],
) -> None:
    _, decoder = engines
    room = asyncio.Event()

    async def wait() -> None:
        await room.wait()

    decoder.before = wait
    async with two_workers(engines) as program:
        answering = asyncio.create_task(ask_anyone(program))
        await until(lambda: decoder.received, "the decode leg")
        program.signal(signal.SIGTERM)
        await program.says("draining")
        room.set()
        answer = await answering
        assert (answer.is_done, answer.text) == (True, TEXT)
        assert await program.ended() == 0


ENGINES = "--prefill a:1 --decode b:1 --connector ascend_layerwise"
EVERY_ADDRESS = "layerwise.advertised_host must be an address that decoders can reach: {} is every address"


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        ("--host 0.0.0.0", {}, EVERY_ADDRESS.format("0.0.0.0")),
        ("--host ::", {}, EVERY_ADDRESS.format("::")),
        ("", {"PROXY_LAYERWISE__HOST": "0.0.0.0"}, EVERY_ADDRESS.format("0.0.0.0")),
        ("--host g", {"PROXY_LAYERWISE__ADVERTISED_HOST": "0"}, EVERY_ADDRESS.format("0")),
        ("--workers 3", {"PROXY_LAYERWISE__PORT": "65534"}, "layerwise.port 65534 leaves no ports for 3 workers"),
    ],
)
def test_decoders_must_know_where_to_call_back(words: str, environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(sentence)}$"):
        load_settings([*ENGINES.split(), *words.split()], environment)


@pytest.mark.parametrize(
    ("words", "environment", "host"),
    [
        ("", {}, "127.0.0.1"),
        ("--host 10.0.0.1", {}, "10.0.0.1"),
        ("--host 0.0.0.0", {"PROXY_LAYERWISE__HOST": "10.0.0.2"}, "10.0.0.2"),
        ("--host 0.0.0.0", {"PROXY_LAYERWISE__ADVERTISED_HOST": "gateway"}, "gateway"),
        ("--host ::1", {"PROXY_LAYERWISE__PORT": "65534"}, "::1"),
    ],
)
def test_decoders_call_back_the_worker_of_their_request(words: str, environment: dict[str, str], host: str) -> None:
    assert load_settings([*ENGINES.split(), *words.split()], environment).settings.callback_host == host


def test_gateway_without_callbacks_may_listen_everywhere() -> None:
    words = ENGINES.replace("ascend_layerwise", "vllm_pull")
    assert load_settings([*words.split(), "--host", "0.0.0.0"], {}).settings.listen.host == "0.0.0.0"
