"""Slots of the workers, which the supervisor starts, replaces and stops."""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from proxy.common.build_info import BUILD_KIND, IS_COMPILED
from proxy.observe import logs
from proxy.process.configuration import secrets_of
from proxy.process.shared import RunWorker, SharedState, create_shared_state, start_successor
from proxy.process.supervisor.listening import listen_after_predecessor, take_systemd_sockets
from proxy.process.takeover import Predecessor, Successor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.settings import LoadedSettings

logger = logging.getLogger("proxy.supervisor.supervisor")

# Directory in which workers keep their metrics for each other.
_METRICS_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
_SUCCESSOR_POLL_SECONDS: Final = 0.05
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
# A worker ends after its drain, or at once after a second signal. A hanging worker is killed this much later.
_STOP_GRACE_SECONDS = 10.0
_STOP_NOW_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pause before a dead worker is replaced, and the limit of deaths."""

    first_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    max_deaths: int = 10
    window_seconds: float = 60.0
    """Deaths that are older are forgotten. A worker that has lived this long clears them."""

    def restart_delay_seconds(self, deaths: int) -> float:
        """Return the pause after a number of deaths, counted from 1."""
        return min(self.first_delay_seconds * 2.0 ** (deaths - 1), self.max_delay_seconds)


def run_supervisor(
    load: Callable[[], LoadedSettings], run: RunWorker | None = None, restarts: RestartPolicy | None = None
) -> int:
    """Listen and serve until a signal to stop; return the exit code. Raises SettingsError.

    `run` None: `worker.run`. `load` reads the configuration, now and at each reload.
    """
    # Until there is a supervisor to handle them, these signals must not end the program.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _raise_fd_limit()
    predecessor = Predecessor.from_environment(os.environ)
    given = take_systemd_sockets(os.environ) if predecessor is None else predecessor.sockets_by_name
    loaded = load()
    settings = loaded.settings
    logs.set_up_logging(settings.log, secrets=secrets_of(settings))
    logger.info("%s is starting", BUILD_KIND)
    if not IS_COMPILED:
        logger.info(
            "build: interpreted, not compiled: a request takes about 1.8 times the CPU time; pip installs the compiled"
            " build where there is a wheel of it for this Python and platform"
        )
    for warning in loaded.warnings:
        logger.warning("%s", warning)
    # late, because it takes longer than everything before, and the operator waits for the first line
    from proxy.process.supervisor.detection import detect_connector, replace_connector

    with ExitStack() as stack:
        try:
            connector = detect_connector(loaded)
            loaded = replace_connector(loaded, connector)
            settings = loaded.settings
            listeners = stack.enter_context(listen_after_predecessor(settings, given))
        except OSError as error:
            print(f"pdproxy: error: {error}", file=sys.stderr)
            return 1
        if settings.workers > 1:
            # prometheus-client reads this variable once, at its first import, so the worker is imported late.
            os.environ[_METRICS_DIRECTORY] = stack.enter_context(_metrics_directory())
        if run is None:
            from proxy.process import worker

            run = worker.run_worker
        shared = create_shared_state(loaded, lambda: replace_connector(load(), connector), listeners, predecessor)
        if settings.workers == 1:
            return run(shared, 0, None)
        return _WorkerSupervisor(shared, run, restarts or RestartPolicy()).keep_workers_alive()


def _raise_fd_limit() -> None:
    """Raise the limit of file descriptors as far as allowed.

    Most systems begin with 1,024, for programs with select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a lower limit than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _metrics_directory() -> tempfile.TemporaryDirectory[str]:
    """Return the directory of the workers' metrics, which only this user can read."""
    try:
        return tempfile.TemporaryDirectory(prefix="pdproxy-")
    except FileNotFoundError:  # In a container with a read-only root, only its shared memory can be written.
        return tempfile.TemporaryDirectory(prefix="pdproxy-", dir="/dev/shm")


@dataclass(slots=True)
class _WorkerSlot:
    """The slot of one worker. A replacement takes the same slot and the same row of the scoreboard."""

    worker_number: int
    pid: int | None = None
    next_start_at: float | None = 0.0
    started_at: float = 0.0
    is_frozen: bool = False
    """Whether the worker was killed because it was frozen."""
    death_times: list[float] = field(default_factory=list)


