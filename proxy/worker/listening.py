"""Listening for clients, for operators if they have a port of their own, for probes if they have, and for engines."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from proxy.monitor import ProbeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proxy.shared import Listeners
    from proxy.worker.assembly import Worker


@asynccontextmanager
async def listening(worker: Worker, listeners: Listeners) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Serve on the listening sockets, and yield what stops accepting clients; all others are served on.

    Leaving cuts what is still being answered.
    """
    async with AsyncExitStack() as stack:
        if listeners.probes is not None:
            monitor = worker.monitor
            stack.enter_context(ProbeServer(listeners.probes, monitor.is_alive, monitor.was_ready))
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
                    listener.close()  # or engines would wait for another worker's answer when it has ended
        await stack.enter_async_context(worker.front)
        await worker.front.listen(listeners.clients)
        yield worker.front.stop_accepting
