"""Server-sent events: bytes in, events out, each with the exact bytes it arrived in.

Pure and incremental: the events are the same however the network cuts the bytes. Follows the WHATWG event-stream
grammar as far as engines and the proxies in front of them use it: LF, CRLF and CR line ends, comments, several `data`
lines, a byte-order mark is not expected.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.wire.openai import NO_KV_PARAMS, names_engine_members

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


# Events that carry one token
#
# Engines write each chunk of an answer alike, so nearly all events of a stream differ only in text and token id. Once
# one event was parsed, the next ones are recognised by their bytes. That takes a small part of the time of parsing.

# The members of a chat's delta and of a completion's choice that hold text. Inside a JSON string the quotes would be
# escaped, so these bytes are a member's name wherever they stand.
_TEXT_BEGINS: Final = re.compile(rb'"(content|text|reasoning|reasoning_content)" ?: ?"(?=[^"])')
_IDS_BEGIN: Final = re.compile(rb'"token_ids" ?: ?\[')
_one_id: Final = re.compile(rb"[0-9]{1,9}(?=\])").match
_END: Final = b"}\n\n"
_plain_text: Final = re.compile(rb'[^"\\\x00-\x1f]+(?=")').match


class Shape:
    """What all of them have in common: the pieces of bytes around the text, and around the id if there is one."""

    __slots__ = ("behind", "between", "head", "is_reasoning")

    def __init__(self, head: bytes, between: bytes | None, behind: bytes, *, is_reasoning: bool) -> None:
        self.head = head
        """Up to the text, the quote before it included."""
        self.between = between
        """From the quote behind the text up to the id, the bracket before it included; None: there is no id."""
        self.behind = behind
        """The rest, with the bracket behind the id, or the quote behind the text."""
        self.is_reasoning = is_reasoning
        """Whether the text is a chat's reasoning."""

    @classmethod
    def of(cls, raw: bytes) -> Shape | None:
        """The shape of a whole event with exactly one text and at most one token id; None when it has anything else."""
        texts, ids = [*_TEXT_BEGINS.finditer(raw)], [*_IDS_BEGIN.finditer(raw)]
        if len(texts) != 1 or len(ids) > 1 or _has_more_of_engines(raw):
            return None
        begin = texts[0].end()
        text = _plain_text(raw, begin)
        if text is None:
            return None
        is_reasoning = texts[0][1].startswith(b"reasoning")
        if not ids:
            return cls(raw[:begin], None, raw[text.end() :], is_reasoning=is_reasoning)
        number = _one_id(raw, ids[0].end())
        if number is None or number.start() < text.end():
            return None
        return cls(raw[:begin], raw[text.end() : number.start()], raw[number.end() :], is_reasoning=is_reasoning)

    def is_around(self, raw: bytes) -> bool:
        """Is an event like this at its beginning and its end, whatever is between?"""
        return raw.startswith(self.head) and raw.endswith(self.behind)


def _has_more_of_engines(raw: bytes) -> bool:
    """Whether an event has members for engines alone that are more than `NO_KV_PARAMS` at its end."""
    before, _, behind = raw.rpartition(NO_KV_PARAMS)
    return names_engine_members(before if behind == _END else raw)
