"""The life of one process: it serves until it must stop, waits for its streams, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import uvloop

from proxy.common.build_info import BUILD_KIND
from proxy.common.terms import format_count
from proxy.listener.http_listener import connections_for_fds
from proxy.observe import logs
from proxy.process.configuration import secrets_of
from proxy.process.monitor import ProbeServer
from proxy.process.shared import Listeners, Shared, start_successor
from proxy.process.worker.assembly import Worker, build
from proxy.process.worker.tuning import tune
from proxy.settings import Endpoint, Settings, connectable_host, is_loopback_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from proxy.listener.drain import DrainManager
    from proxy.process.takeover import Successor

logger = logging.getLogger("proxy.worker.process")

# Interval of log lines during a drain, time to accept connections that the kernel has queued, and time to send errors
# to the last clients.
_LEFT_EVERY_SECONDS: Final = 5.0
_IDLE_LOOK_SECONDS: Final = 0.2
_STOP_ACCEPTING_SECONDS: Final = 2.0
_CUT_OFF_SECONDS: Final = 0.5

# A user who wants fewer connections sets listen.max_connections.
_FEW_CONNECTIONS: Final = 1024


def run(shared: Shared, worker: int, alive_fd: int | None = None) -> int:
    """Serve until the process must stop; return the exit code.

    The code is 0 after a drain, even if some answers were cut, and 128 plus the signal's number after a second signal.
    `alive_fd`: a pipe that closes when the supervisor ends.
    """
    settings = shared.configuration.current().settings
    logs.setup(settings.log, secrets=secrets_of(settings))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(shared, worker, alive_fd))
    finally:
        logs.flush()


async def _serve(shared: Shared, index: int, alive_fd: int | None) -> int:
    stop = Stop(alive_fd, partial(start_successor, shared))
    loop = asyncio.get_running_loop()
    async with build(shared, index) as worker:
        logs.call_before_lines(worker.observers.settle)
        with worker.observers.in_batches(loop.call_later):
            await _serve_until_told(shared, worker, stop)
    return stop.exit_code


async def _serve_until_told(shared: Shared, worker: Worker, stop: Stop) -> None:
    loop = asyncio.get_running_loop()
    manager = ServiceManager(os.environ)
    if shared.predecessor is not None:
        # It serves until then. If it is gone, a process that is not ready is better than none.
        await _first_of(worker.monitor.became_ready.wait(), shared.predecessor.gone(), stop.requested.wait())
        if stop.requested.is_set():  # the takeover was cancelled, and the old process continues
            return
    async with manager.sending_heartbeats(), listening(worker, shared.listeners) as doors:
        loop.add_signal_handler(signal.SIGHUP, _on_hang_up, worker)
        tune()
        if worker.index == 0:
            logger.info("%s", _banner(worker.settings, shared.listeners))
            for told in (*worker.settings.access_warnings, *shortages(worker.settings)):
                logger.warning("%s", told)
        if shared.predecessor is None:
            manager.notify(READY, "listening")
        else:
            manager.notify(f"{READY}\nMAINPID={os.getppid() if stop.is_supervised else os.getpid()}", "listening")
            shared.predecessor.tell_accepting(worker.settings.workers)
        telling = loop.create_task(_log_when_ready(worker, shared, manager))
        await stop.requested.wait()
        telling.cancel()
        if stop.has_successor:
            await _make_room(worker, stop, doors)
        else:
            manager.notify(STOPPING, "draining")
            await _drain(worker, stop, doors.stop_accepting)


async def _log_when_ready(worker: Worker, shared: Shared, manager: ServiceManager) -> None:
    """Log one line for the whole gateway, in the first worker that is ready. For systemd, the last one counts."""
    await worker.monitor.became_ready.wait()
    host, port = shared.listeners.clients.getsockname()[:2]
    scheme = "http" if worker.settings.listen.tls_certificate is None else "https"
    told = f"ready: {scheme}://{Endpoint(host=connectable_host(host), port=port)}"
    manager.notify("", told)
    if shared.log_once.is_news("gateway", "ready"):
        logger.info("%s", told)


def _on_hang_up(worker: Worker) -> None:
    if not worker.drain.is_draining:
        worker.watcher.begin_reload("SIGHUP")


async def _drain(worker: Worker, stop: Stop, stop_accepting: Callable[[], Awaitable[None]]) -> None:
    """Wait for the running answers, up to the limit, and then end them."""
    drain, limits = worker.drain, worker.settings.drain
    drain.is_draining = worker.front.close_after_each_answer = True
    _log_remaining(drain)
    # Load balancers notice the drain at /readyz. Until then, their requests are served.
    await _first_of(stop.now.wait(), seconds=limits.not_ready_seconds)
    await _first_of(stop.now.wait(), stop_accepting(), seconds=_STOP_ACCEPTING_SECONDS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.streams_seconds
    while drain.in_flight and not stop.now.is_set() and (left_seconds := deadline - loop.time()) > 0:
        _log_remaining(drain)
        await _first_of(stop.now.wait(), drain.idle(), seconds=min(_LEFT_EVERY_SECONDS, left_seconds))
    await _cut_off(drain)


async def _make_room(worker: Worker, stop: Stop, doors: WorkerListeners) -> None:
    """Wait for the running answers after a takeover.

    A client may send another request on a connection whose last answer did not announce its end, so such connections
    stay open for a while.
    """
    drain, limits = worker.drain, worker.settings.drain
    drain.is_draining = drain.has_successor = True
    doors.leave()
    _log_remaining(drain)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.not_ready_seconds + limits.streams_seconds
    tell_at = loop.time() + _LEFT_EVERY_SECONDS
    while doors.end_idle(limits.not_ready_seconds) or drain.in_flight:
        if stop.now.is_set() or loop.time() >= deadline:
            break
        if loop.time() >= tell_at:
            tell_at += _LEFT_EVERY_SECONDS
            _log_remaining(drain)
        await _first_of(stop.now.wait(), seconds=_IDLE_LOOK_SECONDS)
    await _cut_off(drain)


async def _cut_off(drain: DrainManager) -> None:
    if count := drain.cut_off():
        logger.warning("drain: %d requests were cut off", count)
        await _first_of(drain.idle(), seconds=_CUT_OFF_SECONDS)


def _log_remaining(drain: DrainManager) -> None:
    logger.info("draining", extra={"fields": {"left": drain.in_flight}})


async def _first_of(*waits: Awaitable[object], seconds: float | None = None) -> None:
    """Wait until one of them is done, for at most `seconds`. Raises its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def shortages(settings: Settings) -> Iterator[str]:
    """Return a sentence for each limit of this process that is too low for the settings."""
    room = connections_for_fds()
    if room < (settings.listen.max_connections or _FEW_CONNECTIONS):
        fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield (
            f"the limit of {fds} open files leaves room for {room} client connections in each worker: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=) for more"
        )


