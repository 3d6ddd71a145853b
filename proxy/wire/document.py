"""A JSON object that is sent on with a few members changed, without being serialised again.

A multimodal request carries megabytes of base64. It is parsed once, for validation and for the few fields the gateway
reads; a changed copy is joined from slices of the original bytes. Members that nobody changes keep their exact bytes:
their order, number spelling and escapes reach the engine as the client wrote them. An object that is spelled just as it
would be serialised, as most SDKs do, is serialised instead: the bytes are the same, and where there are many escapes or
elements to look at that is many times faster. So is an object of very many small elements, however it is spelled.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

REMOVED: Final = object()
"""As the new value of a member in `Document.with_changes`: leave the member out."""

# No possessive repeats in here: Python before 3.11.5 matches them wrongly (python/cpython#106052).
_KEY_BEGINS = re.compile(rb'[\s,]*"')
# What follows a key; the value when it is a number or a literal, nothing when it is a string, an array or an object.
_VALUE_BEGINS = re.compile(rb'\s*:\s*([^\s,{}\[\]"]*)')
_STRUCTURE = re.compile(rb'["\[\]{}]')

# Where finding slices (about 0.5 µs an element) has cost more than serialising would have. Elements are members,
# brackets, strings, and escapes before a quote.
_MAX_ELEMENTS = 10_000

# A longer object is looked at for escapes in its first bytes: a picture has none, and slices of it cost nothing.
_SHORT_BYTES = 8 * 1024
_MANY_ESCAPES = 64

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
        try:
            values = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            # Only the position: the message must not echo a prompt.
            raise InvalidDocument(f"the body is not valid JSON (line {error.lineno}, column {error.colno})") from None
        if not isinstance(values, dict):
            raise InvalidDocument("the body must be a JSON object")
        self.values: dict[str, Any] = values
        self._members: dict[str, tuple[int, int, int]] | None = None
        """Where each member's key begins, and its value begins and ends; None: a copy is made from the values."""
        if not _is_plainly_spelled(raw, values):
            self._members = _find_members(raw)
            if self._members is None:
                _check_can_be_serialised(values)
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
    if len(raw) > _SHORT_BYTES and raw.count(b"\\", 0, _SHORT_BYTES) < _MANY_ESCAPES:
        return False
    try:
        return orjson.dumps(values) == raw
    except orjson.JSONEncodeError:  # nested deeper than orjson writes, though it reads it
        return False


def _check_can_be_serialised(values: dict[str, Any]) -> None:
    try:
        orjson.dumps(values)
    except orjson.JSONEncodeError:
        raise InvalidDocument("the body is nested too deeply") from None


def _find_members(raw: bytes) -> dict[str, tuple[int, int, int]] | None:
    """Start of the key, start and end of the value of each member of a *valid* JSON object, in the order of the bytes.

    None when there are too many elements to look at. Raises InvalidDocument for a name that comes twice.
    """
    members: dict[str, tuple[int, int, int]] = {}
    scan = _Scan(raw)
    position = raw.index(b"{") + 1
    try:
        while (begins := _KEY_BEGINS.match(raw, position)) is not None:
            key_start = begins.end() - 1
            key_end = scan.string_end(key_start)
            value = _VALUE_BEGINS.match(raw, key_end)
            if value is None:  # not reachable for what orjson has accepted
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
    return members


class _TooManyElements(Exception):
    pass


class _Scan:
    """Finds where values of a valid JSON text end, as long as its elements are few."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._elements_left = _MAX_ELEMENTS

    def string_end(self, start: int) -> int:
        """Position after the string that begins at `start`. The quote is searched at memory speed: strings are long."""
        raw, quote = self._raw, start
        while True:
            self._count()
            quote = raw.index(b'"', quote + 1)
            first = quote
            while raw[first - 1] == _BACKSLASH:
                first -= 1
                self._count()
            if (quote - first) % 2 == 0:  # an odd number of backslashes escapes the quote
                return quote + 1

    def container_end(self, start: int) -> int:
        """Position after the array or object that begins at `start`."""
        raw, depth, position = self._raw, 0, start
        while (token := _STRUCTURE.search(raw, position)) is not None:
            position = token.end()
            sign = raw[position - 1]
            if sign == _QUOTE:
                position = self.string_end(position - 1)
                continue
            self._count()
            depth += 1 if sign in b"[{" else -1
            if depth == 0:
                break
        return position

    def _count(self) -> None:
        self._elements_left -= 1
        if self._elements_left < 0:
            raise _TooManyElements
