"""Counts the running requests of one worker, and ends them when the worker stops.

A request that is cut off ends with an error that its client can read. Its task is cancelled, and the `with drain:`
block around the work turns the cancellation into the error. A cancellation for another reason stays a cancellation, for
example that of a client that disconnected.
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


class EndableRequest(Protocol):
    """A request that is answered without a task, and that the drain can end."""

    def cut_off_request(self) -> None:
        """End the running request with the error ShuttingDown."""


class DrainManager:
    """Counts the running requests of one worker, and cuts off those that are left at the end of a drain.

    Use it in a `with` block around the work on a request, in the task of the request. Work that is cut off raises
    ShuttingDown there. The blocks may be nested.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.has_successor_process = False
        """Whether another process accepts on the same sockets, so that the gateway as a whole stays ready."""
        self._running_tasks: set[asyncio.Task[Any]] = set()
        self._requests_without_task: set[EndableRequest] = set()
        self._tasks_cut_off: set[asyncio.Task[Any]] = set()
        self._idle_event = asyncio.Event()

    @property
    def in_flight_count(self) -> int:
        """Number of client requests that this worker is answering."""
        return len(self._running_tasks) + len(self._requests_without_task)

    def count_request(self, request: EndableRequest) -> None:
        """Count a request that has no task, until `stop_counting_request`."""
        self._requests_without_task.add(request)

    def stop_counting_request(self, request: EndableRequest) -> None:
        """Stop counting a request, because it has ended or gets a task."""
        self._requests_without_task.discard(request)
        if not self._running_tasks and not self._requests_without_task:
            self._idle_event.set()

    @web.middleware
    async def count_while_answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request while it is being answered."""
        # Without this argument, Python 3.11 makes a system call to find the loop.
        task = asyncio.current_task(request.task.get_loop())
        assert task is not None
        with self.count_task(task), self:
            return await handler(request)

    @contextmanager
    def count_task(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Count a request while its task runs this block."""
        self._running_tasks.add(task)
        try:
            yield
        finally:
            self._running_tasks.discard(task)
            self._tasks_cut_off.discard(task)
            if not self._running_tasks and not self._requests_without_task:
                self._idle_event.set()

    @contextmanager
    def exclude_task(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Neither count nor cut off a task while it runs this block: `count_request` already counts its request."""
        self._running_tasks.discard(task)
        try:
            yield
        finally:
            self._running_tasks.add(task)

    async def wait_until_idle(self) -> None:
        """Wait until no request is running."""
        while self.in_flight_count:
            self._idle_event.clear()
            await self._idle_event.wait()

    def cut_off_all(self) -> int:
        """End all running requests with an error. Returns their number."""
        for task in self._running_tasks - self._tasks_cut_off:
            self._tasks_cut_off.add(task)
            task.cancel()
        count = len(self._tasks_cut_off) + len(self._requests_without_task)
        for request in tuple(self._requests_without_task):
            request.cut_off_request()
        return count

    def __enter__(self) -> None:
        """Do nothing. Cancellations are handled at the end of the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and self._tasks_cut_off:
            task = asyncio.current_task()
            # With more than one cancellation the client disconnected, too.
            if task in self._tasks_cut_off and not task.uncancel():
                self._tasks_cut_off.discard(task)
                raise ShuttingDown from None
