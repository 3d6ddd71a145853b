"""A TCP proxy between a gateway and an engine that spoils connections on request, as toxiproxy does.

A toxic works on one direction of all connections, open ones included, during its `with` block. Besides toxics, the
proxy can reset all connections, refuse new ones (`refusing`), or be unreachable (`lost`).
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
    """The direction of bytes, as seen by the client of the proxy."""

    UP = "to the server"
    DOWN = "to the client"


class Watcher(Protocol):
    """Sees the bytes of one connection at the client's side, before toxics delay, cut or drop them."""

    def on_data(self, direction: Direction, data: bytes) -> None: ...

    def on_end(self, direction: Direction) -> None:
        """Note that a direction has ended. The other one may still be open."""

    def on_close(self) -> None: ...


class Toxic(Protocol):
    """A treatment of bytes. `treat` yields the bytes to pass on."""

    def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class Latency:
    """Delays bytes by at least `seconds`. Bytes that arrive meanwhile wait, too."""

    seconds: float

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        await sleep(self.seconds)
        yield data


@dataclass(frozen=True, slots=True)
class Slicer:
    """Cuts bytes into pieces of `size`, with a pause after each."""

    size: int
    pause_seconds: float = 0.0

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        for at in range(0, len(data), self.size):
            yield data[at : at + self.size]
            await sleep(self.pause_seconds)


@dataclass(frozen=True, slots=True)
class Blackhole:
    """Holds all bytes until `over` is set, then passes them, as TCP retransmits."""

    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def treat(self, data: bytes, sleep: Sleep) -> AsyncIterator[bytes]:
        await self.over.wait()
        yield data


class ToxicProxy:
    """A proxy in front of one server, on a constant port. Use it with `async with`.

    `watch` makes a watcher for each connection. Tests replace `sleep`.
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
        """Apply a toxic to all bytes of a direction, after the earlier toxics."""
        self._toxics[direction].append(toxic)
        try:
            yield
        finally:
            self._toxics[direction].remove(toxic)
            if isinstance(toxic, Blackhole):
                toxic.over.set()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse new connections, as a host whose process has ended."""
        self._stop_listening()
        try:
            yield
        finally:
            self._listen()

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Lose all packets: open connections fall silent, and new ones are not even refused."""
        with ExitStack() as stack:
            for direction in Direction:
                stack.enter_context(self.toxic(Blackhole(), direction))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            # While this queue is full, the kernel does not answer new connections.
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
        with suppress(BlockingIOError):  # the client has left
            sock, _ = self._listener.accept()
            self._start(self._link(sock))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _link(self, sock: socket.socket) -> None:
        """Connect to the server for one client connection. A reset of either side resets both."""
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
