"""Silent streams are kept alive with both readers and in every dialect, and their answers do not change."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment

SOON: Final = 0.02
BOTH: Final = {"keep_alive_after_seconds": SOON, "keep_alive_seconds": SOON}
COMMENT: Final = b": keep-alive\n\n"
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGES: Final = [{"role": "user", "content": "Hello there"}]
ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "Hello there", "max_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "Hello there", "max_output_tokens": 8},
}
# What differs between two answers to the same request, and between one that was resumed and one that was not.
_CHANCE: Final = re.compile(
    rb'(?<=null) +|"(id|item_id)": ?"[^"]*"|"(created|created_at|completed_at)": ?[0-9]+|[0-9a-f]{32}'
)

ROADS: Final = pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
PATHS: Final = pytest.mark.parametrize("path", ASKED)


def kept_alive(path: str) -> bytes:
    return PING if path == "/v1/messages" else COMMENT


@dataclass
class Stream:
    """An answer that is being read."""

    response: aiohttp.ClientResponse
    path: str
    read: bytearray

    async def has(self, count: int, what: bytes | None = None) -> None:
        """Read until this has come so often; what keeps the stream alive unless given."""
        what = kept_alive(self.path) if what is None else what
        while self.read.count(what) < count:
            data = await self.response.content.readany()
            assert data, bytes(self.read)
            self.read += data

    async def rest(self) -> bytes:
        """Return the answer without the keep-alive bytes."""
        try:
            while data := await self.response.content.readany():
                self.read += data
        except aiohttp.ClientPayloadError:
            self.read += b"CUT"
        return _CHANCE.sub(b"", bytes(self.read).replace(kept_alive(self.path), b""))


@asynccontextmanager
async def streaming(gateway: Deployment, path: str) -> AsyncIterator[Stream]:
    """Ask for a streamed answer, of which nothing but the status has been read."""
    body = {"model": "sim", "stream": True, **ASKED[path]}
    async with aiohttp.ClientSession() as session, session.post(gateway.url + path, json=body) as response:
        yield Stream(response, path, bytearray())


async def answer(gateway: Deployment, path: str) -> bytes:
    """Return the answer without any silence."""
    async with streaming(gateway, path) as stream:
        return await stream.rest()


@asynccontextmanager
async def occupied(gateway: Deployment) -> AsyncIterator[None]:
    """Keep the only decoder busy until the end of the block. It writes one answer at a time."""
    gateway.decoders[0].faults.add("stall_after_tokens", times=1, tokens=1)
    async with streaming(gateway, "/v1/completions") as stream:
        await stream.has(1, b"data: ")
        yield


def working(engines: list[SimulatedEngine]) -> SimulatedEngine:
    """Return the only engine that serves a request."""
    (one,) = (engine for engine in engines if engine.is_running and engine.state.live)
    return one


def one_at_a_time(*, is_fast: bool, wait_seconds: float = 30.0, **stream: float) -> dict[str, Any]:
    return {
        "admission": {"max_running_decode": 1, "wait_seconds": wait_seconds},
        "resume": {"mode": "off"},
        "listen": {"fast_path": is_fast},
        "stream": stream,
    }


@pytest.mark.fault(142)
@ROADS
@PATHS
async def test_stream_that_waits_in_the_queue_is_kept_alive(deploy: Deploy, path: str, is_fast: bool) -> None:
    gateway = await deploy(**one_at_a_time(is_fast=is_fast, **BOTH))
    expected = await answer(gateway, path)
    async with occupied(gateway):
        waiting = streaming(gateway, path)
        stream = await waiting.__aenter__()
        assert stream.response.status == 200
        assert stream.response.headers["Content-Type"].startswith("text/event-stream")
        await stream.has(3)
        assert gateway.metrics("pdproxy_queued_requests") == {(): 1.0}
    assert await stream.rest() == expected
    await waiting.__aexit__(None, None, None)


@pytest.mark.fault(142)
@ROADS
@PATHS
async def test_prefill_is_repeated_after_the_status_was_sent(deploy: Deploy, path: str, is_fast: bool) -> None:
    gateway = await deploy(2, 1, listen={"fast_path": is_fast}, stream=BOTH)
    expected = await answer(gateway, path)
    for engine in gateway.prefillers:
        engine.faults.add("hang_before_headers")
    async with streaming(gateway, path) as stream:
        await stream.has(2)
        busy = working(gateway.prefillers)
        for engine in gateway.prefillers:
            engine.faults.clear()
        await busy.kill()
        assert await stream.rest() == expected
    assert sum(gateway.metrics("pdproxy_retries_total").values()) == 1


@pytest.mark.fault(142)
@ROADS
@PATHS
async def test_stream_is_kept_alive_between_tokens_and_while_it_is_resumed(
    deploy: Deploy, path: str, is_fast: bool
) -> None:
    gateway = await deploy(1, 2, listen={"fast_path": is_fast}, stream={"keep_alive_seconds": SOON})
    expected = await answer(gateway, path)
    for engine in gateway.decoders:
        engine.faults.add("stall_after_tokens", tokens=3)
    async with streaming(gateway, path) as stream:
        await stream.has(2)
        assert stream.read.startswith((b"data: {", b"event: message_start", b"event: response.created"))
        lost = working(gateway.decoders)
        (other,) = (engine for engine in gateway.decoders if engine is not lost)
        other.faults.clear()
        other.faults.add("slow_headers", seconds=0.5)
        await lost.kill()
        await until(lambda: gateway.metrics("pdproxy_resumes_total"), "the answer is taken up")
        await stream.has(stream.read.count(kept_alive(path)) + 1)
        assert await stream.rest() == expected


@pytest.mark.fault(142)
@ROADS
@PATHS
async def test_error_after_the_status_was_sent_is_an_event(deploy: Deploy, path: str, is_fast: bool) -> None:
    gateway = await deploy(**one_at_a_time(is_fast=is_fast, wait_seconds=0.4, **BOTH))
    async with occupied(gateway), streaming(gateway, path) as stream:
        assert stream.response.status == 200
        await stream.rest()
    told = bytes(stream.read)
    assert told.endswith(b"CUT")
    data = orjson.loads(told.removesuffix(b"\n\nCUT").rpartition(b"data: ")[2])
    match path:
        case "/v1/messages":
            assert (data["type"], data["error"]["type"]) == ("error", "overloaded_error")
        case "/v1/responses":
            assert (data["type"], data["response"]["status"]) == ("response.failed", "failed")
        case _:
            assert data["error"]["code"] == "queue_timeout"
    assert gateway.metrics("pdproxy_rejected_total")["queue_timeout",] == 1
    assert gateway.metrics("pdproxy_request_end_total")["PQ",] == 1
    assert gateway.metrics("pdproxy_streams_broken_total")["refused", "gateway"] == 1


@pytest.mark.fault(142)
@ROADS
@pytest.mark.parametrize("stream", [{}, {"keep_alive_seconds": SOON}], ids=["off", "begun ones only"])
@PATHS
async def test_without_the_option_an_error_has_its_status(
    deploy: Deploy, path: str, is_fast: bool, stream: dict[str, float]
) -> None:
    gateway = await deploy(**one_at_a_time(is_fast=is_fast, wait_seconds=0.1, **stream))
    async with occupied(gateway), streaming(gateway, path) as refused:
        assert refused.response.status in (503, 529)
        assert kept_alive(path) not in await refused.rest()


@ROADS
@PATHS
async def test_client_of_a_silent_stream_may_leave(deploy: Deploy, path: str, is_fast: bool) -> None:
    gateway = await deploy(**one_at_a_time(is_fast=is_fast, **BOTH))
    async with occupied(gateway):
        async with streaming(gateway, path) as stream:
            await stream.has(1)
        await until(lambda: not gateway.metrics("pdproxy_queued_requests"), "nobody waits")
