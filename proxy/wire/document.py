"""Changes members of a JSON object without building or serialising the rest of it.

A request may have a prompt of kilobytes, or megabytes of base64, that the gateway does not read. All bytes are checked,
but a member becomes a Python object only when it is read. A changed copy consists of slices of the original bytes, so
unchanged members keep their order, number spelling and escapes. A short object is read as a whole. If serialising it
returns the same bytes, as for most SDKs, copies are serialised instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.members import (
    Members,
    NotAnObject,
    Spans,
    TooManyMembers,
    count_text_bytes,
    find_member_spans,
    parse_like_python,
)
from proxy.wire.python_json import dumps, parse_again
from proxy.wire.weight import parse_weighed_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


REMOVED: Final = object()
"""New value for `Document.make_changed_body` that removes the member."""

MAX_JOINED_BYTES: Final = 64 * 1024
"""Maximum length in bytes of an object whose changed copy is one piece. Longer copies share bytes with the original."""

Body = bytes | list[bytes | memoryview]
"""The body of a request: its bytes, or the pieces of a long body in order."""

SHORT_DOCUMENT_BYTES: Final = 4 * 1024
"""Maximum length in bytes of an object that is parsed completely, because that costs less than finding its members."""
_BRACKET: Final = ord("[")


class InvalidDocument(ValueError):
    """The bytes are not a JSON object, or have repeated or too many members. The message is safe to show."""


class Document:
    """One JSON object: its values, and the bytes of each top-level member.

    Raises InvalidDocument for bytes that are not a JSON object or that repeat a name. Parsers disagree on which of two
    equal names counts, so the gateway and the engine could read different values.
    """

    def __init__(self, raw: bytes | bytearray) -> None:
        self.values: dict[str, Any] | Members
        """Values by name. A long object reads each value at its first use."""
        self._spans: Spans | None = None
        """Positions of the members; None: copies are serialised from the values, with the same bytes."""
        # Stays empty where it is not needed, because a document lives as long as its request.
        self._raw: bytes | bytearray = b""
        try:
            if len(raw) > SHORT_DOCUMENT_BYTES:
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
                self._raw, self._spans = raw, find_member_spans(raw)
        except TooManyMembers as error:
            raise InvalidDocument(str(error)) from None
        except (NotAnObject, orjson.JSONDecodeError):
            self._parse_like_python(raw)

    def _parse_like_python(self, raw: bytes | bytearray) -> None:
        """Read bytes that orjson rejects with the parser that engines use. Raises InvalidDocument."""
        try:
            self.values, self._spans = parse_like_python(raw)
        except TooManyMembers as error:
            raise InvalidDocument(str(error)) from None
        except NotAnObject:
            raise _make_unreadable_error(raw) from None
        self._raw = raw

    @property
    def read_values(self) -> list[Any]:
        """Return the members' values that have already become Python objects."""
        values = self.values
        return list(values.values()) if isinstance(values, dict) else values.parse_members

    def load(self) -> Any:
        """Return all values. Those that were not read yet are not kept."""
        values = self.values
        return (
            values
            if isinstance(values, dict)
            else {name: parse_again(bytes(self.raw_member_view(name))) for name in values}
        )

    def excerpt_member(self, name: str) -> tuple[Any, Callable[[str], int]]:
        """Return the value of a member, or None without one, and a function that returns the bytes of a string in it.

        The value is not kept. Long strings in it lack their middles, so only the function knows their length.
        """
        values = self.values
        if self._spans is not None and isinstance(values, Members) and name in values:
            return values.excerpt_member(name)
        return values.get(name), count_text_bytes

    def is_list_of_prompts(self, name: str) -> bool:
        """Return whether a member is an array that does not begin with a whole number. Token ids begin with one."""
        values = self.values
        if isinstance(values, Members) and name in values and not values.is_parsed(name):
            written = values.raw_member_view(name)
            return written[0] == _BRACKET and not are_token_ids(written)
        value = values.get(name)
        return isinstance(value, list) and not (value and isinstance(value[0], int))

    def count_token_ids(self, name: str) -> int | None:
        """Count the token ids in a member without reading them.

        None if the member was read already, or has no token ids.
        """
        values = self.values
        if isinstance(values, Members) and name in values and not values.is_parsed(name):
            return count_token_ids(values.raw_member_view(name))
        return None

    def raw_value(self, name: str) -> bytes | None:
        """Return a copy of a member's JSON bytes, or None if the document lacks the member."""
        if name not in self.values:
            return None
        return bytes(self.raw_member_view(name))  # copied, because each result of orjson keeps a buffer of 4 KB

    def raw_member_view(self, name: str) -> memoryview:
        """Return a memory view of a member's JSON bytes. Raises KeyError."""
        if self._spans is None:
            return memoryview(dumps(self.values[name]))
        _, start, end = self._spans[name]
        return memoryview(self._raw)[start:end]

    def merge_changes(self, first: Mapping[str, object], second: Mapping[str, object]) -> Body:
        """Apply `first`, then `second`, as `make_changed_body` does."""
        if self._spans is not None:
            return self.make_changed_body({**first, **second})
        members = self._copy_values()
        _apply_changes(members, first)
        _apply_changes(members, second)
        return dumps(members)

    def with_raw_member(self, changes: Mapping[str, object], name: str, value: bytes) -> Body:
        """Apply changes as `make_changed_body` does, then set the member `name` to these JSON bytes.

        The changes must not contain `name`.
        """
        if self._spans is not None:
            return self.make_changed_body({**changes, name: orjson.Fragment(value)})
        members = self._copy_values()
        _apply_changes(members, changes)
        members[name] = orjson.Fragment(value)
        return dumps(members)

    def make_changed_body(self, changes: Mapping[str, object]) -> Body:
        """Return the JSON object's bytes with members replaced, added at the end, or removed (REMOVED).

        `dumps` writes the new values; `orjson.Fragment` inserts bytes. Separators between unchanged neighbours stay.
        """
        if self._spans is None:
            members = self._copy_values()
            _apply_changes(members, changes)
            return dumps(members)
        source = memoryview(self._raw)
        pieces: list[bytes | memoryview] = [b"{"]
        start, end = -1, 0  # of a run of unchanged members; a start of -1: no run
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
        return b"".join(pieces) if len(source) <= MAX_JOINED_BYTES else pieces

    def _copy_values(self) -> dict[str, Any]:
        """Return a copy of the document's values. Used for documents without positions of members."""
        values = self.values
        assert isinstance(values, dict)
        return values.copy()


