"""Finds the members of a JSON object, and reads each value only when it is used.

msgspec returns the bytes of each value and checks their syntax. This takes a third of the time of building objects, and
no memory for them. This module checks what msgspec does not: UTF-8, and repeated names.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, KeysView, Mapping
from typing import Any, Final

import msgspec
import orjson

from proxy.wire.python_json import check_nesting_depth, encode_utf8, parse_again
from proxy.wire.weight import LONG_BYTES, is_within_string, parse_weighed_json, remove_escapes

Spans = Mapping[str, tuple[int, int, int]]
"""Positions by name, in the order of the bytes: start of the key, start of the value, end of the value."""

# Matches up to the value: separators, a key without escapes, and a colon. It has no possessive repeats, because Python
# before 3.11.5 matches them wrongly (python/cpython#106052).
_KEY_TO_VALUE_PATTERN: Final = re.compile(rb'[\s,{]*("[^"\\]*"\s*:\s*)')
_VALUE_TO_KEY_PATTERN: Final = re.compile(rb"[\s,{]*")
_KEY_END_PATTERN: Final = re.compile(rb"[\s:]*")
# The longest spelling of a character: two escapes of six bytes each.
_MAX_ESCAPED_CHARACTER_BYTES: Final = 12

# A longer value is read at its first use. Nearly all values that are used are shorter. Reading all of these together
# costs less than reading a single one alone.
_SHORT_BYTES: Final = 256
_UNREAD_VALUE: Final = object()

# More members than any client sends. Finding more would take too long.
_MAX_MEMBERS: Final = 10_000

# Text is decoded in steps, because Python stores each character of a string with the width of the widest one.
_STEP_BYTES: Final = 256 * 1024

_members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

_match_blanks: Final = re.compile(r"[ \t\r\n]*").match
_parse_value_at: Final = json.JSONDecoder().raw_decode


class NotAnObject(Exception):
    """The bytes are not JSON, not an object, or nested too deeply."""


class TooManyMembers(Exception):
    """The object repeats a name, or has more members than any client sends. The message is safe to show."""


class Members(Mapping[str, Any]):
    """Members of a JSON object as a mapping whose long values are read at their first use.

    Raises NotAnObject, TooManyMembers.
    """

    def __init__(self, raw: bytes | bytearray) -> None:
        try:
            _check_utf8(raw)
            members = _members_of(raw)
            self.spans = _find_spans(raw, members)
            short = [name for name, value in members.items() if len(value) <= _SHORT_BYTES]
            read = orjson.loads(b"[%b]" % b",".join([members[name] for name in short]))
        except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise NotAnObject from None
        self._raw = raw
        self._values: dict[str, Any] = dict.fromkeys(members, _UNREAD_VALUE)
        self._values.update(zip(short, read, strict=True))

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return self._parse_member(name) if value is _UNREAD_VALUE else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a member of the JSON object, or `default` if it is missing."""
        value = self._values.get(name, default)
        return self._parse_member(name) if value is _UNREAD_VALUE else value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> KeysView[str]:
        """Return the names of the members, without a Python call for each name."""
        return self._values.keys()

    def _parse_member(self, name: str) -> Any:
        raw = self.raw_member_view(name)
        try:
            value = parse_weighed_json(raw)
        except orjson.JSONDecodeError:  # orjson rejects numbers beyond the range of a float
            value = parse_again(bytes(raw))
        self._values[name] = value
        return value

    @property
    def parse_members(self) -> list[Any]:
        """Return the members' values that have already become Python objects."""
        return [value for value in self._values.values() if value is not _UNREAD_VALUE]

    def is_parsed(self, name: str) -> bool:
        """Return whether a member's value has already become a Python object."""
        return self._values[name] is not _UNREAD_VALUE

    def update(self, values: Mapping[str, object]) -> None:
        """Replace the values of members in this mapping. The original bytes do not change."""
        self._values.update(values)

    def excerpt_member(self, name: str) -> tuple[Any, Callable[[str], int]]:
        """Return the value of a member without keeping it; see the function `excerpt_value`."""
        if self.is_parsed(name):
            return self._values[name], count_text_bytes
        _, start, end = self.spans[name]
        try:
            return excerpt_value(self._raw, start, end)
        except orjson.JSONDecodeError:
            return self._parse_member(name), count_text_bytes

    def raw_member_view(self, name: str) -> memoryview:
        """Return a memory view of a member's JSON bytes."""
        _, start, end = self.spans[name]
        return memoryview(self._raw)[start:end]


