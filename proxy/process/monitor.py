"""Self-monitoring of a worker, and a thread that answers probes while the event loop is busy."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from proxy.common.errors import BadRequest, GatewayError
from proxy.observe import logs
from proxy.process.loop_lag import LoopLag
from proxy.wire.openai import error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.monitor.monitor")

# Use of memory and file descriptors, as Linux reports them. Unknown values count as unused.

_ENTRIES_AT_A_TIME: Final = 500
"""Listing this many entries takes less than a millisecond."""


class MemoryUse:
    """The share of available memory that the gateway uses.

    Limits are those of the control groups around the process (version 1 or 2), of its address space, and of the
    machine. All workers count, each like this one. Memory that other programs certainly use is subtracted from both use
    and limit: an engine that fills the container is no reason to refuse requests while the gateway is small.
    """

    def __init__(self, workers: int = 1, root: Path = Path("/"), address_space_bytes: int | None = None) -> None:
        """Keep the sources. `root`: directory of /proc and /sys. `address_space_bytes` None: RLIMIT_AS."""
        self._worker_count = workers
        self._statm_path = root / "proc/self/statm"
        self._address_space_bytes = address_space_bytes or resource.getrlimit(resource.RLIMIT_AS)[0]
        self._machine_bytes = 1024 * _read_table(root / "proc/meminfo").get(b"MemTotal:", 0)
        self._control_groups = tuple(_find_control_groups(root))

    def resident_bytes(self) -> int:
        """Return the resident memory of this process in bytes; 0 if not known."""
        pages = _read_bytes(self._statm_path).split()
        return int(pages[1]) * resource.getpagesize() if pages else 0

    def used_share(self) -> float:
        """Return the used share of the closest limit, from 0 to 1."""
        pages = _read_bytes(self._statm_path).split()
        if not pages or not self._machine_bytes:
            return 0.0
        size, resident = (int(count) * resource.getpagesize() for count in pages[:2])
        ours = resident * self._worker_count
        shares = [ours / self._machine_bytes]
        if self._address_space_bytes != resource.RLIM_INFINITY:
            shares.append(size / self._address_space_bytes)
        for group in self._control_groups:
            limit = _read_bytes(group.limit_file).strip()
            # Without a limit, version 2 writes `max`, and version 1 a very large number.
            if limit.isdigit() and int(limit) < self._machine_bytes:
                shares.append(
                    _used_share_of(
                        int(limit), int(_read_bytes(group.usage_file) or 0), _read_table(group.stat_file), group, ours
                    )
                )
        return max(shares)


class OpenFds:
    """The share of file descriptors that the process uses."""

    def __init__(self, path: str = "/proc/self/fd", limit: int | None = None) -> None:
        """Keep the sources. `limit` None: RLIMIT_NOFILE."""
        self._path = path
        self._max_open_files = limit
        self._directory_listing: Iterator[os.DirEntry[str]] | None = None
        self._listed_count = 0

    def used_share(self) -> float | None:
        """Return the used share, from 0 to 1; None while counting, so that the caller asks again soon."""
        limit = self._max_open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            count = os.stat(self._path).st_size or self._count_some()
        except FileNotFoundError:
            return 0.0
        except OSError:  # there is no descriptor left for the directory
            return 1.0
        return None if count is None else count / limit

    def _count_some(self) -> int | None:
        """Count some entries of the directory of open files.

        Before Linux 6.2, it has no size, and listing 20,000 entries takes 20 ms.
        """
        if self._directory_listing is None:
            self._directory_listing, self._listed_count = os.scandir(self._path), 0
        some = sum(1 for _ in islice(self._directory_listing, _ENTRIES_AT_A_TIME))
        self._listed_count += some
        if some == _ENTRIES_AT_A_TIME:
            return None
        self._directory_listing = None
        return self._listed_count


class _ControlGroup(NamedTuple):
    """Files of a control group, and names in its `stat_file` of anonymous memory and idle page cache."""

    limit_file: Path
    usage_file: Path
    stat_file: Path
    anonymous_name: bytes
    cache_name: bytes


def _find_control_groups(root: Path) -> Iterator[_ControlGroup]:
    """Return the control groups that may limit the memory of this process, the innermost first.

    A container sees its own group as the root of the tree, whatever name /proc/self/cgroup has.
    """
    for line in _read_bytes(root / "proc/self/cgroup").decode(errors="replace").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            tree = root / "sys/fs/cgroup"
            files = ("memory.max", "memory.current", "memory.stat")
            names = (b"anon", b"inactive_file")
        elif "memory" in controllers.split(","):
            tree = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            names = (b"total_rss", b"total_inactive_file")
        else:
            continue
        inner = tree / name.lstrip("/")
        for directory in (inner, *inner.parents):
            if (directory / files[0]).exists():
                limit, usage, stat = (directory / file for file in files)
                yield _ControlGroup(limit, usage, stat, *names)
            if directory == tree:
                break


def _used_share_of(
    limit_bytes: int, used_bytes: int, stat: dict[bytes, int], group: _ControlGroup, own_bytes: int
) -> float:
    # The kernel frees idle page cache before it kills a process; the kubelet counts in the same way.
    used_bytes -= stat.get(group.cache_name, 0)
    # Socket buffers and other kernel memory stay in, because they may belong to the gateway.
    others = max(0, stat.get(group.anonymous_name, 0) - own_bytes)
    return max(0, used_bytes - others) / max(1, limit_bytes - others)


def _read_table(file_path: Path) -> dict[bytes, int]:
    """Return lines of a name, a number, and perhaps a unit."""
    return {
        words[0]: int(words[1]) for words in map(bytes.split, _read_bytes(file_path).splitlines()) if len(words) > 1
    }


def _read_bytes(file_path: Path) -> bytes:
    try:
        with file_path.open("rb", buffering=0) as file:  # unbuffered, because the kernel returns all at once
            return file.read()
    except OSError:
        return b""


# The timer of each worker

_TICK_SECONDS: Final = 0.25
_LAG_WINDOW_SECONDS: Final = 15.0
_MEMORY_SECONDS: Final = 1.0
_FDS_SECONDS: Final = 5.0
_SHRINK_SECONDS: Final = 10.0
_DEAD_AFTER_SECONDS: Final = 30.0

# As in Envoy's overload manager.
_CLOSE_FROM: Final = 0.92
_REFUSE_FROM: Final = 0.95
_HYSTERESIS: Final = 0.02


class OverloadState(IntEnum):
    """Overload by lack of memory. The values are those of the metric."""

    NONE = 0
    CLOSES_CONNECTIONS = 1
    REFUSES_REQUESTS = 2


_MEANINGS: Final = {
    OverloadState.NONE: "no measures are needed",
    OverloadState.CLOSES_CONNECTIONS: "connections are closed after each answer",
    OverloadState.REFUSES_REQUESTS: "new requests are refused",
}


def overload_of(memory_share: float, previous_state: OverloadState) -> OverloadState:
    """Return the state for a share of memory in use. The threshold for leaving a state is a little lower."""
    for state, threshold in (
        (OverloadState.REFUSES_REQUESTS, _REFUSE_FROM),
        (OverloadState.CLOSES_CONNECTIONS, _CLOSE_FROM),
    ):
        if memory_share >= threshold - (_HYSTERESIS if previous_state >= state else 0.0):
            return state
    return OverloadState.NONE


def _shrink_heap() -> None:
    """Return unused memory to the system. The C library would keep it, so overload would never end."""
    gc.collect()  # the body of a failed request may be in a cycle with its traceback
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc only


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MonitorParts:
    """Parts of one worker that a Monitor uses."""

    memory: MemoryUse = field(default_factory=MemoryUse)
    """Memory in use, and its limit."""
    open_fds: OpenFds = field(default_factory=OpenFds)
    """Open file descriptors, and their limit."""
    tick_callbacks: Sequence[Callable[[], object]] = ()
    """Functions that are called on the event loop at each tick. An exception of one does not affect the others."""
    is_ready: Callable[[], bool] = lambda: True
    """Returns whether the worker is ready; `was_ready` returns the last result."""
    tick_seconds: float = _TICK_SECONDS
    """Time between two ticks."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    shrink_heap: Callable[[], object] = _shrink_heap
    """Returns unused memory to the system."""
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """Takes the delays of the event loop."""
    on_busy_share: Callable[[float], object] = lambda share: None
    """Takes the CPU time of the event loop's thread in each tick, as a share of a core."""


