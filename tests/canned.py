"""Engines that send prepared bytes and record received bytes, for cases that simulated engines lack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

from proxy.sim.state import EngineState


@dataclass(frozen=True)
class Received:
    """One request, as its bytes arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


def http(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """Return a complete answer with its length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def json_answer(payload: Any) -> bytes:
    return http(orjson.dumps(payload))


def event_stream(pieces: Iterable[bytes], *, is_whole: bool = True) -> list[bytes]:
    """Return a chunked stream in these pieces. `is_whole` False: without the end of the body."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return [head, *chunks, b"0\r\n\r\n"] if is_whole else [head, *chunks]


def data(payload: Any) -> bytes:
    """Return one event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def read_request(reader: asyncio.StreamReader) -> tuple[str, Received]:
    """Read one request. Return its method and the request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return method, Received(path, headers, body)


@dataclass(kw_only=True)
class LoopbackServer:
    """A server that calls `_exchange` for each connection until it returns False. Leaving ends all connections."""

    host: str = "127.0.0.1"
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)  # serves connections that were just accepted
        connections = tuple(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Return False if the connection is to be closed."""
        raise NotImplementedError


@dataclass
class CannedEngine(LoopbackServer):
    """An engine that writes `answer` to every generation request, in its pieces.

    It closes the connection afterwards if `closes`. If `answer` is a function, it returns the pieces. `sent_bytes`
    counts the written bytes. The engine passes health checks, and has the interface of a SimulatedEngine.
    """

    role: str
    answer: Iterable[bytes] | Callable[[Received], Iterable[bytes]] = ()
    closes: bool = False
    received: list[Received] = field(default_factory=list)
    sent_bytes: int = 0
    pause_seconds: float = 0.0
    """Pause after each piece, in seconds."""
    pages: Mapping[str, bytes] = field(default_factory=dict)
    """Complete answers to GET requests by path. Other paths get empty ones."""
    state: EngineState = field(default_factory=EngineState)
    pins: dict[str, Any] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, received = await read_request(reader)
        if method == "GET":
            writer.write(self.pages.get(received.path.partition("?")[0], http(b"")))
            return True
        self.received.append(received)
        try:
            for piece in self.answer(received) if callable(self.answer) else self.answer:
                if writer.is_closing():  # uvloop's transports raise another exception
                    raise ConnectionResetError
                writer.write(piece)
                await writer.drain()
                self.sent_bytes += len(piece)
                await asyncio.sleep(
                    self.pause_seconds
                )  # at least one turn of the loop, so that pieces are sent separately
        except ConnectionError:
            self.state.disconnects += 1
            self.state.notify_waiters()
            raise
        return not self.closes
