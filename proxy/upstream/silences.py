"""Finds out whether an engine still works on an answer when nothing more of it arrives.

An engine that was stopped may keep its connections open without sending anything. vLLM 0.32 does so at SIGTERM: the
engine core has ended and the port is closed, but the API server waits for answers that will never arrive. An engine may
also hang while no other engine is working that it could be compared with.

Both begin with an unusually long silence. After a short one the gateway connects to the engine: if it refuses, or is
known to be down, its silent answers are lost. After a long one the gateway reads the metrics of the engine: without
progress the engine hangs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.stalls import StreamPace
from proxy.common.background import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from proxy.common.backend import Backend
    from proxy.upstream.connection import EngineConnection

_LOST_AFTER_GAPS: Final = 5.0
"""The length of a silence, in usual gaps between parts, after which the gateway opens a test connection."""
_CHECKED_AFTER_GAPS: Final = 20.0
"""The length of a silence, in usual gaps between parts, after which the progress of an engine is checked."""
_SHARE_BETWEEN_READINGS: Final = 0.1
"""Time between two readings of the metrics of an engine, as a share of `silence_seconds`."""
_GAPS_BETWEEN_READINGS: Final = 3.0
_TEST_SECONDS: Final = 2.0
_REMEMBERED_SECONDS: Final = 3600.0
_REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EHOSTDOWN})
"""Errors which show that no process listens on a port. Other errors may have their cause on this host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SilenceChecks:
    """Callbacks that check engines and receive the results."""

    is_backend_down: Callable[[Backend], bool]
    """Returns whether health checks consider the backend down."""
    on_refused_connection: Callable[[Backend], None]
    """Called when a backend with silent answers refuses a connection."""
    makes_progress: Callable[[Backend, float], Awaitable[bool]]
    """Reads the metrics of a backend twice, this many seconds apart. Returns whether they show progress."""
    on_engine_hang: Callable[[Backend], bool]
    """Called when a backend makes no progress. Returns whether its streams are to fail."""


@dataclass(slots=True, eq=False)
class StreamProgress:
    """Progress of the streams of one backend since the last check."""

    backend: Backend
    answer_parts: int = 0
    """Parts of answers that have arrived."""
    timed_parts: int = 0
    """Parts of streams that an earlier check has seen."""
    timed_seconds: float = 0.0
    """Total time of the timed parts."""


@dataclass(slots=True, eq=False)
class _WatchedBackend:
    backend_pace: StreamPace = field(default_factory=StreamPace)
    seen_at: float = 0.0
    """Clock time at which the backend was last seen with a stream or a silence."""
    next_check_at: float = 0.0
    """Clock time of the next check of progress, at the earliest."""
    is_being_checked: bool = False
    """Whether a check of progress is running."""


Silence = tuple["EngineConnection", float]
"""A connection, and the clock time since which nothing of its answer has arrived."""


