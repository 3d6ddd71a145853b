"""EngineClient: addresses, bounds, and the errors of requests without an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from proxy.common.errors import Failure
from proxy.upstream import AddressRules, EngineClient, EngineRequest, EngineRequestError
from tests.clock import Clock
from tests.upstream.desk import LOOPBACK, Desk, desk
from tests.upstream.raw import OK, STREAM_HEAD, Link, chunk, engine


async def serve_get(link: Link) -> None:
    await link.reader.readuntil(b"\r\n\r\n")
    link.send(OK)


# Addresses


@asynccontextmanager
async def served(
    clock: Clock, *hosts: str, rules: AddressRules = LOOPBACK
) -> AsyncIterator[tuple[Desk, EngineClient, int]]:
    """Names, a client that uses them, and the port of an engine on loopback."""
    async with desk(clock, *hosts, rules=rules) as at, engine(serve_get) as server, EngineClient(at.names) as client:
        yield at, client, server.port


async def test_client_connects_to_the_addresses_of_a_name(clock: Clock) -> None:
    async with served(clock) as (at, client, port):
        at.server.say(["127.0.0.1"])
        assert (await client.get_body(f"http://engine.invalid:{port}", "/", 5.0)).body == b"ok"
        assert at.server.asked == ["engine.invalid"]


async def test_client_checks_addresses_at_each_connect(clock: Clock) -> None:
    async with served(clock) as (at, client, port):
        url = f"http://added.invalid:{port}"
        at.server.say(["127.0.0.1"])
        await client.get_body(url, "/", 5.0)
        clock.now += 10.1
        at.server.say(["169.254.169.254"])
        at.names.known_addresses("added.invalid")
        await at.refreshed("added.invalid")
        with pytest.raises(EngineRequestError, match="its address is not allowed"):
            await client.get_body(url, "/", 5.0, {"Connection": "close"})


async def test_client_checks_addresses_in_urls(clock: Clock) -> None:
    async with served(clock, rules=AddressRules(["10.0.0.0/8"])) as (at, client, port):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(EngineRequestError, match="its address is not allowed"):
            await client.get_body(url, "/", 5.0)
        at.names.set_rules(AddressRules([]), ["127.0.0.1"])
        assert (await client.get_body(url, "/", 5.0)).body == b"ok"


async def test_client_reaches_configured_names_at_any_address(clock: Clock) -> None:
    async with served(clock, "engine.invalid", rules=AddressRules([])) as (at, client, port):
        at.server.say(["127.0.0.1"])
        assert (await client.get_body(f"http://engine.invalid:{port}", "/", 5.0)).body == b"ok"


async def test_client_reports_why_a_name_has_no_address(clock: Clock) -> None:
    async with desk(clock) as at, EngineClient(at.names) as client:
        at.server.say(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        with pytest.raises(EngineRequestError, match="name or service not known"):
            await client.get_body("http://engine.invalid:1", "/", 5.0)


async def test_connect_limit_includes_looking_up_the_name(clock: Clock) -> None:
    async with desk(clock) as at, EngineClient(at.names) as client:
        with pytest.raises(EngineRequestError, match=r"cannot connect \(timed out\)"):
            async with client.stream_response("GET", "http://slow.invalid:1", "/", b"", {}, 0.01):
                pass


async def test_client_reports_reused_connections() -> None:
    reused: list[None] = []

    async def serve_twice(link: Link) -> None:
        await serve_get(link)
        await serve_get(link)

    async with engine(serve_twice) as server, EngineClient(on_reuse=lambda: reused.append(None)) as client:
        for _ in range(2):
            await client.get_body(f"http://127.0.0.1:{server.port}", "/", 5.0)
    assert len(reused) == 1


# Bounds


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[EngineClient, str]]:
    """Provide a client, and the URL of an engine that sends these bytes."""

    async def script(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(answer)

    async with engine(script) as server, EngineClient() as client:
        yield client, f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (STREAM_HEAD + chunk(b"o") + chunk(b"k") + b"0\r\n\r\n", b"ok"),
    ],
)
async def test_body_up_to_the_bound_is_read(answer: bytes, body: bytes) -> None:
    async with answering(answer) as (client, url):
        assert (await client.get_body(url, "/", 5.0, max_bytes=2)).body == body


@pytest.mark.parametrize(
    "answer",
    [OK, STREAM_HEAD + chunk(b"ok"), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no"],
    ids=["too large", "too large, without end", "broken off"],
)
async def test_body_beyond_the_bound_is_not_read(answer: bytes) -> None:
    async with answering(answer) as (client, url):
        with pytest.raises(EngineRequestError) as failed:
            await client.get_body(url, "/", 5.0, max_bytes=1)
        assert failed.value.failure_kind is Failure.BROKEN


# Requests and answers


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient() as client:
        yield client


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """URL of an engine with a few paths."""

    async def good(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.18.1"}, headers={"Server": "engine"})

    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(body=b"<html>", status=418)

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPFound("/good")

    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.query["a"] == "b" and await request.read() == b"{}" else 400)

    app = web.Application()
    app.add_routes([web.get(f"/{answer.__name__}", answer) for answer in (good, nonsense, redirect, never)])
    app.add_routes([web.post("/check", check)])
    async with TestServer(app, host="127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_client_returns_whole_answers_of_any_status(client: EngineClient, url: str) -> None:
    good = await client.get_body(url, "/good", 5.0)
    assert (good.status, good.headers["Server"], good.parsed_json) == (200, "engine", {"version": "0.18.1"})
    nonsense = await client.get_body(url, "/nonsense", 5.0)
    assert (nonsense.status, nonsense.body, nonsense.parsed_json_or_none) == (418, b"<html>", None)
    with pytest.raises(ValueError, match="unexpected character"):
        _ = nonsense.parsed_json
    assert await client.get_status(url, "/nonsense", 5.0) == 418


async def test_client_follows_no_redirects(client: EngineClient, url: str) -> None:
    assert (await client.get_body(url, "/redirect", 5.0)).status == 302


async def test_client_posts_query_and_body(client: EngineClient, url: str) -> None:
    request = EngineRequest(path="/check", query_parameters=[("a", "b")], headers={}, body=b"{}")
    assert await client.post_status(url, request, timeout_seconds=5.0, connect_seconds=5.0) == 200


async def test_error_says_why_there_is_no_answer(client: EngineClient, url: str) -> None:
    with pytest.raises(EngineRequestError, match=r"^/never did not answer within 0.05 s$") as late:
        await client.get_body(url, "/never", 0.05)
    with pytest.raises(EngineRequestError, match=r"^/good failed \(ClientPayloadError\)$") as long:
        await client.get_body(url, "/good", 5.0, max_bytes=3)
    with pytest.raises(EngineRequestError, match=r"^cannot connect \(.*refused.*\)$") as refused:
        await client.get_body(f"http://127.0.0.1:{unused_port()}", "/good", 5.0)
    with pytest.raises(EngineRequestError, match=r"^cannot connect \(not a host name\)$") as no_name:
        await client.get_status("http://a..b:1", "/good", 5.0)
    assert [error.value.failure_kind for error in (late, long, refused, no_name)] == [
        Failure.TIMEOUT,
        Failure.BROKEN,
        Failure.CONNECT,
        Failure.CONNECT,
    ]
    assert "refused" in refused.value.error_reason
