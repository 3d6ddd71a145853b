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
from proxy.process.shared import ListeningSockets, SharedState, start_successor
from proxy.process.worker.assembly import Worker, build_worker
from proxy.process.worker.tuning import tune_process
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


def run_worker(shared: SharedState, worker: int, alive_fd: int | None = None) -> int:
    """Serve until the process must stop; return the exit code.

    The code is 0 after a drain, even if some answers were cut, and 128 plus the signal's number after a second signal.
    `alive_fd`: a pipe that closes when the supervisor ends.
    """
    settings = shared.configuration.current_snapshot().settings
    logs.set_up_logging(settings.log, secrets=secrets_of(settings))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_until_stop(shared, worker, alive_fd))
    finally:
        logs.flush()


async def _serve_until_stop(shared: SharedState, index: int, alive_fd: int | None) -> int:
    stop = StopRequest(alive_fd, partial(start_successor, shared))
    loop = asyncio.get_running_loop()
    async with build_worker(shared, index) as worker:
        logs.call_before_lines(worker.request_observers.flush_batch)
        with worker.request_observers.collect_in_batches(loop.call_later):
            await _serve_until_told(shared, worker, stop)
    return stop.exit_code


async def _serve_until_told(shared: SharedState, worker: Worker, stop: StopRequest) -> None:
    loop = asyncio.get_running_loop()
    manager = ServiceManager(os.environ)
    if shared.predecessor is not None:
        # It serves until then. If it is gone, a process that is not ready is better than none.
        await _wait_for_first(
            worker.monitor.became_ready.wait(), shared.predecessor.wait_until_gone(), stop.stop_requested.wait()
        )
        if stop.stop_requested.is_set():  # the takeover was cancelled, and the old process continues
            return
    async with manager.sending_heartbeats(), listening(worker, shared.listeners) as doors:
        loop.add_signal_handler(signal.SIGHUP, _on_hang_up, worker)
        tune_process()
        if worker.worker_number == 0:
            logger.info("%s", _start_message(worker.settings, shared.listeners))
            for told in (*worker.settings.access_warnings, *describe_shortages(worker.settings)):
                logger.warning("%s", told)
        if shared.predecessor is None:
            manager.send_state(READY, "listening")
        else:
            manager.send_state(f"{READY}\nMAINPID={os.getppid() if stop.has_supervisor else os.getpid()}", "listening")
            shared.predecessor.report_accepting(worker.settings.workers)
        telling = loop.create_task(_log_when_ready(worker, shared, manager))
        await stop.stop_requested.wait()
        telling.cancel()
        if stop.has_successor:
            await _make_room(worker, stop, doors)
        else:
            manager.send_state(STOPPING, "draining")
            await _drain(worker, stop, doors.stop_accepting)


async def _log_when_ready(worker: Worker, shared: SharedState, manager: ServiceManager) -> None:
    """Log one line for the whole gateway, in the first worker that is ready. For systemd, the last one counts."""
    await worker.monitor.became_ready.wait()
    host, port = shared.listeners.clients.getsockname()[:2]
    scheme = "http" if worker.settings.listen.tls_certificate is None else "https"
    told = f"ready: {scheme}://{Endpoint(host=connectable_host(host), port=port)}"
    manager.send_state("", told)
    if shared.log_once.is_news("gateway", "ready"):
        logger.info("%s", told)


def _on_hang_up(worker: Worker) -> None:
    if not worker.drain_manager.is_draining:
        worker.config_watcher.begin_reload("SIGHUP")


