"""Values in memory that forked processes share, and the record of what they have logged.

Create them before forking. The memory is anonymous and inherited, so no other process can open it by a name.
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
    from collections.abc import Callable, Iterator


_HEAD_CELLS: Final = 5  # version, then length and checksum of each place


class SharedValue:
    """A versioned JSON value in memory that forked processes share.

    There are two places and the version's parity says which one counts. A writer fills the other place and then moves
    the version, so a writer that dies half-way does no harm and readers never wait. Each place carries its version and
    a checksum: a reader that was overtaken, or sees the stores out of order as aarch64 allows, notices and looks again.

    Writers exclude each other with a POSIX record lock, because the kernel releases it when its holder dies; the lock
    belongs to the process, so forked ones may use the inherited descriptor. It guards an anonymous memory file: nothing
    to name, to clean up or to be refused by a read-only disk.
    """

    def __init__(self, noun: str, capacity_bytes: int) -> None:
        """`noun` is what a value that does not fit is called."""
        self._noun = noun
        self._capacity = capacity_bytes
        self._memory = mmap.mmap(-1, 8 * _HEAD_CELLS + 2 * capacity_bytes)
        self.head = memoryview(self._memory)[: 8 * _HEAD_CELLS].cast("q")
        """Read only. Its first cell is the version, which costs no call there."""
        self._lock = os.memfd_create("lock")
        weakref.finalize(self, os.close, self._lock)

    @property
    def version(self) -> int:
        """Moves with every write; 0 before the first."""
        return self.head[0]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the writers' lock, for as long as it takes to read, decide and write."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def read(self) -> tuple[int, Any]:
        """The version and the value that belongs to it. Something must have been written before."""
        while True:
            version = self.version
            place = version % 2
            start = self._start(place)
            text = self._memory[start : start + self.head[1 + 2 * place]]
            if zlib.crc32(text) == self.head[2 + 2 * place]:
                written_version, value = orjson.loads(text)
                if written_version == version:
                    return version, value

    def write(self, value: Any) -> None:
        """Replace the value; the caller holds the lock. Raises ValueError when it does not fit."""
        self.prepare(value)()

    def prepare(self, value: Any) -> Callable[[], None]:
        """Fill the place that does not count; what is returned makes it count. The caller holds the lock over both.

        Raises ValueError when the value does not fit.
        """
        version = self.version + 1
        place = version % 2
        start = self._start(place)
        text = orjson.dumps((version, value))
        if len(text) > self._capacity:
            raise ValueError(f"the {self._noun} is too long")
        self._memory[start : start + len(text)] = text
        self.head[1 + 2 * place] = len(text)
        self.head[2 + 2 * place] = zlib.crc32(text)

        def commit() -> None:
            self.head[0] = version

        return commit

    def _start(self, place: int) -> int:
        return 8 * _HEAD_CELLS + place * self._capacity


_CAPACITY_BYTES: Final = 1024 * 1024  # 1,024 instances with the longest names take 300 KiB


class LogOnce:
    """The last logged state of each subject, such as an instance, shared by all workers.

    All workers find the same changes. The first one logs a change, and the others find it here.
    """

    def __init__(self, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        """Create an empty record. If it outgrows `capacity_bytes` as JSON, only the newest entry is kept."""
        self._shared = SharedValue("bulletin", capacity_bytes)
        self._shared.write({})
        self._read_version = -1
        self._words: dict[str, str] = {}

    def is_news(self, subject: str, word: str) -> bool:
        """Return whether `word` differs from the last state of the subject, and record it."""
        if self._read().get(subject) == word:
            return False
        with self._shared.exclusive():
            words = self._read()
            if words.get(subject) == word:
                return False
            self._write({**words, subject: word}, or_only={subject: word})
            return True

    def forget(self, subject: str) -> None:
        """Drop a subject that no longer exists. If it returns, its first state is news."""
        with self._shared.exclusive():
            words = self._read()
            self._write({known: word for known, word in words.items() if known != subject}, or_only={})

    def _read(self) -> dict[str, str]:
        if self._shared.version != self._read_version:
            self._read_version, self._words = self._shared.read()
        return self._words

    def _write(self, words: dict[str, str], or_only: dict[str, str]) -> None:
        try:
            self._shared.write(words)
        except ValueError:  # full of what is gone and was not forgotten: some things are told twice
            self._shared.write(or_only)
