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


class BackOffState(NamedTuple):
    """Back-off of one backend. Times are seconds of the system's monotonic clock."""

    refuses_until: float = 0.0
    """End of the back-off after a refusal."""
    refusal_streak: int = 0
    """Refusals since the backend last served. Refusals at the same time count once."""
    turn_count: int = 0
    """Requests that the backend may get before `refuses_until`, one for each that it has completed."""
    last_refused_at: float = 0.0
    """Time of the last refusal. 0: there was none."""
    lacks_kv_until: float = 0.0
    """Time until which the backend is taken to lack KV memory."""
    retry_after_until: float = 0.0
    """Time until which the backend takes no request according to its Retry-After, without a maximum. 0: none sent."""

    def takes_one_at_a_time(self, now: float) -> bool:
        """Return whether the backend gets one request at a time, because it refused a short time ago."""
        return self.last_refused_at > 0 and (
            self.refusal_streak > 0 or now < self.last_refused_at + _REOPENS_AFTER_SECONDS
        )

    def would_refuse(self, now: float) -> bool:
        """Return whether the backend gets no request, because it would probably refuse."""
        return now < self.refuses_until and not self.turn_count and self.takes_one_at_a_time(now)


UNKNOWN: Final = BackOffState()
"""Standing of a backend without a record."""


class BackOffs:
    """Table of the standings of all backends, by slot."""

    def __init__(self, slots: int = 1024) -> None:
        # The first slot has only the number of changes.
        self._standing_cells = memoryview(mmap.mmap(-1, (1 + slots) * _CELLS_PER_SLOT * _CELL_BYTES)).cast("q")
        self.change_cells = self._standing_cells[:1]
        """One cell, which changes with every write."""

    def standing_of(self, backend: Backend) -> BackOffState:
        """Return the standing of a backend."""
        owner, *fields = _SLOT.unpack_from(self._standing_cells, _cell_offset(backend))
        return BackOffState(*fields) if owner == _backend_checksum(backend) else UNKNOWN

    def would_refuse(self, backend: Backend, now: float) -> bool:
        """Return whether a backend would probably refuse a request now."""
        return self.standing_of(backend).would_refuse(now)

    def record_refusal(self, backend: Backend, now: float, retry_after_seconds: float | None, *, doubles: bool) -> int:
        """Record a refusal and return the streak.

        Args:
            backend: The backend that refused.
            now: Clock seconds.
            retry_after_seconds: Its Retry-After. None: it sent none.
            doubles: Whether the back-off doubles, because other backends would take its requests.
        """
        standing = self.standing_of(backend)
        streak = standing.refusal_streak
        if not streak or now >= standing.last_refused_at + _back_off_seconds(streak):
            streak += 1
        seconds = _back_off_seconds(streak if doubles else 1)
        closed_until = 0.0 if retry_after_seconds is None else now + retry_after_seconds
        if retry_after_seconds is not None:
            seconds = min(max(retry_after_seconds, seconds if doubles else FIRST_SECONDS), LONGEST_SECONDS)
        # A full engine also refuses requests that were sent before, and still has room for as many as it completes.
        turns = standing.turn_count if streak == 1 else 0
        self._write_standing(
            backend,
            standing._replace(
                refuses_until=now + seconds,
                refusal_streak=streak,
                turn_count=turns,
                last_refused_at=now,
                retry_after_until=closed_until,
            ),
        )
        return streak

    def use_turn(self, backend: Backend, now: float) -> None:
        """Record that a backend gets a request, which uses up a turn if it gets one at a time."""
        standing = self.standing_of(backend)
        if not standing.takes_one_at_a_time(now):
            return
        if standing.turn_count:
            standing = standing._replace(turn_count=standing.turn_count - 1)
        else:
            standing = standing._replace(refuses_until=now + _back_off_seconds(standing.refusal_streak))
        self._write_standing(backend, standing)

    def record_answer_begin(self, backend: Backend, now: float, *, is_complete: bool) -> None:
        """Record that a backend has begun to answer a request.

        `is_complete`: it has completed the request, so it has room for another one.
        """
        standing = self.standing_of(backend)
        if standing.takes_one_at_a_time(now):
            self._write_standing(
                backend,
                standing._replace(
                    refusal_streak=0, turn_count=standing.turn_count + is_complete, retry_after_until=0.0
                ),
            )

    def record_end_without_success(self, backend: Backend, now: float) -> None:
        """Record that a request on a backend ended without success, which may leave room for another."""
        standing = self.standing_of(backend)
        if standing.takes_one_at_a_time(now):
            self._write_standing(backend, standing._replace(turn_count=standing.turn_count + 1))

    def record_kv_pressure(self, backend: Backend, until: float) -> None:
        """Record that a backend lacks KV memory until a time."""
        self._write_standing(backend, self.standing_of(backend)._replace(lacks_kv_until=until))

    def forget_backend(self, backend: Backend) -> None:
        """Drop the standing of a backend that has left."""
        if self.standing_of(backend) != UNKNOWN:
            self._write_standing(backend, UNKNOWN)

    def _write_standing(self, backend: Backend, standing: BackOffState) -> None:
        _SLOT.pack_into(self._standing_cells, _cell_offset(backend), _backend_checksum(backend), *standing)
        self._standing_cells[0] = time.monotonic_ns()


def _back_off_seconds(streak: int) -> float:
    """Return the back-off after a number of consecutive refusals."""
    return min(FIRST_SECONDS * 2.0 ** min(max(streak - 1, 0), _MAX_DOUBLINGS), LONGEST_SECONDS)


def _cell_offset(backend: Backend) -> int:
    return (1 + backend.slot) * _CELLS_PER_SLOT * _CELL_BYTES


def _backend_checksum(backend: Backend) -> int:
    """Return a checksum of the backend. It is not 0, and differs for a later backend in the same slot."""
    return zlib.crc32(backend.key.encode()) + 1