async def _drain(worker: Worker, stop_request: StopRequest, stop_accepting: Callable[[], Awaitable[None]]) -> None:
    """Wait for the running answers, up to the limit, and then end them."""
    drain, limits = worker.drain_manager, worker.settings.drain
    drain.is_draining = worker.client_listener.closes_after_each_answer = True
    _log_remaining(drain)
    # Load balancers notice the drain at /readyz. Until then, their requests are served.
    await _wait_for_first(stop_request.stop_now.wait(), seconds=limits.not_ready_seconds)
    await _wait_for_first(stop_request.stop_now.wait(), stop_accepting(), seconds=_STOP_ACCEPTING_SECONDS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.streams_seconds
    while drain.in_flight_count and not stop_request.stop_now.is_set() and (left_seconds := deadline - loop.time()) > 0:
        _log_remaining(drain)
        await _wait_for_first(
            stop_request.stop_now.wait(), drain.wait_until_idle(), seconds=min(_LEFT_EVERY_SECONDS, left_seconds)
        )
    await _cut_off(drain)


async def _make_room(worker: Worker, stop: StopRequest, worker_listeners: WorkerListeners) -> None:
    """Wait for the running answers after a takeover.

    A client may send another request on a connection whose last answer did not announce its end, so such connections
    stay open for a while.
    """
    drain, limits = worker.drain_manager, worker.settings.drain
    drain.is_draining = drain.has_successor_process = True
    worker_listeners.accept_only_callbacks()
    _log_remaining(drain)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.not_ready_seconds + limits.streams_seconds
    tell_at = loop.time() + _LEFT_EVERY_SECONDS
    while worker_listeners.close_idle_connections(limits.not_ready_seconds) or drain.in_flight_count:
        if stop.stop_now.is_set() or loop.time() >= deadline:
            break
        if loop.time() >= tell_at:
            tell_at += _LEFT_EVERY_SECONDS
            _log_remaining(drain)
        await _wait_for_first(stop.stop_now.wait(), seconds=_IDLE_LOOK_SECONDS)
    await _cut_off(drain)


async def _cut_off(drain: DrainManager) -> None:
    if count := drain.cut_off_all():
        logger.warning("drain: %d requests were cut off", count)
        await _wait_for_first(drain.wait_until_idle(), seconds=_CUT_OFF_SECONDS)


def _log_remaining(drain: DrainManager) -> None:
    logger.info("draining", extra={"fields": {"left": drain.in_flight_count}})


async def _wait_for_first(*awaitables: Awaitable[object], seconds: float | None = None) -> None:
    """Wait until one of them is done, for at most `seconds`. Raises its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in awaitables]
    done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def describe_shortages(settings: Settings) -> Iterator[str]:
    """Return a sentence for each limit of this process that is too low for the settings."""
    room = connections_for_fds()
    if room < (settings.listen.max_connections or _FEW_CONNECTIONS):
        fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield (
            f"the limit of {fds} open files leaves room for {room} client connections in each worker: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=) for more"
        )


def _start_message(settings: Settings, listeners: ListeningSockets) -> str:
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


class StopRequest:
    """The request to stop a worker.

    The first signal asks the worker to drain; the second, or the end of the supervisor, to stop now. SIGUSR2 means a
    takeover: without a supervisor, this process starts the successor and drains when that accepts; with one, the signal
    says that the successor accepts. A request to drain before that stops the successor, too.
    """

    def __init__(self, alive_fd: int | None, start_successor: Callable[[], Successor | None]) -> None:
        """Keep the parts. `alive_fd`: see `run_worker`. `start_successor` returns None if there can be no successor."""
        self.stop_requested = asyncio.Event()
        self.stop_now = asyncio.Event()
        self.exit_code = 0
        self.has_successor = False
        """Whether this worker drains because another process accepts on the same sockets."""
        self.has_supervisor = alive_fd is not None
        self._start_successor = start_successor
        self._successor: Successor | None = None
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(
            signal.SIGUSR2, self._hand_over_to_successor if self.has_supervisor else self._begin_handing_over
        )
        if alive_fd is not None:
            loop.add_reader(alive_fd, self._on_supervisor_gone, alive_fd)

    def _on_signal(self, number: int) -> None:
        if self.stop_requested.is_set():
            self.stop_now.set()
            self.exit_code = 128 + number
        self._stop_successor()
        self.stop_requested.set()

    def _on_supervisor_gone(self, alive_fd: int) -> None:
        self._loop.remove_reader(alive_fd)
        self.stop_requested.set()
        self.stop_now.set()

    def _hand_over_to_successor(self) -> None:
        if not self.stop_requested.is_set():
            self.has_successor = True
            self.stop_requested.set()

    def _begin_handing_over(self) -> None:
        if self._successor is None and not self.stop_requested.is_set():
            self._successor = self._start_successor()
            self._await_successor()

    def _stop_successor(self) -> None:
        """Stop the successor, unless it has just taken over."""
        if self._successor is not None:
            self._check_successor()
        if self._successor is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._successor.fileno())
            self._successor.stop_process()
            self._successor = None

    def _await_successor(self) -> None:
        if self._successor is not None:
            self._loop.add_reader(self._successor.fileno(), self._check_successor)
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._check_successor)

    def _check_successor(self) -> None:
        assert self._successor is not None
        self._timer.cancel()
        self._loop.remove_reader(self._successor.fileno())
        has_taken_over = self._successor.check_takeover()
        if has_taken_over is None:
            self._await_successor()
            return
        self._successor = None
        if has_taken_over:
            self._hand_over_to_successor()


# Listening for clients, operators, probes and engines, each at its port.


class WorkerListeners:
    """The listening of a worker. Leaving `listening` cuts the remaining answers."""

    def __init__(self, worker: Worker, probes: ProbeServer | None) -> None:
        self._client_listener = worker.client_listener
        self._all_listeners = [front for front in (worker.client_listener, worker.admin_listener) if front is not None]
        self._probe_server = probes

    async def stop_accepting(self) -> None:
        """Accept no more connections of clients, and serve all others. See HttpListener."""
        await self._client_listener.stop_accepting()

    def accept_only_callbacks(self) -> None:
        """Accept only callbacks of engines, because another process accepts.

        Open connections stay open until their next answer.
        """
        if self._probe_server is not None:
            self._probe_server.stop_accepting()
        for front in self._all_listeners:
            front.stop_listening_for_takeover()

    def close_idle_connections(self, seconds: float) -> int:
        """Close connections that were idle for this time, see HttpListener; return the number of those left."""
        for front in self._all_listeners:
            front.close_idle_connections(seconds)
        return sum(front.connection_count for front in self._all_listeners)


@asynccontextmanager
async def listening(worker: Worker, listeners: ListeningSockets) -> AsyncIterator[WorkerListeners]:
    """Serve on the listening sockets, inside `async with`."""
    async with AsyncExitStack() as stack:
        probes = None
        if listeners.probes is not None:
            monitor = worker.monitor
            probes = stack.enter_context(ProbeServer(listeners.probes, monitor.is_alive, monitor.was_ready))
        if listeners.admin is not None:
            assert worker.admin_listener is not None
            await stack.enter_async_context(worker.admin_listener)
            await worker.admin_listener.listen_on(listeners.admin)
        if worker.callback_listener is not None:
            await stack.enter_async_context(worker.callback_listener)
            for index, listener in enumerate(listeners.callbacks):
                if index == worker.worker_number:
                    await worker.callback_listener.listen_on(listener)
                else:
                    listener.close()  # otherwise engines would wait for the answer of another worker that has ended
        await stack.enter_async_context(worker.client_listener)
        await worker.client_listener.listen_on(listeners.clients)
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
        self._socket_address = f"\0{address[1:]}" if address.startswith("@") else address
        patience = environ.get("WATCHDOG_USEC", "")
        self._heartbeat_seconds = int(patience) / 1e6 / 3 if self._socket_address and patience.isdecimal() else None

    def send_state(self, state: str, status: str) -> None:
        """Report an event, which may be empty, and a line for `systemctl status`."""
        self._send_message(f"{state}\nSTATUS={status}".strip())

    @asynccontextmanager
    async def sending_heartbeats(self) -> AsyncIterator[None]:
        """Report regularly that the event loop runs, as often as `WatchdogSec=` requires, inside this context."""
        beating = (
            asyncio.create_task(self._send_heartbeats(self._heartbeat_seconds)) if self._heartbeat_seconds else None
        )
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()

    async def _send_heartbeats(self, seconds: float) -> None:
        while True:
            self._send_message(_ALIVE)
            await asyncio.sleep(seconds)

    def _send_message(self, message: str) -> None:
        """Send without waiting, because a service manager that does not read must not delay tokens."""
        if self._socket_address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), self._socket_address)
