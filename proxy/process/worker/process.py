"""The life of one process: it serves until it is told to stop, lets its streams end, and leaves."""

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

# How often a drain tells how much is left of it, how long it may take to let in who is already connected, and how long
# to tell the error to those who are left at last.
_LEFT_EVERY_SECONDS: Final = 5.0
_IDLE_LOOK_SECONDS: Final = 0.2
_STOP_ACCEPTING_SECONDS: Final = 2.0
_CUT_OFF_SECONDS: Final = 0.5

# Who wants fewer than this says so by listen.max_connections.
_FEW_CONNECTIONS: Final = 1024


def run(shared: Shared, worker: int, alive_fd: int | None = None) -> int:
    """Serve until told to stop. `alive_fd`: a pipe that closes when the supervisor is gone.

    The exit code is 0 after a drain, also one at whose end something was cut off, and 128 and the signal's number
    after a second signal.
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
        # It serves until then. If it is gone, somebody who is not ready is better than nobody.
        await _first_of(worker.monitor.became_ready.wait(), shared.predecessor.gone(), stop.requested.wait())
        if stop.requested.is_set():  # it was given up, and the other one goes on
            return
    async with manager.told_that_it_lives(), listening(worker, shared.listeners) as doors:
        loop.add_signal_handler(signal.SIGHUP, _on_hang_up, worker)
        tune()
        if worker.index == 0:
            logger.info("%s", _banner(worker.settings, shared.listeners))
            for told in (*worker.settings.doors, *shortages(worker.settings)):
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
    """One line for the whole gateway, by the worker that is ready first. For systemd the one that comes last counts."""
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
    """Let what is being answered come to its end, as long as it may take, and then end it."""
    drain, limits = worker.drain, worker.settings.drain
    drain.is_draining = worker.front.close_after_each_answer = True
    _tell_left(drain)
    # Load balancers in front learn from /readyz; until they have, what they still send is served.
    await _first_of(stop.now.wait(), seconds=limits.not_ready_seconds)
    await _first_of(stop.now.wait(), stop_accepting(), seconds=_STOP_ACCEPTING_SECONDS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.streams_seconds
    while drain.in_flight and not stop.now.is_set() and (left_seconds := deadline - loop.time()) > 0:
        _tell_left(drain)
        await _first_of(stop.now.wait(), drain.idle(), seconds=min(_LEFT_EVERY_SECONDS, left_seconds))
    await _cut_off(drain)


async def _make_room(worker: Worker, stop: Stop, doors: Doors) -> None:
    """Let what is being answered come to its end, while another process has taken over.

    A client may ask once more on a connection whose last answer did not say that it is the last one: so it stays open
    for a while, until that was said.
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
        logger.warning("cut off %d requests", count)
        await _first_of(drain.idle(), seconds=_CUT_OFF_SECONDS)


def _tell_left(drain: DrainManager) -> None:
    logger.info("draining", extra={"fields": {"left": drain.in_flight}})


async def _first_of(*waits: Awaitable[object], seconds: float | None = None) -> None:
    """Wait until one of them is done, for at most `seconds`. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def shortages(settings: Settings) -> Iterator[str]:
    """What this process may not have as much of as it will need, a sentence each."""
    room = connections_for_fds()
    if room < (settings.listen.max_connections or _FEW_CONNECTIONS):
        fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield (
            f"the limit of {fds} open files leaves room for {room} client connections in each worker: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=) for more"
        )


def _banner(settings: Settings, listeners: Listeners) -> str:
    """One line that tells an operator what this process is and what it looks after."""
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
