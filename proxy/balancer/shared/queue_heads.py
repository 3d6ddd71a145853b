"""Who is the next in each worker's queue: what makes several queues nearly one.

Each worker, and each other gateway of the group, has a queue of its own, and would send its own next one wherever there
is room. So each writes the place of its next one here, and leaves room for a moment to another one whose next is before
its own. Nobody waits for that for long, as the other one may not want this room. Create it before forking.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_HEAD: Final = 0
"""In place of a front."""
AGEING: Final = 1 / 3
"""Seconds of work that a second of waiting makes up for: a unit goes before all that come later by three times its
work, which is earliest deadline first with that as everyone's deadline. With 0 the long would starve behind the short;
the nearer to 1, the more all wait in turn, and near saturation the short are late because of the long."""
_CELL_BYTES: Final = 8
_PLACE_BITS: Final = 52
_MOST_PLACE: Final = (1 << _PLACE_BITS) - 1
_MOST_PRIORITY: Final = 1 << 10
# How long room is left: until others have looked, of which each does so every 20 ms.
_LEFT_SECONDS: Final = 0.05


def encode_head(priority: int, place_seconds: float) -> int:
    """Where one stands: lower goes first. `place_seconds`: its work, and AGEING times when it came by the system's
    monotonic clock.
    """
    clipped = min(max(priority, -_MOST_PRIORITY), _MOST_PRIORITY)
    return (clipped << _PLACE_BITS) + min(max(1, round(place_seconds * 1e6)), _MOST_PLACE)


def shift_head(front: int, seconds: float) -> int:
    """A front by another clock, which is `seconds` ahead of the one it was made with; NO_HEAD stays NO_HEAD."""
    if front == NO_HEAD:
        return NO_HEAD
    return encode_head(front >> _PLACE_BITS, (front & _MOST_PLACE) / 1e6 + AGEING * seconds)


class QueueHeads:
    """A cell for each worker, and one for all other gateways, each with one writer."""

    def __init__(self, workers: int = 1, guests: int = 0) -> None:
        self.workers = workers
        self._cells = memoryview(mmap.mmap(-1, (workers + guests) * _CELL_BYTES)).cast("q")

    def of_worker(self, number: int) -> WorkerQueueHead | None:
        """The access of the worker with this number; None: it is the only queue, so nobody has to be told."""
        return WorkerQueueHead(self, number) if len(self._cells) > 1 else None

    def put(self, number: int, front: int) -> None:
        """Write the front of the worker with this number, as `encode_head` makes it; NO_HEAD: nobody waits there."""
        self._cells[number] = front

    def put_guests(self, front: int) -> None:
        """Write the first of the fronts of all other gateways. Does nothing where no others are configured."""
        if len(self._cells) > self.workers:
            self._cells[self.workers] = front

    def own(self) -> int:
        """The first of this gateway's workers, or NO_HEAD."""
        return first_head(self._cells[: self.workers])

    def elsewhere(self, number: int) -> int:
        """The first of all others, or NO_HEAD."""
        return first_head([*self._cells[:number], *self._cells[number + 1 :]])


def first_head(fronts: Iterable[int]) -> int:
    """The first of these, or NO_HEAD."""
    return min((front for front in fronts if front != NO_HEAD), default=NO_HEAD)


class WorkerQueueHead:
    """One worker's: it tells where the next one in its queue stands, and sees where those of the others do."""

    def __init__(self, fronts: QueueHeads, number: int) -> None:
        self._fronts = fronts
        self._number = number
        self._left_to = NO_HEAD
        self._left_at = 0.0

    def tell(self, priority: int, place_seconds: float) -> None:
        """Its next one stands there."""
        self._fronts.put(self._number, encode_head(priority, place_seconds))

    def tell_empty(self) -> None:
        """Nobody waits here."""
        self._fronts.put(self._number, NO_HEAD)

    def leaves_room(self, priority: int, place_seconds: float, now: float) -> bool:
        """Whether one that might go now had better leave the room to another one, for the moment. What was left to
        somebody in vain is not left to him again.
        """
        other = self._fronts.elsewhere(self._number)
        if other == NO_HEAD or other >= encode_head(priority, place_seconds):
            return False
        if other != self._left_to:
            self._left_to, self._left_at = other, now
        return now - self._left_at < _LEFT_SECONDS