def _banner(settings: Settings, listeners: Listeners) -> str:
    """Return the first line of the log: what this process is, and what it serves."""
    ports = [
        f"{name}{socket_host}:{socket_port}"
        for name, sock in (
            ("", listeners.clients),
            ("operators on ", listeners.admin),
            ("probes on ", listeners.probes),
        )
        if sock is not None
        for socket_host, socket_port in [sock.getsockname()[:2]]
    ]
    is_any_users = settings.admin.trust_local or settings.admin.port is not None
    here = "from this host only" if is_any_users else "from this user's programs only"
    if not is_loopback_host(settings.administration_host):
        here = "closed"
    admin = "with the admin key" if settings.auth.admin_key else here
    return (
        f"{BUILD_KIND} on {', '.join(ports)}, connector {settings.connector}, "
        f"{settings.fleet}, {format_count(settings.workers, 'worker')}, "
        f"administration {admin}"
    )


# Signals that stop a worker.


_LOOK_SECONDS: Final = 1.0


class Stop:
    """The request to stop a worker.

    The first signal asks the worker to drain; the second, or the end of the supervisor, to stop now. SIGUSR2 means a
    takeover: without a supervisor, this process starts the successor and drains when that accepts; with one, the signal
    says that the successor accepts. A request to drain before that stops the successor, too.
    """

    def __init__(self, alive_fd: int | None, start_successor: Callable[[], Successor | None]) -> None:
        """Keep the parts. `alive_fd`: see `run`. `start_successor` returns None if there can be no successor."""
        self.requested = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_code = 0
        self.has_successor = False
        """Whether this worker drains because another process accepts on the same sockets."""
        self.is_supervised = alive_fd is not None
        self._start_successor = start_successor
        self._successor: Successor | None = None
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR2, self._hand_over if self.is_supervised else self._begin_handing_over)
        if alive_fd is not None:
            loop.add_reader(alive_fd, self._on_supervisor_gone, alive_fd)

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set():
            self.now.set()
            self.exit_code = 128 + number
        self._stop_successor()
        self.requested.set()

    def _on_supervisor_gone(self, alive_fd: int) -> None:
        self._loop.remove_reader(alive_fd)
        self.requested.set()
        self.now.set()

    def _hand_over(self) -> None:
        if not self.requested.is_set():
            self.has_successor = True
            self.requested.set()

    def _begin_handing_over(self) -> None:
        if self._successor is None and not self.requested.is_set():
            self._successor = self._start_successor()
            self._await_successor()

    def _stop_successor(self) -> None:
        """Stop the successor, unless it has just taken over."""
        if self._successor is not None:
            self._look()
        if self._successor is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._successor.fileno())
            self._successor.stop()
            self._successor = None

    def _await_successor(self) -> None:
        if self._successor is not None:
            self._loop.add_reader(self._successor.fileno(), self._look)
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        assert self._successor is not None
        self._timer.cancel()
        self._loop.remove_reader(self._successor.fileno())
        has_taken_over = self._successor.look()
        if has_taken_over is None:
            self._await_successor()
            return
        self._successor = None
        if has_taken_over:
            self._hand_over()


