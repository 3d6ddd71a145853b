"""aiohttp's client goes where the hot path goes, and nowhere else."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from proxy.upstream import AddressProblem, AddressRules, new_session, read_bounded
from tests.upstream.desk import desk
from tests.upstream.raw import OK, STREAM_HEAD, Link, chunk, engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.clock import Clock


async def serve_get(link: Link) -> None:
    await link.reader.readuntil(b"\r\n\r\n")
    link.send(OK)


async def test_it_connects_to_the_same_addresses(clock: Clock) -> None:
    async with desk(clock) as at, engine(serve_get) as server, new_session(at.names) as session:
        at.server.say(["127.0.0.1"])
        async with session.get(f"http://engine.invalid:{server.port}/") as answer:
            assert await answer.read() == b"ok"
        assert at.server.asked == ["engine.invalid"]


async def test_it_asks_at_every_connect(clock: Clock) -> None:
    async with desk(clock) as at, engine(serve_get) as server, new_session(at.names) as session:
        at.server.say(["127.0.0.1"])
        async with session.get(f"http://added.invalid:{server.port}/") as answer:
            await answer.read()
        clock.now += 10.1
        at.server.say(["169.254.169.254"])
        at.names.known("added.invalid")
        await at.refreshed("added.invalid")
        with pytest.raises(aiohttp.ClientConnectorError) as failed:
            await session.get(f"http://added.invalid:{server.port}/", headers={"Connection": "close"})
        assert isinstance(failed.value.os_error, AddressProblem)


async def test_it_is_bound_by_the_rules_for_literals_too(clock: Clock) -> None:
    rules = AddressRules(["10.0.0.0/8"])
    async with desk(clock, rules=rules) as at, engine(serve_get) as server, new_session(at.names) as session:
        with pytest.raises(aiohttp.ClientConnectorError) as failed:
            await session.get(f"http://127.0.0.1:{server.port}/")
        assert str(failed.value.os_error) == "its address is not allowed by admin.networks"
        at.names.configure(AddressRules([]), ["127.0.0.1"])
        async with session.get(f"http://127.0.0.1:{server.port}/") as answer:
            assert await answer.read() == b"ok"


async def test_it_reaches_configured_names_wherever_they_are(clock: Clock) -> None:
    rules = AddressRules([])
    async with (
        desk(clock, "engine.invalid", rules=rules) as at,
        engine(serve_get) as server,
        new_session(at.names) as session,
    ):
        at.server.say(["127.0.0.1"])
        async with session.get(f"http://engine.invalid:{server.port}/") as answer:
            assert await answer.read() == b"ok"


async def test_it_tells_why_there_is_no_address(clock: Clock) -> None:
    async with desk(clock) as at, new_session(at.names) as session:
        at.server.say(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        with pytest.raises(aiohttp.ClientConnectorError) as failed:
            await session.get("http://engine.invalid:1/")
        assert str(failed.value.os_error) == "name or service not known"


async def test_it_waits_for_a_name_no_longer_than_for_a_connection(clock: Clock) -> None:
    async with desk(clock) as at, new_session(at.names) as session:
        with pytest.raises(aiohttp.ConnectionTimeoutError):
            await session.get("http://slow.invalid:1/", timeout=aiohttp.ClientTimeout(total=None, connect=0.01))


@asynccontextmanager
async def got(clock: Clock, answer: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    async def script(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(answer)

    async with (
        desk(clock) as at,
        engine(script) as server,
        new_session(at.names) as session,
        session.get(f"http://127.0.0.1:{server.port}/") as response,
    ):
        yield response


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (STREAM_HEAD + chunk(b"o") + chunk(b"k") + b"0\r\n\r\n", b"ok"),
    ],
)
async def test_a_body_up_to_the_bound_is_read(clock: Clock, answer: bytes, body: bytes) -> None:
    async with got(clock, answer) as response:
        assert await read_bounded(response, 2) == body


@pytest.mark.parametrize(
    "answer",
    [OK, STREAM_HEAD + chunk(b"ok"), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no"],
    ids=["too large", "too large, without end", "broken off"],
)
async def test_a_body_beyond_the_bound_is_not_read(clock: Clock, answer: bytes) -> None:
    async with got(clock, answer) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_bounded(response, 1)
