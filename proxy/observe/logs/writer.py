"""Writes lines to a file descriptor and never waits for their reader.

What a full pipe does not take is kept, up to a limit; beyond it, and when the disk is full or the reader is gone, whole
lines are dropped and counted. A line that was begun is finished before the next one. Lines of up to PIPE_BUF bytes
(4096) stay whole when several processes write to one pipe; a longer one can be torn apart while the pipe is full.
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
# Written at once.
_MOST_BYTES: Final = select.PIPE_BUF


class LineWriter:
    """Lines on their way to one file description, which is its own where the kernel allows."""

    def __init__(self, fd: int, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._raw = _open(fd)
        self._max_kept_bytes = max_kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_begun = False
        """The first of them is the rest of a line that is partly written."""
        self._is_failing = False
        """The last attempt to write failed, and not for lack of room."""
        self.dropped = 0
        """Lines lost so far."""

    def write(self, line: bytes) -> bool:
        """Write a line if that can be done at once, otherwise keep or drop it; whether it, and all else, is written."""
        return self.keep((line,)) and self.flush()

    def keep(self, lines: Iterable[bytes]) -> bool:
        """Keep lines for the next flush; False when one had to be dropped."""
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
        """Write what was kept, as far as that can be done at once; whether lines flow again, or still do."""
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
        """Close the description. What is kept is lost."""
        self._raw.close()

    def _next(self) -> tuple[bytes, int]:
        """As many lines as a pipe takes whole, or one that is longer; and how many these are."""
        size_bytes = count = 0
        for line in self._kept:
            size_bytes += len(line)
            if size_bytes > _MOST_BYTES:
                break
            count += 1
        return (b"".join(islice(self._kept, count)), count) if count else (self._kept[0], 1)

    def _take_out(self, taken_bytes: int) -> None:
        """How many bytes of the lines are written."""
        self._kept_bytes -= taken_bytes
        while taken_bytes:
            line = self._kept.popleft()
            taken_bytes -= len(line)
            self._is_begun = taken_bytes < 0
            if self._is_begun:
                self._kept.appendleft(line[taken_bytes:])
                return

    def _drop(self) -> None:
        """Drop all lines of which nothing is written."""
        begun = [self._kept[0]] if self._is_begun else []
        self.dropped += len(self._kept) - len(begun)
        self._kept = deque(begun)
        self._kept_bytes = sum(map(len, begun))


class _Raw(Protocol):
    def write(self, line: bytes, /) -> int | None:
        """The number of bytes written, None where it would have to wait. Raises OSError."""

    def close(self) -> None: ...


def _open(fd: int) -> _Raw:
    """A duplicate that is written to without waiting.

    The flag O_NONBLOCK belongs to the file description, which standard output shares with the shell and everything else
    that was started there. So a pipe or a terminal is opened anew, by way of /proc.
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
    """A socket, such as the one to systemd's journal: it cannot be opened anew, but a write can be told not to wait."""

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
    """A pipe or terminal that is asked before each write; it waits only if another process fills it in between."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    def write(self, line: bytes) -> int | None:
        # A pipe that is ready has room for so much.
        return os.write(self._fd, line[: select.PIPE_BUF]) if self._poll.poll(0) else None

    def close(self) -> None:
        os.close(self._fd)
