"""Parts of a request that no engine can serve: the text that takes their place, and their kinds for the log.

A client cannot change the conversation that it sends again with each turn, nor the tools of its default configuration.
So what cannot be served is left out, and the request is answered without it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Kinds are names that a client chose. Anything else could break a line of the log.
_is_kind: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_MAX_KINDS: Final = 16
"""Kinds of one request that are logged."""

_MEDIA: Final = {"application/pdf": "PDF", "image": "image", "audio": "audio", "video": "video"}
"""By media type, or by its first half."""

# Members that say nothing to a model: ids, marks for another service, and what only that service can read.
_OPAQUE: Final = frozenset({"type", "id", "call_id", "tool_use_id", "status", "signature", "cache_control", "caller"})
_ENCRYPTED: Final = "encrypted"
# A string without a space that is this long is encoded bytes, such as an image, and no words.
_MAX_WORD: Final = 512
_MAX_DEPTH: Final = 16


class LeftOut:
    """The kinds of tools and of content that the translation of one request has left out."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[str, None] = {}

    def add(self, what: str, kind: object) -> None:
        """Note a `tool`, an `item` or `content` of some kind."""
        if len(self._kinds) < _MAX_KINDS:
            self._kinds[f"{what} {kind_name(kind)}"] = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their kinds, each once, such as `tool web_search`."""
        return tuple(self._kinds)


def kind_name(kind: object) -> str:
    """The name of a kind that can be shown; `of an unknown type` for anything else than a short name."""
    return kind if isinstance(kind, str) and _is_kind(kind) else "of an unknown type"


def note(what: str, *, name: object = None, size_bytes: int | None = None) -> str:
    """The text in place of content that the model cannot read, such as `[PDF, 12,345 bytes: not readable by this
    model]`.
    """
    named = f" {name}" if isinstance(name, str) and 0 < len(name) <= _MAX_WORD else ""
    size = "" if size_bytes is None else f", {size_bytes:,} bytes"
    return f"[{what}{named}{size}: not readable by this model]"


def media_name(media_type: object) -> str:
    """The word for files of a media type."""
    if not isinstance(media_type, str):
        return "file"
    return _MEDIA.get(media_type.lower()) or _MEDIA.get(media_type.partition("/")[0].lower()) or "file"


def base64_bytes(data: str) -> int:
    """The number of bytes that a base64 text stands for."""
    return len(data) * 3 // 4 - (data.endswith("=") + data.endswith("=="))


def described(kind: object, members: Mapping[str, Any]) -> str | None:
    """The readable members of an object as text, such as `[web_search_call] {"query": "…"}`; None: there are none."""
    told = readable(members)
    return f"[{kind_name(kind)}] {json.dumps(told, ensure_ascii=False)}" if told else None


def readable(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of an object that a model can read."""
    told: dict[str, Any] = _readable(members, 0)
    return told


def _readable(value: Any, depth: int) -> Any:
    """A value without members that a model cannot read; None, or something empty: nothing is left."""
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        members = ((name, _readable(each, depth + 1)) for name, each in value.items() if not _is_opaque(name, depth))
        return {name: each for name, each in members if not _is_nothing(each)}
    if isinstance(value, list):
        return [each for each in (_readable(each, depth + 1) for each in value) if not _is_nothing(each)]
    if isinstance(value, str) and len(value) > _MAX_WORD and " " not in value[:_MAX_WORD]:
        return f"[{len(value):,} bytes]"
    return value


def _is_opaque(name: str, depth: int) -> bool:
    return name.startswith(_ENCRYPTED) or (name in _OPAQUE and (depth == 0 or name != "type"))


def _is_nothing(value: Any) -> bool:
    return value is None or value in ("", {}, [])


def lines(texts: Iterable[str]) -> str:
    """Texts that are not empty, one below the other."""
    return "\n".join(filter(None, texts))


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """The texts of parts of a chat's message; other parts as notes, where there can be text only."""
    return lines(part["text"] if part["type"] == "text" else note("image") for part in parts)
