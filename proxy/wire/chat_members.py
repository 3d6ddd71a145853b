"""Reads the members of a chat answer in every form that engines are known to write. No IO."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.python_json import dumps, encode_utf8, replace_surrogates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RAW_ARGUMENTS_MEMBER: Final = "raw_arguments"
"""The name of a member for tool arguments that are not a JSON object. It holds their text."""

_MAX_TOOL_CALLS: Final = 4096
_STRING_END_PATTERN: Final = re.compile(rb'["\\]')
_STRUCTURE_PATTERN: Final = re.compile(rb'["{}\[\]]')


class UnreadableMember(Exception):
    """A member of an engine's answer has a form that no engine is known to write; the message names the member."""


# Text


def read_text(value: object, name: str) -> str:
    """Return the text of an answer's member: a string, nothing, or parts with text. Raises UnreadableMember."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(read_text(part, name) for part in value)
    if isinstance(value, dict) and isinstance(text := value.get("text"), str):
        return text
    raise UnreadableMember(f"{name} is neither text nor a list of parts with text")


def read_reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message or delta, for which engines have two names. Raises UnreadableMember."""
    return read_text(message.get("reasoning") or message.get("reasoning_content"), "reasoning")


def read_object_member(value: object, name: str) -> dict[str, Any]:
    """Return an answer's member that is an object or missing. Raises UnreadableMember."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise UnreadableMember(f"{name} is not an object")


def read_objects(value: object, name: str) -> list[dict[str, Any]]:
    """Return the objects of an answer's member, which is a list, one object, or missing. Raises UnreadableMember."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [value] if value else []
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    raise UnreadableMember(f"{name} is not a list of objects")


# Tool calls


class JsonNesting:
    """Tracks strings and brackets of a JSON text that arrives in pieces, without reading values."""

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = False
        """Whether the text so far ends inside a string."""
        self.is_escaped = False
        """Whether the text so far ends with a backslash that escapes the next character."""
        self.is_closed = False
        """Whether an object or array began and every bracket is closed."""

    def scan(self, data: bytes | bytearray) -> None:
        """Scan the next piece of a JSON text for strings and brackets."""
        at, end = 0, len(data)
        if self.is_escaped and end:
            at, self.is_escaped = 1, False
        while at < end:
            found = (_STRING_END_PATTERN if self.in_string else _STRUCTURE_PATTERN).search(data, at)
            if found is None:
                return
            at = found.end()
            sign = found[0]
            if sign == b'"':
                self.in_string = not self.in_string
            elif sign == b"\\":
                self.is_escaped = at == end
                at += 1
            elif sign in b"{[":
                self._depth += 1
            else:
                self._depth -= 1
                self.is_closed = self.is_closed or self._depth <= 0


@dataclass(slots=True)
class ToolCall:
    """A tool call as far as the engine has written it."""

    call_number: int
    """The position of this call among the calls of the answer, in the order in which they began."""
    index: int | None
    """The `index` that the engine gave to the call; None if it gave none."""
    id: str
    """The ID that the engine gave to the call; empty if it gave none."""
    name: str
    written_arguments: bytearray = field(default_factory=bytearray)
    """The arguments of a tool call so far, in UTF-8."""
    _nesting: JsonNesting = field(default_factory=JsonNesting, repr=False, compare=False)
    _scanned_bytes: int = field(default=0, repr=False, compare=False)

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments so far."""
        return replace_surrogates(self.written_arguments)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments so far are an object or array that has ended."""
        if self._scanned_bytes < len(self.written_arguments):
            self._nesting.scan(self.written_arguments[self._scanned_bytes :])
            self._scanned_bytes = len(self.written_arguments)
        return self._nesting.is_closed


