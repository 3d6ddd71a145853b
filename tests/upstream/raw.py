"""Provide servers that send scripted bytes, and clients for them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import Timeouts
from proxy.upstream import HostNames, Response, Upstream, UpstreamOptions

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
async def engine(
    *scripts: Callable[[Link], Awaitable[None]],
    host: str = "127.0.0.1",
    port: int = 0,
    servers: list[asyncio.Server] | None = None,
) -> AsyncIterator[Backend]:
    """Start a server whose n-th connection runs the n-th script, and closes at its end.

    With `servers`, to which the server is added, further connections are closed at once.

    Leaving waits until every script has ended, and fails when one did, or when one was not asked for.
    """
    waiting = list(scripts)
    running: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not waiting and servers is not None:
                return
            assert waiting, "unexpected connection"
            await waiting.pop(0)(Link(reader, writer))
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, host, port)
    if servers is not None:
        servers.append(server)
    try:
        yield Backend(Role.PREFILL, host, server.sockets[0].getsockname()[1])
        await asyncio.gather(*running)
        assert not waiting, "a connection that was never made"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# Our side


def new_upstream(key: str | None = None, names: HostNames | None = None, **timeouts: float) -> Upstream:
    return Upstream(Timeouts(**timeouts), EngineKeys(key), names, UpstreamOptions(sweep_seconds=0.01))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def deaf(address: str = "127.0.0.1", port: int = 0) -> Iterator[socket.socket]:
    """Provide a listener to which connecting hangs, because its queue of one connection is full.

    After `listen(16)` the kernel completes connections, but no process accepts them.
    """
    with socket.socket() as listener, socket.socket() as first:
        listener.bind((address, port))
        listener.listen(0)
        first.connect(listener.getsockname())
        yield listener


@asynccontextmanager
async def exchange(
    upstream: Upstream, backend: Backend, body: bytes = b"{}", **options: Any
) -> AsyncIterator[Response]:
    with await upstream.post_and_await_head(
        backend, "/v1/x", body, {}, **{"answer_seconds": LONG, **options}
    ) as response:
        yield response


async def fetch(upstream: Upstream, backend: Backend, body: bytes = b"{}", **options: Any) -> bytes:
    return (await upstream.post_and_read_body(backend, "/v1/x", body, {}, **{"answer_seconds": LONG, **options}))[1]


async def failure_of(work: Awaitable[object]) -> Failure:
    with pytest.raises(UpstreamError) as failed:
        await work
    assert "127.0.0.1" not in failed.value.message
    return failed.value.failure


class Collector:
    """A Sink that keeps what it is given, and can be waited for."""

    is_progress = True
    """Return the results of reading these pieces."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.begun = asyncio.Event()
        self.finished: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()

    @property
    def body(self) -> bytes:
        return b"".join(self.reads)

    def on_body_data(self, data: bytes) -> bool:
        assert data
        assert not self.finished.done()
        self.reads.append(data)
        self.begun.set()
        return self.is_progress

    def can_move_to_other_backend(self) -> bool:
        return True

    def on_body_end(self, error: UpstreamError | None) -> None:
        self.finished.set_result(error)