class WorkerMonitor:
    """Monitors one worker's event loop, memory and files inside `async with`.

    One timer measures the delay of the event loop and the use of memory and descriptors, and decides on overload. It
    also counts lost log lines, and calls all periodic functions.
    """

    def __init__(self, metrics: Metrics, parts: MonitorParts) -> None:
        self._metrics = metrics
        self._memory = parts.memory
        self._open_fds = parts.open_fds
        self._tick_callbacks = parts.tick_callbacks
        self._is_ready = parts.is_ready
        self._tick_seconds = parts.tick_seconds
        self._clock = parts.clock
        self._shrink_heap = parts.shrink_heap
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = self._due = self._memory_at = self._fds_at = self._shrink_at = parts.clock()
        self._loop_lag = parts.loop_lag
        self._on_busy_share = parts.on_busy_share
        self._loop_seconds = time.thread_time()
        self._cpu_seconds = 0.0
        self._reported_losses = logs.LostLines()
        self._was_ready = False
        self.overload = OverloadState.NONE
        self.became_ready = asyncio.Event()
        """Set when the worker is ready for the first time."""

    async def __aenter__(self) -> Self:
        self._due = self._clock()
        self._on_timer()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def closes_connections(self) -> bool:
        """Return whether to close each connection after its answer, because idle connections use memory."""
        return self.overload >= OverloadState.CLOSES_CONNECTIONS

    @property
    def refuses_requests(self) -> bool:
        """Return whether to answer new requests with 503 `memory`."""
        return self.overload >= OverloadState.REFUSES_REQUESTS

    # For other threads: plain reads of values that the event loop has written.

    def is_alive(self) -> bool:
        """Return whether the worker's event loop runs."""
        return self._clock() - self._ticked_at <= _DEAD_AFTER_SECONDS

    def was_ready(self) -> bool:
        """Return whether the worker was ready at the last tick, and may still be."""
        return self._was_ready and self.is_alive()

    # The timer

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        # First, so that no exception below ends the timer.
        self._timer = loop.call_later(self._tick_seconds, self._on_timer)
        for ticker in self._tick_callbacks:
            loop.call_soon(ticker)
        self.run_due_measurements()

    def run_due_measurements(self) -> None:
        """Run the measurements of the worker that are due."""
        now = self._clock()
        self._measure_lag(now)
        if now >= self._memory_at:
            self._memory_at = now + _MEMORY_SECONDS
            self._measure_memory(now)
        if now >= self._fds_at and (fds_share := self._open_fds.used_share()) is not None:
            self._fds_at = now + _FDS_SECONDS
            self._metrics.open_fds_share.set(fds_share)
        self._log_lost_lines()
        self._was_ready = self._is_ready()
        if self._was_ready:
            self.became_ready.set()

    def _measure_lag(self, now: float) -> None:
        before_seconds, self._loop_seconds = self._loop_seconds, time.thread_time()
        if now > self._ticked_at:
            self._on_busy_share((self._loop_seconds - before_seconds) / (now - self._ticked_at))
        self._loop_lag.add_lag(now, max(0.0, now - self._due))
        self._metrics.loop_lag_seconds.set(self._loop_lag.longest_lag_since(now - _LAG_WINDOW_SECONDS))
        self._ticked_at, self._due = now, now + self._tick_seconds

    def _measure_memory(self, now: float) -> None:
        before_seconds, self._cpu_seconds = self._cpu_seconds, time.process_time()
        self._metrics.cpu_seconds_total.inc(self._cpu_seconds - before_seconds)
        self._metrics.resident_memory_bytes.set(self._memory.resident_bytes())
        share = self._memory.used_share()
        self._metrics.memory_share.set(share)
        before, self.overload = self.overload, overload_of(share, self.overload)
        self._metrics.overload_state.set(self.overload)
        if self.overload is not before:
            level = logging.WARNING if self.overload > before else logging.INFO
            logger.log(
                level, "memory: new state: %s: %.1f %% of the limit in use", _MEANINGS[self.overload], 100 * share
            )
        if self.closes_connections and now >= self._shrink_at:
            self._shrink_at = now + _SHRINK_SECONDS
            self._shrink_heap()

    def _log_lost_lines(self) -> None:
        logs.flush()
        before, self._reported_losses = self._reported_losses, logs.count_lost_lines()
        self._metrics.log_lines_dropped_total.inc(self._reported_losses.dropped - before.dropped)
        self._metrics.log_lines_suppressed_total.inc(self._reported_losses.suppressed - before.suppressed)


