"""Test bodies that are valid, too long, too slow, encoded or incomplete."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request

from proxy.common.errors import GatewayError, Overloaded
from proxy.listener import body
from proxy.listener.body import deadline_seconds, read_body
from proxy.settings import Listen
from tests.asking import until
from tests.listener.listeners import CLEAN, HEAD, PATH, Client, Site, serving

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


@pytest.fixture(autouse=True)
def lingers_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which the listener waits for the end of a client."""
    monkeypatch.setattr("proxy.listener.http_listener.LINGERING_SECONDS", 0.01)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(max_body_bytes=MIB) as site:
        yield site


async def refused(client: Client) -> tuple[int, str]:
    """Status and code of the answer after which the connection is closed."""
    reply = await client.reply()
    assert reply.closes
    assert await client.is_closed()
    return reply.status, reply.code


async def test_body_may_arrive_in_pieces(site: Site) -> None:
    for pieces in (
        [HEAD + b"Content-Length: 5\r\n\r\na", b"bcd", b"e"],
        [CHUNKED, chunk(b"ab"), chunk(b"cde") + LAST_CHUNK],
    ):
        client = await site.connect()
        for piece in pieces:
            client.send(piece)
            assert await site.serves()
        assert (await client.reply()).status == 200
    assert site.seen.count(("POST", PATH, b"abcde")) == 2


async def test_body_that_has_arrived_needs_no_timer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("proxy.listener.body.asyncio")
    for sent in (CLEAN, CHUNKED + chunk(b"{}") + LAST_CHUNK, HEAD + b"\r\n"):
        client = await site.ask(sent)
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("length", [0, 1, MIB - 1, MIB])
async def test_body_of_the_maximum_length_is_accepted(site: Site, length: int) -> None:
    data = bytes(length)
    chunks = chunk(data) if data else b""
    for sent in (HEAD + b"Content-Length: %d\r\n\r\n" % length + data, CHUNKED + chunks + LAST_CHUNK):
        client = await site.ask(sent)
        assert (await client.reply()).status == 200
        assert site.seen[-1] == ("POST", PATH, data)


@pytest.mark.parametrize(
    "coding", [b"gzip", b"deflate", b"br", b"zstd", b"GZIP", b"gzip, gzip", b"identity, gzip", b"x"]
)
async def test_body_with_content_encoding_is_rejected_unread(site: Site, coding: bytes) -> None:
    """The final size is unknown before the end."""
    client = await site.ask(CLEAN.replace(b"Host", b"Content-Encoding: " + coding + b"\r\nHost", 1))
    reply = await client.reply()
    assert (reply.status, reply.code) == (415, "content_encoding")
    assert reply.headers["accept-encoding"] == "identity"
    assert site.rejected("content_encoding") == 1.0
    client = await site.ask(HEAD + b"Content-Encoding: " + coding + b"\r\nContent-Length: 10\r\n\r\n")
    assert await refused(client) == (415, "content_encoding")
    assert site.seen == []


async def test_content_encoding_identity_is_accepted(site: Site) -> None:
    client = await site.ask(CLEAN.replace(b"Host", b"Content-Encoding: Identity\r\nHost", 1))
    assert (await client.reply()).status == 200


async def test_body_with_too_large_content_length_is_rejected_unread(site: Site) -> None:
    client = await site.ask(HEAD + b"Content-Length: %d\r\n\r\n" % (MIB + 1))
    assert await refused(client) == (413, "request_too_large")
    assert site.rejected("too_large") == 1.0


async def test_body_is_rejected_when_it_grows_beyond_the_limit(site: Site) -> None:
    client = await site.ask(CHUNKED + chunk(bytes(MIB)))
    client.send(chunk(b"x"))
    assert await refused(client) == (413, "request_too_large")
    assert site.rejected("too_large") == 1.0


