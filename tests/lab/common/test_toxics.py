"""Effects of the toxic proxy on connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest

from lab.common.toxics import Blackhole, Direction, Latency, Slicer, Toxic, ToxicProxy
from tests.asking import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pauses:
    """Replaces `asyncio.sleep` and records the durations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Notes:
    """A watcher that records all calls."""

    def __init__(self) -> None:
        self.up = b""
        self.down = b""
        self.ends: list[Direction] = []
        self.is_closed = asyncio.Event()

    def on_data(self, direction: Direction, data: bytes) -> None:
        if direction is Direction.UP:
            self.up += data
        else:
            self.down += data

    def on_end(self, direction: Direction) -> None:
        self.ends.append(direction)

    def on_close(self) -> None:
        self.is_closed.set()


class Server:
    """A server that echoes data in upper case, and closes the connection after "bye"."""

    def __init__(self) -> None:
        self.connections = 0
        self.received = b""
        self.ended_with: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        end = "closed"
        try:
            while data := await reader.read(65536):
                self.received += data
                if data == b"bye":
                    break
                writer.write(data.upper())
        except ConnectionResetError:
            end = "reset"
        self.ended_with.append(end)
        writer.close()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def proxy(server: Server, pauses: Pauses, notes: Notes) -> AsyncIterator[ToxicProxy]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with ToxicProxy("127.0.0.1", port, watch=lambda: notes, sleep=pauses) as proxy:
            yield proxy


@asynccontextmanager
async def connected(proxy: ToxicProxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_bytes_pass_both_ways(proxy: ToxicProxy, notes: Notes) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        writer.write(b" again")
        assert await reader.readexactly(6) == b" AGAIN"
    await notes.is_closed.wait()
    assert (notes.up, notes.down) == (b"hello again", b"HELLO AGAIN")


async def test_end_is_forwarded_from_either_side(proxy: ToxicProxy, server: Server, notes: Notes) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"bye")
        assert await reader.read() == b""
    await notes.is_closed.wait()
    notes.is_closed.clear()
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"HELLO"
    await notes.is_closed.wait()
    assert server.ended_with == ["closed", "closed"]
    assert notes.ends == [Direction.DOWN, Direction.UP, Direction.UP, Direction.DOWN]


@pytest.mark.parametrize(
    ("toxic", "seconds"),
    [
        (Latency(0.5), [0.5]),
        (Slicer(2, pause_seconds=0.25), [0.25, 0.25, 0.25]),
    ],
    ids=str,
)
async def test_latency_delays_bytes_without_loss(
    proxy: ToxicProxy, pauses: Pauses, toxic: Toxic, seconds: list[float]
) -> None:
    async with connected(proxy) as (reader, writer):
        with proxy.toxic(toxic):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"HELLO"
            writer.write(b"bye")
            assert await reader.read() == b""
    assert pauses.seconds == seconds


async def test_toxics_work_on_output_of_earlier_toxics(proxy: ToxicProxy, pauses: Pauses) -> None:
    async with connected(proxy) as (reader, writer):
        with proxy.toxic(Slicer(3)), proxy.toxic(Latency(0.5)):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"HELLO"
    assert pauses.seconds.count(0.5) == 2


async def test_toxic_works_in_its_direction_during_its_block(proxy: ToxicProxy, pauses: Pauses, server: Server) -> None:
    async with connected(proxy) as (reader, writer):
        with proxy.toxic(Latency(0.5), Direction.UP):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"HELLO"
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
    assert pauses.seconds == [0.5]
    assert server.received == b"hellohello"


async def test_reset_affects_both_ends(proxy: ToxicProxy, server: Server, notes: Notes) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        proxy.reset_all()
        with pytest.raises(ConnectionResetError):
            await reader.read()
    await notes.is_closed.wait()
    await until(lambda: server.ended_with, "the server to notice")
    assert server.ended_with == ["reset"]


async def test_blackhole_forwards_held_bytes_at_its_end(proxy: ToxicProxy, server: Server, notes: Notes) -> None:
    async with connected(proxy) as (reader, writer):
        with proxy.toxic(Blackhole()):
            writer.write(b"hello")
            await until(lambda: server.received, "the question")
            reading = asyncio.create_task(reader.readexactly(5))
            done, _ = await asyncio.wait([reading], timeout=0.01)
            assert not done
            assert notes.down == b""
        assert await reading == b"HELLO"
    await notes.is_closed.wait()
    assert notes.down == b"HELLO"


async def test_connections_are_refused_during_the_block(proxy: ToxicProxy) -> None:
    port = proxy.port
    async with connected(proxy) as (reader, writer):
        with proxy.refusing(), pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
    async with connected(proxy) as (reader, writer):
        writer.write(b"again")
        assert await reader.readexactly(5) == b"AGAIN"
    assert proxy.port == port


async def test_packets_are_lost_during_the_block(proxy: ToxicProxy, server: Server, notes: Notes) -> None:
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        with ExitStack() as stack:
            stack.enter_context(proxy.lost())
            writer.write(b" again")
            await until(lambda: notes.up == b"hello again", "what was sent")
            connecting = asyncio.create_task(asyncio.open_connection("127.0.0.1", proxy.port))
            done, _ = await asyncio.wait([connecting], timeout=0.01)
            assert not done
            assert server.received == b"hello"
            connecting.cancel()
        assert await reader.readexactly(6) == b" AGAIN"
    async with connected(proxy) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"


async def test_client_of_dead_server_is_reset(proxy: ToxicProxy) -> None:
    async with ToxicProxy("127.0.0.1", proxy.port) as second:
        with proxy.refusing():
            async with connected(second) as (reader, _):
                with pytest.raises(ConnectionResetError):
                    await reader.read()
