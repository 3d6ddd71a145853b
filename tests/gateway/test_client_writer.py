"""The client's side of an answer on raw sockets: framing, headers and broken answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest
from yarl import URL

from proxy.gateway.client_writer import ClientConnection, ClientWriter
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations


def raw_request(body: dict[str, Any], *headers: bytes, version: bytes = b"1.1") -> bytes:
    content = orjson.dumps(body)
    lines = (b"POST %b HTTP/%b" % (Api.CHAT.path.encode(), version), b"Host: x", *headers)
    return b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(content) + content


async def exchange(gateway: Deployment, sent: bytes) -> tuple[dict[str, str], bytes]:
    """Headers and body of the answer on a connection that the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return {"status": status, **headers}, body


async def test_http_10_client_gets_a_stream_without_chunks(gateway: Deployment) -> None:
    headers, body = await exchange(gateway, raw_request(request(Api.CHAT, stream=True), version=b"1.0"))
    assert headers["status"].endswith("200 OK")
    assert "transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_stream_without_chunks_ends_with_the_connection(deploy: Deploy, breaks_off: bool) -> None:
    """Whatever a client of HTTP/1.0 asks for: it could not tell otherwise where the answer ends."""
    gateway = await deploy(resume={"mode": "off"}, listen={"keepalive_seconds": 3600.0})
    if breaks_off:
        gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    body = request(Api.CHAT, stream=True)
    headers, answer = await exchange(gateway, raw_request(body, b"Connection: keep-alive", version=b"1.0"))
    assert headers["connection"] == "close"
    assert answer.endswith(b"data: [DONE]\n\n") is not breaks_off


async def test_http_10_connection_stays_open_after_a_whole_answer_on_request(
    gateway: Deployment,
) -> None:
    whole = raw_request(request(Api.CHAT), b"Connection: keep-alive", version=b"1.0")
    _, answers = await exchange(gateway, whole + whole.replace(b"keep-alive", b"close"))
    assert answers.count(b"HTTP/1.0 200") + answers.count(b"HTTP/1.1 200") == 1  # the first one's is not in the body


class Connection:
    """A ClientConnection that keeps what is written. It is its own transport."""

    is_writing_paused = False
    supports_chunked_encoding = True

    def __init__(self) -> None:
        self.transport = self
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False


async def test_writer_writes_no_empty_chunk() -> None:
    """An empty chunk would be the end of the body."""
    connection = Connection()
    writer = ClientWriter(cast("ClientConnection", connection), lambda *_: b"head ", "X-Request-Id", "r", 60.0)
    for data in (b"", b"a", b"", b"b", b""):
        assert not writer.write(data)
    writer.write_with_next(b"c")
    writer.end_stream(b"d")
    assert connection.written == [b"head 1\r\na\r\n", b"1\r\nb\r\n", b"2\r\ncd\r\n0\r\n\r\n"]


async def test_http_11_client_gets_chunks_and_headers_against_proxy_buffering(
    gateway: Deployment,
) -> None:
    headers, body = await exchange(gateway, raw_request(request(Api.CHAT, stream=True), b"Connection: close"))
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["transfer-encoding"] == "chunked"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["server"] == "pdproxy"
    assert body.endswith(b"\r\n0\r\n\r\n")


async def test_cut_stream_has_an_error_event_and_no_end_mark(deploy: Deploy) -> None:
    gateway = await deploy(resume={"mode": "off"})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    _, body = await exchange(gateway, raw_request(request(Api.CHAT, stream=True)))
    assert body.endswith(b'"code":"decode_broken"}}\n\n\r\n')
    assert b"[DONE]" not in body


async def test_connection_serves_one_request_after_the_other(gateway: Deployment) -> None:
    streamed = raw_request(request(Api.CHAT, stream=True))
    refused = raw_request({"model": "sim", "n": 0})
    last = raw_request(request(Api.CHAT), b"Connection: close")
    _, answers = await exchange(gateway, streamed + refused + last)
    assert answers.count(b"HTTP/1.1 400") == 1
    assert answers.count(b"HTTP/1.1 200") == 1  # the first status line is not part of the body
    assert len(generations(*gateway.decoders)) == 2


@pytest.mark.parametrize("given", ["abc-1", "x" * 200, "with space"])
async def test_valid_request_id_of_a_client_is_returned(gateway: Deployment, given: str) -> None:
    for stream in (True, False):
        answer = await gateway.ask(request(Api.CHAT, stream=stream), x_request_id=given)
        assert (answer.headers["x-request-id"] == given) == (given == "abc-1")
        assert answer.headers["x-request-id"]


async def test_client_that_expects_100_continue_gets_it(gateway: Deployment) -> None:
    """Clients such as curl expect it before a large body."""
    head, _, content = raw_request(request(Api.CHAT), b"Expect: 100-continue", b"Connection: close").partition(
        b"\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(content)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_body_may_come_in_chunks(gateway: Deployment) -> None:
    content = orjson.dumps(request(Api.CHAT))
    sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    headers, _ = await exchange(gateway, sent + chunks)
    assert headers["status"] == "HTTP/1.1 200 OK"
    assert "content-length" in generations(*gateway.prefillers)[0].headers


async def test_client_that_disconnects_during_its_body_reaches_no_engine(gateway: Deployment) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
    writer.write(raw_request(request(Api.CHAT))[:-5])
    await writer.drain()
    writer.transport.abort()
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert len(generations(*gateway.prefillers)) == 1
    assert await reader.read() == b""
