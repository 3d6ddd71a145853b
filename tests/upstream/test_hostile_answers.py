"""Test that clients receive an error of the gateway for invalid answers of engines, never a part of them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import Answer, request, until
from tests.canned import CannedEngine, data, event_stream, http, json_answer
from tests.conftest import Deploy

WHOLE = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
TEXT = orjson.dumps(WHOLE)
EVENTS = [data({**WHOLE, "object": "text_completion.chunk", "usage": None}), b"data: [DONE]\n\n"]
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

NO_ANSWERS = {
    "cut short of its length": ([JSON + b"Content-Length: %d\r\n\r\n%b" % (len(TEXT) + 1, TEXT)], "broken"),
    "cut in the middle": ([json_answer(WHOLE)[:-5]], "broken"),
    "chunked without an end": (event_stream([TEXT], is_whole=False), "broken"),
    "ended by the connection": ([JSON + b"\r\n" + TEXT], "broken"),
    "longer than it says": ([JSON + b"Content-Length: %d\r\n\r\n%b" % (len(TEXT) - 1, TEXT)], "bad_answer"),
    "not JSON": ([http(b"<html>")], "bad_answer"),
    "no JSON object": ([http(b"[]")], "bad_answer"),
    "without choices": ([http(b'{"choices": []}')], "bad_answer"),
    "compressed without a request for it": ([http(gzip.compress(TEXT))], "bad_answer"),
    "no content": ([b"HTTP/1.1 204 No Content\r\n\r\n"], "bad_answer"),
    "elsewhere": ([http(TEXT, "302 Found\r\nLocation: http://127.0.0.1:1/")], "bad_answer"),
    "not modified": ([b"HTTP/1.1 304 Not Modified\r\n\r\n"], "bad_answer"),
    "another protocol": ([b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"], "bad_answer"),
    "a status there is not": ([http(TEXT, "999 Nope")], "bad_answer"),
    "framed in two ways": (
        [JSON + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
        "bad_answer",
    ),
    "headers without end": ([JSON, *[b"X-Bomb: 1\r\n" * 1000] * 30], "bad_answer"),
    "interim answers without end": ([b"HTTP/1.1 102 Processing\r\n\r\n" * 1000] * 30, "bad_answer"),
    "nothing": ([b""], "reset"),
}


async def ask(deploy: Deploy, answer: Iterable[bytes], *, stream: bool, **fields: Any) -> Answer:
    engine = CannedEngine("both", answer=answer, closes=True)
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "restart-only"})
    return await gateway.ask(request(Api.COMPLETIONS, stream=stream, **fields))


@pytest.mark.fault(12)
@pytest.mark.fault(16)
@pytest.mark.fault(53)
@pytest.mark.parametrize(("answer", "failure"), NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_invalid_answer_becomes_a_gateway_error(deploy: Deploy, answer: Sequence[bytes], failure: str) -> None:
    got = await ask(deploy, answer, stream=False)
    assert (got.status, got.error["code"], got.is_whole) == (502, f"decode_{failure}", True)
    assert "location" not in got.headers


NO_STREAMS = {
    **{name: answer for name, (answer, failure) in NO_ANSWERS.items() if failure != "broken"},
    "JSON": [json_answer(WHOLE)],
    "nothing in it": event_stream([]),
    "half an event": event_stream([EVENTS[0][:-20]]),
    "only a comment": event_stream([b": hello\n\n"]),
}


@pytest.mark.fault(16)
@pytest.mark.fault(53)
@pytest.mark.parametrize("answer", NO_STREAMS.values(), ids=NO_STREAMS)
async def test_invalid_stream_fails_before_any_part_is_sent(deploy: Deploy, answer: Sequence[bytes]) -> None:
    got = await ask(deploy, answer, stream=True)
    assert (got.status, got.is_stream, got.is_whole) == (502, False, True)
    assert got.error["code"] in ("decode_bad_answer", "decode_broken", "decode_reset")


HALF_STREAMS = {
    "that ends without its end mark": event_stream(EVENTS[:1]),
    "that is cut": event_stream(EVENTS[:1], is_whole=False),
    "that only the connection ends": [SSE + b"\r\n", EVENTS[0]],
    "with a broken frame": [*event_stream(EVENTS[:1], is_whole=False), b"xyz\r\n"],
}


@pytest.mark.fault(10)
@pytest.mark.parametrize("answer", HALF_STREAMS.values(), ids=HALF_STREAMS)
async def test_incomplete_stream_never_looks_complete(deploy: Deploy, answer: Sequence[bytes]) -> None:
    got = await ask(deploy, answer, stream=True)
    assert (got.status, got.is_stream, got.is_whole) == (200, True, False)
    assert got.text == "Hello"
    assert got.error["code"] in ("decode_bad_answer", "decode_broken")
    assert b"[DONE]" not in got.body


WHOLE_STREAMS = {
    "that only the connection ends": [SSE + b"\r\n", *EVENTS],
    "that is cut after its end mark": event_stream(EVENTS, is_whole=False),
    "with garbage after its end mark": [*event_stream(EVENTS, is_whole=False), b"xyz\r\n"],
    "in one read": [b"".join(event_stream(EVENTS))],
    "with headers after its body": [*event_stream(EVENTS)[:-1], b"0\r\nX-Trailer: 1\r\n\r\n"],
}


@pytest.mark.parametrize("answer", WHOLE_STREAMS.values(), ids=WHOLE_STREAMS)
async def test_stream_with_its_end_mark_is_whole(deploy: Deploy, answer: Sequence[bytes]) -> None:
    got = await ask(deploy, answer, stream=True)
    assert (got.status, got.text, got.is_done) == (200, "Hello", True)


@pytest.mark.fault(15)
async def test_event_of_megabytes_passes(deploy: Deploy) -> None:
    event = EVENTS[0].replace(b"Hello", b"x" * 4_000_000)
    got = await ask(deploy, event_stream([event[:1_000_000], event[1_000_000:], EVENTS[1]]), stream=True)
    assert (len(got.text), got.is_done) == (4_000_000, True)


@pytest.mark.fault(15)
async def test_event_without_end_is_given_up(deploy: Deploy) -> None:
    piece = b"data: " + b"x" * 1_000_000
    engine = CannedEngine("both", answer=event_stream([piece] * 64, is_whole=False))
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "restart-only"})
    got = await gateway.ask(request(Api.COMPLETIONS, stream=True))
    assert (got.status, got.error["code"]) == (502, "decode_bad_answer")
    await until(lambda: engine.state.disconnects, "the engine's connection to be cut")


# Headers of clients

HOSTILE_VALUES = [b"a\r\nX-Injected: 1", b"a\nX-Injected: 1", b"a\rX-Injected: 1", b"a\0b", b"a\r\n X-Injected: 1"]


@pytest.mark.fault(27)
@pytest.mark.parametrize("value", HOSTILE_VALUES)
@pytest.mark.parametrize("name", [b"Authorization", b"traceparent", b"tracestate"])
async def test_client_cannot_inject_header_lines_to_an_engine(deploy: Deploy, name: bytes, value: bytes) -> None:
    heads = await heads_at_the_engine(deploy, name + b": " + value)
    assert all("x-injected" not in head for head in heads)
    assert all("\0" not in text for head in heads for text in head.values())


@pytest.mark.parametrize(("length", "passes"), [(8000, True), (100_000, False)])
@pytest.mark.parametrize("name", [b"Authorization", b"traceparent", b"tracestate"])
async def test_headers_that_go_to_engines_are_short(deploy: Deploy, name: bytes, length: int, passes: bool) -> None:
    heads = await heads_at_the_engine(deploy, name + b": " + b"x" * length)
    assert [head[name.decode().lower()] for head in heads] == ["x" * length] * passes


@pytest.mark.fault(27)
async def test_headers_about_the_connection_do_not_go_to_engines(deploy: Deploy) -> None:
    lines = [
        *(b"Connection: x-secret, upgrade", b"x-secret: 1", b"Upgrade: h2c", b"TE: trailers", b"Keep-Alive: 1"),
        *(b"Cookie: a=b", b"X-data-parallel-rank: 3", b"X-Request-Id: own", b"User-Agent: test"),
    ]
    (head,) = await heads_at_the_engine(deploy, *lines)
    assert set(head) == {"host", "content-type", "content-length", "accept-encoding", "x-request-id"}
    assert head["x-request-id"] != "own"


async def heads_at_the_engine(deploy: Deploy, *lines: bytes) -> list[dict[str, str]]:
    """Return the headers that an engine receives for a request with these headers."""
    engine = CannedEngine("both", answer=[json_answer(WHOLE)])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "restart-only"})
    host, port = gateway.url.removeprefix("http://").split(":")
    body = orjson.dumps(request(Api.COMPLETIONS))
    head = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        status = await reader.readline()
    finally:
        writer.close()
    assert status.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/1.1 431 ")), status
    return [received.headers for received in engine.received]
