"""Raw HTTP to engines, against servers that say exactly the bytes they are told to."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from proxy.balancer.backend import Backend, Role
from proxy.balancer.engine_keys import EngineKeys
from proxy.errors import Failure, UpstreamError
from proxy.settings import Timeouts
from proxy.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

LONG = 3600.0
SHORT = 0.05
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# The other side


class Link:
    """The engine's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        return head, await self.reader.readexactly(int(fields[b"Content-Length"]))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, data: bytes = OK) -> None:
        await self.request()
        self.send(data)

    async def left(self) -> None:
        """Until the gateway has closed the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        """Close with RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def engine(*scripts: Callable[[Link], Awaitable[None]]) -> AsyncIterator[Backend]:
    """A server whose n-th connection follows the n-th script, and is closed when that ends.

    Leaving waits until every script has ended, and fails when one did, or when one was not asked for.
    """
    waiting = list(scripts)
    running: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert waiting, "a connection nobody expects"
            await waiting.pop(0)(Link(reader, writer))
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield Backend(Role.PREFILL, "127.0.0.1", server.sockets[0].getsockname()[1])
        await asyncio.gather(*running)
        assert not waiting, "a connection that was never made"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# Our side


def new_upstream(key: str | None = None, **timeouts: float) -> Upstream:
    return Upstream(Timeouts(**timeouts), EngineKeys(key), sweep_seconds=0.01)


@pytest.fixture
async def upstream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upstream]:
    monkeypatch.setattr("proxy.upstream.upstream._KEEP_ALIVE_SECONDS", LONG)  # none is closed for its age
    async with new_upstream() as opened:
        yield opened
        assert opened.busy_connections == 0


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


def exchange(upstream: Upstream, backend: Backend, body: bytes = b"{}", **options: Any) -> Any:
    return upstream.open(backend, "/v1/x", body, {}, **{"silence_seconds": LONG, **options})


async def fetch(upstream: Upstream, backend: Backend, body: bytes = b"{}", silence_seconds: float = LONG) -> bytes:
    return (await upstream.fetch(backend, "/v1/x", body, {}, silence_seconds=silence_seconds))[1]


async def failure_of(work: Awaitable[object]) -> Failure:
    with pytest.raises(UpstreamError) as failed:
        await work
    assert "127.0.0.1" not in failed.value.message
    return failed.value.failure


