"""A JSON object that is sent on with a few members changed, without being built or serialised again.

A request carries a prompt of kilobytes, or megabytes of base64, which nobody here looks at. All of it is checked, and
only members that somebody asks for become Python objects; a changed copy is made of slices of the original bytes.
Members that nobody changes keep their exact bytes: their order, number spelling and escapes reach the engine as the
client wrote them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from proxy.wire.elision import excerpt, text_bytes
from proxy.wire.weight import load, without_escapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REMOVED: Final = object()
"""As the new value of a member in `Document.with_changes`: leave the member out."""

JOINED_BYTES: Final = 64 * 1024
"""A copy of an object that is no longer than this is made in one piece; a longer one refers to the original."""

Body = bytes | list[bytes | memoryview]
"""The bytes of a request, or the pieces of a long one, whose order counts."""

# Up to the value: what is before a key, the key, if it has no escapes, and what is behind it. No possessive repeats in
# here: Python before 3.11.5 matches them wrongly (python/cpython#106052).
_TO_VALUE: Final = re.compile(rb'[\s,{]*("[^"\\]*"\s*:\s*)')
_TO_KEY: Final = re.compile(rb"[\s,{]*")
_BEHIND_KEY: Final = re.compile(rb"[\s:]*")
# The longest spelling of a character: two escapes of six bytes each.
_MAX_SPELLING_BYTES: Final = 12

# A longer value is read when somebody asks for it. Nearly all that are asked for are shorter, and read at once cost
# less than one of them does by itself.
_SHORT_BYTES: Final = 256
_UNREAD: Final = object()

# More members than any client sends take too long to find.
_MAX_MEMBERS: Final = 10_000

# Decoded in steps: Python keeps a whole text in as many bytes as the widest of its characters needs.
_STEP_BYTES: Final = 256 * 1024

_members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class InvalidDocument(ValueError):
    """The bytes are not one JSON object, or one that no sane client sends; the message is safe to show."""


class Document(Mapping[str, Any]):
    """One JSON object: a mapping from names to values, which are read when they are asked for, and their raw bytes.

    Raises InvalidDocument for bytes that are not a JSON object or that name a member twice: parsers disagree on which
    of two equal names counts, so such a body could mean one thing to the gateway and another to the engine.
    """

    __slots__ = ("_raw", "_spans", "_values")

    def __init__(self, raw: bytes | bytearray) -> None:
        try:
            _check_utf8(raw)
            members = _members_of(raw)
            spans = _spans(raw, members)
            short = [name for name, value in members.items() if len(value) <= _SHORT_BYTES]
            read = orjson.loads(b"[%b]" % b",".join([members[name] for name in short]))
        except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise _refusal(raw) from None
        values: dict[str, Any] = dict.fromkeys(members, _UNREAD)
        values.update(zip(short, read, strict=True))
        self._raw = raw
        self._spans = spans
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return self._read(name) if value is _UNREAD else value

    def get(self, name: str, default: Any = None) -> Any:
        """A member's value; what it is if there is none."""
        value = self._values.get(name, default)
        return self._read(name) if value is _UNREAD else value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _read(self, name: str) -> Any:
        raw = self.view(name)
        assert raw is not None
        try:
            value = load(raw)
        except orjson.JSONDecodeError:  # JSON that orjson does not read: a number beyond all numbers
            value = json.loads(bytes(raw))
        self._values[name] = value
        return value

    @property
    def read_values(self) -> Sequence[Any]:
        """Those that are Python objects by now."""
        return [value for value in self._values.values() if value is not _UNREAD]

    def let_mean(self, values: Mapping[str, object]) -> None:
        """Have members that engines take for other values than they are read as the same here; their bytes stay."""
        self._values.update(values)

    def excerpt(self, name: str) -> tuple[Any, Callable[[str], int]]:
        """A member's value, None when there is no such member, which is not kept; see `elision.excerpt`."""
        span = self._spans.get(name)
        if span is None or (value := self._values[name]) is not _UNREAD:
            return (None if span is None else value), text_bytes
        try:
            return excerpt(self._raw, span[1], span[2])
        except orjson.JSONDecodeError:
            return self._read(name), text_bytes

    def view(self, name: str) -> memoryview | None:
        """The bytes of a member's value, which keep all others; None when there is no such member."""
        span = self._spans.get(name)
        return None if span is None else memoryview(self._raw)[span[1] : span[2]]

    def raw_value(self, name: str) -> bytes | None:
        """A copy of the bytes of a member's value; None when there is no such member."""
        view = self.view(name)
        return None if view is None else bytes(view)

    def with_changes(self, changes: Mapping[str, object]) -> Body:
        """The object with members replaced, added at the end, or left out (REMOVED).

        A new value is anything orjson serialises; `orjson.Fragment` puts bytes in verbatim. What is between members
        that stay beside each other stays, too.
        """
        source = memoryview(self._raw)
        pieces: list[bytes | memoryview] = [b"{"]
        start, end = -1, 0  # of the members in a row that stay as they are; before 0: there are none
        for name, (key, value, value_end) in self._spans.items():
            if name not in changes:
                if start < 0:
                    start = key
                end = value_end
                continue
            new = changes[name]
            if new is not REMOVED:
                pieces += (source[key if start < 0 else start : value], orjson.dumps(new), b",")
            elif start >= 0:
                pieces += (source[start:end], b",")
            start = -1
        if start >= 0:
            pieces += (source[start:end], b",")
        added = {name: new for name, new in changes.items() if new is not REMOVED and name not in self._spans}
        if added:
            pieces.append(memoryview(orjson.dumps(added))[1:])
        elif len(pieces) > 1:
            pieces[-1] = b"}"
        else:
            pieces.append(b"}")
        return b"".join(pieces) if len(source) <= JOINED_BYTES else pieces


