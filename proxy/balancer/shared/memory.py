"""Memory that forked processes share: values, the last logged states, and the heads of the workers' queues.

Create these objects before forking. The memory is anonymous and inherited, so no other process can open it by a name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_HEAD_CELLS: Final = 5  # version, then length and checksum of each place


class SharedValue:
    """A versioned JSON value in memory that forked processes share.

    There are two places, and the parity of the version selects the valid one. A writer fills the other place and then
    increases the version, so a writer that dies half-way does no harm and readers never wait. Each place has its
    version and a checksum. They show a reader that it was overtaken, or that it has seen the stores out of order, as
    aarch64 allows; it reads again.

    Writers exclude each other with a POSIX record lock, because the kernel releases it when its holder dies. The lock
    belongs to the process, so forked processes may use the inherited descriptor. It guards an anonymous memory file,
    which needs no name, no clean-up and no writable disk.
    """

    def __init__(self, noun: str, capacity_bytes: int) -> None:
        """Create a value that has not been written yet. `noun` names it in the error if a value does not fit."""
        self._noun_for_errors = noun
        self._capacity = capacity_bytes
        self._shared_memory = mmap.mmap(-1, 8 * _HEAD_CELLS + 2 * capacity_bytes)
        self.head_cells = memoryview(self._shared_memory)[: 8 * _HEAD_CELLS].cast("q")
        """Read only. The first cell is the version; reading it here saves a call."""
        self._parsed_version = 0
        self._parsed_value: Any = None
        self._lock_descriptor = os.memfd_create("lock")
        weakref.finalize(self, os.close, self._lock_descriptor)

    @property
    def current_version(self) -> int:
        """Number of the last write; 0 before the first."""
        return self.head_cells[0]

    @property
    def current_value(self) -> Any:
        """Latest value, parsed once per version. The caller must not change it."""
        if self.head_cells[0] != self._parsed_version:
            self._parsed_version, self._parsed_value = self.read_version_and_value()
        return self._parsed_value

    @contextmanager
    def hold_writer_lock(self) -> Iterator[None]:
        """Hold the writers' lock, so that a change can be read, decided and written as one step."""
        fcntl.lockf(self._lock_descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_descriptor, fcntl.LOCK_UN)

    def read_version_and_value(self) -> tuple[int, Any]:
        """Return the version and its value. A value must have been written before."""
        while True:
            version = self.current_version
            place = version % 2
            start = self._place_start(place)
            text = self._shared_memory[start : start + self.head_cells[1 + 2 * place]]
            if zlib.crc32(text) == self.head_cells[2 + 2 * place]:
                written_version, value = orjson.loads(text)
                if written_version == version:
                    return version, value

    def write_value(self, value: Any) -> None:
        """Replace the value. The caller holds the lock. Raises ValueError if the value does not fit."""
        self.prepare_value(value)()

    def prepare_value(self, value: Any) -> Callable[[], None]:
        """Write the value to the unused place, and return a function that makes it valid.

        The caller holds the lock over both steps. Raises ValueError if the value does not fit.
        """
        version = self.current_version + 1
        place = version % 2
        start = self._place_start(place)
        text = orjson.dumps((version, value))
        if len(text) > self._capacity:
            raise ValueError(f"the {self._noun_for_errors} is too long")
        self._shared_memory[start : start + len(text)] = text
        self.head_cells[1 + 2 * place] = len(text)
        self.head_cells[2 + 2 * place] = zlib.crc32(text)

        def commit() -> None:
            self.head_cells[0] = version

        return commit

    def _place_start(self, place: int) -> int:
        return 8 * _HEAD_CELLS + place * self._capacity


_CAPACITY_BYTES: Final = 1024 * 1024  # 1,024 instances with the longest names take 300 KiB


