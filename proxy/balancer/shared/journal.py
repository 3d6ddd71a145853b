"""What each worker has done that the others should know of, in shared memory: nobody waits, nothing is kept for long.

Each worker appends records to a ring of its own, which it goes on with when it takes the place of a worker that died.
Others read what is new in it, or look back at what is there. Who reads too late loses records, so they may only hold
what is of use and not what is needed. Make the journal before forking.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

_RING_BYTES: Final = 1024 * 1024
_CELL_BYTES: Final = 8
# Of a record: where it and the one before begin, in bytes since the worker's first one, its length without this, and
# its checksum.
_HEAD: Final = Struct("<QQII")


class Journal:
    """All rings, each with one writer. A record carries its place and a checksum: a reader that was
    overtaken, or sees the stores out of order as aarch64 allows, notices.
    """

    def __init__(self, workers: int = 1, ring_bytes: int = _RING_BYTES, write_only: int = 0) -> None:
        """`workers`: all who write and read. One of them may be a guest who tells what workers on other hosts have
        done. `write_only` only write, and have the seats behind the workers'.
        """
        self.workers = workers
        self.rings = rings = workers + write_only
        self._ring_bytes = ring_bytes
        self._memory = mmap.mmap(-1, rings * (2 * _CELL_BYTES + ring_bytes))
        cells = memoryview(self._memory)[: 2 * rings * _CELL_BYTES].cast("q")
        self.written = cells[:rings]
        """Bytes that each worker has ever written."""
        self.newest = cells[rings:]
        """Where the last record of each worker begins."""

    def writer(self, worker: int) -> JournalWriter:
        """One worker's access. What was written before is not read."""
        return JournalWriter(self, worker)

    def put(self, worker: int, place: int, data: bytes) -> None:
        """Store bytes at a place of a worker's ring."""
        start = self._start(worker)
        at = place % self._ring_bytes
        first = data[: self._ring_bytes - at]
        self._memory[start + at : start + at + len(first)] = first
        self._memory[start : start + len(data) - len(first)] = data[len(first) :]

    def get(self, worker: int, place: int, length: int) -> bytes:
        """The bytes at a place of a worker's ring."""
        start = self._start(worker)
        at = place % self._ring_bytes
        first = self._memory[start + at : start + min(self._ring_bytes, at + length)]
        return first + self._memory[start : start + length - len(first)]

    def latest(self, worker: int) -> Iterator[bytes]:
        """What there is of a worker's records, the newest first, until one that is written over meanwhile."""
        place = self.newest[worker]
        while self.written[worker]:
            begins, before, length, checksum = _HEAD.unpack(self.get(worker, place, _HEAD.size))
            record = self.get(worker, place + _HEAD.size, length) if begins == place else b""
            if begins != place or crc32(record) != checksum or not self.holds(worker, place):
                return
            yield record
            if not place:
                return
            place = before

    def holds(self, worker: int, place: int) -> bool:
        """Whether what was written there has not been written over yet."""
        return self.written[worker] - place <= self._ring_bytes

    def fits(self, length: int) -> bool:
        """Whether a record of this length leaves room for others."""
        return _HEAD.size + length <= self._ring_bytes // 4

    def _start(self, worker: int) -> int:
        return 2 * self.rings * _CELL_BYTES + worker * self._ring_bytes


class JournalWriter:
    """One worker's: it writes its ring and reads the others'."""

    def __init__(self, journal: Journal, worker: int) -> None:
        self._journal = journal
        self._worker = worker
        self.is_heard = journal.workers > 1
        """Others read what this one writes."""
        self._read = journal.written.tolist()

    @property
    def has_news(self) -> bool:
        """Whether the others have written something since."""
        read = self._read
        read[self._worker] = self._journal.written[self._worker]
        return self._journal.written.tolist() != read

    def write(self, record: bytes) -> None:
        """Append a record. One that is too long is left out."""
        journal, worker = self._journal, self._worker
        if journal.fits(len(record)):
            place = journal.written[worker]
            head = _HEAD.pack(place, journal.newest[worker], len(record), crc32(record))
            journal.put(worker, place, head + record)
            journal.written[worker] = place + _HEAD.size + len(record)
            journal.newest[worker] = place

    def news(self) -> Iterator[bytes]:
        """What the others have written since."""
        for worker in range(self._journal.rings):
            if worker != self._worker:
                yield from self._news_of(worker)

    def _news_of(self, worker: int) -> Iterator[bytes]:
        journal, place = self._journal, self._read[worker]
        while place < journal.written[worker]:
            begins, _, length, checksum = _HEAD.unpack(journal.get(worker, place, _HEAD.size))
            record = journal.get(worker, place + _HEAD.size, length) if begins == place else b""
            if not journal.holds(worker, place):
                place = journal.written[worker]  # overtaken: what it has lost, nobody needs
            elif begins != place or crc32(record) != checksum:
                break  # it will be there at the next look
            else:
                place += _HEAD.size + length
                yield record
        self._read[worker] = place