def find_member_spans(raw: bytes | bytearray) -> Spans:
    """Return the positions of the members of a JSON object that is known to be UTF-8.

    Raises NotAnObject, TooManyMembers.
    """
    try:
        return _find_spans(raw, _members_of(raw))
    except (msgspec.DecodeError, RecursionError):
        raise NotAnObject from None


def parse_like_python(raw: bytes | bytearray) -> tuple[dict[str, Any], Spans]:
    """Return the values and member positions of a JSON object that orjson rejects.

    It may have half of a surrogate pair, for example, which the parser of Python accepts. Engines read requests with
    that parser. Raises NotAnObject, TooManyMembers.
    """
    try:
        text = raw.decode()
        values, spans = _parse_members_like_python(text)
        check_nesting_depth(values)
    except (ValueError, IndexError, RecursionError):
        raise NotAnObject from None
    return values, spans if len(text) == len(raw) else _to_byte_positions(spans, text)


def _parse_members_like_python(text: str) -> tuple[dict[str, Any], Spans]:
    """Return a JSON object's values and their positions. Raises ValueError, IndexError or RecursionError if invalid."""
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int, int]] = {}
    at = _expect_sign("{", text, 0)
    closes = text[at] == "}"
    while not closes:
        key = at
        name, end = _parse_value_at(text, key)
        if not isinstance(name, str):
            raise ValueError("a member's name is not a string")
        if name in values:
            raise _make_repeated_name_error()
        start = _expect_sign(":", text, end)
        values[name], end = _parse_value_at(text, start)
        spans[name] = key, start, end
        if len(spans) > _MAX_MEMBERS:
            raise _make_too_many_error()
        at = _skip_blanks(text, end)
        closes = text[at] == "}"
        if not closes:
            at = _expect_sign(",", text, at)
    if _skip_blanks(text, at + 1) != len(text):
        raise ValueError("the text continues after the object")
    return values, spans


def _expect_sign(sign: str, text: str, at: int) -> int:
    """Return the position after a required character and the blanks around it. Raises ValueError if it is missing."""
    at = _skip_blanks(text, at)
    if text[at] != sign:
        raise ValueError(f"{sign!r} is missing at position {at}")
    return _skip_blanks(text, at + 1)


def _skip_blanks(text: str, at: int) -> int:
    """Return the position of the next character that is not blank."""
    found = _match_blanks(text, at)
    return at if found is None else found.end()


def _to_byte_positions(spans: Spans, text: str) -> Spans:
    """Convert positions in a text to positions in its UTF-8 bytes."""
    found: dict[str, tuple[int, int, int]] = {}
    at = size = 0
    for name, places in spans.items():
        sizes: list[int] = []
        for place in places:
            size += len(text[at:place].encode())
            at = place
            sizes.append(size)
        key, start, end = sizes
        found[name] = key, start, end
    return found


def _check_utf8(raw: bytes | bytearray) -> None:
    """Raise UnicodeDecodeError for invalid UTF-8, which the parser ignores in values that it does not read."""
    if raw.isascii():
        return
    if len(raw) <= _STEP_BYTES:
        raw.decode()
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(raw)
    for start in range(0, len(raw), _STEP_BYTES):
        decoder.decode(view[start : start + _STEP_BYTES])
    decoder.decode(b"", final=True)


