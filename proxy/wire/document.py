"""A JSON object that is sent on with a few members changed, without being built or serialised again.

A request carries a prompt of kilobytes, or megabytes of base64, which nobody here looks at. All of it is checked, and
only members that somebody asks for become Python objects; a changed copy is made of slices of the original bytes.
Members that nobody changes keep their exact bytes: their order, number spelling and escapes reach the engine as the
client wrote them. A short object is read at once, and if it is spelled just as it would be serialised, as most SDKs do,
it is serialised: the bytes are the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.members import Members, NotAnObject, TooManyMembers, as_python_reads, spans_of, text_bytes
from proxy.wire.python_json import dumps
from proxy.wire.weight import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.wire.members import Spans

REMOVED: Final = object()
"""As the new value of a member in `Document.with_changes`: leave the member out."""

JOINED_BYTES: Final = 64 * 1024
"""A copy of an object that is no longer than this is made in one piece; a longer one refers to the original."""

Body = bytes | list[bytes | memoryview]
"""The bytes of a request, or the pieces of a long one, whose order counts."""

SHORT_BYTES: Final = 4 * 1024
"""To build all of such an object costs less than to find out what of it need not be."""
_BRACKET: Final = ord("[")


class InvalidDocument(ValueError):
    """The bytes are not one JSON object, or one that no sane client sends; the message is safe to show."""


class Document:
    """One JSON object: its values, and the raw bytes of each top-level member.

    Raises InvalidDocument for bytes that are not a JSON object or that name a member twice: parsers disagree on which
    of two equal names counts, so such a body could mean one thing to the gateway and another to the engine.
    """

    __slots__ = ("_raw", "_spans", "values")

    def __init__(self, raw: bytes | bytearray) -> None:
        self.values: dict[str, Any] | Members
        """By name. Those of a long object are read when they are asked for."""
        self._spans: Spans | None = None
        """None: a copy is made from the values, with the same bytes."""
        # Not kept beside the values where it is not needed: a call lives as long as its answer takes.
        self._raw: bytes | bytearray = b""
        try:
            if len(raw) > SHORT_BYTES:
                self.values = Members(raw)
                self._raw, self._spans = raw, self.values.spans
                return
            values = orjson.loads(raw)
            if not isinstance(values, dict):
                raise NotAnObject
            self.values = values
            try:
                is_plainly_spelled = orjson.dumps(values) == raw
            except orjson.JSONEncodeError:  # nested deeper than orjson writes, though it reads it
                is_plainly_spelled = False
            if not is_plainly_spelled:  # if it is, no name stands twice, too
                self._raw, self._spans = raw, spans_of(raw)
        except TooManyMembers as error:
            raise InvalidDocument(str(error)) from None
        except (NotAnObject, orjson.JSONDecodeError):
            self._read_again(raw)

    def _read_again(self, raw: bytes | bytearray) -> None:
        """Read bytes that orjson refuses as engines do. Raises InvalidDocument."""
        try:
            self.values, self._spans = as_python_reads(raw)
        except TooManyMembers as error:
            raise InvalidDocument(str(error)) from None
        except NotAnObject:
            raise _refusal(raw) from None
        self._raw = raw

    @property
    def read_values(self) -> list[Any]:
        """Those that are Python objects by now."""
        values = self.values
        return list(values.values()) if isinstance(values, dict) else values.read

    def excerpt(self, name: str) -> tuple[Any, Callable[[str], int]]:
        """A member's value, None when there is no such member, and what tells how many bytes its strings have.

        It is not kept, and of long strings in it only the length is known.
        """
        values = self.values
        if self._spans is not None and isinstance(values, Members) and name in values:
            return values.excerpt(name)
        return values.get(name), text_bytes

    def is_list_of_prompts(self, name: str) -> bool:
        """Whether a member's value is an array that does not begin with a whole number, as one of token ids does."""
        values = self.values
        if isinstance(values, Members) and name in values and not values.is_read(name):
            written = values.view(name)
            return written[0] == _BRACKET and not are_token_ids(written)
        value = values.get(name)
        return isinstance(value, list) and not (value and isinstance(value[0], int))

    def count_token_ids(self, name: str) -> int | None:
        """How many token ids a member's value is, without reading them; None if that cannot be told."""
        values = self.values
        if isinstance(values, Members) and name in values and not values.is_read(name):
            return count_token_ids(values.view(name))
        return None

    def raw_value(self, name: str) -> bytes | None:
        """A copy of the bytes of a member's value; None when there is no such member."""
        if name not in self.values:
            return None
        return bytes(self.view(name))  # what orjson writes keeps 4 KB, however short it is

    def view(self, name: str) -> memoryview:
        """The bytes of a member's value; of a long object they are its own. Raises KeyError."""
        if self._spans is None:
            return memoryview(dumps(self.values[name]))
        _, start, end = self._spans[name]
        return memoryview(self._raw)[start:end]

    def with_both(self, first: Mapping[str, object], second: Mapping[str, object]) -> Body:
        """As `with_changes` with both, one after the other."""
        if self._spans is not None:
            return self.with_changes({**first, **second})
        members = self._copied()
        _change(members, first)
        _change(members, second)
        return dumps(members)

    def with_written(self, changes: Mapping[str, object], name: str, value: bytes) -> Body:
        """As `with_changes`, and then with this member, which the changes do not have: its value verbatim."""
        if self._spans is not None:
            return self.with_changes({**changes, name: orjson.Fragment(value)})
        members = self._copied()
        _change(members, changes)
        members[name] = orjson.Fragment(value)
        return dumps(members)

    def with_changes(self, changes: Mapping[str, object]) -> Body:
        """The object with members replaced, added at the end, or left out (REMOVED).

        A new value is anything that `dumps` writes; `orjson.Fragment` puts bytes in verbatim. What is between members
        that stay beside each other stays, too.
        """
        if self._spans is None:
            members = self._copied()
            _change(members, changes)
            return dumps(members)
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
                pieces += (source[key if start < 0 else start : value], dumps(new), b",")
            elif start >= 0:
                pieces += (source[start:end], b",")
            start = -1
        if start >= 0:
            pieces += (source[start:end], b",")
        added = {name: new for name, new in changes.items() if new is not REMOVED and name not in self._spans}
        if added:
            pieces.append(memoryview(dumps(added))[1:])
        elif len(pieces) > 1:
            pieces[-1] = b"}"
        else:
            pieces.append(b"}")
        return b"".join(pieces) if len(source) <= JOINED_BYTES else pieces

    def _copied(self) -> dict[str, Any]:
        """Return a copy of the values of an object without `_spans`."""
        values = self.values
        assert isinstance(values, dict)
        return values.copy()


