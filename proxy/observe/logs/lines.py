"""The way of a log line: limits for similar lines, masking of secrets, fast access lines, and the output.

Each kind of line has a token bucket: a burst passes, and then a fixed number per second. Lines that are left out are
counted, and the number is logged. Nearly all access lines are written without a formatter.

The writer never waits for the reader of the log. Lines that a full pipe does not take are kept, up to a limit. Beyond
it, and if the disk is full or the reader is gone, whole lines are dropped and counted. A partly written line is
finished before the next one. Lines of up to PIPE_BUF bytes (4096) stay whole if several processes write to one pipe. A
longer line can be torn while the pipe is full.

This module is compiled. Formatters and handlers cannot be, because they inherit from classes of logging.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import socket
import stat
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

BURST_LINES: Final = 20
LINES_PER_SECOND: Final = 5.0
_TELL_AFTER_SECONDS: Final = 1.0


class LineKind(NamedTuple):
    """Kind of a log line. Two lines of one kind differ only in their arguments."""

    logger: str
    level: int
    message: str
    """The message without arguments.

    Libraries may compose messages, so their lines have the place in the code instead.
    """
    term: str = ""
    code: int | None = None


@dataclass(slots=True)
class _TokenBucket:
    available_tokens: float
    filled_at: float
    unreported_lines: int = 0
    """Number of lines left out since the number was last logged."""
    unreported_since: float = 0.0


class FloodLimits:
    """The token buckets, one per kind. There must be few kinds, because each bucket stays in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets_by_kind: dict[LineKind, _TokenBucket] = {}
        self.suppressed_lines = 0
        """Total number of lines left out."""

    def admits_line(self, kind: LineKind) -> bool:
        """Return whether one more line of this kind may be written now."""
        now = self._clock()
        bucket = self._buckets_by_kind.get(kind)
        if bucket is None:
            bucket = self._buckets_by_kind[kind] = _TokenBucket(BURST_LINES, now)
        bucket.available_tokens = min(
            BURST_LINES, bucket.available_tokens + (now - bucket.filled_at) * LINES_PER_SECOND
        )
        bucket.filled_at = now
        if bucket.available_tokens >= 1.0:
            bucket.available_tokens -= 1.0
            return True
        if not bucket.unreported_lines:
            bucket.unreported_since = now
        bucket.unreported_lines += 1
        self.suppressed_lines += 1
        return False

    def take_suppressed(self, kind: LineKind) -> int:
        """Return how many lines of this kind were left out since the last call."""
        bucket = self._buckets_by_kind[kind]
        unreported, bucket.unreported_lines = bucket.unreported_lines, 0
        return unreported

    def overdue_kinds(self) -> Iterator[LineKind]:
        """Return the kinds whose numbers are due: lines were left out a while ago, and no line has come since."""
        told_by = self._clock() - _TELL_AFTER_SECONDS
        return (
            kind
            for kind, bucket in self._buckets_by_kind.items()
            if bucket.unreported_lines and bucket.unreported_since <= told_by
        )


MASK: Final = "***"

_LEAST_CHARS: Final = 8
"""Minimum length of a secret. Shorter ones would be found in ordinary words."""

# The token is RFC 6750's b64token, so that no pattern includes the quote at the end of a JSON string.
_TOKENS: Final = re.compile(
    rf"\b(bearer\s+)[A-Za-z0-9._~+/=-]{{{_LEAST_CHARS},}}|(?<![A-Za-z0-9])(sk-)[A-Za-z0-9_-]{{{_LEAST_CHARS},}}",
    re.IGNORECASE,
)


