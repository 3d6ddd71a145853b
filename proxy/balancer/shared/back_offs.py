"""Back-offs: backends that get no requests for a while because they refused some or lack KV memory, for all workers.

A backend that answers 429 or 503 gets no request for a while. The time doubles with each refusal until the backend
serves one. After that time it gets one request at a time: one at once, and one more for each request that it completes.
Once it has served and has not refused for 5 seconds, it gets any number again.

Every worker writes every cell. A cell is written as a whole, and a lost update costs one request a second attempt.
Create the table before forking.
"""

from __future__ import annotations

import mmap
import time
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from proxy.common.backend import Backend

FIRST_SECONDS: Final = 1.0
"""Back-off after the first refusal, unless the backend sends Retry-After."""
LONGEST_SECONDS: Final = 30.0
"""Maximum back-off."""
_REOPENS_AFTER_SECONDS: Final = 5.0
"""Time without a refusal after which a backend that serves gets any number of requests."""
_MAX_DOUBLINGS: Final = 8
_CELL_BYTES: Final = 8
_CELLS_PER_SLOT: Final = 8
_SLOT: Final = Struct("qdqqddd")  # checksum of the backend, then the fields of its Standing


class Standing(NamedTuple):
    """Back-off of one backend. Times are seconds of the system's monotonic clock."""

    until: float = 0.0
    """End of the back-off after a refusal."""
    streak: int = 0
    """Refusals since the backend last served. Refusals at the same time count once."""
    turns: int = 0
    """Requests that the backend may get before `until`, one for each that it has completed."""
    refused_at: float = 0.0
    """Time of the last refusal. 0: there was none."""
    pressed_until: float = 0.0
    """Time until which the backend is taken to lack KV memory."""
    closed_until: float = 0.0
    """Time until which the backend takes no request according to its Retry-After, without a maximum. 0: none sent."""

    def takes_turns(self, now: float) -> bool:
        """Return whether the backend gets one request at a time, because it refused a short time ago."""
        return self.refused_at > 0 and (self.streak > 0 or now < self.refused_at + _REOPENS_AFTER_SECONDS)

    def refuses(self, now: float) -> bool:
        """Return whether the backend gets no request, because it would probably refuse."""
        return now < self.until and not self.turns and self.takes_turns(now)


UNKNOWN: Final = Standing()
"""Standing of a backend without a record."""


class BackOffs:
    """Table of the standings of all backends, by slot."""

    def __init__(self, slots: int = 1024) -> None:
        # The first slot has only the number of changes.
        self._cells = memoryview(mmap.mmap(-1, (1 + slots) * _CELLS_PER_SLOT * _CELL_BYTES)).cast("q")
        self.changes = self._cells[:1]
        """One cell, which changes with every write."""

    def of(self, backend: Backend) -> Standing:
        """Return the standing of a backend."""
        owner, *fields = _SLOT.unpack_from(self._cells, _place(backend))
        return Standing(*fields) if owner == _owner(backend) else UNKNOWN

    def refuses(self, backend: Backend, now: float) -> bool:
        """Return whether a backend would probably refuse a request now."""
        return self.of(backend).refuses(now)

    def refuse(self, backend: Backend, now: float, retry_after_seconds: float | None, *, doubles: bool) -> int:
        """Record a refusal and return the streak.

        Args:
            backend: The backend that refused.
            now: Clock seconds.
            retry_after_seconds: Its Retry-After. None: it sent none.
            doubles: Whether the back-off doubles, because other backends would take its requests.
        """
        standing = self.of(backend)
        streak = standing.streak
        if not streak or now >= standing.refused_at + _seconds(streak):
            streak += 1
        seconds = _seconds(streak if doubles else 1)
        closed_until = 0.0 if retry_after_seconds is None else now + retry_after_seconds
        if retry_after_seconds is not None:
            seconds = min(max(retry_after_seconds, seconds if doubles else FIRST_SECONDS), LONGEST_SECONDS)
        # A full engine also refuses requests that were sent before, and still has room for as many as it completes.
        turns = standing.turns if streak == 1 else 0
        self._write(
            backend,
            standing._replace(
                until=now + seconds, streak=streak, turns=turns, refused_at=now, closed_until=closed_until
            ),
        )
        return streak

    def take_turn(self, backend: Backend, now: float) -> None:
        """Record that a backend gets a request, which uses up a turn if it gets one at a time."""
        standing = self.of(backend)
        if not standing.takes_turns(now):
            return
        if standing.turns:
            standing = standing._replace(turns=standing.turns - 1)
        else:
            standing = standing._replace(until=now + _seconds(standing.streak))
        self._write(backend, standing)

    def serve(self, backend: Backend, now: float, *, is_complete: bool) -> None:
        """Record that a backend has begun to answer a request.

        `is_complete`: it has completed the request, so it has room for another one.
        """
        standing = self.of(backend)
        if standing.takes_turns(now):
            self._write(backend, standing._replace(streak=0, turns=standing.turns + is_complete, closed_until=0.0))

    def make_room(self, backend: Backend, now: float) -> None:
        """Record that a request on a backend ended without success, which may leave room for another."""
        standing = self.of(backend)
        if standing.takes_turns(now):
            self._write(backend, standing._replace(turns=standing.turns + 1))

    def press(self, backend: Backend, until: float) -> None:
        """Record that a backend lacks KV memory until a time."""
        self._write(backend, self.of(backend)._replace(pressed_until=until))

    def forget(self, backend: Backend) -> None:
        """Drop the standing of a backend that has left."""
        if self.of(backend) != UNKNOWN:
            self._write(backend, UNKNOWN)

    def _write(self, backend: Backend, standing: Standing) -> None:
        _SLOT.pack_into(self._cells, _place(backend), _owner(backend), *standing)
        self._cells[0] = time.monotonic_ns()


def _seconds(streak: int) -> float:
    """Return the back-off after a number of consecutive refusals."""
    return min(FIRST_SECONDS * 2.0 ** min(max(streak - 1, 0), _MAX_DOUBLINGS), LONGEST_SECONDS)


def _place(backend: Backend) -> int:
    return (1 + backend.slot) * _CELLS_PER_SLOT * _CELL_BYTES


def _owner(backend: Backend) -> int:
    """Return a checksum of the backend. It is not 0, and differs for a later backend in the same slot."""
    return zlib.crc32(backend.key.encode()) + 1