# Probes

_ANSWER_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1
_MAX_REQUEST_BYTES: Final = 8192

_ALIVE_PATHS: Final = frozenset({"/livez"})
_READY_PATHS: Final = frozenset({"/readyz", "/health", "/healthz", "/ping"})

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


class ProbeServer:
    """A thread that answers /livez and /readyz, inside `with`, so that a busy event loop cannot delay the answers.

    It serves one connection at a time, one request for each, and one second for that, because only orchestrators ask.
    It reads values that the event loop has left, and touches nothing else. Several processes may share the socket.
    """

    def __init__(self, sock: socket.socket, is_alive: Callable[[], bool], is_ready: Callable[[], bool]) -> None:
        """Keep the parts. Both functions are called in the thread. The caller closes the socket later."""
        self._listening_socket = sock
        self._is_alive = is_alive
        self._is_ready = is_ready
        self._has_left = False
        self._thread = threading.Thread(target=self._serve_probes, name="probes", daemon=True)

    def __enter__(self) -> Self:
        self._listening_socket.setblocking(False)  # another process may accept first
        self._stop, self._stopped = socket.socketpair()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._stopped.close()

    def stop_accepting(self) -> None:
        """Accept no further connection, because a successor does. Open connections are answered."""
        self._has_left = True

    def _serve_probes(self) -> None:
        while self._wait_until_readable(self._listening_socket) and not self._has_left:
            try:
                connection, _ = self._listening_socket.accept()
            except BlockingIOError:
                continue
            except OSError:  # for example, no free descriptor
                self._wait_until_readable(self._stopped, _PAUSE_SECONDS)
                continue
            with connection, suppress(OSError):  # the prober may close the connection
                self._answer_connection(connection)

    def _wait_until_readable(self, sock: socket.socket, seconds: float | None = None) -> bool:
        """Wait until the socket can be read, or the server stops."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)]
        return bool(ready) and self._stopped.fileno() not in ready

    def _answer_connection(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        until = time.monotonic() + _ANSWER_SECONDS
        request = b""
        while b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
            if not self._wait_until_readable(connection, until - time.monotonic()):
                return
            piece = connection.recv(_MAX_REQUEST_BYTES - len(request))
            if not piece:
                return
            request += piece
        connection.sendall(self._make_reply(request))

    def _make_reply(self, request: bytes) -> bytes:
        """Return the answer to a probe, as bytes."""
        request_line = request.partition(b"\r\n")[0].decode("latin-1")
        method, _, rest = request_line.partition(" ")
        target, _, version = rest.partition(" ")
        try:
            if b"\r\n\r\n" not in request or not version.startswith("HTTP/1."):
                raise BadRequest("this is not an HTTP/1.1 request, or it is too long")
            self._check_probe(method, target.partition("?")[0])
        except GatewayError as error:
            status, body = error.status, error_body(error)
        else:
            status, body = 200, b'{"status":"ok"}'
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
            "Server: pdproxy\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)

    def _check_probe(self, method: str, path: str) -> None:
        """Raise GatewayError if the check of a probe fails."""
        if path not in _ALIVE_PATHS | _READY_PATHS:
            raise GatewayError("there is no such route on this port", code="not_found", status=404)
        if method not in ("GET", "HEAD"):
            raise GatewayError("this route does not support that method", code="method_not_allowed", status=405)
        if not self._is_alive():
            raise GatewayError("the event loop has stalled", code="event_loop_stalled", status=503)
        if path in _READY_PATHS and not self._is_ready():
            raise GatewayError("the gateway is not ready", code="not_ready", status=503)
