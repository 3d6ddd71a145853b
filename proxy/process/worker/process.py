"""The life of one process: it serves until it must stop, waits for its streams, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from functools import partial
from typing import TYPE_CHECKING, Final

import uvloop

from proxy.common.build_info import BUILD
from proxy.common.terms import counted
from proxy.listener.http_listener import connections_for_fds
from proxy.observe import logs
from proxy.process.configuration import secrets_of
from proxy.process.shared import start_successor
from proxy.process.worker.assembly import build
from proxy.process.worker.listening import listening
from proxy.process.worker.service_manager import READY, STOPPING, ServiceManager
from proxy.process.worker.stop import Stop
from proxy.process.worker.tuning import tune
from proxy.settings import Endpoint, is_loopback, reachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from proxy.listener.drain import DrainManager
    from proxy.process.shared import Listeners, Shared
    from proxy.process.worker.assembly import Worker
    from proxy.process.worker.listening import Doors
    from proxy.settings import Settings

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
    async with manager.told_that_it_lives(), listening(worker, shared.listeners) as doors:
        loop.add_signal_handler(signal.SIGHUP, _on_hang_up, worker)
        tune()
        if worker.index == 0:
            logger.info("%s", _banner(worker.settings, shared.listeners))
            for told in (*worker.settings.access_warnings, *shortages(worker.settings)):
                logger.warning("%s", told)
        if shared.predecessor is None:
            manager.tell(READY, "listening")
        else:
            manager.tell(f"{READY}\nMAINPID={os.getppid() if stop.is_supervised else os.getpid()}", "listening")
            shared.predecessor.tell_accepting(worker.settings.workers)
        telling = loop.create_task(_tell_when_ready(worker, shared, manager))
        await stop.requested.wait()
        telling.cancel()
        if stop.has_successor:
            await _make_room(worker, stop, doors)
        else:
            manager.tell(STOPPING, "draining")
            await _drain(worker, stop, doors.stop_accepting)


async def _tell_when_ready(worker: Worker, shared: Shared, manager: ServiceManager) -> None:
    """Log one line for the whole gateway, in the first worker that is ready. For systemd, the last one counts."""
    await worker.monitor.became_ready.wait()
    host, port = shared.listeners.clients.getsockname()[:2]
    told = f"ready: http://{Endpoint(host=reachable(host), port=port)}"
    manager.tell("", told)
    if shared.log_once.is_news("gateway", "ready"):
        logger.info("%s", told)


def _on_hang_up(worker: Worker) -> None:
    if not worker.drain.is_draining:
        worker.watcher.begin_reload("SIGHUP")


async def _drain(worker: Worker, stop: Stop, stop_accepting: Callable[[], Awaitable[None]]) -> None:
    """Wait for the running answers, up to the limit, and then end them."""
    drain, limits = worker.drain, worker.settings.drain
    drain.is_draining = worker.front.close_after_each_answer = True
    _tell_left(drain)
    # Load balancers notice the drain at /readyz. Until then, their requests are served.
    await _first_of(stop.now.wait(), seconds=limits.not_ready_seconds)
    await _first_of(stop.now.wait(), stop_accepting(), seconds=_STOP_ACCEPTING_SECONDS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.streams_seconds
    while drain.in_flight and not stop.now.is_set() and (left_seconds := deadline - loop.time()) > 0:
        _tell_left(drain)
        await _first_of(stop.now.wait(), drain.idle(), seconds=min(_LEFT_EVERY_SECONDS, left_seconds))
    await _cut_off(drain)


async def _make_room(worker: Worker, stop: Stop, doors: Doors) -> None:
    """Wait for the running answers after a takeover.

    A client may send another request on a connection whose last answer did not announce its end, so such connections
    stay open for a while.
    """
    drain, limits = worker.drain, worker.settings.drain
    drain.is_draining = drain.has_successor = True
    doors.leave()
    _tell_left(drain)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.not_ready_seconds + limits.streams_seconds
    tell_at = loop.time() + _LEFT_EVERY_SECONDS
    while doors.end_idle(limits.not_ready_seconds) or drain.in_flight:
        if stop.now.is_set() or loop.time() >= deadline:
            break
        if loop.time() >= tell_at:
            tell_at += _LEFT_EVERY_SECONDS
            _tell_left(drain)
        await _first_of(stop.now.wait(), seconds=_IDLE_LOOK_SECONDS)
    await _cut_off(drain)


async def _cut_off(drain: DrainManager) -> None:
    if count := drain.cut_off():
        logger.warning("drain: %d requests were cut off", count)
        await _first_of(drain.idle(), seconds=_CUT_OFF_SECONDS)


def _tell_left(drain: DrainManager) -> None:
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
    if not is_loopback(settings.administration_host):
        here = "closed"
    admin = "with the admin key" if settings.auth.admin_key else here
    return (
        f"{BUILD} on {', '.join(ports)}, connector {settings.connector}, "
        f"{settings.fleet}, {counted(settings.workers, 'worker')}, "
        f"administration {admin}"
    )