# Listening for clients, operators, probes and engines, each at its port.


class WorkerListeners:
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
            front.stop_listening_for_takeover()

    def end_idle(self, seconds: float) -> int:
        """Close connections that were idle for this time, see HttpListener; return the number of those left."""
        for front in self._fronts:
            front.end_idle(seconds)
        return sum(front.connections for front in self._fronts)


@asynccontextmanager
async def listening(worker: Worker, listeners: Listeners) -> AsyncIterator[WorkerListeners]:
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
        yield WorkerListeners(worker, probes)


# Messages to systemd, if the program is a service of `Type=notify` (sd_notify(3), sd_watchdog_enabled(3)).
#
# Each of several workers sends them, which requires `NotifyAccess=all`. Repeated messages have no effect.


READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_ALIVE: Final = "WATCHDOG=1"


class ServiceManager:
    """Sends messages to the service manager; does nothing without one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        patience = environ.get("WATCHDOG_USEC", "")
        self._beat_seconds = int(patience) / 1e6 / 3 if self._address and patience.isdecimal() else None

    def notify(self, state: str, status: str) -> None:
        """Report an event, which may be empty, and a line for `systemctl status`."""
        self._send(f"{state}\nSTATUS={status}".strip())

    @asynccontextmanager
    async def sending_heartbeats(self) -> AsyncIterator[None]:
        """Report regularly that the event loop runs, as often as `WatchdogSec=` requires, inside this context."""
        beating = asyncio.create_task(self._beat(self._beat_seconds)) if self._beat_seconds else None
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat(self, seconds: float) -> None:
        while True:
            self._send(_ALIVE)
            await asyncio.sleep(seconds)

    def _send(self, message: str) -> None:
        """Send without waiting, because a service manager that does not read must not delay tokens."""
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), self._address)
