"""Answers that have begun and fallen silent: does their engine still work on them?

An engine that was stopped may keep its connections open and say nothing more on them. vLLM 0.32 does so at SIGTERM: its
engine core is gone and nobody listens, but its API server waits for the answers that it will never have. And an engine
may hang as a whole while no other one works, so that no peer shows that it could.

Both begin with a silence that is longer than usual. A short one has the engine knocked at: if it refuses connections,
or is known to be down, its silent answers are lost. A long one has its metrics looked at: if they show no progress, the
engine hangs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.stalls import Pace
from proxy.common.background import Background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from proxy.common.backend import Backend
    from proxy.upstream.connection import EngineConnection

_LOST_AFTER_GAPS: Final = 5.0
"""How many usual gaps an answer of an engine that accepts no connections may be silent before it is lost."""
_CHECKED_AFTER_GAPS: Final = 20.0
"""How many usual gaps an answer may be silent before its engine is checked."""
_SHARE_BETWEEN_READINGS: Final = 0.1
"""The time between two readings of an engine's metrics, as a share of `silence_seconds`."""
_GAPS_BETWEEN_READINGS: Final = 3.0
_KNOCK_SECONDS: Final = 2.0
_REMEMBERED_SECONDS: Final = 3600.0
_GONE: Final = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EHOSTDOWN})
"""What connecting fails with where nobody listens. Other failures may be of this host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SilenceChecks:
    """What is known of engines elsewhere, and who is told."""

    is_down: Callable[[Backend], bool]
    """Whether health checks say that the backend is down."""
    on_refused: Callable[[Backend], None]
    """Called when a backend with silent answers has refused a connection."""
    makes_progress: Callable[[Backend, float], Awaitable[bool]]
    """Whether the backend's metrics show that it works; they are read twice, so many seconds apart."""
    on_hang: Callable[[Backend], bool]
    """Called when a backend makes no progress. Returns whether its answers are to be taken away from it."""


@dataclass(slots=True, eq=False)
class Moves:
    """What the streams of one backend did since the last look."""

    backend: Backend
    parts: int = 0
    timed_parts: int = 0
    """Those of streams that have been seen before, which took `timed_seconds` together."""
    timed_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Watched:
    pace: Pace = field(default_factory=Pace)
    seen_at: float = 0.0
    check_at: float = 0.0
    """When the next check is due at the earliest."""
    is_checked: bool = False
    """A check is under way."""


Silence = tuple["EngineConnection", float]
"""An exchange, and the clock time since which nothing of its answer has arrived."""


