"""Server-sent events: bytes in, events out, each with the exact bytes it arrived in.

Pure and incremental: the events are the same however the network cuts the bytes. Follows the WHATWG event-stream
grammar as far as engines and the proxies in front of them use it: LF, CRLF and CR line ends, comments, several `data`
lines, a byte-order mark is not expected.
"""

from __future__ import annotations

import re
from typing import Final

_BLANK_LINE: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n|\r\n\r|\n\r(?!\n)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_LF: Final = 0x0A
_CR: Final = 0x0D


class Event:
    """One event of a stream."""

    __slots__ = ("_raw", "data")

    def __init__(self, data: bytes | None, raw: bytes | None = None) -> None:
        """Take the bytes of an event. `raw` None: they are those of `data: `, the data and a blank line."""
        self.data = data
        """Its data field; None: it has none, as a comment or a heartbeat."""
        self._raw = raw

    @property
    def raw(self) -> bytes:
        """Its bytes, with the blank line that ends it."""
        raw = self._raw
        if raw is None:
            assert self.data is not None
            raw = self._raw = b"data: " + self.data + b"\n\n"
        return raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.raw == other.raw and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Event({self.raw!r}, {self.data!r})"


class EventTooLong(ValueError):
    """An event grew beyond the splitter's bound without ending."""


class EventSplitter:
    """Cuts a byte stream into events; owns the bytes of the event that has not ended yet."""

    __slots__ = ("_has_cr", "_max_event_bytes", "_parts", "_pending_bytes", "_tail")

    def __init__(self, max_event_bytes: int = 32 * 1024 * 1024) -> None:
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._has_cr = False
        """Whether one of the parts has a carriage return."""
        self._tail = b""  # the last bytes of the parts: as many as may belong to the blank line that ends the event
        self._max_event_bytes = max_event_bytes

    @property
    def pending(self) -> bytes:
        """Bytes after the last complete event: empty at a clean end of the stream."""
        return b"".join(self._parts)

    @property
    def is_empty(self) -> bool:
        """Is there nothing after the last complete event?"""
        return not self._parts

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes and return the events they complete. Raises EventTooLong."""
        has_cr = _CR in chunk
        if self._parts:
            # A long event is not searched again with every read: its end must touch the new bytes.
            if not has_cr and self._tail[-1] != _CR and not _has_blank_line(self._tail[-1], chunk):
                self._hold(chunk, has_cr=False)
                return []
            chunk = b"".join((*self._parts, chunk))
            has_cr |= self._has_cr
            self._parts.clear()
            self._pending_bytes = 0
            self._has_cr = False
            self._tail = b""
        if has_cr:
            return self._feed_any_line_end(chunk)
        events: list[Event] = []
        lines = chunk.split(b"\n")
        first = 0  # line of the event that has not ended yet
        for at in range(1, len(lines) - 1):
            if lines[at] or at == first:
                continue
            line = lines[first]
            if at == first + 1 and line[:6] == b"data: ":  # nearly all events
                events.append(Event(line[6:]))
            else:
                text = b"\n".join(lines[first:at])
                events.append(Event(_data_of(text), text + b"\n\n"))
            first = at + 1
        if rest := b"\n".join(lines[first:]):
            self._hold(rest, has_cr=False)
        return events

    def _feed_any_line_end(self, chunk: bytes) -> list[Event]:
        events = []
        start = 0
        for blank in _BLANK_LINE.finditer(chunk):
            if blank.end() == len(chunk) and chunk.endswith(b"\n\r"):
                break  # lines ended with LF, so the LF of this line end may still be on its way
            events.append(Event(_data_of(chunk[start : blank.start()]), chunk[start : blank.end()]))
            start = blank.end()
        if start < len(chunk):
            rest = chunk[start:]
            self._hold(rest, has_cr=_CR in rest)
        return events

    def _hold(self, chunk: bytes, *, has_cr: bool) -> None:
        self._parts.append(chunk)
        self._has_cr |= has_cr
        self._pending_bytes += len(chunk)
        self._tail = (self._tail + chunk[-3:])[-3:]
        if self._pending_bytes > self._max_event_bytes:
            raise EventTooLong


def _has_blank_line(before: int, chunk: bytes) -> bool:
    """Whether two line feeds follow each other, if this byte is in front. One byte is found much faster than two."""
    at = chunk.find(_LF)
    if at == 0 and before == _LF:
        return True
    while 0 <= at < len(chunk) - 1:
        if chunk[at + 1] == _LF:
            return True
        at = chunk.find(_LF, at + 1)
    return False


def _data_of(text: bytes) -> bytes | None:
    """The data field of an event's lines, several joined by LF; None when there is none."""
    data = []
    for line in _LINE_END.split(text):
        if line == b"data":
            data.append(b"")
        elif line.startswith(b"data:"):
            data.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return b"\n".join(data) if data else None
