"""Position of the first request in each worker's queue, which keeps several queues nearly in one order.

Each worker, and each other gateway of the group, has a queue. Without coordination it would send its first request
wherever there is room. So each writes the position of its first request here, and leaves room for a moment to an
earlier one of another queue. It does not wait longer, because the other queue may not need this room. Create the table
before forking.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_HEAD: Final = 0
"""Position of an empty queue."""
AGEING: Final = 1 / 3
"""Seconds of work that one second of waiting offsets.

A unit goes before all units that arrive later than three times its work: earliest deadline first, with that time as the
deadline. With 0, long units would starve behind short ones. Near 1 the order is that of arrival, and near saturation
short units are late because of long ones."""
_CELL_BYTES: Final = 8
_PLACE_BITS: Final = 52
_MOST_PLACE: Final = (1 << _PLACE_BITS) - 1
_MOST_PRIORITY: Final = 1 << 10
# Time for which room is left, in seconds. Each queue looks for room every 20 ms.
_LEFT_SECONDS: Final = 0.05


def encode_head(priority: int, place_seconds: float) -> int:
    """Return a position as an integer; lower goes first.

    Args:
        priority: The request's priority; lower goes first.
        place_seconds: Its work, plus AGEING times its arrival on the monotonic clock of the system.
    """
    clipped = min(max(priority, -_MOST_PRIORITY), _MOST_PRIORITY)
    return (clipped << _PLACE_BITS) + min(max(1, round(place_seconds * 1e6)), _MOST_PLACE)


def shift_head(head: int, seconds: float) -> int:
    """Return a position for a clock that is `seconds` ahead of its own. NO_HEAD stays NO_HEAD."""
    if head == NO_HEAD:
        return NO_HEAD
    return encode_head(head >> _PLACE_BITS, (head & _MOST_PLACE) / 1e6 + AGEING * seconds)


class QueueHeads:
    """One cell for each worker and one for all other gateways. Each cell has one writer."""

    def __init__(self, workers: int = 1, guests: int = 0) -> None:
        self.workers = workers
        self._cells = memoryview(mmap.mmap(-1, (workers + guests) * _CELL_BYTES)).cast("q")

    def of_worker(self, number: int) -> WorkerQueueHead | None:
        """Return the view of one worker, or None if it has the only queue."""
        return WorkerQueueHead(self, number) if len(self._cells) > 1 else None

    def put(self, number: int, head: int) -> None:
        """Write the position of a worker's first request, or NO_HEAD if its queue is empty."""
        self._cells[number] = head

    def put_guests(self, head: int) -> None:
        """Write the first position of all other gateways. Does nothing if none are configured."""
        if len(self._cells) > self.workers:
            self._cells[self.workers] = head

    def own(self) -> int:
        """Return the first position of this gateway's workers, or NO_HEAD."""
        return first_head(self._cells[: self.workers])

    def elsewhere(self, number: int) -> int:
        """Return the first position of all other queues, or NO_HEAD."""
        return first_head([*self._cells[:number], *self._cells[number + 1 :]])


def first_head(heads: Iterable[int]) -> int:
    """Return the first of these positions, or NO_HEAD."""
    return min((head for head in heads if head != NO_HEAD), default=NO_HEAD)


class WorkerQueueHead:
    """One worker's view: it writes its own position and compares it with the others."""

    def __init__(self, queue_heads: QueueHeads, number: int) -> None:
        self._queue_heads = queue_heads
        self._number = number
        self._left_to = NO_HEAD
        self._left_at = 0.0

    def tell(self, priority: int, place_seconds: float) -> None:
        """Write the position of the first request in this queue."""
        self._queue_heads.put(self._number, encode_head(priority, place_seconds))

    def tell_empty(self) -> None:
        """Record that this queue is empty."""
        self._queue_heads.put(self._number, NO_HEAD)

    def leaves_room(self, priority: int, place_seconds: float, now: float) -> bool:
        """Return whether a request must leave the room to an earlier one of another queue.

        Room is left to the same request only once, for a moment.
        """
        other = self._queue_heads.elsewhere(self._number)
        if other == NO_HEAD or other >= encode_head(priority, place_seconds):
            return False
        if other != self._left_to:
            self._left_to, self._left_at = other, now
        return now - self._left_at < _LEFT_SECONDS
