"""Listening for clients, operators, probes and engines, each at its port."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from proxy.process.monitor import ProbeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.process.shared import Listeners
    from proxy.process.worker.assembly import Worker


class Doors:
    """The listening of a worker. Leaving `listening` cuts the remaining answers."""

    def __init__(self, worker: Worker, probes: ProbeServer | None) -> None:
        self._front = worker.front
        self._fronts = [front for front in (worker.front, worker.admin_front) if front is not None]
        self._probes = probes

    async def stop_accepting(self) -> None:
        """Accept no more connections of clients, and serve all others. See HttpListener."""
        await self._front.stop_accepting()

    def leave(self) -> None:
        """Accept only callbacks of engines, because another process accepts.

        Open connections stay open until their next answer.
        """
        if self._probes is not None:
            self._probes.leave()
        for front in self._fronts:
            front.leave_listening()

    def end_idle(self, seconds: float) -> int:
        """Close connections that were idle for this time, see HttpListener; return the number of those left."""
        for front in self._fronts:
            front.end_idle(seconds)
        return sum(front.connections for front in self._fronts)


@asynccontextmanager
async def listening(worker: Worker, listeners: Listeners) -> AsyncIterator[Doors]:
    """Serve on the listening sockets, inside `async with`."""
    async with AsyncExitStack() as stack:
        probes = None
        if listeners.probes is not None:
            monitor = worker.monitor
            probes = stack.enter_context(ProbeServer(listeners.probes, monitor.is_alive, monitor.was_ready))
        if listeners.admin is not None:
            assert worker.admin_front is not None
            await stack.enter_async_context(worker.admin_front)
            await worker.admin_front.listen(listeners.admin)
        if worker.callback_front is not None:
            await stack.enter_async_context(worker.callback_front)
            for index, listener in enumerate(listeners.callbacks):
                if index == worker.index:
                    await worker.callback_front.listen(listener)
                else:
                    listener.close()  # otherwise engines would wait for the answer of another worker that has ended
        await stack.enter_async_context(worker.front)
        await worker.front.listen(listeners.clients)
        yield Doors(worker, probes)
