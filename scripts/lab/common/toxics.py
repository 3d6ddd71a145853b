"""A TCP proxy that spoils connections on request, as toxiproxy does: what lies between a gateway and an engine.

A toxic works on one direction of all connections, open ones included, as long as its `with` block lasts. Besides there
is what happens to hosts: they reset all connections, refuse new ones (`refusing`), or cannot be reached (`lost`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from proxy.sim.engine.stream import reset_transport

Sleep = Callable[[float], Awaitable[None]]

_HOST = "127.0.0.1"
_BACKLOG = 4096


class Direction(Enum):
    """Of bytes, as seen by who connects to the proxy."""

    UP = "to the server"
    DOWN = "to the client"


class Watcher(Protocol):
    """Told of one connection as the client sees it: what it sent, before any toxic works on that, and what it got."""

    def on_data(self, direction: Direction, data: bytes) -> None: ...

    def on_end(self, direction: Direction) -> None:
        """Nothing more will come this way, though something may the other way."""

    def on_close(self) -> None: ...


class Toxic(Protocol):
    """What happens to bytes. Yields what is passed on of them."""

    def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class Latency:
    """Bytes arrive at least so much later, and with those that came meanwhile."""

    seconds: float

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        await sleep(self.seconds)
        yield data


@dataclass(frozen=True, slots=True)
class Slicer:
    """Bytes come in small pieces."""

    size: int
    pause_seconds: float = 0.0

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        for at in range(0, len(data), self.size):
            yield data[at : at + self.size]
            await sleep(self.pause_seconds)


@dataclass(frozen=True, slots=True)
class Blackhole:
    """Nothing passes until it is over. Then everything does, as TCP sends again what nobody has acknowledged."""

    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        await self.over.wait()
        yield data


class ToxicProxy:
    """In front of one server, on a port that stays the same; `async with` it.

    `watch` makes a watcher for each connection. `sleep` is for tests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listen_on: int = 0,
        watch: Callable[[], Watcher] | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.port = listen_on
        self._target = (host, port)
        self._watch = watch
        self._sleep = sleep
        self._toxics: dict[Direction, list[Toxic]] = {direction: [] for direction in Direction}
        self._links: set[tuple[asyncio.WriteTransport, asyncio.WriteTransport]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        self.reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def toxic(self, toxic: Toxic, direction: Direction = Direction.DOWN) -> Iterator[None]:
        """Everything that goes this way is treated with it, behind earlier toxics."""
        self._toxics[direction].append(toxic)
        try:
            yield
        finally:
            self._toxics[direction].remove(toxic)
            if isinstance(toxic, Blackhole):
                toxic.over.set()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Nobody listens: new connections are refused, as on a host whose process is gone."""
        self._stop_listening()
        try:
            yield
        finally:
            self._listen()

    @contextmanager
    def lost(self) -> Iterator[None]:
        """All packets are lost: open connections fall silent, and new ones are not even refused."""
        with ExitStack() as stack:
            for direction in Direction:
                stack.enter_context(self.toxic(Blackhole(), direction))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            # While this queue is full, the kernel does not answer those who want to connect.
            self._listener.listen(0)
            for filler in [stack.enter_context(socket.socket()) for _ in range(2)]:
                filler.setblocking(False)
                filler.connect_ex((_HOST, self.port))
            try:
                yield
            finally:
                self._listener.listen(_BACKLOG)
                loop.add_reader(self._listener, self._accept)

    def reset_all(self) -> None:
        """Reset every open connection, at both ends."""
        for transport in [transport for link in self._links for transport in link]:
            reset_transport(transport)

    def _listen(self) -> None:
        self._listener = socket.create_server((_HOST, self.port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _stop_listening(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError):  # who was there has left
            sock, _ = self._listener.accept()
            self._start(self._link(sock))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _link(self, sock: socket.socket) -> None:
        """One connection, and the one to the server that belongs to it: what happens to one happens to both."""
        sock.setblocking(False)
        from_client, to_client = await asyncio.open_connection(sock=sock)
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            reset_transport(to_client.transport)
            return
        link = (to_client.transport, to_server.transport)
        self._links.add(link)
        watcher = self._watch() if self._watch is not None else None
        try:
            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(self._pipe(Direction.UP, from_client, to_server, watcher))
                pipes.create_task(self._pipe(Direction.DOWN, from_server, to_client, watcher))
        except* OSError:  # mostly a ConnectionError
            for transport in link:
                reset_transport(transport)
        finally:
            self._links.discard(link)
            for transport in link:
                transport.close()
            if watcher is not None:
                watcher.on_close()

    async def _pipe(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watcher: Watcher | None,
    ) -> None:
        while data := await reader.read(65536):
            if watcher is not None and direction is Direction.UP:
                watcher.on_data(direction, data)
            async for part in self._treated(data, tuple(self._toxics[direction])):
                if writer.is_closing():
                    return  # it was reset meanwhile
                writer.write(part)
                await writer.drain()
                if watcher is not None and direction is Direction.DOWN:
                    watcher.on_data(direction, part)
        if watcher is not None:
            watcher.on_end(direction)
        if not writer.is_closing():
            with suppress(OSError):  # it has just been reset
                writer.write_eof()

    async def _treated(self, data: bytes, toxics: tuple[Toxic, ...]) -> AsyncIterator[bytes]:
        if not toxics:
            yield data
            return
        async for part in toxics[0].treat(data, self._sleep):
            async for treated in self._treated(part, toxics[1:]):
                yield treated
