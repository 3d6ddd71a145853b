"""Keys of a prompt's prefixes: equal keys, equal text so far. What the engines' prefix caches have in common with us.

The prompt is cut into pieces, and each piece's key also depends on all pieces before it, as vLLM's block hashes do
(`hash_block_tokens`), so the longest prefix that two prompts share is found by comparing keys. Pieces have 512 bytes,
about 128 tokens, and grow with what is before them to a sixteenth of it, so that long prompts are soon looked up. What
is hashed are the bytes of the JSON text: what is spelled otherwise counts as another text. Only the text is known here
and not what the chat template makes of it: the keys tell what a cache probably holds, which is enough to choose by, and
never what it certainly holds.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest as hashed

from proxy.wire.document import REMOVED, are_token_ids
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.wire.document import Document

_LEAST_PIECE_BYTES: Final = 512
_PIECES_PER_DOUBLING: Final = 16
_MOST_BYTES: Final = 1 << 30


def _piece_ends() -> Iterator[int]:
    """Where pieces end, in bytes from the prompt's beginning: the same whatever the prompt's length."""
    size, end = _LEAST_PIECE_BYTES, 0
    while end < _MOST_BYTES:
        for _ in range(_PIECES_PER_DOUBLING):
            end += size
            yield end
        size = end // _PIECES_PER_DOUBLING


_ENDS: Final = tuple(_piece_ends())

# Members that are a prompt, where there are no messages.
_PROMPTS: Final = ("prompt", "text", "input_ids")
# What decides how the engine renders or looks up the prompt, beside the prompt itself.
_SALT: Final = ("model", "cache_salt", "chat_template", "chat_template_kwargs", "thinking", "reasoning_effort")

# A picture is told by its length and its two ends: hashing 8 MB of base64 would cost more than choosing may.
_MEDIA_STARTS: Final = (b";base64,", b'"data":"')
_MEDIA_END_BYTES: Final = 4096
_REASONING: Final = re.compile(rb'\s*,?\s*"reasoning(?:_content)?"\s*:\s*(?:null|"[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)

_BRACKET: Final = ord("[")
_QUOTE: Final = ord('"')


_NONE: Final = (b"", b"null", b"[]")


class _Said(msgspec.Struct):
    """Of a message, what tells whether a turn ends with it."""

    role: Any = None
    tool_calls: msgspec.Raw = msgspec.Raw()


_said_in = msgspec.json.Decoder(list[_Said]).decode
_messages_in = msgspec.json.Decoder(list[msgspec.Raw]).decode


class PrefixKeys(NamedTuple):
    """`keys[i]` names the prompt up to the end of its piece `i`, in 64 bits that are the same in every process and on
    every host; `sizes[i]` is how many bytes of JSON that is. Both are empty when there is no single prompt.
    """

    keys: Sequence[int] = ()
    sizes: Sequence[int] = ()


NO_KEYS: Final = PrefixKeys()


class Prompt:
    """The prompt of a request body. Its keys are computed when somebody asks, and once for all calls that share it."""

    __slots__ = ("_changes", "_document", "_has_media", "_has_reasoning", "_keys")

    def __init__(
        self,
        document: Document,
        changes: Mapping[str, object] | None = None,
        has_reasoning: bool = False,
        has_media: bool = False,
    ) -> None:
        """`changes`: the members of the document that are others by now, or REMOVED. `has_reasoning`, `has_media`: the
        messages hold an assistant's reasoning, or more than text.
        """
        self._document = document
        self._changes = changes or {}
        self._has_reasoning = has_reasoning
        self._has_media = has_media
        self._keys: PrefixKeys | None = None

    def changed(self, changes: Mapping[str, object]) -> Prompt:
        """The prompt of a body with some members changed, as by `Document.with_changes`; often the same one."""
        if changes.keys().isdisjoint(_PROMPTS):
            return self
        return Prompt(self._document, {**self._changes, **changes}, self._has_reasoning, self._has_media)

    @property
    def keys(self) -> PrefixKeys:
        """About 20 µs for 64 KiB of text."""
        if self._keys is None:
            self._keys = self._computed()
        return self._keys

    def _computed(self) -> PrefixKeys:
        texts = self._texts()
        if not texts:
            return NO_KEYS
        values = self._document.values
        key = hashed(dumps([values.get(name) for name in _SALT]))
        keys: list[int] = []
        sizes: list[int] = []
        before = 0
        for text in texts:
            after = before + len(text)
            ends = [*_ENDS[bisect_right(_ENDS, before) : bisect_left(_ENDS, after)], after]
            places = [0, *(ends if not before else [end - before for end in ends])]
            keys += [key := hashed(text[start:end], key) for start, end in pairwise(places)]
            sizes += ends
            before = after
        return PrefixKeys(keys, sizes)

    def _texts(self) -> list[memoryview]:
        """What the engine computes, in this order: the tools, as templates render them first, and the messages."""
        messages = self._written("messages")
        if messages is None:
            prompt = next((written for name in _PROMPTS if (written := self._written(name)) is not None), None)
            return [prompt] if prompt is not None and (prompt[0] == _QUOTE or are_token_ids(prompt)) else []
        if messages[0] != _BRACKET:
            return []
        if self._has_reasoning:
            messages = memoryview(_as_templates_keep(messages))
        if self._has_media:
            messages = memoryview(_without_media(bytes(messages)))
        tools = self._written("tools")
        return [messages] if tools is None else [tools, messages]

    def _written(self, name: str) -> memoryview | None:
        """A member's value as JSON; None: there is none, or it is null."""
        if name in self._changes:
            value = self._changes[name]
            return None if value is REMOVED or value is None else memoryview(dumps(value))
        if name not in self._document.values:
            return None
        written = self._document.view(name)
        return None if bytes(written[:5]) == b"null" else written


def _as_templates_keep(messages: memoryview) -> bytes:
    """Messages without the reasoning of turns that have ended: Kimi K2's chat_template.jinja keeps only what comes
    behind the last assistant message without tool calls.
    """
    try:
        written, said = _messages_in(messages), _said_in(messages)
    except (msgspec.DecodeError, RecursionError):  # the engine says what is wrong with them
        return bytes(messages)
    ends = (place for place, each in enumerate(said, 1) if each.role == "assistant" and bytes(each.tool_calls) in _NONE)
    ended = max(ends, default=0)
    turns = [_REASONING.sub(b"", message) for message in written[:ended]]
    return b"[%b]" % b",".join([*turns, *written[ended:]])


def _without_media(text: bytes) -> bytes:
    """Without the middles of pictures and recordings."""
    for mark in _MEDIA_STARTS:
        pieces: list[bytes] = []
        start = 0
        while (at := text.find(mark, start)) >= 0:
            end = text.find(b'"', at + len(mark))
            if end - at > 2 * _MEDIA_END_BYTES:
                pieces += [text[start : at + _MEDIA_END_BYTES], b"%d" % (end - at)]
                start = end - _MEDIA_END_BYTES
            else:
                pieces.append(text[start : at + len(mark)])
                start = at + len(mark)
        text = b"".join([*pieces, text[start:]])
    return text