def _find_spans(raw: bytes | bytearray, members: Mapping[str, msgspec.Raw]) -> Spans:
    """Return the positions of all members of a JSON object. Raises TooManyMembers.

    For equal names the parser keeps the place of the first and the value of the last. Each value must stand after its
    key, and the object must end after the last one. This holds only if no name is repeated.
    """
    if len(members) > _MAX_MEMBERS:
        raise _make_too_many_error()
    spans: dict[str, tuple[int, int, int]] = {}
    end = 0
    to_value, stands_at = _KEY_TO_VALUE_PATTERN.match, raw.startswith
    for name, value in members.items():
        found = to_value(raw, end)
        key, start = _to_value_behind_escapes(raw, end, name) if found is None else found.span(1)
        if not stands_at(value, start):
            raise _make_repeated_name_error()
        end = start + len(value)
        spans[name] = key, start, end
    if raw[end:].strip(b" \t\r\n,{") != b"}":
        raise _make_repeated_name_error()
    return spans


def _to_value_behind_escapes(raw: bytes | bytearray, position: int, name: str) -> tuple[int, int]:
    """Return the start of an escaped key, and the start of its value. Raises TooManyMembers for another name."""
    key = _match_end(_VALUE_TO_KEY_PATTERN, raw, position)
    spelled = remove_escapes(bytes(raw[key : key + 2 + _MAX_ESCAPED_CHARACTER_BYTES * len(name)]))
    key_end = spelled.find(b'"', 1)
    if key_end < 0 or not spelled.startswith(b'"'):
        raise _make_repeated_name_error()
    return key, _match_end(_KEY_END_PATTERN, raw, key + key_end + 1)


def _match_end(pattern: re.Pattern[bytes], raw: bytes | bytearray, position: int) -> int:
    found = pattern.match(raw, position)
    assert found is not None
    return found.end()


def _make_too_many_error() -> TooManyMembers:
    return TooManyMembers(f"the body has more than {_MAX_MEMBERS} members")


def _make_repeated_name_error() -> TooManyMembers:
    return TooManyMembers("the body names a member twice")


# Long strings
#
# Reading megabytes of base64 takes milliseconds. Searching them for a quote takes a tenth of that, so `excerpt_value`
# leaves out the middles of long strings.

_ELIDED_BYTES: Final = 64 * 1024
# Replaces a piece of this size. A prompt that contains this text is counted as longer than it is.
_ELISION_MARK: Final = "~64 KiB: 6f1c9e7a~"
_CONTINUES, _CONTINUED = 0x80, 0xC0  # range of UTF-8 bytes that do not begin a character


def excerpt_value(raw: bytes | bytearray, start: int, end: int) -> tuple[Any, Callable[[str], int]]:
    """Return the value in a part of a valid JSON text, and a function that returns the UTF-8 length of its strings.

    The middle of long strings is missing in the value. Names of up to some kilobytes are complete.
    """
    if end - start <= LONG_BYTES:
        return parse_weighed_json(memoryview(raw)[start:end]), count_text_bytes
    kept: list[bytes | memoryview] = []
    text, mark = memoryview(raw), _ELISION_MARK.encode()
    for piece in range(start, end - _ELIDED_BYTES, _ELIDED_BYTES):
        behind = piece + _ELIDED_BYTES
        if (
            is_within_string(raw, piece, behind)
            and raw.find(b"\\", piece - 1, behind) < 0
            and not any(_CONTINUES <= raw[position] < _CONTINUED for position in (piece, behind))
        ):
            kept += (text[start:piece], mark)
            start = behind
    kept.append(text[start:end])
    return parse_weighed_json(b"".join(kept)), _count_marked_text_bytes


def count_text_bytes(text: str) -> int:
    """Return the length of a string in UTF-8 bytes."""
    return len(text) if text.isascii() else len(encode_utf8(text))


def _count_marked_text_bytes(text: str) -> int:
    return count_text_bytes(text) + text.count(_ELISION_MARK) * (_ELIDED_BYTES - len(_ELISION_MARK))
