"""Writes lines to a file descriptor without ever waiting for its reader.

Lines that a full pipe does not take are kept, up to a limit. Beyond it, and if the disk is full or the reader is gone,
whole lines are dropped and counted. A partly written line is finished before the next one.

Lines of up to PIPE_BUF bytes (4096) stay whole if several processes write to one pipe. A longer line can be torn while
the pipe is full.
"""

from __future__ import annotations

import io
import os
import select
import socket
import stat
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_KEPT_BYTES: Final = 1024 * 1024
# Size of one write.
_MOST_BYTES: Final = select.PIPE_BUF


class LineWriter:
    """Lines on the way to one file description, which the writer opens for itself if the kernel allows that."""

    def __init__(self, fd: int, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._raw = _open(fd)
        self._max_kept_bytes = max_kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_begun = False
        """Whether the first kept line is the rest of a partly written line."""
        self._is_failing = False
        """Whether the last write failed for another reason than a full pipe."""
        self.dropped = 0
        """Total number of dropped lines."""

    def write(self, line: bytes) -> bool:
        """Write a line at once, or keep or drop it; return whether all lines are written."""
        return self.keep((line,)) and self.flush()

    def keep(self, lines: Iterable[bytes]) -> bool:
        """Keep lines for the next flush. Returns False if one was dropped."""
        lines = tuple(lines)
        kept_bytes = self._kept_bytes + sum(map(len, lines))
        if kept_bytes <= self._max_kept_bytes:
            self._kept.extend(lines)
            self._kept_bytes = kept_bytes
            return True
        is_kept = True
        for line in lines:
            kept_bytes = self._kept_bytes + len(line)
            if kept_bytes > self._max_kept_bytes:
                self.flush()
                kept_bytes = self._kept_bytes + len(line)
                if kept_bytes > self._max_kept_bytes:
                    self.dropped += 1
                    is_kept = False
                    continue
            self._kept.append(line)
            self._kept_bytes = kept_bytes
        return is_kept

    def flush(self) -> bool:
        """Write kept lines, as far as possible without waiting; return whether the writer takes lines."""
        kept = self._kept
        while kept:
            lines, count = self._next()
            try:
                taken = self._raw.write(lines) or 0
            except OSError:  # the disk is full, or the reader is gone
                self._is_failing = True
                self._drop()
                return False
            self._is_failing = False
            if taken < len(lines):
                self._take_out(taken)
                if not taken:
                    return False
                continue
            self._kept_bytes -= taken
            self._is_begun = False
            for _ in range(count):
                kept.popleft()
        return not self._is_failing

    def close(self) -> None:
        """Close the file description. Kept lines are lost."""
        self._raw.close()

    def _next(self) -> tuple[bytes, int]:
        """Return as many lines as a pipe takes in one piece, or one longer line, and their number."""
        size_bytes = count = 0
        for line in self._kept:
            size_bytes += len(line)
            if size_bytes > _MOST_BYTES:
                break
            count += 1
        return (b"".join(islice(self._kept, count)), count) if count else (self._kept[0], 1)

    def _take_out(self, taken_bytes: int) -> None:
        """Remove written bytes from the kept lines."""
        self._kept_bytes -= taken_bytes
        while taken_bytes:
            line = self._kept.popleft()
            taken_bytes -= len(line)
            self._is_begun = taken_bytes < 0
            if self._is_begun:
                self._kept.appendleft(line[taken_bytes:])
                return

    def _drop(self) -> None:
        """Drop all lines that are not partly written."""
        begun = [self._kept[0]] if self._is_begun else []
        self.dropped += len(self._kept) - len(begun)
        self._kept = deque(begun)
        self._kept_bytes = sum(map(len, begun))


class _Raw(Protocol):
    def write(self, line: bytes, /) -> int | None:
        """Return the number of bytes written, or None if the write would wait. Raises OSError."""

    def close(self) -> None: ...


def _open(fd: int) -> _Raw:
    """Return a duplicate of the descriptor that writes without waiting.

    O_NONBLOCK belongs to the file description, which standard output shares with the shell and its other programs. So a
    pipe or terminal is reopened through /proc.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return _Socket(fd)
    if stat.S_ISREG(mode):
        return io.FileIO(os.dup(fd), "w")
    try:
        return io.FileIO(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "w")
    except OSError:  # another user's pipe, as after `su` in a container; a pipe without a reader; no /proc
        return _Polled(fd)


class _Socket:
    """A socket, such as the one to systemd's journal. It cannot be reopened, but supports writes without waiting."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

    def write(self, line: bytes) -> int | None:
        try:
            return self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._socket.close()


class _Polled:
    """A pipe or terminal that is polled before each write.

    A write waits only if another process fills it in between.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    def write(self, line: bytes) -> int | None:
        # a pipe that is ready has room for this size
        return os.write(self._fd, line[: select.PIPE_BUF]) if self._poll.poll(0) else None

    def close(self) -> None:
        os.close(self._fd)
