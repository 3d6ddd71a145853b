"""A JSON object that is sent on with a few members changed, without being serialised again.

A multimodal request carries megabytes of base64. It is parsed once, for validation and for the few fields the gateway
reads; a changed copy is joined from slices of the original bytes. Members that nobody changes keep their exact bytes:
their order, number spelling and escapes reach the engine as the client wrote them. A short object that is spelled just
as it would be serialised, as most SDKs do, is serialised instead: the bytes are the same. So is an object of very many
strings, arrays and objects, however it is spelled, because that is many times as fast as to look for slices of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.weight import LONG_BYTES, load, without_escapes

if TYPE_CHECKING:
    from collections.abc import Mapping

REMOVED: Final = object()
"""As the new value of a member in `Document.with_changes`: leave the member out."""

# No possessive repeats in here: Python before 3.11.5 matches them wrongly (python/cpython#106052).
_KEY_BEGINS = re.compile(rb'[\s,]*"')
# What follows a key; the value when it is a number or a literal, nothing when it is a string, an array or an object.
_VALUE_BEGINS = re.compile(rb'\s*:\s*([^\s,{}\[\]"]*)')
_STRUCTURE = re.compile(rb'["\[\]{}]')
_SIGNS: Final = (b'"', b"[", b"]", b"{", b"}")

# Where finding slices (about 0.5 µs an element) has cost more than serialising would have. Elements are members,
# brackets and strings.
_MAX_ELEMENTS = 10_000

# Where a copy of it all without its escapes costs less than looking at more of them before quotes.
_MAX_ESCAPES = 1_000

# A longer object is tried to be serialised only if it has so many escapes in its first bytes: prose has, and finding
# slices of that takes longer. A picture has none.
_SHORT_BYTES = 8 * 1024
_MANY_ESCAPES = 64

# Numbers and space are looked at byte by byte up to so many, and behind that, in arrays, in steps of a window.
_NEAR_BYTES = 64
_WINDOW_BYTES = 4 * 1024
# More space in a row, or digits, is no reason to look at all of it.
_MAX_SPACE_BYTES = 64 * 1024

# A whole number that needs more than 64 bits has at least so many digits.
_LONG_DIGITS = 19
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG_INTEGER = re.compile(rb"-?(?<![0-9.eE+])[0-9]{%d,}(?![0-9.eE])" % _LONG_DIGITS)

_QUOTE, _BACKSLASH = 0x22, 0x5C


class InvalidDocument(ValueError):
    """The bytes are not one JSON object, or one that no sane client sends; the message is safe to show."""


class Document:
    """One JSON object: parsed values, and the raw bytes of each top-level member.

    Raises InvalidDocument for bytes that are not a JSON object or that name a member twice: parsers disagree on which
    of two equal names counts, so such a body could mean one thing to the gateway and another to the engine.
    """

    __slots__ = ("_members", "_raw", "values")

    def __init__(self, raw: bytes) -> None:
        self._load(raw)
        self.check()

    @classmethod
    def unchecked(cls, raw: bytes) -> Document:
        """Half of what it takes to make one, where it would hold others up to do all at once: `check` is the rest.

        Until then there are only the values.
        """
        document = cls.__new__(cls)
        document._load(raw)
        return document

    def _load(self, raw: bytes) -> None:
        try:
            values = load(raw)
        except orjson.JSONDecodeError as error:
            # Only the position: the message must not echo a prompt.
            raise InvalidDocument(f"the body is not valid JSON (line {error.lineno}, column {error.colno})") from None
        if not isinstance(values, dict):
            raise InvalidDocument("the body must be a JSON object")
        self.values: dict[str, Any] = values
        self._raw = raw

    def check(self) -> None:
        """Find the members. Raises InvalidDocument where they could mean something else to somebody else."""
        raw = self._raw
        self._members: dict[str, tuple[int, int, int]] | None = None
        """Where each member's key begins, and its value begins and ends; None: a copy is made from the values."""
        if not _is_plainly_spelled(raw, self.values):
            self._members = _find_members(raw)
            if self._members is None:
                _check_can_be_serialised(raw, self.values)
        # Not kept beside the values where it is not needed any more: a call lives as long as its answer takes.
        self._raw = raw if self._members is not None else b""

    def raw_value(self, name: str) -> bytes | None:
        """The bytes of a member's value; None when there is no such member."""
        if self._members is None:
            return trimmed(orjson.dumps(self.values[name])) if name in self.values else None
        span = self._members.get(name)
        return None if span is None else self._raw[span[1] : span[2]]

    def with_changes(self, changes: Mapping[str, object]) -> bytes:
        """The object with members replaced, added at the end, or left out (REMOVED).

        A new value is anything orjson serialises; `orjson.Fragment` puts bytes in verbatim. The copy is joined once.
        """
        if self._members is None:
            members = {**self.values, **changes}
            return orjson.dumps({name: value for name, value in members.items() if value is not REMOVED})
        source = memoryview(self._raw)
        parts: list[bytes | memoryview] = [b"{"]
        for name, (key_start, value_start, value_end) in self._members.items():
            if name not in changes:
                parts += (source[key_start:value_end], b",")
            elif changes[name] is not REMOVED:
                parts += (source[key_start:value_start], orjson.dumps(changes[name]), b",")
        for name, value in changes.items():
            if name not in self._members and value is not REMOVED:
                parts += (orjson.dumps(name), b":", orjson.dumps(value), b",")
        if len(parts) > 1:
            parts.pop()
        parts.append(b"}")
        return b"".join(parts)


