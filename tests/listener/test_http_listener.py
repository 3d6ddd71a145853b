"""Bytes that no well-behaved client sends, more clients than there is room for, and the end of listening."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web, web_protocol
from aiohttp.http import RawRequestMessage
from yarl import URL

from proxy.listener.connection import AiohttpConnection
from proxy.settings import Listen
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import generations
from tests.listener.listeners import CLEAN, HEAD, PATH, Client, Site, serving

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"

# Everything in these that is not HTTP itself is this word, which must never come back.
MARK = b"secret"


@pytest.fixture
async def site(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    caplog.set_level(logging.INFO, logger="proxy")
    monkeypatch.setattr("proxy.listener.connection.LINGERING_SECONDS", 3600.0)  # the test does not wait for its end
    async with serving() as site:
        yield site


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Everything that was logged, by whomever."""
    return caplog.records


async def test_private_names_of_aiohttp_still_exist(site: Site) -> None:
    assert {"_waiter", "_messages", "_current_request"} <= set(web.RequestHandler.__slots__)
    assert {"request_handler", "request_factory"} <= vars(site.front._server).keys()
    assert "exc" in web_protocol._ErrInfo.__slots__
    assert callable(RawRequestMessage._replace)


MALFORMED = {
    "content-length-twice": (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "two-content-lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "content-length-list": (HEAD + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "content-length-and-chunked": (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked-and-content-length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", 400),
    "content-length-plus": (HEAD + b"Content-Length: +2\r\n\r\n{}", 400),
    "content-length-negative": (HEAD + b"Content-Length: -1\r\n\r\n{}", 400),
    "content-length-hex": (HEAD + b"Content-Length: 0x10\r\n\r\n{}", 400),
    "content-length-underscore": (HEAD + b"Content-Length: 1_0\r\n\r\n{}", 400),
    "content-length-digits-of-others": (HEAD + "Content-Length: ٢\r\n\r\n{}".encode(), 400),
    "content-length-empty": (HEAD + b"Content-Length:\r\n\r\n{}", 400),
    "content-length-overflow": (HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}", 400),
    "content-length-word": (HEAD + b"Content-Length: secret\r\n\r\n{}", 400),
    "transfer-encoding-xchunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "transfer-encoding-identity": (HEAD + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
    "transfer-encoding-twice": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "transfer-encoding-not-last": (HEAD + b"Transfer-Encoding: chunked, secret\r\n\r\n0\r\n\r\n", 400),
    "transfer-encoding-vertical-tab": (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "transfer-encoding-space-colon": (HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "transfer-encoding-identity-chunked": (HEAD + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", 501),
    "transfer-encoding-gzip-chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "transfer-encoding-1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", 400),
    "chunk-size-plus": (CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-negative": (CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-hex": (CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-space": (CHUNKED + b"2 \r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-overflow": (CHUNKED + b"f" * 17 + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-empty": (CHUNKED + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk-size-line-feed": (CHUNKED + b"2\n{}\r\n0\r\n\r\n", 400),
    "chunk-data-line-feed": (CHUNKED + b"2\r\n{}\n0\r\n\r\n", 400),
    "chunk-data-too-long": (CHUNKED + b"2\r\nsecret\r\n0\r\n\r\n", 400),
    "chunk-extension-line-feed": (CHUNKED + b"2;sec\nret\r\n{}\r\n0\r\n\r\n", 400),
    "trailer-content-length": (CHUNKED + b"2\r\n{}\r\n0\r\nContent-Length: 2\r\n\r\n", 400),
    "too-many-trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"Secret: x\r\n" * 200 + b"\r\n", 431),
    "line-feed-after-request-line": (b"GET /livez HTTP/1.1\nHost: x\r\n\r\n", 400),
    "line-feed-after-header": (GET + b"A: secret\nB: x\r\n\r\n", 400),
    "line-feed-at-the-end": (GET + b"\n", 400),
    "carriage-return-in-value": (GET + b"A: secret\rB: x\r\n\r\n", 400),
    "folded-header": (GET + b"A: b\r\n secret\r\n\r\n", 400),
    "folded-first-header": (b"GET /livez HTTP/1.1\r\n Host: secret\r\n\r\n", 400),
    "space-before-colon": (GET + b"Secret : x\r\n\r\n", 400),
    "nul-in-value": (GET + b"X-Request-Id: sec\0ret\r\n\r\n", 400),
    "escape-in-value": (GET + b"A: secret\x1b[31m\r\n\r\n", 400),
    "header-without-colon": (GET + b"secret\r\n\r\n", 400),
    "header-without-name": (GET + b": secret\r\n\r\n", 400),
    "odd-header-name": (GET + b"sec(ret: x\r\n\r\n", 400),
    "old-websocket-key": (GET + b"Sec-WebSocket-Key1: secret\r\n\r\n", 400),
    "no-host": (b"GET /livez HTTP/1.1\r\n\r\n", 400),
    "two-hosts": (GET + b"Host: secret\r\n\r\n", 400),
    "odd-host": (b"GET /livez HTTP/1.1\r\nHost: secret/x@y z\r\n\r\n", 400),
    "lower-case-method": (b"get /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "unknown-method": (b"SECRET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "space-before-method": (b" GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "tab-after-method": (b"GET\t/secret HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "space-in-target": (b"GET /sec ret HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "nul-in-target": (b"GET /secret\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "byte-in-target": (b"GET /secret\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "relative-target": (b"GET secret/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "star-of-a-get": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "absolute-target-without-host": (b"GET http:///secret HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "absolute-target-of-another-scheme": (b"GET ftp://secret/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "tls": (bytes.fromhex("160301020001000001fc0303") + MARK * 80, 400),
    "http-2-preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "prompt": (b'{"messages": [{"role": "user", "content": "secret"}]}\r\n\r\n', 400),
    "long-header": (GET + b"X-Request-Id: " + MARK * 1500 + b"\r\n\r\n", 431),
    "long-header-name": (GET + MARK * 1500 + b": x\r\n\r\n", 431),
    "long-target": (b"GET /" + MARK * 1500 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "200-headers": (GET + b"".join(b"Secret-%d: x\r\n" % number for number in range(200)) + b"\r\n", 431),
    "64-kib-request-id": (GET + b"X-Request-Id: " + b"x" * 65536 + b"\r\n\r\n", 431),
    "http-2.0": (GET.replace(b"1.1", b"2.0") + b"\r\n", 505),
    "http-0.9": (GET.replace(b"1.1", b"0.9") + b"\r\n", 505),
    "http-1.2": (GET.replace(b"1.1", b"1.2") + b"\r\n", 505),
    "http-3.0": (GET.replace(b"1.1", b"3.0") + b"\r\n", 505),
    "lower-case-protocol": (b"GET /livez http/1.1\r\nHost: x\r\n\r\n", 400),
    "other-protocol": (b"GET /livez SECRET/1.1\r\nHost: x\r\n\r\n", 400),
    "request-after-the-last": (GET + b"Connection: close\r\n\r\n" + CLEAN, 400),
    "two-authorizations": (GET + b"Authorization: Bearer secret\r\nauthorization: Bearer x\r\n\r\n", 400),
    "the-same-authorization-twice": (GET + b"Authorization: Bearer secret\r\n" * 2 + b"\r\n", 400),
    "two-api-keys": (GET + b"X-Api-Key: secret\r\nx-api-key: x\r\n\r\n", 400),
    "two-admin-keys": (GET + b"X-Admin-Key: secret\r\nx-admin-key: x\r\n\r\n", 400),
    "garbage-after-a-request": (CLEAN + MARK + b"\r\n\r\n", 400),
    "body-without-length": (HEAD + b"\r\n{}", 400),
}


@pytest.mark.parametrize(("sent", "status"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_invalid_http_is_rejected_in_the_format_of_the_gateway(
    site: Site, caplog: pytest.LogCaptureFixture, sent: bytes, status: int
) -> None:
    client = await site.ask(sent)
    reply = await client.reply()
    assert (reply.status, reply.code, reply.closes) == (status, "malformed_http", True)
    assert await client.is_closed()
    (line,) = lines(caplog)
    assert (line.name, line.levelname, line.exc_info) == ("proxy.listener.http_listener", "INFO", None)
    assert line.msg == "listener: request rejected: %s"
    assert line.fields == {"id": reply.headers["x-request-id"], "client": "127.0.0.1", "code": status}  # type: ignore[attr-defined]
    assert MARK not in (reply.body + line.getMessage().encode()).lower()
    assert "date" in reply.headers
    assert site.seen == []
    assert (site.rejected("malformed_http"), site.count("pdproxy_http_parse_errors_total")) == (1.0, 1.0)
    assert await site.serves()


@pytest.mark.parametrize("sent", [sent for sent, _ in MALFORMED.values() if sent.startswith(CHUNKED)])
async def test_invalid_bytes_inside_a_body_are_rejected(
    site: Site, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """Without the gateway, aiohttp would let the reader of the body wait forever."""
    client = await site.ask(CHUNKED)
    await site.begins(1)
    client.send(sent.removeprefix(CHUNKED))
    reply = await client.reply()
    assert (reply.code, reply.closes) == ("malformed_http", True)
    assert await client.is_closed()
    assert len(lines(caplog)) == 1
    assert site.seen == []
    assert (site.rejected("malformed_http"), site.count("pdproxy_http_parse_errors_total")) == (1.0, 1.0)
    assert await site.serves()


REFUSED = {
    "connect": (b"CONNECT secret:80 HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    "connect-to-a-route": (b"CONNECT /livez HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    "expectation": (HEAD + b"Expect: secret\r\nContent-Length: 2\r\n\r\n{}", 417, "expectation_failed"),
    "expectation-and-another": (
        HEAD + b"Expect: 100-continue, x\r\nContent-Length: 2\r\n\r\n{}",
        417,
        "expectation_failed",
    ),
}


@pytest.mark.parametrize(("sent", "status", "code"), REFUSED.values(), ids=REFUSED.keys())
async def test_requests_that_no_route_may_see_are_rejected(
    site: Site, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, code: str
) -> None:
    client = await site.ask(sent)
    reply = await client.reply()
    assert (reply.status, reply.code, reply.closes) == (status, code, True)
    assert reply.headers.get("allow") == ("" if status == 405 else None)
    assert await client.is_closed()
    assert len(lines(caplog)) == 1
    assert site.seen == []
    assert site.count("pdproxy_http_parse_errors_total") == 0.0
    assert await site.serves()


async def test_rejected_requests_do_not_reach_an_engine(deploy: Deploy) -> None:
    gateway = await deploy()

    async def answer_to(sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
        writer.write(sent)
        received = await reader.read()
        writer.close()
        return received

    refused = [*(sent for sent, _ in MALFORMED.values()), *(sent for sent, _, _ in REFUSED.values())]
    for received in await asyncio.gather(*map(answer_to, refused)):
        assert received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
    assert generations(*gateway.engines) == []
    assert (await gateway.ask(request(Api.CHAT))).is_done


TAKEN = {
    "origin-form": (CLEAN, PATH, b"{}"),
    "absolute-form": (CLEAN.replace(b"/v1", b"http://elsewhere:1/v1", 1), PATH, b"{}"),
    "absolute-form-with-a-password": (CLEAN.replace(b"/v1", b"HTTPS://a:b@other/v1", 1), PATH, b"{}"),
    "escaped-letter": (CLEAN.replace(b"chat", b"%63hat", 1), PATH, b"{}"),
    "empty-lines-before": (b"\r\n\r\n" + CLEAN, PATH, b"{}"),
    "http-1.0": (CLEAN.replace(b"1.1", b"1.0"), PATH, b"{}"),
    "http-1.0-without-host": (CLEAN.replace(b"1.1\r\nHost: x", b"1.0"), PATH, b"{}"),
    "empty-host": (CLEAN.replace(b"Host: x", b"Host:"), PATH, b"{}"),
    "ipv6-host": (CLEAN.replace(b"Host: x", b"Host: [::1]:1999"), PATH, b"{}"),
    "chunks": (CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", PATH, b"{}"),
    "chunked-in-capitals": (CHUNKED.replace(b"chunked", b"CHUNKED") + b"2\r\n{}\r\n0\r\n\r\n", PATH, b"{}"),
    "chunk-extension": (CHUNKED + b'2;a="b"\r\n{}\r\n0\r\n\r\n', PATH, b"{}"),
    "chunk-size-with-zeros": (CHUNKED + b"0002\r\n{}\r\n00\r\n\r\n", PATH, b"{}"),
    "trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nX-Request-Id: trailer\r\n\r\n", PATH, b"{}"),
    "empty-chunked-body": (CHUNKED + b"0\r\n\r\n", PATH, b""),
    "upgrade-to-websocket": (
        CLEAN.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost", 1),
        *(PATH, b"{}"),
    ),
    "upgrade-to-http-2": (CLEAN.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost", 1), PATH, b"{}"),
    "connection-names-a-header": (CLEAN.replace(b"Host", b"Connection: x-api-key\r\nHost", 1), PATH, b"{}"),
    "expectation-in-capitals": (CLEAN.replace(b"Host", b"Expect: 100-CONTINUE\r\nHost", 1), PATH, b"{}"),
    "empty-line-after-the-last": (CLEAN.replace(b"Host", b"Connection: close\r\nHost", 1) + b"\r\n", PATH, b"{}"),
}


@pytest.mark.parametrize(("sent", "path", "body"), TAKEN.values(), ids=TAKEN.keys())
async def test_unusual_but_valid_http_is_served(
    site: Site, caplog: pytest.LogCaptureFixture, sent: bytes, path: str, body: bytes
) -> None:
    client = await site.ask(sent)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, path.encode())
    assert site.seen == [("POST", path, body)]
    assert lines(caplog) == []


NOWHERE = {
    "two-slashes": b"POST /" + PATH.encode(),
    "dots": b"POST /v1/../v1/chat/completions",
    "escaped-dots": b"POST /v1/%2e%2e/%2e%2e/livez",
    "escaped-slash": b"POST /v1%2fchat/completions",
    "backslash": b"POST \\v1\\chat\\completions".replace(b" ", b" /"),
    "slash-behind": b"POST " + PATH.encode() + b"/",
    "nul": b"POST " + PATH.encode() + b"%00",
    "absolute-form-without-path": b"POST http://x",
    "absolute-form-with-two-slashes": b"POST http://x/" + PATH.encode(),
    "star": b"OPTIONS *",
}


@pytest.mark.parametrize("line", NOWHERE.values(), ids=NOWHERE.keys())
async def test_path_is_served_as_written_or_not_found(site: Site, line: bytes) -> None:
    client = await site.ask(line + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, reply.code) == (404, "not_found")
    assert site.seen == []


@pytest.mark.parametrize("line", [b"HEAD *", b"HEAD /livez", b"HEAD /nowhere", b"HEAD http://x", b"HEAD secret"])
@pytest.mark.parametrize("more", [b"", b"Expect: secret\r\n", b"Host: secret/\r\n", b"Secret : x\r\n"])
async def test_head_answers_have_no_body(site: Site, line: bytes, more: bytes) -> None:
    """A client would read the body of a HEAD answer as the beginning of the next answer."""
    host = b"" if more.startswith(b"Host") else b"Host: x\r\n"
    client = await site.ask(line + b" HTTP/1.1\r\nConnection: close\r\n" + host + more + b"\r\n")
    head, blank, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 ")
    assert (blank, body) == (b"\r\n\r\n", b"")


async def test_pipelined_requests_are_answered(site: Site) -> None:
    client = await site.ask(CLEAN + CLEAN + GET + b"Connection: close\r\n\r\n")
    assert [(await client.reply()).status for _ in range(3)] == [200, 200, 200]
    assert await client.is_closed()


async def test_connection_closes_after_an_upgrade_request(site: Site) -> None:
    """The parser of aiohttp loses it, so an answer without `Connection: close` would let the client wait."""
    for protocol in (b"h2c", b"websocket"):
        upgrade = GET + b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n"
        client = await site.ask(upgrade + CLEAN)
        assert (await client.reply()).closes
        assert await client.is_closed()


async def test_invalid_bytes_after_a_request_are_rejected_after_its_answer(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    client = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    await site.begins(1)
    client.send(MARK + b"\r\n\r\n")
    other = await site.ask(CLEAN)  # served after the garbage was read
    assert (await other.reply()).status == 200
    site.let_go.set()
    assert (await client.reply()).body == b"held"
    assert (await client.reply()).code == "malformed_http"
    assert await client.is_closed()
    assert len(lines(caplog)) == 1


async def test_invalid_body_of_an_answered_request_closes_the_connection(site: Site) -> None:
    client = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n" + CHUNKED)
    await site.begins(1)
    client.send(b"secret\r\n")
    other = await site.ask(CLEAN)
    assert (await other.reply()).status == 200
    site.let_go.set()
    assert (await client.reply()).body == b"held"
    assert await client.is_closed()
    assert site.seen == [("POST", PATH, b"{}")]


async def test_client_that_still_sends_headers_gets_its_answer(site: Site) -> None:
    """The rest is read and forgotten, for a while: a reset would overtake the answer."""
    client = await site.ask(GET + b"X: " + b"x" * 9000)
    reply = await client.reply()
    assert reply.status == 431
    assert await client.is_closed()
    for _ in range(16):
        client.send(b"x" * 1_000_000)
        await client.writer.drain()
    assert not client.writer.is_closing()  # as it would be after a reset


@pytest.mark.parametrize("size", [4000, 8000])
async def test_total_size_of_headers_is_limited(site: Site, caplog: pytest.LogCaptureFixture, size: int) -> None:
    client = await site.ask(GET)
    for number in range(100):
        client.send(b"X-%d: " % number + b"x" * size + b"\r\n")
    reply = await client.reply()
    assert (reply.status, reply.code, reply.closes) == (431, "malformed_http", True)
    assert len(lines(caplog)) == 1


# Ids


@pytest.mark.parametrize("given", ["ümlaut".encode(), b"\xff\xfe", b"a b", b"a,b", b"x" * 129, b'"', b"\\r\\n"])
async def test_unacceptable_request_id_is_not_used_without_a_route(site: Site, given: bytes) -> None:
    for sent in (CLEAN, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", CLEAN.replace(b"1.1", b"2.0")):
        client = await site.ask(sent.replace(b"Host", b"X-Request-Id: " + given + b"\r\nHost", 1))
        reply = await client.reply()
        assert len(reply.headers["x-request-id"]) == 32
        assert reply.headers["x-request-id"].isalnum()


async def test_acceptable_request_id_is_used_without_a_route(site: Site) -> None:
    client = await site.ask(CLEAN.replace(b"1.1", b"2.0").replace(b"Host", b"X-Request-Id: a.b-1\r\nHost", 1))
    assert (await client.reply()).headers["x-request-id"] == "a.b-1"


# Expect


def expecting(head: bytes) -> bytes:
    return head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"


async def test_expect_continue_gets_100_when_the_body_is_needed(site: Site) -> None:
    client = await site.ask(expecting(HEAD))
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"{}")
    assert (await client.reply()).status == 200
    client.send(CLEAN)
    assert (await client.reply()).status == 200


async def test_body_sent_at_once_gets_no_100_continue(site: Site) -> None:
    client = await site.ask(expecting(HEAD) + b"{}")
    assert (await client.reply()).status == 200


async def test_http_1_0_client_gets_no_100_continue(site: Site) -> None:
    client = await site.ask(expecting(HEAD.replace(b"1.1", b"1.0")))
    await site.begins(1)
    client.send(b"{}")
    assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD.replace(PATH.encode(), b"/nowhere"), 404),
        (HEAD.replace(b"POST", b"DELETE"), 405),
        (HEAD + b"Content-Encoding: gzip\r\n", 415),
        (HEAD.replace(PATH.encode(), b"/ignore"), 200),
    ],
)
async def test_rejected_request_gets_no_100_continue(site: Site, head: bytes, status: int) -> None:
    client = await site.ask(expecting(head))
    assert (await client.reply()).status == status


async def test_too_long_body_is_rejected_before_it_is_sent() -> None:
    async with serving(max_body_bytes=1) as site:
        client = await site.ask(expecting(HEAD))
        reply = await client.reply()
        assert (reply.status, reply.code, reply.closes) == (413, "request_too_large", True)


# Patience


async def test_silent_client_is_disconnected_without_an_answer(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    client = await site.connect()
    await pass_by(site, 9.9)
    assert not client.reader.at_eof()
    await pass_by(site, 0.1)
    assert await client.is_closed()
    assert lines(caplog) == []
    assert site.rejected("slow_header") == 0.0


async def pass_by(site: Site, seconds: float) -> None:
    """Let the front read what was sent, and then some time go by."""
    assert await site.serves()
    site.clock.now += seconds
    site.front.close_overdue_connections()


async def test_header_deadline_starts_when_the_connection_opens(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    client = await site.ask(GET)
    await pass_by(site, 9.9)
    await pass_by(site, 0.1)
    reply = await client.reply()
    assert (reply.status, reply.code, reply.closes) == (408, "slow_header", True)
    assert reply.headers["x-should-retry"] == "false"
    assert await client.is_closed()
    (line,) = lines(caplog)
    assert (line.name, line.levelname) == ("proxy.listener.http_listener", "INFO")
    assert (site.rejected("slow_header"), site.count("pdproxy_http_parse_errors_total")) == (1.0, 0.0)


async def test_header_deadline_does_not_move_with_more_headers(site: Site) -> None:
    client = await site.ask(GET)
    for number in range(4):
        client.send(b"X-%d: x\r\n" % number)
        await pass_by(site, 2.5)
    assert (await client.reply()).code == "slow_header"


async def test_kept_connection_may_be_idle_but_headers_have_a_deadline(site: Site) -> None:
    client = await site.ask(CLEAN)
    await client.reply()
    await pass_by(site, 60.0)
    client.send(CLEAN)
    assert (await client.reply()).status == 200
    await pass_by(site, 60.0)
    client.send(GET)
    await pass_by(site, 9.0)
    (connection,) = (each for each in site.front._connections if each.client_transport in site.front.header_deadlines)
    assert isinstance(connection, AiohttpConnection)
    assert connection._keepalive_handle is None  # the timer of aiohttp for idle connections
    client.send(b"\r\n")  # after 69 seconds, but 9 after the first byte
    assert (await client.reply()).status == 200
    client.send(GET)
    await pass_by(site, 10.0)
    assert (await client.reply()).code == "slow_header"


async def test_connection_with_partial_headers_is_not_idle() -> None:
    async with serving(keepalive_seconds=0.001) as site:
        client = await site.ask(GET)
        await pass_by(site, 0.0)
        await asyncio.sleep(0.01)  # aiohttp's own timer would have ended it by now
        client.send(b"\r\n")
        assert (await client.reply()).status == 200
        assert await client.is_closed()  # for it is idle now


async def test_header_deadline_does_not_limit_bodies_and_answers(site: Site) -> None:
    client = await site.ask(CLEAN[:-1])
    held = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    await site.begins(2)
    site.clock.now += 1000.0
    site.front.close_overdue_connections()
    client.send(b"}")
    site.let_go.set()
    assert (await client.reply()).status == 200
    assert (await held.reply()).status == 200


async def test_time_limits_can_be_reconfigured(site: Site) -> None:
    client = await site.ask(GET)
    assert await site.serves()
    site.front.set_limits(Listen(header_seconds=2.0))
    site.clock.now += 2.0
    site.front.close_overdue_connections()
    assert (await client.reply()).code == "slow_header"


async def test_listener_checks_time_limits_periodically() -> None:
    async with serving(tick_seconds=0.001, header_seconds=1.0) as site:
        client = await site.ask(GET)
        assert await site.serves()
        site.clock.now += 1.0
        assert (await client.reply()).code == "slow_header"


async def test_client_that_closes_its_side_counts_as_disconnected(site: Site) -> None:
    """It could be one that has nothing more to send. But who leaves looks the same, and an engine works for them."""
    client = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    await site.begins(1)
    client.writer.write_eof()
    assert await client.is_closed()
    await until(lambda: site.front.connection_count == 0, "the connection to be closed")


# Room


async def test_connections_above_the_limit_get_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(max_connections=2) as site:
        first, second = await site.ask(CLEAN), await site.ask(CLEAN)
        assert [(await client.reply()).status for client in (first, second)] == [200, 200]
        assert site.count("pdproxy_connections") == 2.0
        third = await site.ask(CLEAN)
        reply = await third.reply()
        assert (reply.status, reply.code, reply.closes) == (503, "too_many_connections", True)
        assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("1", "1000")
        fourth = await site.connect()  # while the third one is open, no other one gets an error
        assert await fourth.is_closed()
        assert await third.is_closed()
        third.leave()
        assert (site.front.connection_count, site.rejected("connections")) == (2, 2.0)
        (line,) = lines(caplog)
        assert line.getMessage() == "listener: new connections rejected: the limit of 2 is reached"
        first.leave()
        await until(lambda: site.front.connection_count == 1, "the first to be gone")
        assert await site.serves()
        assert len(site.seen) == 3


async def test_rejected_connection_closes_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(max_connections=1) as site:
        first = await site.ask(CLEAN)
        await first.reply()
        second = await site.connect()
        await second.reply()
        site.clock.now += 2.0
        site.front.close_overdue_connections()
        site.clock.now += 10.0
        third = await site.connect()
        assert (await third.reply()).code == "too_many_connections"
        assert [line.levelname for line in lines(caplog)] == ["WARNING", "WARNING"]


async def test_connection_limit_is_a_share_of_the_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as site:
        for limit, connections in ((5, 2), (resource.RLIM_INFINITY, 3)):
            monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
            site.front.set_limits(Listen())
            clients = [await site.ask(CLEAN) for _ in range(3)]
            statuses = sorted([(await client.reply()).status for client in clients])
            assert statuses.count(200) == connections
            for client in clients:
                client.leave()
            await until(lambda: not site.front.connection_count, "all to be gone")


# The end


async def test_connections_can_be_closed_after_each_answer(site: Site) -> None:
    kept = await site.ask(CLEAN)
    assert not (await kept.reply()).closes
    held = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    old = await site.ask(b"GET /hold HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    await site.begins(3)
    site.front.closes_after_each_answer = True
    kept.send(CLEAN)
    site.let_go.set()
    streamed = await site.ask(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    refused = await site.ask(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    for client in (kept, held, old, streamed, refused):
        assert (await client.reply()).closes
        assert await client.is_closed()
    site.front.closes_after_each_answer = False
    kept = await site.ask(CLEAN + CLEAN)
    assert [(await kept.reply()).closes for _ in range(2)] == [False, False]


async def test_connections_in_the_kernel_queue_are_answered_at_stop(site: Site) -> None:
    """Closing the listening socket would reset them."""
    with socket.create_connection(("127.0.0.1", site.port)) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
    waiting = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(5)]
    for sock in waiting[:-1]:
        sock.sendall(CLEAN)
    stopping = asyncio.create_task(site.front.stop_accepting())  # no other task has run so far
    clients = [Client(*await asyncio.open_connection(sock=sock)) for sock in waiting]
    site.clients += clients
    for client in clients[:-1]:
        reply = await client.reply()
        assert (reply.status, reply.closes) == (200, True)
        assert await client.is_closed()
    assert not stopping.done()
    clients[-1].send(CLEAN)  # even if it comes a little later
    await stopping
    assert (await clients[-1].reply()).status == 200
    with pytest.raises(ConnectionRefusedError):
        await site.connect()


async def test_silent_connections_do_not_delay_the_stop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.listener.http_listener._LAST_HEADS_SECONDS", 0.01)
    client = await site.connect()
    await site.front.stop_accepting()
    assert not client.reader.at_eof()


async def test_idle_connections_close_when_listening_ends(site: Site) -> None:
    idle = await site.ask(CLEAN)
    await idle.reply()
    sending = await site.ask(CLEAN[:-1])
    held = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    streamed = await site.ask(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    several = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n" + CLEAN)
    await site.begins(5)
    await site.front.stop_accepting()
    assert await idle.is_closed()
    sending.send(b"}")
    site.let_go.set()
    for client in (sending, held, streamed, several):
        reply = await client.reply()
        assert (reply.status, reply.closes) == (200, client is not streamed)
        assert await client.is_closed()


async def test_arrived_request_is_read_before_idle_connections_close(site: Site) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", site.port)) as sock:
        sock.setblocking(False)
        sock.send(CLEAN)
        assert await loop.sock_recv(sock, 65536)
        sock.send(CLEAN)  # no task has run when listening ends
        await site.front.stop_accepting()
        assert await loop.sock_recv(sock, 65536)
    assert len(site.seen) == 2


async def test_leaving_the_listener_cuts_running_answers() -> None:
    async with serving() as site:
        held = await site.ask(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await site.begins(1)
        await site.front.__aexit__(None, None, None)
        assert await held.is_closed()


async def test_late_error_outside_of_routes_cuts_the_answer(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(request: web.Request) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        raise ValueError

    monkeypatch.setattr(site.front, "_serve", fail)
    client = await site.ask(CLEAN)
    received = await client.reader.read()
    assert (received.count(b"HTTP/1.1"), received.count(b"error")) == (1, 0)
    assert not received.endswith(b"0\r\n\r\n")
    assert len(lines(caplog)) == 1


async def test_error_outside_of_routes_is_logged_once_and_answered(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(request: Any) -> Any:
        raise ValueError(MARK.decode())

    monkeypatch.setattr(site.front, "_serve", fail)
    client = await site.ask(CLEAN)
    reply = await client.reply()
    assert (reply.status, reply.code, reply.closes) == (500, "internal_error", True)
    (line,) = lines(caplog)
    assert (line.name, line.levelname) == ("proxy.listener.replies", "ERROR")
    assert MARK.decode() not in caplog.text