class Collector:
    """A Sink that keeps what it is given, and can be waited for."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.begun = asyncio.Event()
        self.finished: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()

    @property
    def body(self) -> bytes:
        return b"".join(self.reads)

    def received(self, data: bytes) -> None:
        assert data
        assert not self.finished.done()
        self.reads.append(data)
        self.begun.set()

    def ended(self, error: UpstreamError | None) -> None:
        self.finished.set_result(error)


# What is sent


async def test_the_request_is_what_engines_expect(upstream: Upstream) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(link: Link) -> None:
        seen.append(await link.request())
        link.send(OK)

    async with engine(script) as backend:
        headers = {"x-request-id": "r1", "authorization": "Bearer of-the-client"}
        await upstream.fetch(backend, "/v1/completions", b'{"prompt":"\xc3\xbc"}', headers, silence_seconds=LONG)
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


async def test_a_header_reaches_the_engine_with_the_clients_bytes(upstream: Upstream) -> None:
    seen: list[bytes] = []

    async def script(link: Link) -> None:
        seen.append((await link.request())[0])
        link.send(OK)

    async with engine(script) as backend:
        received = b"caf\xc3\xa9 \xe9 \xe6\xbc\xa2".decode("utf-8", "surrogateescape")  # as aiohttp reads it
        await upstream.fetch(backend, "/", b"{}", {"tracestate": received}, silence_seconds=LONG)
    assert b"tracestate: caf\xc3\xa9 \xe9 \xe6\xbc\xa2\r\n" in seen[0]


async def test_an_instance_that_is_not_configured_never_sees_the_engine_key() -> None:
    seen: list[bytes] = []

    async def script(link: Link) -> None:
        seen.append((await link.request())[0])
        link.send(OK)

    async with new_upstream(key="secret") as upstream, engine(script) as backend:
        await upstream.fetch(backend, "/", b"{}", {"authorization": "Bearer own"}, silence_seconds=LONG)
    assert b"uthorization" not in seen[0]


# What is received

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
async def test_the_answer_is_the_same_wherever_it_is_cut(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        for cut in range(1, len(answer)):
            await link.answer(answer[:cut])
            await asyncio.sleep(0)  # a turn for the reader, so that it sees the cut
            await asyncio.sleep(0)
            link.send(answer[cut:])

    async with engine(script) as backend:
        for _ in range(1, len(answer)):
            response, body = await upstream.fetch(backend, "/", b"{}", {}, silence_seconds=LONG)
            assert (response.status, body) == (200, BODY)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_the_answer_is_the_same_byte_by_byte(upstream: Upstream, answer: bytes) -> None:
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
        assert await response.read() == b"busy"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
)
async def test_an_answer_may_have_no_body(upstream: Upstream, answer: bytes) -> None:
    async with engine(lambda link: link.answer(answer)) as backend:
        assert await fetch(upstream, backend) == b""


async def test_a_body_that_arrived_before_anybody_attached_is_not_lost(upstream: Upstream) -> None:
    told = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"one "))
        await told.wait()
        link.send(chunk(b"two"))
        link.send(b"0\r\n\r\n")

    async with engine(script) as backend, exchange(upstream, backend) as response:
        sink = Collector()
        response.attach(sink)
        await sink.begun.wait()
        told.set()
        assert await sink.finished is None
        assert sink.body == b"one two"


async def test_a_whole_body_that_arrived_before_anybody_attached_is_not_lost(upstream: Upstream) -> None:
    async with engine(lambda link: link.answer()) as backend, exchange(upstream, backend) as response:
        await asyncio.sleep(0)
        sink = Collector()
        response.attach(sink)
        assert await sink.finished is None
        assert sink.body == b"ok"


async def test_an_answer_larger_than_the_bound_is_refused(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.response._MAX_ANSWER_BYTES", 10)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n12345678901"
    async with engine(lambda link: link.answer(answer)) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


# Connections that serve again


async def test_a_connection_serves_again(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer()
        await link.answer(STREAM_HEAD + chunk(b"ok") + b"0\r\n\r\n")
        await link.answer()

    async with engine(script) as backend:
        assert [await fetch(upstream, backend) for _ in range(3)] == [b"ok"] * 3


async def test_requests_at_the_same_time_have_a_connection_each(upstream: Upstream) -> None:
    both = asyncio.Barrier(2)

    async def script(link: Link) -> None:
        await link.request()
        await both.wait()
        link.send(OK)

    async with engine(script, script) as backend, asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(fetch(upstream, backend))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_the_engine_wants_closed_does_not_serve_again(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.answer(answer)
        await link.left()

    async with engine(script, script) as backend:
        assert [await fetch(upstream, backend) for _ in range(2)] == [b"ok"] * 2


@pytest.mark.parametrize("more", [OK, b"garbage", b"\x00"])
async def test_bytes_after_the_answer_end_the_connection_and_not_the_answer(upstream: Upstream, more: bytes) -> None:
    async def together(link: Link) -> None:
        await link.answer(OK + more)
        await link.left()

    async def later(link: Link) -> None:
        await link.answer(OK)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        link.send(more)
        await link.left()

    async with engine(together, later) as backend:
        assert await fetch(upstream, backend) == b"ok"
        assert await fetch(upstream, backend) == b"ok"


async def test_a_connection_that_was_paused_at_the_end_of_its_answer_serves_again(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer()
        await link.answer()

    async with engine(script) as backend:
        async with exchange(upstream, backend) as response:
            assert await response.read() == b"ok"
            response.pause()
        assert await fetch(upstream, backend) == b"ok"


async def test_idle_connections_are_closed_before_the_engine_does_it(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.upstream.upstream._KEEP_ALIVE_SECONDS", 0.0)

    async def script(link: Link) -> None:
        await link.answer()
        await link.left()

    async with engine(script) as backend:
        assert await fetch(upstream, backend) == b"ok"


async def closes_for_the_second_request(link: Link) -> None:
    await link.answer()
    await link.request()


async def resets_for_the_second_request(link: Link) -> None:
    await closes_for_the_second_request(link)
    link.reset()


stale = pytest.mark.parametrize("script", [closes_for_the_second_request, resets_for_the_second_request])


@stale
async def test_a_request_on_a_stale_connection_is_sent_again(upstream: Upstream, script: Any) -> None:
    seen: list[bytes] = []

    async def fresh(link: Link) -> None:
        seen.append((await link.request())[1])
        link.send(OK)

    async with engine(script, fresh) as backend:
        await fetch(upstream, backend)
        assert await fetch(upstream, backend, b'{"again":1}') == b"ok"
    assert seen == [b'{"again":1}']


@stale
async def test_a_request_that_must_not_be_sent_twice_is_not(upstream: Upstream, script: Any) -> None:
    async with engine(script) as backend:
        await fetch(upstream, backend)
        assert await failure_of(exchange(upstream, backend).__aenter__()) is Failure.RESET


async def test_a_request_is_sent_again_on_a_fresh_connection() -> None:
    both, stale_requests = asyncio.Barrier(2), 0

    async def goes_stale(link: Link) -> None:
        nonlocal stale_requests
        await link.request()
        await both.wait()
        link.send(OK)
        with suppress(asyncio.IncompleteReadError):
            await link.request()
            stale_requests += 1

    async with engine(goes_stale, goes_stale, Link.answer) as backend, new_upstream() as upstream:
        await asyncio.gather(fetch(upstream, backend), fetch(upstream, backend))
        assert await fetch(upstream, backend) == b"ok"
        assert stale_requests == 1


async def test_a_request_is_sent_again_only_once(upstream: Upstream) -> None:
    async def closes(link: Link) -> None:
        await link.request()

    async with engine(closes_for_the_second_request, closes) as backend:
        await fetch(upstream, backend)
        assert await failure_of(fetch(upstream, backend)) is Failure.RESET


async def test_a_stale_connection_that_began_to_answer_is_not_asked_again(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer()
        await link.answer(b"HTTP/1.1 2")

    async with engine(script) as backend:
        await fetch(upstream, backend)
        assert await failure_of(fetch(upstream, backend)) is Failure.BROKEN


# How it fails


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_refused_connection_is_a_failed_connect(upstream: Upstream) -> None:
    with pytest.raises(UpstreamError) as failed:
        await fetch(upstream, Backend(Role.DECODE, "127.0.0.1", free_port()))
    assert failed.value.failure is Failure.CONNECT
    assert failed.value.message == "decode instance: cannot connect (connection refused)"


@asynccontextmanager
async def deaf_backend() -> AsyncIterator[Backend]:
    """A port where connecting hangs: the one place in the listener's queue is taken."""
    with socket.socket() as listener, socket.socket() as first:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first.connect(listener.getsockname())
        yield Backend(Role.DECODE, "127.0.0.1", listener.getsockname()[1])