class LogOnce:
    """The last logged state of each subject, such as an instance, shared by all workers.

    All workers find the same changes. The first one logs a change, and the others find it here.
    """

    def __init__(self, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        """Create an empty record. If it outgrows `capacity_bytes` as JSON, only the newest entry is kept."""
        self._shared_value = SharedValue("record of logged states", capacity_bytes)
        self._shared_value.write_value({})

    def is_news(self, subject: str, state_word: str) -> bool:
        """Return whether `state_word` differs from the last state of the subject, and record it."""
        if self._shared_value.current_value.get(subject) == state_word:
            return False
        with self._shared_value.hold_writer_lock():
            words = self._shared_value.current_value
            if words.get(subject) == state_word:
                return False
            self._write_words({**words, subject: state_word}, or_only={subject: state_word})
            return True

    def forget_subject(self, subject: str) -> None:
        """Drop a subject that no longer exists. If it returns, its first state is news."""
        with self._shared_value.hold_writer_lock():
            words = self._shared_value.current_value
            self._write_words({other: word for other, word in words.items() if other != subject}, or_only={})

    def _write_words(self, words: dict[str, str], or_only: dict[str, str]) -> None:
        try:
            self._shared_value.write_value(words)
        except ValueError:  # Full of subjects that were never forgotten: some changes are logged twice.
            self._shared_value.write_value(or_only)


NO_HEAD: Final = 0
"""Position of an empty queue."""
AGEING: Final = 1 / 3
"""Seconds of work that one second of waiting offsets.

A unit goes before all units that arrive later than three times its work: earliest deadline first, with that time as the
deadline. With 0, long units would starve behind short ones. Near 1 the order is that of arrival, and near saturation
short units are late because of long ones."""
_CELL_BYTES: Final = 8
_PLACE_BITS: Final = 52
_MAX_PLACE: Final = (1 << _PLACE_BITS) - 1
_MAX_PRIORITY: Final = 1 << 10
# Time for which room is left, in seconds. Each queue looks for room every 20 ms.
_LEFT_SECONDS: Final = 0.05


def encode_head(priority: int, place_seconds: float) -> int:
    """Return a position as an integer; lower goes first.

    Args:
        priority: The request's priority; lower goes first.
        place_seconds: Its work, plus AGEING times its arrival on the monotonic clock of the system.
    """
    clipped = min(max(priority, -_MAX_PRIORITY), _MAX_PRIORITY)
    return (clipped << _PLACE_BITS) + min(max(1, round(place_seconds * 1e6)), _MAX_PLACE)


def shift_head(head: int, seconds: float) -> int:
    """Return a position moved to a clock that is `seconds` ahead. NO_HEAD stays NO_HEAD."""
    if head == NO_HEAD:
        return NO_HEAD
    return encode_head(head >> _PLACE_BITS, (head & _MAX_PLACE) / 1e6 + AGEING * seconds)


class QueueHeads:
    """Position of the first request in each worker's queue, which keeps several queues nearly in one order.

    Each worker, and each other gateway of the group, has a queue. Without coordination it would send its first request
    wherever there is room. So each writes the position of its first request here, and leaves room for a moment to an
    earlier one of another queue. It does not wait longer, because the other queue may not need this room.

    There is one cell for each worker and one for all other gateways. Each cell has one writer.
    """

    def __init__(self, workers: int = 1, guests: int = 0) -> None:
        self.worker_count = workers
        self._head_cells = memoryview(mmap.mmap(-1, (workers + guests) * _CELL_BYTES)).cast("q")

    def view_of_worker(self, number: int) -> WorkerQueueHead | None:
        """Return the view of one worker, or None if it has the only queue."""
        return WorkerQueueHead(self, number) if len(self._head_cells) > 1 else None

    def write_head(self, worker_number: int, head: int) -> None:
        """Write the position of a worker's first request, or NO_HEAD if its queue is empty."""
        self._head_cells[worker_number] = head

    def write_guest_head(self, head: int) -> None:
        """Write the first position of all other gateways. Does nothing if none are configured."""
        if len(self._head_cells) > self.worker_count:
            self._head_cells[self.worker_count] = head

    def first_head_of_workers(self) -> int:
        """Return the first position of this gateway's workers, or NO_HEAD."""
        return first_head(self._head_cells[: self.worker_count])

    def first_head_of_others(self, number: int) -> int:
        """Return the first position of all other queues, or NO_HEAD."""
        return first_head([*self._head_cells[:number], *self._head_cells[number + 1 :]])


def first_head(heads: Iterable[int]) -> int:
    """Return the first of these positions, or NO_HEAD."""
    return min((head for head in heads if head != NO_HEAD), default=NO_HEAD)


class WorkerQueueHead:
    """One worker's view: it writes its own position and compares it with the others."""

    def __init__(self, queue_heads: QueueHeads, number: int) -> None:
        self._queue_heads = queue_heads
        self._worker_number = number
        self._yielded_to_head = NO_HEAD
        self._yielded_at = 0.0

    def publish_head(self, priority: int, place_seconds: float) -> None:
        """Write the position of the first request in this queue."""
        self._queue_heads.write_head(self._worker_number, encode_head(priority, place_seconds))

    def publish_empty(self) -> None:
        """Record that this queue is empty."""
        self._queue_heads.write_head(self._worker_number, NO_HEAD)

    def should_yield_to_earlier(self, priority: int, place_seconds: float, now: float) -> bool:
        """Return whether a request must leave the room to an earlier one of another queue.

        Room is left to the same request only once, for a moment.
        """
        other = self._queue_heads.first_head_of_others(self._worker_number)
        if other == NO_HEAD or other >= encode_head(priority, place_seconds):
            return False
        if other != self._yielded_to_head:
            self._yielded_to_head, self._yielded_at = other, now
        return now - self._yielded_at < _LEFT_SECONDS