class Silences:
    """Watches the silent exchanges of one worker."""

    def __init__(self, checks: SilenceChecks, busy: Callable[[], Iterable[EngineConnection]]) -> None:
        """Store the checks. `busy` returns the connections with an exchange under way."""
        self._checks = checks
        self._busy = busy
        self._watched: dict[Backend, _Watched] = {}
        self._background = Background(logging.getLogger(__name__), "a look at a silent engine")
        self._knocked: set[tuple[Backend, str | None]] = set()
        """The addresses of backends that are being looked at."""
        self._forget_at = 0.0

    async def close(self) -> None:
        """End the looks that are under way."""
        await self._background.__aexit__(None, None, None)

    def look(
        self,
        now: float,
        least_seconds: float,
        silence_seconds: float,
        moves: Collection[Moves],
        silent: Iterable[EngineConnection],
    ) -> None:
        """Take in one look at all exchanges, and end those that are known to be lost.

        Args:
            now: Clock seconds.
            least_seconds: The time between two looks, which is the shortest silence that can be seen.
            silence_seconds: The silence after which an engine is checked; see settings.HealthChecks.
            moves: Of each backend with streams.
            silent: The exchanges of which nothing has arrived since the last look.
        """
        for moved in moves:
            watched = self._watch(moved.backend, now)
            if moved.timed_parts:
                watched.pace.add(moved.timed_parts, moved.timed_seconds)
        moving = {moved.backend for moved in moves if moved.parts}
        suspected: dict[tuple[Backend, str | None], list[Silence]] = {}
        for connection in silent:
            if self._is_suspicious(connection, now, least_seconds, silence_seconds, moving):
                place = connection.backend, connection.address
                suspected.setdefault(place, []).append((connection, connection.quiet_since))
        for (backend, address), silences in suspected.items():
            self._look_up(backend, address, silences, is_still=backend not in moving)
        if now >= self._forget_at:
            self._forget_at = now + _REMEMBERED_SECONDS
            kept = self._watched.items()
            self._watched = {backend: one for backend, one in kept if one.seen_at > now - _REMEMBERED_SECONDS}

    def _is_suspicious(
        self,
        connection: EngineConnection,
        now: float,
        least_seconds: float,
        silence_seconds: float,
        moving: Collection[Backend],
    ) -> bool:
        """Whether an exchange is silent for so long that it is lost if nobody listens where its answer comes from. If
        it is silent for much longer, a check of its backend begins.
        """
        backend, seconds = connection.backend, now - connection.quiet_since
        watched = self._watch(backend, now)
        gap_seconds = watched.pace.gap_seconds
        if not connection.has_begun:
            # No pace is known of it, and an engine that drains may need long for a prompt.
            return seconds >= max(least_seconds, silence_seconds)
        is_long = seconds >= max(silence_seconds, _CHECKED_AFTER_GAPS * gap_seconds)
        if is_long and backend not in moving and now >= watched.check_at and not watched.is_checked:
            watched.is_checked = True
            watched.check_at = now + silence_seconds
            pause_seconds = max(_SHARE_BETWEEN_READINGS * silence_seconds, _GAPS_BETWEEN_READINGS * gap_seconds)
            self._background.start(self._look_for_progress(backend, watched, pause_seconds))
        return seconds >= max(least_seconds, _LOST_AFTER_GAPS * gap_seconds)

    def _watch(self, backend: Backend, now: float) -> _Watched:
        watched = self._watched.get(backend)
        if watched is None:
            watched = self._watched[backend] = _Watched()
        watched.seen_at = now
        return watched

    # Does anybody listen?

    def _look_up(self, backend: Backend, address: str | None, silences: list[Silence], *, is_still: bool) -> None:
        """Find out whether a place is gone where answers are silent. `is_still`: nothing there moves."""
        place = backend, address
        if place in self._knocked:
            return
        if is_still:  # those that have just begun are lost with the others
            silences = [
                (connection, connection.quiet_since)
                for connection in self._busy()
                if (connection.backend, connection.address) == place
            ]
        self._knocked.add(place)
        self._background.start(self._knock(backend, address, silences))

    async def _knock(self, backend: Backend, address: str | None, silences: Sequence[Silence]) -> None:
        try:
            is_refused = await _is_refused(address or backend.host, backend.port)
        finally:
            self._knocked.discard((backend, address))
        if is_refused:
            self._checks.on_refused(backend)
        elif not self._checks.is_down(backend):
            return
        for connection, since in silences:
            # A health check may have failed because the engine is busy with a prompt, which then is still to come.
            if connection.is_silent_since(since) and (connection.has_begun or is_refused):
                connection.lose("accepts no connections any more" if is_refused else "is down")

    # Does it make progress?

    async def _look_for_progress(self, backend: Backend, watched: _Watched, pause_seconds: float) -> None:
        streams = [
            (connection, connection.quiet_since)
            for connection in self._busy()
            if connection.backend == backend and connection.is_stream
        ]
        try:
            makes_progress = await self._checks.makes_progress(backend, pause_seconds)
        finally:
            watched.is_checked = False
        silent = [connection for connection, since in streams if connection.is_silent_since(since)]
        if not makes_progress and silent and self._checks.on_hang(backend):
            for connection in silent:
                connection.stall("sends nothing and makes no progress")


async def _is_refused(host: str, port: int) -> bool:
    opening = asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
    try:
        async with asyncio.timeout(_KNOCK_SECONDS):
            transport, _ = await opening
    except TimeoutError:  # it is an OSError, too
        return False
    except OSError as error:
        return error.errno in _GONE
    transport.close()
    return False