async def test_a_connection_that_takes_too_long_is_a_failed_connect() -> None:
    async with deaf_backend() as backend, new_upstream(connect_seconds=SHORT) as upstream:
        with pytest.raises(UpstreamError) as failed:
            await fetch(upstream, backend)
    assert failed.value.failure is Failure.CONNECT
    assert failed.value.message == "decode instance: cannot connect (timed out)"


async def closes_at_once(link: Link) -> None:
    pass


async def closes_after_the_request(link: Link) -> None:
    await link.request()


async def resets_after_the_request(link: Link) -> None:
    await link.request()
    link.reset()


@pytest.mark.parametrize("script", [closes_at_once, closes_after_the_request, resets_after_the_request])
async def test_no_byte_of_an_answer_is_a_reset(upstream: Upstream, script: Any) -> None:
    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.RESET


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
        b"HTTP/1.1 200 OK\r\n\r\nnobody can tell whether this is all",
    ],
)
async def test_part_of_an_answer_is_a_broken_one(upstream: Upstream, begun: bytes, how: Callable[[Link], None]) -> None:
    async def script(link: Link) -> None:
        await link.answer(begun)
        await link.writer.drain()
        how(link)

    async with engine(script) as backend:
        # Bytes that a reset overtakes may never have arrived.
        allowed = {Failure.BROKEN} if how is not Link.reset else {Failure.BROKEN, Failure.RESET}
        assert await failure_of(fetch(upstream, backend)) in allowed