class Redaction:
    """Masks bearer tokens, keys in OpenAI's form (`sk-…`), and configured secrets."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spellings = {
            spelling for secret in secrets if len(secret) >= _LEAST_CHARS for spelling in _spellings_of_secret(secret)
        }
        # the longest first, because a secret may be the beginning of another
        self._secret_spellings = sorted(spellings, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secret_spellings:
            if secret in text:
                text = text.replace(secret, MASK)
        # A search for strings takes a twentieth of the time of the expression.
        lower = text.lower()
        if "sk-" in lower or "bearer" in lower:
            text = _TOKENS.sub(lambda found: f"{found[1] or found[2]}{MASK}", text)
        return text


def _spellings_of_secret(secret: str) -> set[str]:
    """Return a secret as it is, and as JSON writes it."""
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}


MAX_VALUE_CHARS: Final = 2048
"""Maximum length of a message or value; longer ones are cut."""
REQUEST: Final = {"level": "INFO", "logger": "proxy.access", "message": "request"}
"""Beginning of all access lines, after the time."""
_MEMBERS: Final = b'",' + orjson.dumps(REQUEST)[1:-1] + b","
_DELETE: Final = 0x7F


def plain_request_line(created: float, fields: Mapping[str, object]) -> bytes | None:
    """Return the line of a finished request, with its line end, or None if a formatter must write it.

    Nearly all lines are short plain ASCII without an error, and orjson writes them as they are.

    Args:
        created: System time at the end of the request, in seconds.
        fields: Members of the line.
    """
    if not fields or fields.get("error") is not None:
        return None
    try:
        members = orjson.dumps(fields)
    except TypeError:
        return None
    line = b"".join((b'{"time":"', format_timestamp(created).encode(), _MEMBERS, members[1:], b"\n"))
    return line if len(line) <= MAX_VALUE_CHARS and line.isascii() and _DELETE not in line else None


_second = (0, "")
"""The last formatted second, and its text."""
_MILLISECONDS: Final = tuple([f".{number:03d}Z" for number in range(1000)])


def format_timestamp(created: float) -> str:
    """Return a time as UTC with milliseconds. The date is formatted once a second."""
    global _second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return _second[1] + _MILLISECONDS[int((created - whole) * 1000)]


MAX_KEPT_BYTES: Final = 1024 * 1024
# Maximum size of one write of several lines.
_WRITE_BYTES: Final = select.PIPE_BUF


class LineWriter:
    """Lines on the way to one file description, which the writer opens for itself if the kernel allows that."""

    def __init__(self, fd: int, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._raw_output = _open_output(fd)
        self._max_kept_bytes = max_kept_bytes
        self._kept_lines: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_begun = False
        """Whether the first kept line is the rest of a partly written line."""
        self._is_failing = False
        """Whether the last write failed for another reason than a full pipe."""
        self.dropped_lines = 0
        """Total number of dropped lines."""

    def write(self, line: bytes) -> bool:
        """Write a line at once, or keep or drop it; return whether all lines are written."""
        return self.keep_lines((line,)) and self.flush_kept()

    def keep_lines(self, lines: Iterable[bytes]) -> bool:
        """Keep lines for the next flush. Returns False if one was dropped."""
        lines = tuple(lines)
        kept_bytes = self._kept_bytes + sum(map(len, lines))
        if kept_bytes <= self._max_kept_bytes:
            self._kept_lines.extend(lines)
            self._kept_bytes = kept_bytes
            return True
        is_kept = True
        for line in lines:
            kept_bytes = self._kept_bytes + len(line)
            if kept_bytes > self._max_kept_bytes:
                self.flush_kept()
                kept_bytes = self._kept_bytes + len(line)
                if kept_bytes > self._max_kept_bytes:
                    self.dropped_lines += 1
                    is_kept = False
                    continue
            self._kept_lines.append(line)
            self._kept_bytes = kept_bytes
        return is_kept

    def flush_kept(self) -> bool:
        """Write kept lines, as far as possible without waiting; return whether the writer takes lines."""
        kept = self._kept_lines
        while kept:
            lines, count = self._next_piece()
            try:
                taken = self._raw_output.write(lines) or 0
            except OSError:  # the disk is full, or the reader is gone
                self._is_failing = True
                self._drop_kept()
                return False
            self._is_failing = False
            if taken < len(lines):
                self._remove_written(taken)
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
        self._raw_output.close()

    def _next_piece(self) -> tuple[bytes, int]:
        """Return as many lines as a pipe takes in one piece, or one longer line, and their number."""
        size_bytes = count = 0
        for line in self._kept_lines:
            size_bytes += len(line)
            if size_bytes > _WRITE_BYTES:
                break
            count += 1
        return (b"".join(islice(self._kept_lines, count)), count) if count else (self._kept_lines[0], 1)

    def _remove_written(self, taken_bytes: int) -> None:
        """Remove the bytes that were written from the kept lines."""
        self._kept_bytes -= taken_bytes
        while taken_bytes:
            line = self._kept_lines.popleft()
            taken_bytes -= len(line)
            self._is_begun = taken_bytes < 0
            if self._is_begun:
                self._kept_lines.appendleft(line[taken_bytes:])
                return

    def _drop_kept(self) -> None:
        """Drop all kept log lines that are not partly written."""
        begun = [self._kept_lines[0]] if self._is_begun else []
        self.dropped_lines += len(self._kept_lines) - len(begun)
        self._kept_lines = deque(begun)
        self._kept_bytes = sum(map(len, begun))


class _RawOutput(Protocol):
    def write(self, line: bytes, /) -> int | None:
        """Return the number of bytes written, or None if the write would wait. Raises OSError."""

    def close(self) -> None: ...


def _open_output(fd: int) -> _RawOutput:
    """Return a duplicate of the descriptor that writes without waiting.

    O_NONBLOCK belongs to the file description, which standard output shares with the shell and its other programs. So a
    pipe or terminal is reopened through /proc.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return _SocketOutput(fd)
    if stat.S_ISREG(mode):
        return io.FileIO(os.dup(fd), "w")
    try:
        return io.FileIO(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "w")
    except OSError:  # another user's pipe, as after `su` in a container; a pipe without a reader; no /proc
        return _PolledOutput(fd)


class _SocketOutput:
    """A socket, such as the one to systemd's journal. It cannot be reopened, but supports writes without waiting."""

    def __init__(self, fd: int) -> None:
        self._log_socket = socket.socket(fileno=os.dup(fd))

    def write(self, line: bytes) -> int | None:
        try:
            return self._log_socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._log_socket.close()


class _PolledOutput:
    """A pipe or terminal that is polled before each write.

    A write waits only if another process fills it in between.
    """

    def __init__(self, fd: int) -> None:
        self._descriptor = os.dup(fd)
        self._poll_object = select.poll()
        self._poll_object.register(self._descriptor, select.POLLOUT)

    def write(self, line: bytes) -> int | None:
        # a pipe that is ready has room for this size
        return os.write(self._descriptor, line[: select.PIPE_BUF]) if self._poll_object.poll(0) else None

    def close(self) -> None:
        os.close(self._descriptor)
