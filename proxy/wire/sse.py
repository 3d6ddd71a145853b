"""Splits a byte stream into server-sent events, each with the exact bytes in which it arrived.

The events do not depend on how the network cuts the bytes. The parser follows the WHATWG grammar as far as engines and
proxies use it: LF, CRLF and CR line ends, comments, and several `data` lines. It expects no byte-order mark.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.wire.openai import NO_KV_PARAMS, names_engine_members

_BLANK_LINE_PATTERN: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n|\r\n\r|\n\r(?!\n)")
_LINE_END_PATTERN: Final = re.compile(rb"\r\n|\n|\r")
_LINE_FEED: Final = 0x0A
_CARRIAGE_RETURN: Final = 0x0D


class Event:
    """One server-sent event of a stream, with the bytes in which it arrived."""

    def __init__(self, data: bytes | None, raw: bytes | None = None) -> None:
        """Store the data and the bytes of an event. `raw` None: the bytes are `data: `, the data and a blank line."""
        self.data = data
        """The data field; None if the event has none, such as a comment or a heartbeat."""
        self._raw = raw

    @property
    def raw(self) -> bytes:
        """The bytes of the event, including the blank line at its end."""
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
    """An event is longer than the limit of the splitter."""


class EventSplitter:
    """Splits a byte stream into events, and keeps the bytes of the last, incomplete event."""

    def __init__(self, max_event_bytes: int = 32 * 1024 * 1024) -> None:
        self._pending_parts: list[bytes] = []
        self._pending_bytes = 0
        self._ends_with_cr = False
        """Whether the kept bytes have a carriage return."""
        self._last_bytes = b""  # the last kept bytes, which may belong to the blank line at the end of the event
        self._max_event_bytes = max_event_bytes

    @property
    def pending_bytes(self) -> bytes:
        """The bytes after the last complete event. They are empty at the proper end of a stream."""
        return b"".join(self._pending_parts)

    @property
    def is_empty(self) -> bool:
        """Whether no bytes follow the last complete event."""
        return not self._pending_parts

    def split_chunk(self, chunk: bytes) -> list[Event]:
        """Add bytes of the stream, and return the events that they complete. Raises EventTooLong."""
        has_cr = _CARRIAGE_RETURN in chunk
        if self._pending_parts:
            # A long event is not searched again at each read, because its end must include new bytes.
            if (
                not has_cr
                and self._last_bytes[-1] != _CARRIAGE_RETURN
                and not _has_blank_line(self._last_bytes[-1], chunk)
            ):
                self._keep_incomplete_event(chunk, has_cr=False)
                return []
            chunk = b"".join((*self._pending_parts, chunk))
            has_cr |= self._ends_with_cr
            self._pending_parts.clear()
            self._pending_bytes = 0
            self._ends_with_cr = False
            self._last_bytes = b""
        if has_cr:
            return self._split_any_line_end(chunk)
        events: list[Event] = []
        start = searched = 0
        is_one_line = True
        # Searches for one byte, because Python searches for two, or splits, several times as slowly in a long event.
        while 0 <= (line_end := chunk.find(_LINE_FEED, searched)) < len(chunk) - 1:
            searched = line_end + 1
            if chunk[searched] != _LINE_FEED:
                is_one_line = False
                continue
            if is_one_line and chunk[start : start + 6] == b"data: ":  # nearly all events
                events.append(Event(chunk[start + 6 : line_end]))
            else:
                events.append(Event(_event_data(chunk[start:line_end]), chunk[start : line_end + 2]))
            start = searched = line_end + 2
            is_one_line = True
        if start < len(chunk):
            self._keep_incomplete_event(chunk[start:], has_cr=False)
        return events

    def _split_any_line_end(self, chunk: bytes) -> list[Event]:
        events = []
        start = 0
        for blank in _BLANK_LINE_PATTERN.finditer(chunk):
            if blank.end() == len(chunk) and chunk.endswith(b"\n\r"):
                break  # the lines end with LF, so the LF of this line end may arrive later
            events.append(Event(_event_data(chunk[start : blank.start()]), chunk[start : blank.end()]))
            start = blank.end()
        if start < len(chunk):
            rest = chunk[start:]
            self._keep_incomplete_event(rest, has_cr=_CARRIAGE_RETURN in rest)
        return events

    def _keep_incomplete_event(self, chunk: bytes, *, has_cr: bool) -> None:
        self._pending_parts.append(chunk)
        self._ends_with_cr |= has_cr
        self._pending_bytes += len(chunk)
        self._last_bytes = (self._last_bytes + chunk[-3:])[-3:]
        if self._pending_bytes > self._max_event_bytes:
            raise EventTooLong


def _has_blank_line(before: int, chunk: bytes) -> bool:
    """Return whether two line feeds are adjacent in the chunk, or where `before` and the chunk meet.

    Searching one byte is much faster than searching two.
    """
    at = chunk.find(_LINE_FEED)
    if at == 0 and before == _LINE_FEED:
        return True
    while 0 <= at < len(chunk) - 1:
        if chunk[at + 1] == _LINE_FEED:
            return True
        at = chunk.find(_LINE_FEED, at + 1)
    return False


def _event_data(text: bytes) -> bytes | None:
    """Return the data field of an event: its `data` lines, joined by LF. None if it has none."""
    data = []
    for line in _LINE_END_PATTERN.split(text):
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
_match_token_id: Final = re.compile(rb"[0-9]{1,9}(?=\])").match
_TEXT_END: Final = b"}\n\n"
_plain_text: Final = re.compile(rb'[^"\\\x00-\x1f]+(?=")').match


class TokenShape:
    """The bytes that the events of a stream have in common: all bytes except the text and the token ID."""

    def __init__(self, head: bytes, between: bytes | None, behind: bytes, *, is_reasoning: bool) -> None:
        self.bytes_before_text = head
        """The bytes before the text, including its opening quote."""
        self.bytes_between = between
        """The bytes between text and ID, from the closing quote to the opening bracket; None if there is no ID."""
        self.bytes_after_id = behind
        """The bytes after the ID, or after the text if there is no ID."""
        self.is_reasoning = is_reasoning
        """Whether the text is the reasoning of a chat."""

    @classmethod
    def recognise(cls, raw: bytes) -> TokenShape | None:
        """Return the shape of an event with one text and at most one token ID; None for any other event."""
        texts, ids = [*_TEXT_BEGINS.finditer(raw)], [*_IDS_BEGIN.finditer(raw)]
        before, _, behind = raw.rpartition(NO_KV_PARAMS)
        has_engine_members = names_engine_members(before if behind == _TEXT_END else raw)
        if len(texts) != 1 or len(ids) > 1 or has_engine_members:
            return None
        begin = texts[0].end()
        text = _plain_text(raw, begin)
        if text is None:
            return None
        is_reasoning = texts[0][1].startswith(b"reasoning")
        if not ids:
            return cls(raw[:begin], None, raw[text.end() :], is_reasoning=is_reasoning)
        number = _match_token_id(raw, ids[0].end())
        if number is None or number.start() < text.end():
            return None
        return cls(raw[:begin], raw[text.end() : number.start()], raw[number.end() :], is_reasoning=is_reasoning)

    def has_same_frame(self, raw: bytes) -> bool:
        """Return whether an event begins and ends with the same bytes as this shape."""
        return raw.startswith(self.bytes_before_text) and raw.endswith(self.bytes_after_id)
