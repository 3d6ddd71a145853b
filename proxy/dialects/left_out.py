"""Omits parts of a request that no engine can serve, replaces them by a text, and lists their kinds for the log.

Clients send the whole conversation again with each turn, and tools that they are configured with. They cannot change
either. So the gateway omits the parts that it cannot serve, and answers the request without them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Kinds are names that a client chose. Anything else could break a line of the log.
_matches_kind_name: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_MAX_KINDS: Final = 16
"""Maximum number of omitted kinds that are logged for one request."""

_MEDIA_TYPE: Final = {"application/pdf": "PDF", "image": "image", "audio": "audio", "video": "video"}
"""Words for kinds of files, by media type, or by the part of the media type before the slash."""

# Members without meaning for a model: ids, flags for another service, and data that only that service can read.
_OPAQUE_MEMBERS: Final = frozenset(
    {"type", "id", "call_id", "tool_use_id", "status", "signature", "cache_control", "caller"}
)
_ENCRYPTED_MEMBERS: Final = "encrypted"
# A longer string without a space is encoded bytes, such as an image, rather than words.
_MAX_NAME_LENGTH: Final = 512
_MAX_DEPTH: Final = 16


class OmittedParts:
    """The kinds of tools and content that were omitted when one request was translated."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[str, None] = {}

    def add_kind(self, what: str, kind: object) -> None:
        """Record an omitted part. `what` is `tool`, `item` or `content`."""
        if len(self._kinds) < _MAX_KINDS:
            self._kinds[f"{what} {kind_name(kind)}"] = None

    @property
    def listed_kinds(self) -> tuple[str, ...]:
        """The kinds of omitted parts, such as `tool web_search`, without repetitions."""
        return tuple(self._kinds)


def kind_name(kind: object) -> str:
    """Return a kind if it is a short name, otherwise the text `of an unknown type`."""
    return kind if isinstance(kind, str) and _matches_kind_name(kind) else "of an unknown type"


def describe_omitted_part(what: str, *, name: object = None, size_bytes: int | None = None) -> str:
    """Return the text that replaces unreadable content, such as `[PDF, 12,345 bytes: not readable by this model]`."""
    named = f" {name}" if isinstance(name, str) and 0 < len(name) <= _MAX_NAME_LENGTH else ""
    size = "" if size_bytes is None else f", {size_bytes:,} bytes"
    return f"[{what}{named}{size}: not readable by this model]"


def media_name(media_type: object) -> str:
    """Return the word for a kind of files, such as `PDF`."""
    if not isinstance(media_type, str):
        return "file"
    return _MEDIA_TYPE.get(media_type.lower()) or _MEDIA_TYPE.get(media_type.partition("/")[0].lower()) or "file"


def count_base64_bytes(data: str) -> int:
    """Return the number of bytes that a base64 text encodes."""
    return len(data) * 3 // 4 - (data.endswith("=") + data.endswith("=="))


def readable_text(kind: object, members: Mapping[str, Any]) -> str | None:
    """Return an object's readable members as text, such as `[web_search_call] {"query": "…"}`; None if it has none."""
    shown = readable_members(members)
    return f"[{kind_name(kind)}] {json.dumps(shown, ensure_ascii=False)}" if shown else None


def readable_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an object that a model can read."""
    shown: dict[str, Any] = _remove_opaque_members(members, 0)
    return shown


def _remove_opaque_members(value: Any, depth: int) -> Any:
    """Return a value without the members that a model cannot read. The result is None or empty if nothing remains."""
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        members = (
            (name, _remove_opaque_members(each, depth + 1))
            for name, each in value.items()
            if not _is_opaque_member(name, depth)
        )
        return {name: each for name, each in members if not _is_empty_value(each)}
    if isinstance(value, list):
        return [
            each for each in (_remove_opaque_members(each, depth + 1) for each in value) if not _is_empty_value(each)
        ]
    if isinstance(value, str) and len(value) > _MAX_NAME_LENGTH and " " not in value[:_MAX_NAME_LENGTH]:
        return f"[{len(value):,} bytes]"
    return value


def _is_opaque_member(name: str, depth: int) -> bool:
    return name.startswith(_ENCRYPTED_MEMBERS) or (name in _OPAQUE_MEMBERS and (depth == 0 or name != "type"))


def _is_empty_value(value: Any) -> bool:
    return value is None or value in ("", {}, [])


def join_lines(texts: Iterable[str]) -> str:
    """Join the texts with line breaks. Empty texts are skipped."""
    return "\n".join(filter(None, texts))


def join_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the parts of a chat message into one text. Notes replace images."""
    return join_lines(part["text"] if part["type"] == "text" else describe_omitted_part("image") for part in parts)