async def test_body_that_arrived_whole_is_rejected_beyond_the_limit() -> None:
    async with serving(max_body_bytes=1) as site:
        for sent in (CLEAN, CHUNKED + chunk(b"{}") + LAST_CHUNK):
            client = await site.ask(sent)
            reply = await client.reply()
            assert (reply.status, reply.code) == (413, "request_too_large")


async def test_client_that_continues_to_send_receives_the_rejection(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.listener.http_listener.LINGERING_SECONDS", 5.0)
    client = await site.ask(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * MIB))
    client.send(bytes(4 * MIB))
    await client.writer.drain()
    assert await refused(client) == (413, "request_too_large")
    assert await site.serves()


@pytest.mark.parametrize("is_told", [True, False])
async def test_long_body_is_in_memory_once(is_told: bool) -> None:
    length = 16 * MIB
    async with serving(max_body_bytes=length) as site:
        client = await site.ask(HEAD + b"Content-Length: %d\r\n\r\n" % length if is_told else CHUNKED)
        piece = bytes(MIB)
        tracemalloc.start()
        try:
            for _ in range(16):
                client.send(piece if is_told else chunk(piece))
                await client.writer.drain()
            client.send(b"" if is_told else LAST_CHUNK)
            assert (await client.reply()).status == 200
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(site.seen[0][2]) == length
        # The buffer grows by an eighth at a time. The client and aiohttp hold pieces, too.
        assert peak < length * 9 / 8 + 4 * MIB


@pytest.mark.parametrize(
    ("rate", "received", "expected"),
    [
        (1024, 0, 5.0),
        (1024, 1024, 5.0),
        (1024, 5 * 1024, 5.0),
        (1024, 10 * 1024, 10.0),
        (1024, 59 * 1024, 59.0),
        (1024, MIB, 60.0),
        (1, MIB, 60.0),
        (0, 0, 60.0),
        (0, MIB, 60.0),
    ],
)
def test_body_deadline_moves_with_received_bytes(rate: int, received: int, expected: float) -> None:
    assert deadline_seconds(received, Listen(body_bytes_per_second=rate)) == expected


def test_body_grace_time_is_at_most_the_deadline() -> None:
    assert deadline_seconds(0, Listen(body_seconds=2.0)) == 2.0


@pytest.mark.parametrize("head", [HEAD + b"Content-Length: 10\r\n\r\n", CHUNKED])
async def test_body_is_rejected_after_body_seconds(head: bytes) -> None:
    async with serving(body_seconds=0.01, body_bytes_per_second=0) as site:
        client = await site.ask(head)
        assert await refused(client) == (408, "slow_body")
        assert site.rejected("slow_body") == 1.0
        assert site.seen == []
        assert await site.serves()


async def test_body_is_rejected_below_the_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_GRACE_SECONDS", 0.0)
    async with serving(body_bytes_per_second=1_000_000) as site:
        client = await site.ask(HEAD + b"Content-Length: 10\r\n\r\n1")
        assert await refused(client) == (408, "slow_body")


async def test_body_deadline_is_later_after_more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_GRACE_SECONDS", 0.01)
    async with serving(body_bytes_per_second=1) as site:
        client = await site.ask(HEAD + b"Content-Length: 50\r\n\r\n" + bytes(49))
        await site.begins(1)
        await asyncio.sleep(0.02)  # the grace is over, and 49 seconds are not
        client.send(b"x")
        assert (await client.reply()).status == 200


async def test_slow_body_is_accepted_without_a_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_GRACE_SECONDS", 0.0)
    async with serving(body_bytes_per_second=0) as site:
        client = await site.ask(HEAD + b"Content-Length: 4\r\n\r\n")
        for byte in b"abcd":
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).status == 200