def trimmed(serialised: bytes) -> bytes:
    """A copy of what orjson wrote, for keeping: orjson does not give back what it had allocated beyond it, which may be
    ten times as much.
    """
    return bytes(memoryview(serialised))


def _is_plainly_spelled(raw: bytes, values: dict[str, Any]) -> bool:
    """Whether serialising gives these very bytes, as far as it is worth trying. If so, no name stands twice."""
    if len(raw) > _SHORT_BYTES and (len(raw) > LONG_BYTES or raw.count(b"\\", 0, _SHORT_BYTES) < _MANY_ESCAPES):
        return False
    try:
        return orjson.dumps(values) == raw
    except orjson.JSONEncodeError:  # nested deeper than orjson writes, though it reads it
        return False


def _check_can_be_serialised(raw: bytes, values: dict[str, Any]) -> None:
    """Raise InvalidDocument for what would not mean the same if it were written anew."""
    try:
        orjson.dumps(values)
    except orjson.JSONEncodeError:
        raise InvalidDocument("the body is nested too deeply") from None
    if _has_longer_integers(raw):
        raise InvalidDocument("the body has a whole number of more than 64 bits among very many elements")


def _has_longer_integers(raw: bytes) -> bool:
    """Whether orjson takes a whole number of this JSON for a fraction, and so would write another one."""
    if raw.translate(_DIGITS_AS_ZEROS).find(b"0" * _LONG_DIGITS) < 0:
        return False
    outside = b'""'.join(without_escapes(raw).split(b'"')[::2])
    found = (number[0] for number in _LONG_INTEGER.finditer(outside))
    return any(len(number) > _LONG_DIGITS + 1 or not -(2**63) <= int(number) < 2**64 for number in found)


def _find_members(raw: bytes) -> dict[str, tuple[int, int, int]] | None:
    """Start of the key, start and end of the value of each member of a *valid* JSON object, in the order of the bytes.

    None when there are too many elements to look at, or too much space. Raises InvalidDocument for a name that comes
    twice.
    """
    members: dict[str, tuple[int, int, int]] = {}
    scan = _Scan(raw)
    position = raw.index(b"{") + 1
    try:
        while (begins := _KEY_BEGINS.match(raw, position, position + _MAX_SPACE_BYTES)) is not None:
            key_start = begins.end() - 1
            key_end = scan.string_end(key_start)
            value = _VALUE_BEGINS.match(raw, key_end, key_end + _MAX_SPACE_BYTES)
            if value is None or value.end() == key_end + _MAX_SPACE_BYTES:
                return None
            value_start, position = value.span(1)
            if value_start == position:
                is_string = raw[position] == _QUOTE
                position = scan.string_end(position) if is_string else scan.container_end(position)
            key = orjson.loads(raw[key_start:key_end])
            if key in members:
                raise InvalidDocument("the body names a member twice")
            members[key] = (key_start, value_start, position)
    except _TooManyElements:
        return None
    return members if raw[position : position + _MAX_SPACE_BYTES].lstrip().startswith(b"}") else None


class _TooManyElements(Exception):
    pass


class _Scan:
    """Finds where values of a valid JSON text end, as long as its elements are few."""

    def __init__(self, raw: bytes) -> None:
        self._text = raw
        self._elements_left = _MAX_ELEMENTS
        self._escapes_left = _MAX_ESCAPES

    def string_end(self, start: int) -> int:
        """Position after the string that begins at `start`. The quote is searched at memory speed: strings are long."""
        self._count()
        text, quote = self._text, start
        while True:
            quote = text.index(b'"', quote + 1)
            first = quote
            while text[first - 1] == _BACKSLASH and self._escapes_left:
                first -= 1
                self._escapes_left -= 1
            if not self._escapes_left and text[quote - 1] == _BACKSLASH:
                text = self._text = without_escapes(text)
                return text.index(b'"', start + 1) + 1
            if (quote - first) % 2 == 0:  # an odd number of backslashes escapes the quote
                return quote + 1

    def container_end(self, start: int) -> int:
        """Position after the array or object that begins at `start`."""
        text, depth, position = self._text, 0, start
        while (token := self._next_sign(position)) is not None:
            position = token.end()
            sign = text[position - 1]
            if sign == _QUOTE:
                position = self.string_end(position - 1)
                continue
            self._count()
            depth += 1 if sign in b"[{" else -1
            if depth == 0:
                break
        return position

    def _next_sign(self, position: int) -> re.Match[bytes] | None:
        """The next quote or bracket. What has none of them, long lists of numbers, is passed over at memory speed."""
        text = self._text
        token = _STRUCTURE.search(text, position, position + _NEAR_BYTES)
        if token is not None:
            return token
        while position < len(text) and all(text.find(sign, position, position + _WINDOW_BYTES) < 0 for sign in _SIGNS):
            position += _WINDOW_BYTES
        return _STRUCTURE.search(text, position)

    def _count(self) -> None:
        self._elements_left -= 1
        if self._elements_left < 0:
            raise _TooManyElements
