"""Computes keys of the prefixes of a prompt, which estimate the content of the prefix caches of engines.

The prompt is cut into pieces. The key of a piece also depends on all pieces before it, like the block hashes of vLLM
(`hash_block_tokens`). So comparing keys finds the longest common prefix of two prompts. A piece has at least 512 bytes,
about 128 tokens, and a sixteenth of the bytes before it, so that long prompts have few keys. The keys are hashes of the
JSON text, so another spelling is another text. The chat template is not applied: equal keys make a cache hit likely,
not certain. That is enough to choose an instance.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest as hashed

from proxy.wire.document import REMOVED, Document, are_token_ids
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_MIN_PIECE_BYTES: Final = 512
_PIECES_PER_DOUBLING: Final = 16
_MAX_PROMPT_BYTES: Final = 1 << 30


def _piece_ends() -> Iterator[int]:
    """Yield the ends of pieces, in bytes from the beginning of the prompt. They are the same for all prompts."""
    size, end = _MIN_PIECE_BYTES, 0
    while end < _MAX_PROMPT_BYTES:
        for _ in range(_PIECES_PER_DOUBLING):
            end += size
            yield end
        size = end // _PIECES_PER_DOUBLING


_PIECE_ENDS: Final = tuple(_piece_ends())

# Members that hold the prompt of a request without messages.
_PROMPT_MEMBERS: Final = ("prompt", "text", "input_ids")
# Members that change how the engine renders or looks up the prompt.
_MEMBERS_CHANGING_CACHE_KEYS: Final = (
    "model",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "thinking",
    "reasoning_effort",
)

# Only the length and the two ends of a picture are hashed, because hashing 8 MB of base64 takes too long.
_MEDIA_STARTS: Final = (b";base64,", b'"data":"')
_MEDIA_END_BYTES: Final = 4096
_REASONING_PATTERN: Final = re.compile(
    rb'\s*,?\s*"reasoning(?:_content)?"\s*:\s*(?:null|"[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL
)

_BRACKET: Final = ord("[")
_QUOTE: Final = ord('"')


_EMPTY_VALUES: Final = (b"", b"null", b"[]")


class _TurnMembers(msgspec.Struct):
    """The members of a message that decide whether it ends a turn."""

    role: Any = None
    tool_calls: msgspec.Raw = msgspec.Raw()


_turn_members_in = msgspec.json.Decoder(list[_TurnMembers]).decode
_messages_in = msgspec.json.Decoder(list[msgspec.Raw]).decode


class PrefixKeys(NamedTuple):
    """The keys of the pieces of a prompt, and the size of each prefix. Both are empty if there are several prompts.

    `keys[i]` is a hash of 64 bits of the prompt up to the end of piece `i`, the same in all processes and on all hosts.
    `sizes[i]` is the length of that prefix in bytes of JSON.
    """

    keys: Sequence[int] = ()
    sizes: Sequence[int] = ()


NO_PREFIX_KEYS: Final = PrefixKeys()


class PromptPrefixes:
    """The prompt of a request body. Its keys are computed at the first use, for all calls that share the prompt."""

    def __init__(
        self,
        document: Document,
        changes: Mapping[str, object] | None = None,
        has_reasoning: bool = False,
        has_media: bool = False,
    ) -> None:
        """Store the request body that holds the prompt, and its changes.

        Args:
            document: The request body.
            changes: New values of members, or REMOVED.
            has_reasoning: Whether messages have reasoning of the assistant.
            has_media: Whether messages have pictures or other media.
        """
        self._document = document
        self._changes = changes or {}
        self._has_reasoning = has_reasoning
        self._has_media = has_media
        self._keys: PrefixKeys | None = None

    def copy_with_changes(self, changes: Mapping[str, object]) -> PromptPrefixes:
        """Return the prompt of a body with changed members; the same object if the prompt stays the same."""
        if changes.keys().isdisjoint(_PROMPT_MEMBERS):
            return self
        return PromptPrefixes(self._document, {**self._changes, **changes}, self._has_reasoning, self._has_media)

    @property
    def keys(self) -> PrefixKeys:
        """The keys of the prompt's prefixes. Computing them takes about 20 µs for 64 KiB of text."""
        if self._keys is None:
            self._keys = self._compute_keys()
        return self._keys

    def _compute_keys(self) -> PrefixKeys:
        texts = self._prompt_texts()
        if not texts:
            return NO_PREFIX_KEYS
        values = self._document.values
        key = hashed(dumps([values.get(name) for name in _MEMBERS_CHANGING_CACHE_KEYS]))
        keys: list[int] = []
        sizes: list[int] = []
        before = 0
        for text in texts:
            after = before + len(text)
            ends = [*_PIECE_ENDS[bisect_right(_PIECE_ENDS, before) : bisect_left(_PIECE_ENDS, after)], after]
            places = [0, *(ends if not before else [end - before for end in ends])]
            keys += [key := hashed(text[start:end], key) for start, end in pairwise(places)]
            sizes += ends
            before = after
        return PrefixKeys(keys, sizes)

    def _prompt_texts(self) -> list[memoryview]:
        """Return the texts that the engine computes: the tools, which templates render first, and the messages."""
        messages = self._raw_member("messages")
        if messages is None:
            prompt = next(
                (written for name in _PROMPT_MEMBERS if (written := self._raw_member(name)) is not None), None
            )
            return [prompt] if prompt is not None and (prompt[0] == _QUOTE or are_token_ids(prompt)) else []
        if messages[0] != _BRACKET:
            return []
        if self._has_reasoning:
            messages = memoryview(_drop_old_reasoning(messages))
        if self._has_media:
            messages = memoryview(_without_media(bytes(messages)))
        tools = self._raw_member("tools")
        return [messages] if tools is None else [tools, messages]

    def _raw_member(self, name: str) -> memoryview | None:
        """Return the JSON text of a member of the prompt, or None if it is missing or null."""
        if name in self._changes:
            value = self._changes[name]
            return None if value is REMOVED or value is None else memoryview(dumps(value))
        if name not in self._document.values:
            return None
        written = self._document.raw_member_view(name)
        return None if bytes(written[:5]) == b"null" else written


def _drop_old_reasoning(messages: memoryview) -> bytes:
    """Return messages without the reasoning of turns that have ended.

    The chat_template.jinja of Kimi K2 keeps only reasoning after the last assistant message without tool calls.
    """
    try:
        written, members = _messages_in(messages), _turn_members_in(messages)
    except (msgspec.DecodeError, RecursionError):  # the engine rejects them
        return bytes(messages)
    ends = (
        place
        for place, each in enumerate(members, 1)
        if each.role == "assistant" and bytes(each.tool_calls) in _EMPTY_VALUES
    )
    ended = max(ends, default=0)
    turns = [_REASONING_PATTERN.sub(b"", message) for message in written[:ended]]
    return b"[%b]" % b",".join([*turns, *written[ended:]])


def _without_media(text: bytes) -> bytes:
    """Return the text without the middle of each picture and recording."""
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