class _WorkerSupervisor:
    """Owns the slots. All times are monotonic seconds."""

    def __init__(self, shared: SharedState, run: RunWorker, restarts: RestartPolicy) -> None:
        self._shared = shared
        self._run = run
        self._restarts = restarts
        settings = shared.configuration.current_snapshot().settings
        self._slots = [_WorkerSlot(worker) for worker in range(settings.workers)]
        self._watchdog = None
        if settings.worker_timeout_seconds is not None:
            self._watchdog = Watchdog(settings.worker_timeout_seconds, time.monotonic())
        self._alive_reader, self._alive_writer = os.pipe()
        self._signals_before: set[int | signal.Signals] = set()
        self._stop_signals = 0
        self._kill_at: float | None = None
        self._exit_code = 0
        self._successor: Successor | None = None

    def keep_workers_alive(self) -> int:
        """Start the workers and replace dead ones until a signal to stop, or too many deaths; return the exit code."""
        waited_for = _STOP_SIGNALS | {signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD}
        # Blocked and not handled: a blocked signal waits for sigtimedwait and cannot get lost between two lines.
        self._signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
        # Workers share the memory of all imports as long as their garbage collectors do not touch it.
        gc.freeze()
        try:
            self._start_due_workers()
            while any(slot.pid for slot in self._slots) or not self._is_stopping:
                received = signal.sigtimedwait(waited_for, self._seconds_to_next_deadline())
                if received is not None:
                    self._pass_signal_on(signal.Signals(received.si_signo))
                self._check_successor()
                self._reap_dead_workers()
                self._start_due_workers()
                self._kill_frozen_workers()
                self._kill_overdue_workers()
        finally:
            os.close(self._alive_writer)
            os.close(self._alive_reader)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signals_before)
        return self._exit_code

    @property
    def _is_stopping(self) -> bool:
        return self._kill_at is not None

    def _seconds_to_next_deadline(self) -> float:
        deadlines = [slot.next_start_at for slot in self._slots if slot.next_start_at is not None]
        if self._kill_at is not None:
            deadlines.append(self._kill_at)
        if self._watchdog is not None:
            deadlines.append(self._watchdog.next_check_at)
        if self._successor is not None:
            deadlines.append(time.monotonic() + _SUCCESSOR_POLL_SECONDS)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else 3600.0

    def _pass_signal_on(self, number: signal.Signals) -> None:
        if number in _STOP_SIGNALS:
            if self._has_been_replaced():
                return  # the workers drain already
            logger.info("supervisor: stopping the workers: %s", number.name)
            self._begin_stop(now=self._stop_signals > 0)
            self._stop_signals += 1
            self._signal_workers(number)
        elif number is signal.SIGHUP:
            # One worker reloads for all. The oldest is most likely to be listening.
            living = [slot for slot in self._slots if slot.pid is not None]
            for slot in sorted(living, key=lambda slot: slot.started_at)[:1]:
                self._signal_worker(slot, number)
        elif number is signal.SIGUSR2 and self._successor is None and not self._is_stopping:
            self._successor = start_successor(self._shared)

    def _check_successor(self) -> bool:
        """Drain the workers if another process has taken over; return whether it has just done so."""
        if self._successor is None or (has_taken_over := self._successor.check_takeover()) is None:
            return False
        self._successor = None
        if not has_taken_over or self._is_stopping:
            return False
        self._begin_stop(now=False)
        self._signal_workers(signal.SIGUSR2)
        return True

    def _has_been_replaced(self) -> bool:
        """Return whether another process has just taken over. A process that has not is stopped, too."""
        if self._check_successor():
            return True
        if self._successor is not None:
            self._successor.stop_process()
            self._successor = None
        return False

    def _begin_stop(self, *, now: bool) -> None:
        """Replace no more workers. They get this time to stop, after the signal that follows."""
        # Only workers accept. If this copy stayed open after theirs, clients would wait in its queue.
        self._shared.listeners.close()
        drain = self._shared.configuration.current_snapshot().settings.drain
        seconds = drain.not_ready_seconds + drain.streams_seconds + _STOP_GRACE_SECONDS
        self._kill_at = time.monotonic() + (_STOP_NOW_GRACE_SECONDS if now else seconds)
        for slot in self._slots:
            slot.next_start_at = None

    def _signal_workers(self, number: signal.Signals) -> None:
        for slot in self._slots:
            self._signal_worker(slot, number)

    def _signal_worker(self, slot: _WorkerSlot, number: signal.Signals) -> None:
        if slot.pid is not None:  # until it is waited for, the pid cannot belong to another process
            os.kill(slot.pid, number)

    def _kill_frozen_workers(self) -> None:
        if self._watchdog is None or time.monotonic() < self._watchdog.next_check_at:
            return
        counts = self._shared.heartbeats.counts_by_worker()
        living = {slot.worker_number: counts[slot.worker_number] for slot in self._slots if slot.pid is not None}
        for worker in self._watchdog.find_frozen_workers(time.monotonic(), living):
            slot = self._slots[worker]
            slot.is_frozen = True
            logger.warning(
                "supervisor: killing a frozen worker, without progress for worker_timeout_seconds: worker %d (pid %d)",
                worker,
                slot.pid,
            )
            self._signal_worker(slot, signal.SIGKILL)

    def _kill_overdue_workers(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            logger.error("supervisor: killing the workers that did not stop in time")
            self._signal_workers(signal.SIGKILL)
            self._kill_at = time.monotonic() + _STOP_GRACE_SECONDS

    def _reap_dead_workers(self) -> None:
        while any(slot.pid for slot in self._slots):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            # As process 1 of a container, the supervisor also gets orphans of other processes, which have no slot.
            for slot in self._slots:
                if slot.pid == pid:
                    self._record_worker_exit(slot, pid, os.waitstatus_to_exitcode(status))

    def _record_worker_exit(self, slot: _WorkerSlot, pid: int, exit_code: int) -> None:
        from prometheus_client import multiprocess

        slot.pid = None
        reason = "frozen" if slot.is_frozen else "died"
        slot.is_frozen = False
        self._shared.erase_worker(slot.worker_number)
        with suppress(FileNotFoundError):  # another process has deleted a file in the meantime
            multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]
        if self._is_stopping:
            self._exit_code = max(self._exit_code, exit_code if exit_code >= 0 else 128 - exit_code)
            return
        now = time.monotonic()
        slot.death_times = [death for death in slot.death_times if death > now - self._restarts.window_seconds] + [now]
        if len(slot.death_times) >= self._restarts.max_deaths:
            logger.error(
                "supervisor: restart limit reached, shutting down: worker %d (pid %d) ended with code %d",
                slot.worker_number,
                pid,
                exit_code,
            )
            self._exit_code = 1
            self._begin_stop(now=False)
            self._signal_workers(signal.SIGTERM)
            return
        delay = self._restarts.restart_delay_seconds(len(slot.death_times))
        logger.error(
            "supervisor: worker %d (pid %d) ended with code %d: restart in %.1f s",
            slot.worker_number,
            pid,
            exit_code,
            delay,
        )
        slot.next_start_at = now + delay
        self._shared.heartbeats.record_replacement(reason)

    def _start_due_workers(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.next_start_at is not None and slot.next_start_at <= now:
                try:
                    pid = os.fork()
                except OSError as error:  # out of memory or processes; the other workers continue
                    logger.error("supervisor: cannot start worker %d: %s", slot.worker_number, error)
                    slot.next_start_at = now + self._restarts.max_delay_seconds
                    continue
                slot.pid = pid or self._run_worker(slot.worker_number)
                slot.next_start_at, slot.started_at = None, now

    def _run_worker(self, worker: int) -> NoReturn:
        """Run the worker in the forked process, and leave without closing what belongs to the supervisor."""
        exit_code = 1
        try:
            os.close(self._alive_writer)
            # A separate process group. Otherwise a Ctrl-C would arrive twice, from the terminal and from the
            # supervisor.
            os.setpgid(0, 0)
            # before the worker has handlers, there is nothing to drain
            for number in (*_STOP_SIGNALS, signal.SIGUSR2):
                signal.signal(number, lambda *_: os._exit(0))
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signals_before)
            exit_code = self._run(self._shared, worker, self._alive_reader)
        except BaseException:
            logger.exception("supervisor: worker %d failed", worker)
        finally:
            if select.select([self._alive_reader], [], [], 0)[0]:  # the supervisor was killed and cannot clean up
                shutil.rmtree(os.environ[_METRICS_DIRECTORY], ignore_errors=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)