def _apply_changes(members: dict[str, Any], changes: Mapping[str, object]) -> None:
    """Replace, add or remove members of an object, as `Document.make_changed_body` describes."""
    # The compiler reads a dict several times as fast as another mapping, and each leg of each request comes here.
    for name, value in (changes if isinstance(changes, dict) else dict(changes)).items():
        if value is REMOVED:
            members.pop(name, None)
        else:
            members[name] = value


_MIN_TOKEN_IDS: Final = 3


def strings_in(values: Any) -> list[str] | None:
    """Return all strings in a JSON value, with the names of members. None: it contains token ids."""
    found: list[str] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            found += value.keys()
            pending += value.values()
        elif isinstance(value, list | tuple):
            if len(value) >= _MIN_TOKEN_IDS and isinstance(value[0], int):
                return None
            pending += value
    return found


def body_pieces(body: Body) -> Sequence[bytes | memoryview]:
    """Return the pieces of a request body in the order in which they are sent."""
    return (body,) if isinstance(body, bytes) else body


def body_length(body: Body) -> int:
    """Return the length of a request body in bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def join_body(body: Body) -> bytes:
    """Return a request body as one piece of bytes."""
    return body if isinstance(body, bytes) else b"".join(body)


def _make_unreadable_error(raw: bytes | bytearray) -> InvalidDocument:
    """Return the error for a request body that is not valid JSON.

    It names only the position, because it must not quote the prompt.
    """
    try:
        value = parse_weighed_json(raw)
    except orjson.JSONDecodeError as error:
        return InvalidDocument(f"the body is not valid JSON (line {error.lineno}, column {error.colno})")
    is_object = isinstance(value, dict)
    return InvalidDocument("the body is nested too deeply" if is_object else "the body must be a JSON object")


# Prompts that are token ids
#
# They are recognised and counted by their bytes, because reading a hundred thousand numbers takes milliseconds.

_FIRST_TOKEN_ID_PATTERN: Final = re.compile(rb"\[\s*-?[0-9]+\s*[,\]]")


def are_token_ids(value: memoryview) -> bool:
    """Return whether a JSON value is a list that begins with a whole number."""
    return _FIRST_TOKEN_ID_PATTERN.match(value) is not None


def count_token_ids(value: memoryview) -> int | None:
    """Count the elements of a list that begins with a whole number.

    Returns None for any other value, and for a list that contains strings, arrays or objects.
    """
    if not are_token_ids(value):
        return None
    text = bytes(value)
    if text.find(b"[", 1) >= 0 or b'"' in text or b"{" in text:
        return None
    return text.count(b",") + 1


# Long answers


class LongAnswer:
    """A complete engine answer in which only members at the end are changed.

    Finding all members of a long answer would take longer than everything else that is done with it. Raises
    InvalidDocument if it is not a JSON object.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        try:
            values = parse_weighed_json(raw)
        except orjson.JSONDecodeError:  # JSON that only the parser of Python reads, or no JSON
            values = dict(Document(raw).values)
        if not isinstance(values, dict):
            raise InvalidDocument("the answer must be a JSON object")
        self.values: dict[str, Any] = values

    def make_changed_body(self, changes: Mapping[str, object]) -> bytes | None:
        """Return the answer with `usage` or `kv_transfer_params` replaced or removed (REMOVED).

        Returns None if these members are not at the end, where engines write them. The bytes after a comma are the end
        of the object itself if they form an object when a bracket is put before them.
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
        written = join_body(end.make_changed_body(changes))
        return raw[:begin] + (b"}" if written == b"{}" else b"," + written[1:])
