"""One exchange: the bytes that go out, and what becomes of those that come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from proxy.common.errors import Failure
from proxy.upstream import Upstream
from tests.upstream.raw import (
    LONG,
    OK,
    STREAM_HEAD,
    Collector,
    Link,
    chunk,
    engine,
    exchange,
    failure_of,
    fetch,
    new_upstream,
)

# Requests


async def test_request_is_what_engines_expect(upstream: Upstream) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(link: Link) -> None:
        seen.append(await link.request())
        link.send(OK)

    async with engine(script) as backend:
        headers = {"x-request-id": "r1", "authorization": "Bearer of-the-client"}
        await upstream.post_and_read_body(
            backend, "/v1/completions", b'{"prompt":"\xc3\xbc"}', headers, answer_seconds=LONG
        )
    head, body = seen[0]
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert sorted(lines[1:]) == [
        b"Accept-Encoding: identity",
        b"Authorization: Bearer of-the-client",
        b"Content-Length: 15",
        b"Content-Type: application/json",
        b"Host: 127.0.0.1:%d" % backend.port,
        b"x-request-id: r1",
    ]
    assert body == b'{"prompt":"\xc3\xbc"}'


async def test_header_reaches_the_engine_with_the_clients_bytes(upstream: Upstream) -> None:
    seen: list[bytes] = []

    async def script(link: Link) -> None:
        seen.append((await link.request())[0])
        link.send(OK)

    async with engine(script) as backend:
        received = b"caf\xc3\xa9 \xe9 \xe6\xbc\xa2".decode("utf-8", "surrogateescape")  # as aiohttp reads it
        await upstream.post_and_read_body(backend, "/", b"{}", {"tracestate": received}, answer_seconds=LONG)
    assert b"tracestate: caf\xc3\xa9 \xe9 \xe6\xbc\xa2\r\n" in seen[0]


async def test_instance_that_is_not_configured_never_sees_the_engine_key() -> None:
    seen: list[bytes] = []

    async def script(link: Link) -> None:
        seen.append((await link.request())[0])
        link.send(OK)

    async with new_upstream(key="secret") as upstream, engine(script) as backend:
        await upstream.post_and_read_body(backend, "/", b"{}", {"authorization": "Bearer own"}, answer_seconds=LONG)
    assert b"uthorization" not in seen[0]


async def test_instance_added_again_has_no_former_right_to_the_engine_key() -> None:
    seen: list[bytes] = []

    async def script(link: Link) -> None:
        for _ in range(2):
            seen.append((await link.request())[0])
            link.send(OK)

    async with new_upstream(key="secret") as upstream, engine(script) as backend:
        for trusted in (True, False):  # on one connection
            await upstream.post_and_read_body(replace(backend, is_trusted=trusted), "/", b"{}", {}, answer_seconds=LONG)
    assert [b"Authorization: Bearer secret\r\n" in head for head in seen] == [True, False]


async def test_connection_notices_when_its_engine_is_gone(upstream: Upstream) -> None:
    async with engine(Link.answer) as backend, exchange(upstream, backend) as response:
        await response.read_body()
        (connection,) = upstream._busy
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # Only probes tell about an engine that we wait for, and only unacknowledged bytes about one that we write to.
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


# Answers

BODY = b'data: {"text":"\xc3\xbc"}\n\n'
ANSWERS = {
    "content-length": b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "chunked": STREAM_HEAD + chunk(BODY[:5]) + chunk(BODY[5:]) + b"0\r\n\r\n",
    "chunked with extensions and trailers": STREAM_HEAD
    + b"%x;a=b\r\n" % len(BODY)
    + BODY
    + b"\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "1xx first": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"
    + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_answer_is_the_same_wherever_it_is_cut(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        for cut in range(1, len(answer)):
            await link.answer(answer[:cut])
            await asyncio.sleep(0)  # a turn for the reader, so that it sees the cut
            await asyncio.sleep(0)
            link.send(answer[cut:])

    async with engine(script) as backend:
        for _ in range(1, len(answer)):
            response, body = await upstream.post_and_read_body(backend, "/", b"{}", {}, answer_seconds=LONG)
            assert (response.status, body) == (200, BODY)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_answer_is_the_same_byte_by_byte(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.request()
        for i in range(len(answer)):
            link.send(answer[i : i + 1])
            await asyncio.sleep(0)

    async with engine(script) as backend:
        assert await fetch(upstream, backend) == BODY


async def test_status_and_headers_are_there_before_the_body(upstream: Upstream) -> None:
    opened = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(b"HTTP/1.1 429 Slow down\r\nRetry-After: 3\r\nX-Empty:\r\nX-Two: 1\r\nx-two: 2\r\n")
        link.send(b"Content-Length: 4\r\n\r\n")
        await opened.wait()
        link.send(b"busy")

    async with engine(script) as backend, exchange(upstream, backend) as response:
        assert response.status == 429
        assert response.backend is backend
        assert response.headers == {"retry-after": "3", "x-empty": "", "x-two": "2", "content-length": "4"}
        opened.set()
        assert await response.read_body() == b"busy"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
)
async def test_answer_may_have_no_body(upstream: Upstream, answer: bytes) -> None:
    async with engine(lambda link: link.answer(answer)) as backend:
        assert await fetch(upstream, backend) == b""


async def test_body_that_arrived_before_attach_is_delivered(upstream: Upstream) -> None:
    told = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"one "))
        await told.wait()
        link.send(chunk(b"two"))
        link.send(b"0\r\n\r\n")

    async with engine(script) as backend, exchange(upstream, backend) as response:
        sink = Collector()
        response.attach_sink(sink)
        await sink.begun.wait()
        told.set()
        assert await sink.finished is None
        assert sink.body == b"one two"


async def test_whole_body_that_arrived_before_attach_is_delivered(upstream: Upstream) -> None:
    async with engine(lambda link: link.answer()) as backend, exchange(upstream, backend) as response:
        await asyncio.sleep(0)
        sink = Collector()
        response.attach_sink(sink)
        assert await sink.finished is None
        assert sink.body == b"ok"


@pytest.mark.interpreted
async def test_answer_larger_than_the_bound_is_refused(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.response._MAX_ANSWER_BYTES", 10)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n12345678901"
    async with engine(lambda link: link.answer(answer)) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


# Invalid answers


@pytest.mark.parametrize("how", [lambda link: None, Link.reset], ids=["FIN", "RST"])
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        STREAM_HEAD,
        STREAM_HEAD + b"5\r\nok",
        STREAM_HEAD + chunk(b"ok"),
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nthe end of this body is unknown",
    ],
)
async def test_incomplete_answer_fails_as_broken(upstream: Upstream, begun: bytes, how: Callable[[Link], None]) -> None:
    async def script(link: Link) -> None:
        await link.answer(begun)
        await link.writer.drain()
        how(link)

    async with engine(script) as backend:
        # Bytes that a reset overtakes may never have arrived.
        allowed = {Failure.BROKEN} if how is not Link.reset else {Failure.BROKEN, Failure.RESET}
        assert await failure_of(fetch(upstream, backend)) in allowed


async def test_arrived_part_of_a_broken_answer_is_delivered(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"ok"))

    async with engine(script) as backend, exchange(upstream, backend) as response:
        sink = Collector()
        response.attach_sink(sink)
        error = await sink.finished
        assert error is not None
        assert error.failure is Failure.BROKEN
        assert sink.body == b"ok"


BAD_STATUSES = [b"000", b"099", b"600", b"999", b"2000", b"20", b"+20", b"2x0", b"-200"]


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02\x03",
        b"\x16\x03\x01\x02\x00\x01",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"<html></html>\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        *(b"HTTP/1.1 %b X\r\nContent-Length: 2\r\n\r\nok" % status for status in BAD_STATUSES),
        b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/0.9 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"http/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2, 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nok" % 2**64,
        b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        *(
            b"HTTP/1.1 200 OK\r\nContent-Type: a%bX-Injected: b\r\nContent-Length: 2\r\n\r\nok" % between
            for between in (b"\r", b"\n", b"\0", b"\x07", b"\x7f", b"\r\n ")
        ),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Bomb: " + b"x" * 300_000,
        b"HTTP/1.1 200 OK\r\n" + b"X-Bomb: 1\r\n" * 30_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        STREAM_HEAD + b"xyz\r\nok\r\n",
        STREAM_HEAD + b"f" * 20 + b"\r\nok\r\n",
        STREAM_HEAD + b"2\nok\n0\n\n",
        STREAM_HEAD + b"2\r\nokay\r\n",
    ],
    ids=lambda answer: repr(answer[:60]),
)
async def test_invalid_http_fails_as_bad_answer(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.answer(answer)
        await link.left()

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_body_of_an_answer_without_body_is_not_delivered(upstream: Upstream, status: bytes) -> None:
    async def script(link: Link) -> None:
        await link.answer(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(OK), OK))
        await link.left()

    async with engine(script, Link.answer) as backend:
        assert await fetch(upstream, backend) == b""
        assert await fetch(upstream, backend) == b"ok"


@pytest.mark.parametrize("coding", [b"identity", b"xchunked", b"gzip", b"chunked, gzip"])
async def test_body_that_only_the_connection_ends_is_a_broken_one(upstream: Upstream, coding: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: %b\r\n\r\n" % coding + chunk(b"ok") + b"0\r\n\r\n"
    async with engine(lambda link: link.answer(answer)) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BROKEN


async def test_switch_of_protocols_is_not_followed_by_anything(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n" + OK)
        await link.left()

    async with engine(script, Link.answer) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER
        assert await fetch(upstream, backend) == b"ok"


async def test_answer_that_offers_another_protocol_is_an_answer(upstream: Upstream) -> None:
    offer = b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\nok"
    async with engine(lambda link: link.answer(offer)) as backend:
        assert await fetch(upstream, backend) == b"ok"


async def test_trailers_are_not_read_as_headers(upstream: Upstream) -> None:
    trailers = b"".join(b"X-%d: 1\r\n" % number for number in range(1000))
    answer = STREAM_HEAD + chunk(b"ok") + b"0\r\nContent-Type: text/evil\r\n" + trailers + b"\r\n"
    async with engine(lambda link: link.answer(answer)) as backend, exchange(upstream, backend) as response:
        assert await response.read_body() == b"ok"
        assert response.headers == {"content-type": "text/event-stream", "transfer-encoding": "chunked"}


@pytest.mark.fault(16)
async def test_interim_answers_without_end_are_a_bad_answer(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.request()
        while not link.writer.is_closing():
            link.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 1000)
            await asyncio.sleep(0)  # a turn for the reader: no single read is too large
            await asyncio.sleep(0)

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


# Holding the engine back


async def test_paused_answer_is_held_back_and_then_arrives_whole(upstream: Upstream) -> None:
    blocks, block = 512, b"x" * 65536
    full = asyncio.Event()

    async def floods(link: Link) -> None:
        await link.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (blocks * len(block)))
        for _ in range(blocks):
            link.send(block)
            if link.writer.transport.get_write_buffer_size():
                full.set()
            await link.writer.drain()

    class Pausing(Collector):
        paused = False

        def on_body_data(self, data: bytes) -> bool:
            assert not self.paused
            if not self.reads:
                self.paused = True
                response.pause_reading()
            return super().on_body_data(data)

    async with engine(floods, Link.answer) as backend, exchange(upstream, backend) as response:
        sink = Pausing()
        response.attach_sink(sink)
        await sink.begun.wait()
        await full.wait()  # the kernel buffers are full, and the engine does not read them
        assert await fetch(upstream, backend) == b"ok"  # the others go on
        assert len(sink.reads) == 1
        sink.paused = False
        response.resume_reading()
        assert await sink.finished is None
        assert sum(map(len, sink.reads)) == blocks * len(block)


async def test_pausing_and_resuming_twice_is_the_same_as_once(upstream: Upstream) -> None:
    async with engine(Link.answer) as backend, exchange(upstream, backend) as response:
        for change in (
            response.pause_reading,
            response.pause_reading,
            response.resume_reading,
            response.resume_reading,
        ):
            change()
        assert await response.read_body() == b"ok"


async def test_lost_connection_can_still_be_paused_and_resumed(upstream: Upstream) -> None:
    async with engine(lambda link: link.answer(STREAM_HEAD)) as backend, exchange(upstream, backend) as response:
        assert await failure_of(response.read_body()) is Failure.BROKEN
        response.pause_reading()
        response.resume_reading()


# An answer that comes too soon


async def test_answer_may_come_while_the_request_is_still_being_written(upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def refuses(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await gone.wait()

    async with engine(refuses, Link.answer) as backend:
        response, body = await upstream.post_and_read_body(backend, "/", b"x" * 32_000_000, {}, answer_seconds=LONG)
        assert (response.status, body) == (413, b"no")
        assert await fetch(upstream, backend) == b"ok"  # on a connection without the rest of the first request in it
        gone.set()