def _change(members: dict[str, Any], changes: Mapping[str, object]) -> None:
    """Replace, add or leave out members of an object, as `Document.with_changes` describes."""
    # The compiler reads a dict several times as fast as another mapping, and each leg of each request comes here.
    for name, value in (changes if isinstance(changes, dict) else dict(changes)).items():
        if value is REMOVED:
            members.pop(name, None)
        else:
            members[name] = value


def pieces_of(body: Body) -> Sequence[bytes | memoryview]:
    """What to write one after the other."""
    return (body,) if isinstance(body, bytes) else body


def length_of(body: Body) -> int:
    """In bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def joined(body: Body) -> bytes:
    """A body in one piece."""
    return body if isinstance(body, bytes) else b"".join(body)


def _refusal(raw: bytes | bytearray) -> InvalidDocument:
    """Why a body is not read. Only the position: the message must not echo a prompt."""
    try:
        value = load(raw)
    except orjson.JSONDecodeError as error:
        return InvalidDocument(f"the body is not valid JSON (line {error.lineno}, column {error.colno})")
    is_object = isinstance(value, dict)
    return InvalidDocument("the body is nested too deeply" if is_object else "the body must be a JSON object")


# Prompts that are token ids
#
# They are recognised and counted by their bytes, because reading a hundred thousand numbers takes milliseconds.

_FIRST_ID: Final = re.compile(rb"\[\s*-?[0-9]+\s*[,\]]")


def are_token_ids(value: memoryview) -> bool:
    """Whether a JSON value is a list that begins with a whole number."""
    return _FIRST_ID.match(value) is not None


def count_token_ids(value: memoryview) -> int | None:
    """How many elements a list has that begins with a whole number; None for any other value, and for a list with
    strings, arrays or objects in it.
    """
    if not are_token_ids(value):
        return None
    text = bytes(value)
    if text.find(b"[", 1) >= 0 or b'"' in text or b"{" in text:
        return None
    return text.count(b",") + 1


# Long answers


class LongAnswer:
    """A whole answer that is passed on as the engine wrote it, but for its end: to find out where all members of a long
    one stand takes longer than all else about it. Raises InvalidDocument for what is no JSON object.
    """

    __slots__ = ("_raw", "values")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        try:
            values = load(raw)
        except orjson.JSONDecodeError:  # or JSON that orjson does not read
            values = dict(Document(raw).values)
        if not isinstance(values, dict):
            raise InvalidDocument("the answer must be a JSON object")
        self.values: dict[str, Any] = values

    def with_changes(self, changes: Mapping[str, object]) -> bytes | None:
        """The answer with `usage` or `kv_transfer_params` replaced, or left out (REMOVED); see Document. None: they do
        not stand at its end, where engines write them.

        What stands behind a comma is the end of the object itself if, with a bracket before it, it is an object.
        """
        raw = self._raw
        begin = raw.rfind(b',"usage":' if "usage" in changes else b',"kv_transfer_params":')
        if begin < 0:
            return None
        try:
            end = Document(b"{" + raw[begin + 1 :])
        except InvalidDocument:
            return None
        if not changes.keys() <= end.values.keys():
            return None
        written = joined(end.with_changes(changes))
        return raw[:begin] + (b"}" if written == b"{}" else b"," + written[1:])