async def test_what_arrived_of_a_broken_answer_is_delivered(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"ok"))

    async with engine(script) as backend, exchange(upstream, backend) as response:
        sink = Collector()
        response.attach(sink)
        error = await sink.finished
        assert error is not None
        assert error.failure is Failure.BROKEN
        assert sink.body == b"ok"


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02\x03",
        b"\x16\x03\x01\x02\x00\x01",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"<html></html>\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2, 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Bomb: " + b"x" * 300_000,
        b"HTTP/1.1 200 OK\r\n" + b"X-Bomb: 1\r\n" * 30_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        STREAM_HEAD + b"xyz\r\nok\r\n",
        STREAM_HEAD + b"2\r\nokay\r\n",
    ],
    ids=lambda answer: repr(answer[:60]),
)
async def test_what_is_not_http_is_a_bad_answer(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.answer(answer)
        await link.left()

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


async def test_interim_answers_without_end_are_a_bad_answer(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.request()
        while not link.writer.is_closing():
            link.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 1000)
            await asyncio.sleep(0)  # a turn for the reader: no single read is too large
            await asyncio.sleep(0)

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.BAD_ANSWER


async def says_nothing(link: Link) -> None:
    await link.request()
    await link.left()


async def test_an_engine_that_says_nothing_times_out(upstream: Upstream) -> None:
    async with engine(says_nothing) as backend:
        with pytest.raises(UpstreamError) as failed:
            await fetch(upstream, backend, silence_seconds=SHORT)
    assert failed.value.failure is Failure.TIMEOUT
    assert failed.value.status == 504
    assert failed.value.message == "prefill instance: waited 0.05 s for an answer"


async def test_an_engine_that_stops_in_the_middle_times_out(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"ok"))
        await link.left()

    async with engine(script) as backend:
        with pytest.raises(UpstreamError) as failed:
            await fetch(upstream, backend, silence_seconds=SHORT)
    assert failed.value.message == "prefill instance: waited 0.05 s for more of the answer"


async def test_the_bound_on_silence_can_change_with_the_stage(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await link.left()

    async with engine(script) as backend, exchange(upstream, backend, silence_seconds=LONG) as response:
        response.limit_silence(SHORT)
        assert await failure_of(response.read()) is Failure.TIMEOUT


async def test_a_request_that_nobody_reads_times_out(upstream: Upstream) -> None:
    served = asyncio.Event()

    async def script(link: Link) -> None:
        await served.wait()

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend, b"x" * 32_000_000, silence_seconds=SHORT)) is Failure.TIMEOUT
        served.set()