class ToolCalls:
    """Collects the fragments of the tool calls of one answer. Fragments of different calls may be mixed.

    The `index` of a fragment names its call. Some engines give several calls one index and different ids. Some send no
    index or no id, and some repeat the name or send a new id in every fragment.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        """The tool calls of the answer, in the order in which they began."""
        self._latest: dict[tuple[int | None, str], ToolCall] = {}
        """The latest call by index and ID, and by index alone, with an empty ID."""

    def add_fragment(self, fragment: Mapping[str, Any]) -> tuple[ToolCall, str]:
        """Add a fragment of a tool call. Return the call and the new part of its arguments. Raises UnreadableMember."""
        index = _read_index(fragment.get("index"))
        call_id = _read_call_id(fragment.get("id"))
        function = read_object_member(fragment.get("function"), "the function of a tool call")
        name = function.get("name")
        if name is None:
            name = ""
        elif not isinstance(name, str):
            raise UnreadableMember("the name of a tool call is not text")
        arguments = read_arguments(function.get("arguments"))
        latest = self._latest
        call = latest.get((index, call_id)) if call_id else None
        if call is None:
            call = latest.get((index, "")) if index is not None else self.calls[-1] if self.calls else None
            if call is not None and _begins_another_call(call, index, call_id, name, arguments):
                call = None
        if call is None:
            if len(self.calls) >= _MAX_TOOL_CALLS:
                raise UnreadableMember(f"the answer has more than {_MAX_TOOL_CALLS} tool calls")
            call = ToolCall(len(self.calls), index, call_id, name)
            self.calls.append(call)
            latest[index, ""] = call
        else:
            call.id = call.id or call_id
            call.name = call.name or name
        if call_id:
            latest[index, call_id] = call
        if arguments:
            call.written_arguments += encode_utf8(arguments)
        return call, arguments


def _begins_another_call(call: ToolCall, index: int | None, call_id: str, name: str, arguments: str) -> bool:
    """Return whether a fragment begins a new call instead of continuing `call`.

    `call` is the latest call of the same index, or the latest of all for a fragment without an index. The fragment does
    not have the ID of the call.
    """
    has_other_id = bool(call_id and call.id)
    if not name:
        return has_other_id and index is None
    if not call.name:
        return has_other_id
    if name != call.name:
        return True
    # The name is repeated. Complete arguments cannot be continued, and each call without arguments has a new ID.
    if call.is_complete:
        return bool(call_id or arguments.strip())
    return has_other_id and not call.written_arguments


def read_complete_calls(value: object) -> Sequence[ToolCall]:
    """Return the tool calls of a whole message, one for each element. Raises UnreadableMember."""
    found: list[ToolCall] = []
    for each in read_objects(value, "tool_calls"):
        call, _ = ToolCalls().add_fragment(each)
        call.call_number = len(found)
        found.append(call)
    return drop_unnamed_calls(found)


def drop_unnamed_calls(calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Return the same tool calls. Raises UnreadableMember if one has no name."""
    for call in calls:
        if not call.name:
            raise UnreadableMember("a tool call has no name")
    return calls


def _read_index(value: object) -> int | None:
    """Return the index of a tool call's fragment, a number or text; None without one. Raises UnreadableMember."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value[:18])
    raise UnreadableMember("the index of a tool call is not a number")


def _read_call_id(value: object) -> str:
    """Return the ID of a tool call's fragment, or an empty text without one. Raises UnreadableMember."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if type(value) is int:
        return str(value)
    raise UnreadableMember("the id of a tool call is not text")


# Arguments


def read_arguments(value: object) -> str:
    """Return the arguments of a call, or a fragment of them, as text. Some engines send an object instead of text."""
    if type(value) is str:
        return value
    return "" if value is None else dumps(value).decode()


def is_json_object(arguments: str | bytes | bytearray) -> bool:
    """Return whether every JSON parser reads the arguments of a tool call as an object."""
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def read_object(arguments: str) -> dict[str, Any] | None:
    """Read a tool call's arguments as tolerantly as possible. Return the object, or None if they are no object.

    Models write line feeds into strings, and constants such as NaN, which are kept as text.
    """
    try:
        read = json.loads(arguments or "{}", strict=False, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if read is None:
        return {}
    return read if isinstance(read, dict) else None


def arguments_as_object(arguments: str) -> str:
    """Return the arguments of a tool call as the JSON text of an object.

    Arguments that no parser reads as an object become the text of the member `raw_arguments`.
    """
    if is_json_object(arguments):
        return arguments
    read = read_object(arguments)
    if read is not None:
        try:
            return json.dumps(read, allow_nan=False)
        except (ValueError, RecursionError):  # a number beyond all bounds
            pass
    return json.dumps({RAW_ARGUMENTS_MEMBER: arguments})


class ControlCharacterEscaper:
    """Escapes control characters in strings of tool-call arguments. The arguments arrive in fragments.

    Models write such characters, but JSON forbids them, so the parsers of clients would reject the arguments.
    """

    _CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f]")
    _SHORT_ESCAPES: Final[Mapping[str, str]] = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}

    def __init__(self, written: bytearray) -> None:
        """Take the buffer of all arguments so far. The caller adds each fragment to it before calling `escape_text`."""
        self._raw_arguments = written
        self._nesting = JsonNesting()
        self._scanned_bytes = 0

    def escape_text(self, text: str) -> str:
        """Return the next fragment, which the buffer ends with, with its control characters escaped."""
        if self._CONTROL_CHARACTER.search(text) is None:
            return text
        nesting = self._nesting
        nesting.scan(self._raw_arguments[self._scanned_bytes : len(self._raw_arguments) - len(encode_utf8(text))])
        self._scanned_bytes = len(self._raw_arguments)
        pieces: list[str] = []
        at = 0
        for found in self._CONTROL_CHARACTER.finditer(text):
            before, sign = text[at : found.start()], found[0]
            at = found.end()
            nesting.scan(encode_utf8(before))
            pieces.append(before)
            if not nesting.in_string:
                pieces.append(sign)
                continue
            escape = self._SHORT_ESCAPES.get(sign) or f"u{ord(sign):04x}"
            pieces.append(escape if nesting.is_escaped else "\\" + escape)
            nesting.is_escaped = False
        nesting.scan(encode_utf8(text[at:]))
        pieces.append(text[at:])
        return "".join(pieces)
