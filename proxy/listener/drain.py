"""The requests in flight of one worker, and how the worker ends them when it stops.

Work that is cut off ends in an error that its client can read. The cancellation that ends it is turned into that error
by whoever holds `with drain:` around the work, and only where it is the drain's own and nobody else's: a client that
left stays a cancellation.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from proxy.common.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from aiohttp.typedefs import Handler


class CutOff(Protocol):
    """A request that is answered without a task of its own."""

    def cut_off(self) -> None:
        """End it with ShuttingDown."""


class DrainManager:
    """Counts one worker's requests in flight, and ends those that take too long after a drain has begun.

    `with` it around the work on a request, in the request's own task: work that is cut off raises ShuttingDown there.
    It keeps nothing between entering and leaving, so it may be entered again inside itself.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.has_successor = False
        """Another process accepts on the same sockets, so that the gateway as a whole is ready for what comes."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._without_task: set[CutOff] = set()
        self._cut_off: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Client requests being answered by this worker."""
        return len(self._tasks) + len(self._without_task)

    def enter(self, request: CutOff) -> None:
        """Count a request that has no task, until it leaves."""
        self._without_task.add(request)

    def leave(self, request: CutOff) -> None:
        """It is over, or has a task from now on."""
        self._without_task.discard(request)
        if not self._tasks and not self._without_task:
            self._idle.set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request as long as it is being answered."""
        # Without being told the loop, Python 3.11 makes a system call to find it.
        task = asyncio.current_task(request.task.get_loop())
        assert task is not None
        with self.working(task), self:
            return await handler(request)

    @contextmanager
    def working(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Count a request as long as its task is in this block."""
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._cut_off.discard(task)
            if not self._tasks and not self._without_task:
                self._idle.set()

    @contextmanager
    def counted_otherwise(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Do not count, nor cut off, the task of a request that `enter` counts in this block."""
        self._tasks.discard(task)
        try:
            yield
        finally:
            self._tasks.add(task)

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def cut_off(self) -> int:
        """End what is in flight, each with an error; how much that is."""
        for task in self._tasks - self._cut_off:
            self._cut_off.add(task)
            task.cancel()
        count = len(self._cut_off) + len(self._without_task)
        for request in tuple(self._without_task):
            request.cut_off()
        return count

    def __enter__(self) -> None:
        """Nothing to do before there is something to end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and self._cut_off:
            task = asyncio.current_task()
            # More than one cancellation: the client has left, too.
            if task in self._cut_off and not task.uncancel():
                self._cut_off.discard(task)
                raise ShuttingDown from None