class SilenceMonitor:
    """Checks exchanges of one worker whose engine sends nothing."""

    def __init__(self, checks: SilenceChecks, busy_connections: Callable[[], Iterable[EngineConnection]]) -> None:
        """Store the checks. `busy_connections`: returns the connections on which an exchange is under way."""
        self._silence_checks = checks
        self._busy_connections = busy_connections
        self._watched_backends: dict[Backend, _WatchedBackend] = {}
        self._background = BackgroundTasks(logging.getLogger(__name__), "check of a silent engine")
        self._tested_addresses: set[tuple[Backend, str | None]] = set()
        """Backends and addresses to which test connections are being opened."""
        self._next_cleanup_at = 0.0

    async def cancel_checks(self) -> None:
        """Cancel all running checks of silent engines."""
        await self._background.__aexit__(None, None, None)

    def check_silences(
        self,
        now: float,
        least_seconds: float,
        silence_seconds: float,
        backends_with_progress: Collection[StreamProgress],
        silent_connections: Iterable[EngineConnection],
    ) -> None:
        """Process one check of all exchanges, and begin checks of engines with long silences.

        Args:
            now: Clock seconds.
            least_seconds: The time between two calls, which is the shortest silence that can be noticed.
            silence_seconds: The silence after which an engine is checked; see settings.HealthChecks.
            backends_with_progress: Progress of each backend with streams.
            silent_connections: Connections on which nothing has arrived since the last call.
        """
        for moved in backends_with_progress:
            watched = self._watched_backend_of(moved.backend, now)
            if moved.timed_parts:
                watched.backend_pace.add_parts(moved.timed_parts, moved.timed_seconds)
        moving = {moved.backend for moved in backends_with_progress if moved.answer_parts}
        suspected: dict[tuple[Backend, str | None], list[Silence]] = {}
        for connection in silent_connections:
            if self._is_suspicious(connection, now, least_seconds, silence_seconds, moving):
                place = connection.backend, connection.address
                suspected.setdefault(place, []).append((connection, connection.quiet_since))
        for (backend, address), silences in suspected.items():
            self._open_test_connection(backend, address, silences, is_still=backend not in moving)
        if now >= self._next_cleanup_at:
            self._next_cleanup_at = now + _REMEMBERED_SECONDS
            kept = self._watched_backends.items()
            self._watched_backends = {backend: one for backend, one in kept if one.seen_at > now - _REMEMBERED_SECONDS}

    def _is_suspicious(
        self,
        connection: EngineConnection,
        now: float,
        least_seconds: float,
        silence_seconds: float,
        moving: Collection[Backend],
    ) -> bool:
        """Return whether an exchange is silent for so long that a test connection should be opened.

        If it is silent for much longer, a check of the progress of its backend begins.
        """
        backend, seconds = connection.backend, now - connection.quiet_since
        watched = self._watched_backend_of(backend, now)
        gap_seconds = watched.backend_pace.mean_gap_seconds
        if not connection.has_begun:
            # Its usual gap is unknown, and an engine that is draining may take long for a prompt.
            return seconds >= max(least_seconds, silence_seconds)
        is_long = seconds >= max(silence_seconds, _CHECKED_AFTER_GAPS * gap_seconds)
        if is_long and backend not in moving and now >= watched.next_check_at and not watched.is_being_checked:
            watched.is_being_checked = True
            watched.next_check_at = now + silence_seconds
            pause_seconds = max(_SHARE_BETWEEN_READINGS * silence_seconds, _GAPS_BETWEEN_READINGS * gap_seconds)
            self._background.start_task(self._check_progress(backend, watched, pause_seconds))
        return seconds >= max(least_seconds, _LOST_AFTER_GAPS * gap_seconds)

    def _watched_backend_of(self, backend: Backend, now: float) -> _WatchedBackend:
        watched = self._watched_backends.get(backend)
        if watched is None:
            watched = self._watched_backends[backend] = _WatchedBackend()
        watched.seen_at = now
        return watched

    # Test connections

    def _open_test_connection(
        self, backend: Backend, address: str | None, silences: list[Silence], *, is_still: bool
    ) -> None:
        """Open a test connection to an engine with silent answers.

        `is_still`: whether none of its streams progresses.
        """
        place = backend, address
        if place in self._tested_addresses:
            return
        if is_still:  # answers that have just begun are lost with the others
            silences = [
                (connection, connection.quiet_since)
                for connection in self._busy_connections()
                if (connection.backend, connection.address) == place
            ]
        self._tested_addresses.add(place)
        self._background.start_task(self._test_connection(backend, address, silences))

    async def _test_connection(self, backend: Backend, address: str | None, silences: Sequence[Silence]) -> None:
        try:
            is_refused = await _is_connection_refused(address or backend.host, backend.port)
        finally:
            self._tested_addresses.discard((backend, address))
        if is_refused:
            self._silence_checks.on_refused_connection(backend)
        elif not self._silence_checks.is_backend_down(backend):
            return
        for connection, since in silences:
            # A health check may fail because the engine is busy with a prompt. Such an answer can still begin.
            if connection.has_been_silent_since(since) and (connection.has_begun or is_refused):
                connection.fail_as_closed("accepts no connections any more" if is_refused else "is down")

    # Progress

    async def _check_progress(self, backend: Backend, watched: _WatchedBackend, pause_seconds: float) -> None:
        streams = [
            (connection, connection.quiet_since)
            for connection in self._busy_connections()
            if connection.backend == backend and connection.is_stream
        ]
        try:
            makes_progress = await self._silence_checks.makes_progress(backend, pause_seconds)
        finally:
            watched.is_being_checked = False
        silent = [connection for connection, since in streams if connection.has_been_silent_since(since)]
        if not makes_progress and silent and self._silence_checks.on_engine_hang(backend):
            for connection in silent:
                connection.fail_as_stalled("sends nothing and makes no progress")


async def _is_connection_refused(host: str, port: int) -> bool:
    opening = asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
    try:
        async with asyncio.timeout(_TEST_SECONDS):
            transport, _ = await opening
    except TimeoutError:  # a subclass of OSError
        return False
    except OSError as error:
        return error.errno in _REFUSED
    transport.close()
    return False
