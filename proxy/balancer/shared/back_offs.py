"""The backends that are passed over for a while, known to all workers: they refused requests, or lack KV memory.

A backend that answers 429 or 503 gets no request for a while, and the time doubles with each refusal until it serves.
Then it gets one request at a time: one when the time is over, and one for each request that it completes. It gets any
number again when it has served and not refused for some seconds.

Every worker writes every cell. A cell is written as a whole, and a lost update costs one request a second attempt.
Create it before forking.
"""

from __future__ import annotations

import mmap
import time
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from proxy.common.backend import Backend

FIRST_SECONDS: Final = 1.0
"""How long a backend is passed over after its first refusal, unless it says how long itself."""
LONGEST_SECONDS: Final = 30.0
"""How long it is passed over at most."""
_REOPENS_AFTER_SECONDS: Final = 5.0
_MOST_DOUBLINGS: Final = 8
_CELL_BYTES: Final = 8
_OWNER, _REFUSED_AT, _UNTIL, _STREAK, _TURNS, _PRESSED_UNTIL, _CLOSED_UNTIL = range(7)
_CELLS_PER_SLOT: Final = 8
_TICKS_PER_SECOND: Final = 1_000_000


class Standing(NamedTuple):
    """How one backend stands. Times are seconds of the system's monotonic clock."""

    until: float = 0.0
    """Until when it gets no request after a refusal."""
    streak: int = 0
    """How often it refused since it last served, counting refusals of the same moment once."""
    turns: int = 0
    """Requests that it may get before that, because it completed as many."""
    refused_at: float = 0.0
    """When it refused last; 0: it did not."""
    pressed_until: float = 0.0
    """Until when it lacks KV memory."""
    closed_until: float = 0.0
    """Until when it takes no request by its own Retry-After, however long that is; 0: it did not say."""

    def takes_turns(self, now: float) -> bool:
        """Whether it gets one request at a time: it refused, and has not served for long enough since."""
        return self.refused_at > 0 and (self.streak > 0 or now < self.reopens_at)

    def refuses(self, now: float) -> bool:
        """Whether it gets none: it would probably refuse."""
        return now < self.until and not self.turns and self.takes_turns(now)

    @property
    def reopens_at(self) -> float:
        """When it gets any number of requests again, if it serves and does not refuse until then."""
        return self.refused_at + _REOPENS_AFTER_SECONDS


UNKNOWN: Final = Standing()
"""Of a backend that nothing is known of."""


class BackOffs:
    """The standing of all backends, by slot."""

    def __init__(self, slots: int = 1024) -> None:
        self._cells = memoryview(mmap.mmap(-1, (1 + slots) * _CELLS_PER_SLOT * _CELL_BYTES)).cast("q")
        self.changes = self._cells[:1]
        """A number that every write replaces by another one."""

    def of(self, backend: Backend) -> Standing:
        """Return the standing of a backend."""
        cells, first = self._cells, _first(backend)
        if cells[first + _OWNER] != _owner(backend):
            return UNKNOWN
        return Standing(
            cells[first + _UNTIL] / _TICKS_PER_SECOND,
            cells[first + _STREAK],
            cells[first + _TURNS],
            cells[first + _REFUSED_AT] / _TICKS_PER_SECOND,
            cells[first + _PRESSED_UNTIL] / _TICKS_PER_SECOND,
            cells[first + _CLOSED_UNTIL] / _TICKS_PER_SECOND,
        )

    def refuses(self, backend: Backend, now: float) -> bool:
        """Whether a backend would probably refuse a request now."""
        return self.of(backend).refuses(now)

    def refuse(self, backend: Backend, now: float, retry_after_seconds: float | None, *, doubles: bool) -> int:
        """Note a refusal and return the streak. `doubles`: others are left that would take its requests."""
        standing = self.of(backend)
        streak = standing.streak
        if not streak or now >= standing.refused_at + _seconds(streak):
            streak += 1
        seconds = _seconds(streak if doubles else 1)
        closed_until = 0.0 if retry_after_seconds is None else now + retry_after_seconds
        if retry_after_seconds is not None:
            seconds = min(max(retry_after_seconds, seconds if doubles else FIRST_SECONDS), LONGEST_SECONDS)
        # A full engine refuses some that were sent before, and has room for as many as it completes all the same.
        turns = standing.turns if streak == 1 else 0
        self._write(
            backend,
            standing._replace(
                until=now + seconds, streak=streak, turns=turns, refused_at=now, closed_until=closed_until
            ),
        )
        return streak

    def take_turn(self, backend: Backend, now: float) -> None:
        """A backend is given a request. It takes a turn if it gets one at a time."""
        standing = self.of(backend)
        if not standing.takes_turns(now):
            return
        if standing.turns:
            standing = standing._replace(turns=standing.turns - 1)
        else:
            standing = standing._replace(until=now + _seconds(standing.streak))
        self._write(backend, standing)

    def serve(self, backend: Backend, now: float, *, is_complete: bool) -> None:
        """A backend has begun to answer a request; `is_complete`: or has completed one, so that it has room for one."""
        standing = self.of(backend)
        if standing.takes_turns(now):
            self._write(backend, standing._replace(streak=0, turns=standing.turns + is_complete, closed_until=0.0))

    def make_room(self, backend: Backend, now: float) -> None:
        """A request on a backend has ended otherwise, and may leave room for another."""
        standing = self.of(backend)
        if standing.takes_turns(now):
            self._write(backend, standing._replace(turns=standing.turns + 1))

    def press(self, backend: Backend, until: float) -> None:
        """A backend lacks KV memory until then."""
        self._write(backend, self.of(backend)._replace(pressed_until=until))

    def forget(self, backend: Backend) -> None:
        """A backend has left."""
        if self.of(backend) != UNKNOWN:
            self._write(backend, UNKNOWN)

    def _write(self, backend: Backend, standing: Standing) -> None:
        cells, first = self._cells, _first(backend)
        cells[first + _OWNER] = _owner(backend)
        cells[first + _UNTIL] = _ticks(standing.until)
        cells[first + _STREAK] = standing.streak
        cells[first + _TURNS] = standing.turns
        cells[first + _REFUSED_AT] = _ticks(standing.refused_at)
        cells[first + _PRESSED_UNTIL] = _ticks(standing.pressed_until)
        cells[first + _CLOSED_UNTIL] = _ticks(standing.closed_until)
        cells[0] = time.monotonic_ns()


def _seconds(streak: int) -> float:
    """How long a backend is passed over after so many refusals."""
    return min(FIRST_SECONDS * 2.0 ** min(max(streak - 1, 0), _MOST_DOUBLINGS), LONGEST_SECONDS)


def _first(backend: Backend) -> int:
    return (1 + backend.slot) * _CELLS_PER_SLOT


def _owner(backend: Backend) -> int:
    """Never 0, and another one for the backend that has the slot later."""
    return zlib.crc32(backend.key.encode()) + 1


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_SECOND)