async def test_an_engine_that_keeps_talking_does_not_time_out(upstream: Upstream) -> None:
    enough = asyncio.Event()

    async def talks(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        while not enough.is_set():
            link.send(chunk(b"."))
            await link.writer.drain()
            await asyncio.sleep(0)
        link.send(b"0\r\n\r\n")

    async with (
        engine(talks, says_nothing, says_nothing) as backend,
        exchange(upstream, backend, silence_seconds=2 * SHORT) as response,
    ):
        reading = asyncio.create_task(response.read())
        for _ in range(2):
            assert await failure_of(fetch(upstream, backend, silence_seconds=2 * SHORT)) is Failure.TIMEOUT
        enough.set()
        assert set(await reading) == set(b".")


async def test_silence_that_we_asked_for_does_not_count(upstream: Upstream) -> None:
    resumed = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await resumed.wait()
        link.send(chunk(b"ok") + b"0\r\n\r\n")

    async with (
        engine(script, says_nothing, says_nothing) as backend,
        exchange(upstream, backend, silence_seconds=SHORT) as response,
    ):
        response.pause()
        # Exchanges that begin later and time out show that the time has passed.
        for _ in range(2):
            assert await failure_of(fetch(upstream, backend, silence_seconds=SHORT)) is Failure.TIMEOUT
        response.limit_silence(LONG)
        response.resume()
        resumed.set()
        assert await response.read() == b"ok"


# Holding the engine back


async def test_a_paused_answer_is_held_back_and_then_arrives_whole(upstream: Upstream) -> None:
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

        def received(self, data: bytes) -> None:
            assert not self.paused
            super().received(data)
            if len(self.reads) == 1:
                self.paused = True
                response.pause()

    async with engine(floods, Link.answer) as backend, exchange(upstream, backend) as response:
        sink = Pausing()
        response.attach(sink)
        await sink.begun.wait()
        await full.wait()  # the kernel's buffers are, and nobody reads them
        assert await fetch(upstream, backend) == b"ok"  # the others go on
        assert len(sink.reads) == 1
        sink.paused = False
        response.resume()
        assert await sink.finished is None
        assert sum(map(len, sink.reads)) == blocks * len(block)


async def test_pausing_and_resuming_twice_is_the_same_as_once(upstream: Upstream) -> None:
    async with engine(Link.answer) as backend, exchange(upstream, backend) as response:
        for change in (response.pause, response.pause, response.resume, response.resume):
            change()
        assert await response.read() == b"ok"


async def test_a_lost_connection_can_still_be_paused_and_resumed(upstream: Upstream) -> None:
    async with engine(lambda link: link.answer(STREAM_HEAD)) as backend, exchange(upstream, backend) as response:
        assert await failure_of(response.read()) is Failure.BROKEN
        response.pause()
        response.resume()


# An answer that comes too soon


async def test_an_answer_may_come_while_the_request_is_still_being_written(upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def refuses(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await gone.wait()

    async with engine(refuses, Link.answer) as backend:
        response, body = await upstream.fetch(backend, "/", b"x" * 32_000_000, {}, silence_seconds=LONG)
        assert (response.status, body) == (413, b"no")
        assert await fetch(upstream, backend) == b"ok"  # on a connection without the rest of the first request in it
        gone.set()


# Leaving


async def streams_until_it_is_left(link: Link) -> None:
    await link.answer(STREAM_HEAD + chunk(b"ok"))
    await link.left()


async def test_leaving_early_closes_the_engines_connection(upstream: Upstream) -> None:
    async with engine(streams_until_it_is_left) as backend:
        async with exchange(upstream, backend):
            assert upstream.busy_connections == 1
        assert upstream.busy_connections == 0


async def test_leaving_with_an_error_closes_the_engines_connection(upstream: Upstream) -> None:
    async with engine(streams_until_it_is_left) as backend:
        with pytest.raises(ZeroDivisionError):
            async with exchange(upstream, backend):
                raise ZeroDivisionError
        assert upstream.busy_connections == 0


async def test_leaving_the_upstream_closes_every_connection() -> None:
    asked = asyncio.Event()

    async def is_asked(link: Link) -> None:
        await link.request()
        asked.set()
        await link.left()

    async def is_idle(link: Link) -> None:
        await link.answer()
        await link.left()

    async with engine(streams_until_it_is_left, is_asked, is_idle) as backend:
        async with AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(new_upstream())
            async with exchange(upstream, backend) as streaming:
                waiting = asyncio.create_task(failure_of(fetch(upstream, backend)))
                await asked.wait()
                assert await fetch(upstream, backend) == b"ok"
                await stack.aclose()
                assert await failure_of(streaming.read()) is Failure.BROKEN
                assert await waiting is Failure.RESET
        assert upstream.busy_connections == 0


# Cancellation, in each phase


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_while_connecting(upstream: Upstream) -> None:
    async with deaf_backend() as backend:
        task = asyncio.create_task(fetch(upstream, backend))
        await asyncio.sleep(0)  # it has begun
        await cancelled(task)
        assert upstream.busy_connections == 0


async def test_cancelled_while_the_request_is_written(upstream: Upstream) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def reads_little(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        begun.set()
        await gone.wait()
        await link.left()

    async with engine(reads_little) as backend:
        task = asyncio.create_task(fetch(upstream, backend, b"x" * 32_000_000))
        await begun.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0
        gone.set()


async def test_cancelled_while_waiting_for_the_answer(upstream: Upstream) -> None:
    asked = asyncio.Event()

    async def script(link: Link) -> None:
        await link.request()
        asked.set()
        await link.left()

    async with engine(script) as backend:
        task = asyncio.create_task(fetch(upstream, backend))
        await asked.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0


async def test_cancelled_while_sending_again_after_a_stale_connection(upstream: Upstream) -> None:
    asked = asyncio.Event()

    async def script(link: Link) -> None:
        await link.request()
        asked.set()
        await link.left()

    async with engine(closes_for_the_second_request, script) as backend:
        await fetch(upstream, backend)
        task = asyncio.create_task(fetch(upstream, backend))
        await asked.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0


async def test_cancelled_while_the_body_arrives(upstream: Upstream) -> None:
    reading = asyncio.Event()

    async def reads() -> None:
        async with exchange(upstream, backend) as response:
            reading.set()
            await response.read()

    async with engine(streams_until_it_is_left) as backend:
        task = asyncio.create_task(reads())
        await reading.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0


async def test_cancelled_while_paused(upstream: Upstream) -> None:
    paused = asyncio.Event()

    async def pauses() -> None:
        async with exchange(upstream, backend) as response:
            response.pause()
            paused.set()
            await asyncio.Event().wait()

    async with engine(streams_until_it_is_left) as backend:
        task = asyncio.create_task(pauses())
        await paused.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0


async def test_cancelled_after_the_whole_answer_the_connection_serves_again(upstream: Upstream) -> None:
    read = asyncio.Event()

    async def lingers() -> None:
        async with exchange(upstream, backend) as response:
            await response.read()
            read.set()
            await asyncio.Event().wait()

    async def script(link: Link) -> None:
        await link.answer()
        await link.answer()

    async with engine(script) as backend:
        task = asyncio.create_task(lingers())
        await read.wait()
        await cancelled(task)
        assert upstream.busy_connections == 0
        assert await fetch(upstream, backend) == b"ok"