# Detects frozen workers: stopped by a signal, or in a call that does not return.
#
# Each worker's event loop counts its turns in shared memory (`shared.Heartbeats`). A worker is frozen if its count does
# not change for too long. Its clients wait, and its load stays on the engines.


@dataclass(slots=True)
class _WatchedWorker:
    loop_count: int
    unchanged_since: float


class Watchdog:
    """Compares the counts at intervals. Pure: all times are the supervisor's clock seconds.

    Time in which the supervisor itself did not run does not count: a stopped container, or a busy machine, stops all
    processes.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._look_seconds = min(1.0, timeout_seconds / 4)
        self._watched: dict[int, _WatchedWorker] = {}
        self.next_check_at = now + self._look_seconds

    def find_frozen_workers(self, now: float, counts: Mapping[int, int]) -> list[int]:
        """Take the counts of the living workers, and return the frozen ones.

        A worker that stays frozen is returned again after the same time.
        """
        late_seconds = now - self.next_check_at
        lost_seconds = late_seconds if late_seconds > self._look_seconds else 0.0
        self.next_check_at = now + self._look_seconds
        frozen = []
        for worker in self._watched.keys() - counts.keys():
            del self._watched[worker]
        for worker, count in counts.items():
            watched = self._watched.get(worker)
            if watched is None or watched.loop_count != count:
                self._watched[worker] = _WatchedWorker(count, now)
                continue
            watched.unchanged_since += lost_seconds
            if now - watched.unchanged_since > self._timeout_seconds:
                frozen.append(worker)
                watched.unchanged_since = now
        return frozen