def pieces_of(body: Body) -> Sequence[bytes | memoryview]:
    """What to write one after the other."""
    return (body,) if isinstance(body, bytes) else body


def length_of(body: Body) -> int:
    """In bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def joined(body: Body) -> bytes:
    """A body in one piece."""
    return body if isinstance(body, bytes) else b"".join(body)


def _check_utf8(raw: bytes | bytearray) -> None:
    """Raise UnicodeDecodeError: what is not read is not looked at by the parser either."""
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


def _spans(raw: bytes | bytearray, members: Mapping[str, msgspec.Raw]) -> dict[str, tuple[int, int, int]]:
    """Where each member's key begins, and where its value begins and ends. Raises InvalidDocument.

    Of equal names the parser keeps the place of the first and the value of the last. So the members are found one after
    the other only if no name stands twice: each value must stand where its key ends, and then the object must end.
    """
    if len(members) > _MAX_MEMBERS:
        raise InvalidDocument(f"the body has more than {_MAX_MEMBERS} members")
    spans: dict[str, tuple[int, int, int]] = {}
    end = 0
    to_value, stands_at = _TO_VALUE.match, raw.startswith
    for name, value in members.items():
        found = to_value(raw, end)
        key, start = _to_value_behind_escapes(raw, end, name) if found is None else found.span(1)
        if not stands_at(value, start):
            raise _named_twice()
        end = start + len(value)
        spans[name] = key, start, end
    if raw[end:].strip(b" \t\r\n,{") != b"}":
        raise _named_twice()
    return spans


def _to_value_behind_escapes(raw: bytes | bytearray, position: int, name: str) -> tuple[int, int]:
    """Where a key begins that has escapes, and where the value behind it. Raises InvalidDocument for another name."""
    key = _end(_TO_KEY, raw, position)
    spelled = without_escapes(bytes(raw[key : key + 2 + _MAX_SPELLING_BYTES * len(name)]))
    key_end = spelled.find(b'"', 1)
    if key_end < 0 or not spelled.startswith(b'"'):
        raise _named_twice()
    return key, _end(_BEHIND_KEY, raw, key + key_end + 1)


def _end(pattern: re.Pattern[bytes], raw: bytes | bytearray, position: int) -> int:
    found = pattern.match(raw, position)
    assert found is not None
    return found.end()


def _named_twice() -> InvalidDocument:
    return InvalidDocument("the body names a member twice")


def _refusal(raw: bytes | bytearray) -> InvalidDocument:
    """Why a body is not read. Only the position: the message must not echo a prompt."""
    try:
        value = load(raw)
    except orjson.JSONDecodeError as error:
        return InvalidDocument(f"the body is not valid JSON (line {error.lineno}, column {error.colno})")
    is_object = isinstance(value, dict)
    return InvalidDocument("the body is nested too deeply" if is_object else "the body must be a JSON object")