async def test_client_disconnect_during_the_body_is_not_an_error(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for leave in ("abort", "write_eof"):
        client = await site.ask(CLEAN[:-1])
        await until(lambda: site.front.connection_count == 1, "the connection")
        getattr(client.writer.transport, leave)()
        await until(lambda: site.front.connection_count == 0, "the end of the connection")
    assert caplog.records == []
    assert site.seen == []


# By itself


async def test_body_read_ends_when_the_client_has_disconnected() -> None:
    request = request_with(content_of(ends=False))
    request.protocol.transport = None
    with pytest.raises(ConnectionError):
        await read_body(request, Listen())


def request_with(content: StreamReader, **headers: str) -> web.Request:
    return make_mocked_request("POST", "/", headers=headers, payload=content)


def content_of(*pieces: bytes, ends: bool = True) -> StreamReader:
    class Protocol:
        connected = True

        def pause_reading(self) -> None: ...

        def resume_reading(self, resume_parser: bool = True) -> None: ...

    content = StreamReader(Protocol(), 2**16)  # type: ignore[arg-type]
    for piece in pieces:
        content.feed_data(piece)
    if ends:
        content.feed_eof()
    return content


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("problem", [OSError(113, "no route"), TimeoutError(110, "timed out"), ConnectionResetError()])
@pytest.mark.parametrize("told", [{}, {"Content-Length": "4"}])
async def test_body_read_raises_connection_error_for_every_lost_connection(
    problem: OSError, has_ended: bool, told: dict[str, str]
) -> None:
    content = content_of(b"ab", ends=has_ended)
    content.set_exception(problem)
    with pytest.raises(ConnectionError):
        await read_body(request_with(content, **told), Listen())
    content = content_of(b"ab", ends=False)
    reading = asyncio.create_task(read_body(request_with(content, **told), Listen()))
    await asyncio.sleep(0)
    content.set_exception(problem)
    with pytest.raises(ConnectionError):
        await reading


async def test_growth_is_reported_for_a_body_of_unknown_length() -> None:
    grown: list[int] = []
    assert await read_body(request_with(content_of(b"ab", b"cd")), Listen(), grown.append) == b"abcd"
    assert grown == [4]
    content = content_of(b"ab", ends=False)
    reading = asyncio.create_task(read_body(request_with(content), Listen(), grown.append))
    await until(lambda: grown == [4, 2], "the first piece")
    content.feed_data(b"cd")
    await until(lambda: grown == [4, 2, 4], "the second piece")
    content.feed_eof()
    assert await reading == b"abcd"


async def test_growth_is_reported_for_a_body_of_known_length() -> None:
    grown: list[int] = []
    for ends in (True, False):
        content = content_of(b"abcd", ends=ends)
        reading = asyncio.create_task(
            read_body(request_with(content, **{"Content-Length": "4"}), Listen(), grown.append)
        )
        await asyncio.sleep(0)
        if not ends:
            content.feed_eof()
        assert await reading == b"abcd"
    assert grown == [4, 4]


async def test_body_of_known_length_wakes_its_reader_once() -> None:
    grown: list[int] = []
    content = content_of(b"ab", ends=False)
    request = request_with(content, **{"Content-Length": "6"})
    reading = asyncio.create_task(read_body(request, Listen(), grown.append))
    await until(lambda: bool(grown), "the reader to wait")
    for piece in (b"cd", b"ef"):
        content.feed_data(piece)
        assert content._waiter is None
        await asyncio.sleep(0)
    assert grown == [6]
    content.feed_eof()
    assert await reading == b"abcdef"


async def test_body_that_arrived_before_reading_is_read_to_its_end(site: Site) -> None:
    """Return the part of a body that aiohttp buffers before it slows the client down."""
    data = bytes(range(256)) * 4 * 1000
    client = await site.ask(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data[:300_000])
    await site.begins(1)
    client.send(data[300_000:])
    assert (await client.reply()).status == 200
    assert site.seen[-1] == ("POST", PATH, data)


@pytest.mark.parametrize("ends", [True, False])
async def test_body_read_stops_when_growth_is_rejected(ends: bool) -> None:
    def refuse(size: int) -> Any:
        raise Overloaded("no", code="buffers_full")

    with pytest.raises(GatewayError) as caught:
        await read_body(request_with(content_of(b"ab", ends=ends)), Listen(), refuse)
    assert caught.value.code == "buffers_full"
