"""Keys of a prompt's prefixes: equal keys, equal text so far. What the engines' prefix caches have in common with us.

The prompt is cut into pieces, and each piece's key also depends on all pieces before it, as vLLM's block hashes do
(`hash_block_tokens`), so the longest prefix that two prompts share is found by comparing keys. A piece is a message, or
2 KiB of a longer one, about 512 tokens; or 512 token ids. Only the text is known here and not what the chat template
makes of it: the keys tell what a cache probably holds, which is enough to choose by, and never what it certainly holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.document import REMOVED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PIECE_BYTES: Final = 2048
_PIECE_IDS: Final = 512
# Longer prompts have larger pieces, so that looking them up stays cheap.
_MAX_PIECES: Final = 512

# Members that are a prompt, where there are no messages.
_PROMPTS: Final = ("prompt", "text", "input_ids")
# What decides how the engine renders or looks up the prompt, beside the prompt itself.
_SALT: Final = ("model", "cache_salt", "chat_template", "chat_template_kwargs")
_READ: Final = (*_SALT, *_PROMPTS, "messages", "tools")
# Of a message. Reasoning is no part of it: templates drop that of earlier turns (Kimi K2's chat_template.jinja does).
_RENDERED: Final = ("role", "name", "content", "tool_calls", "tool_call_id")

# A picture is told by its length and its two ends: hashing 8 MB of base64 would cost more than choosing may.
_MEDIA_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """`keys[i]` names the prompt up to the end of its piece `i`, in 64 bits that are the same in every process and on
    every host; `sizes[i]` is how many bytes that is, or token ids. Both are empty when there is no single prompt.
    """

    keys: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Prompt:
    """The prompt of a request body. Its keys are computed when somebody asks, and once for all calls that share it."""

    __slots__ = ("_changes", "_keys", "_values")

    def __init__(self, values: Mapping[str, Any], changes: Mapping[str, object] | None = None) -> None:
        """`values`: the members of the body. `changes`: those that are others by now, or REMOVED."""
        self._values = values
        self._changes = changes or {}
        self._keys: PrefixKeys | None = None

    def changed(self, changes: Mapping[str, object]) -> Prompt:
        """The prompt of a body with some members changed, as by `Document.with_changes`; often the same one."""
        if changes.keys().isdisjoint(_PROMPTS):
            return self
        return Prompt(self._values, {**self._changes, **changes})

    @property
    def keys(self) -> PrefixKeys:
        """About 0.2 ms for 64 KiB of text."""
        if self._keys is None:
            members = {name: self._changes.get(name, self._values.get(name)) for name in _READ}
            self._keys = prefix_keys({name: value for name, value in members.items() if value is not REMOVED})
        return self._keys


def prefix_keys(values: Mapping[str, Any]) -> PrefixKeys:
    """The keys of a chat's messages, or of a completion's `prompt`, or SGLang's `text` or `input_ids`."""
    salt = orjson.dumps([values.get(name) for name in _SALT])
    whole = next((values[name] for name in _PROMPTS if values.get(name) is not None), None)
    if isinstance(values.get("messages"), list):
        texts = list(_messages(values))
        pieces = [text for each in texts for text in _cut(each, _piece_size(sum(map(len, texts)), _PIECE_BYTES))]
        sizes = [len(piece) for piece in pieces]
    elif isinstance(whole, str):
        text = whole.encode("utf-8", "surrogatepass")
        pieces = list(_cut(text, _piece_size(len(text), _PIECE_BYTES)))
        sizes = [len(piece) for piece in pieces]
    elif isinstance(whole, list) and set(map(type, whole)) == {int}:
        size = _piece_size(len(whole), _PIECE_IDS)
        parts = [whole[start : start + size] for start in range(0, len(whole), size)]
        pieces, sizes = [orjson.dumps(part) for part in parts], [len(part) for part in parts]
    else:
        return PrefixKeys()
    return _chained(salt, pieces, sizes)


def _chained(salt: bytes, pieces: list[bytes], sizes: list[int]) -> PrefixKeys:
    keys = []
    digest = sha256(salt).digest()
    for piece in pieces:
        digest = sha256(digest + piece).digest()  # processors have instructions for this one
        keys.append(int.from_bytes(digest[:8]))
    return PrefixKeys(tuple(keys), tuple(accumulate(sizes)))


def _piece_size(length: int, size: int) -> int:
    """Pieces double in size until they are few enough."""
    while length > size * _MAX_PIECES:
        size *= 2
    return size


def _cut(text: bytes, size: int) -> Iterator[bytes]:
    return (text[start : start + size] for start in range(0, len(text), size))


def _messages(values: Mapping[str, Any]) -> Iterator[bytes]:
    """Tools first, as templates render them, and then each message."""
    if values.get("tools"):
        yield orjson.dumps(values["tools"])
    for message in values["messages"]:
        if isinstance(message, dict):
            yield orjson.dumps([_shortened(message[name]) for name in _RENDERED if message.get(name) is not None])


def _shortened(content: Any) -> Any:
    """Parts of a message's content without the middle of pictures and recordings."""
    if not isinstance(content, list):
        return content
    return [part if isinstance(part, dict) and "text" in part else _ends(part) for part in content]


def _ends(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MEDIA_BYTES:
        half = _MEDIA_BYTES // 2
        return [len(value), value[:half], value[-half:]]
    if isinstance(value, dict):
        return {name: _ends(member) for name, member in value.items()}
    return value
