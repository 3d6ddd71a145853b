"""Journal of recent events that workers share without locks, in shared memory.

Each worker appends records to its own ring. A worker that replaces a dead one continues its ring. The others read new
records, or look back at those that are still there. A slow reader loses records, so a record may be useful but never
necessary. Create the journal before forking.
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
# Head of a record: places of this record and of the one before, length of the data and its checksum. A place is the
# number of bytes that the worker had written before.
_HEAD: Final = Struct("<QQII")


class Journal:
    """All rings, each with one writer.

    A record carries its place and a checksum. They show a reader that the writer has overtaken it, or that it has seen
    the stores out of order, as aarch64 allows.
    """

    def __init__(self, workers: int = 1, ring_bytes: int = _RING_BYTES, write_only_rings: int = 0) -> None:
        """Create empty rings.

        Args:
            workers: Number of rings whose writers also read. One of them may record the events of other hosts.
            ring_bytes: Size of one ring.
            write_only_rings: Number of further rings, whose writers do not read.
        """
        self.worker_count = workers
        self.ring_count = rings = workers + write_only_rings
        self.ring_bytes = ring_bytes
        self._shared_memory = mmap.mmap(-1, rings * (2 * _CELL_BYTES + ring_bytes))
        cells = memoryview(self._shared_memory)[: 2 * rings * _CELL_BYTES].cast("q")
        self.written_bytes_by_ring = cells[:rings]
        """Bytes that each worker has written since the start."""
        self.newest_record_by_ring = cells[rings:]
        """Place of the last record of each worker."""

    def writer_for(self, worker: int) -> JournalWriter:
        """Return the access of one worker, which skips the records that exist now."""
        return JournalWriter(self, worker)

    def write_bytes(self, worker: int, ring_position: int, data: bytes) -> None:
        """Store bytes at a place of a worker's ring."""
        start = self._ring_start(worker)
        at = ring_position % self.ring_bytes
        first = data[: self.ring_bytes - at]
        self._shared_memory[start + at : start + at + len(first)] = first
        self._shared_memory[start : start + len(data) - len(first)] = data[len(first) :]

    def read_bytes(self, worker: int, ring_position: int, length: int) -> bytes:
        """Return the bytes at a place of a worker's ring."""
        start = self._ring_start(worker)
        at = ring_position % self.ring_bytes
        first = self._shared_memory[start + at : start + min(self.ring_bytes, at + length)]
        return first + self._shared_memory[start : start + length - len(first)]

    def latest_records(self, worker: int) -> Iterator[bytes]:
        """Yield the records of a worker, newest first, up to one that has been overwritten."""
        place = self.newest_record_by_ring[worker]
        while self.written_bytes_by_ring[worker]:
            begins, before, length, checksum = _HEAD.unpack(self.read_bytes(worker, place, _HEAD.size))
            record = self.read_bytes(worker, place + _HEAD.size, length) if begins == place else b""
            if begins != place or crc32(record) != checksum or not self.is_intact(worker, place):
                return
            yield record
            if not place:
                return
            place = before

    def is_intact(self, worker: int, ring_position: int) -> bool:
        """Return whether the bytes at a place have not been overwritten yet."""
        return self.written_bytes_by_ring[worker] - ring_position <= self.ring_bytes

    def _ring_start(self, worker: int) -> int:
        return 2 * self.ring_count * _CELL_BYTES + worker * self.ring_bytes


class JournalWriter:
    """Access of one worker, which writes its own ring and reads the others."""

    def __init__(self, journal: Journal, worker: int) -> None:
        self._journal = journal
        self._worker = worker
        self.has_readers = journal.worker_count > 1
        """Whether other workers read the records of this one."""
        # A longer record would leave too little room for others.
        self._max_bytes = journal.ring_bytes // 4 - _HEAD.size
        self._read_positions = journal.written_bytes_by_ring.tolist()

    @property
    def has_new_records(self) -> bool:
        """Whether the others have written records since the last `new_records`."""
        read = self._read_positions
        read[self._worker] = self._journal.written_bytes_by_ring[self._worker]
        return self._journal.written_bytes_by_ring.tolist() != read

    def write_record(self, record: bytes) -> None:
        """Append a record, unless it is longer than a quarter of the ring."""
        journal, worker = self._journal, self._worker
        if len(record) <= self._max_bytes:
            place = journal.written_bytes_by_ring[worker]
            head = _HEAD.pack(place, journal.newest_record_by_ring[worker], len(record), crc32(record))
            journal.write_bytes(worker, place, head + record)
            journal.written_bytes_by_ring[worker] = place + _HEAD.size + len(record)
            journal.newest_record_by_ring[worker] = place

    def new_records(self) -> Iterator[bytes]:
        """Yield the records that the others have written since the last call."""
        for worker in range(self._journal.ring_count):
            if worker != self._worker:
                yield from self._new_records_of(worker)

    def _new_records_of(self, worker: int) -> Iterator[bytes]:
        journal, place = self._journal, self._read_positions[worker]
        while place < journal.written_bytes_by_ring[worker]:
            begins, _, length, checksum = _HEAD.unpack(journal.read_bytes(worker, place, _HEAD.size))
            record = journal.read_bytes(worker, place + _HEAD.size, length) if begins == place else b""
            if not journal.is_intact(worker, place):
                # The writer has overtaken this reader: skip the lost records.
                place = journal.written_bytes_by_ring[worker]
            elif begins != place or crc32(record) != checksum:
                break  # The stores are not visible yet: read it next time.
            else:
                place += _HEAD.size + length
                yield record
        self._read_positions[worker] = place
