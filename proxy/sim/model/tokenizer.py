"""The tokenizer of simulated engines: one token for each byte, and the special markers of Kimi K2.

The IDs 0 to 255 are bytes, so a character may consist of several tokens, as in real byte-level vocabularies. The
markers have Kimi K2's real IDs. Prefiller and decoder render a chat to the same IDs, as KV transfer requires.
"""

from __future__ import annotations

import codecs
import re
from array import array
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SPACE: Final = 0x20
BOS: Final = 163584
END: Final = 163586
USER: Final = 163587
ASSISTANT: Final = 163588
SYSTEM: Final = 163594
SECTION_BEGIN: Final = 163595
SECTION_END: Final = 163596
CALL_BEGIN: Final = 163597
ARGUMENT_BEGIN: Final = 163598
CALL_END: Final = 163599
MIDDLE: Final = 163601
MEDIA: Final = 163605
THINK: Final = 163606
THINK_END: Final = 163607

MARKERS: Final[dict[int, str]] = {
    BOS: "[BOS]",
    END: "<|im_end|>",
    USER: "<|im_user|>",
    ASSISTANT: "<|im_assistant|>",
    SYSTEM: "<|im_system|>",
    SECTION_BEGIN: "<|tool_calls_section_begin|>",
    SECTION_END: "<|tool_calls_section_end|>",
    CALL_BEGIN: "<|tool_call_begin|>",
    ARGUMENT_BEGIN: "<|tool_call_argument_begin|>",
    CALL_END: "<|tool_call_end|>",
    MIDDLE: "<|im_middle|>",
    MEDIA: "<|media_pad|>",
    THINK: "<think>",
    THINK_END: "</think>",
}

MEDIA_TOKENS: Final = 64
"""The number of placeholder tokens for one image, video or audio part."""

_ROLES: Final = {"user": USER, "assistant": ASSISTANT}
_MARKER_IDS: Final = {text: token for token, text in MARKERS.items()}
_MARKER_PATTERN: Final = re.compile("(" + "|".join(map(re.escape, _MARKER_IDS)) + ")")


def encode_text(text: str) -> list[int]:
    """Convert text to token IDs. A marker in the text becomes its ID, as with Hugging Face's tokenizers."""
    ids: list[int] = []
    for part in _MARKER_PATTERN.split(text):
        ids += [_MARKER_IDS[part]] if part in _MARKER_IDS else part.encode("utf-8", "surrogatepass")
    return ids


def pack(ids: Sequence[int]) -> bytes:
    """Convert token IDs to the bytes from which digests are computed."""
    return array("I", ids).tobytes()


class Detokenizer:
    """Converts token IDs to text, one at a time. It holds back the bytes of a character that is not complete.

    `spaced_after` is the token before the first one, or None. With it, spaces surround the markers that are shown, as
    in slow tokenizers unless `spaces_between_special_tokens` is off (vLLM `tokenizers/detokenizer_utils.py`).
    """

    __slots__ = ("_decoder", "_is_spaced", "_keep_markers", "_was_marker")

    def __init__(self, *, keep_markers: bool = False, spaced_after: int | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._keep_markers = keep_markers
        self._is_spaced = keep_markers and spaced_after is not None
        self._was_marker = spaced_after in MARKERS

    def feed(self, token: int) -> str:
        if token < 256:
            return self._add_spaces(self._decoder.decode(bytes((token,))), is_marker=False)
        # A marker in the middle of a character ends it, broken.
        broken = self._decoder.decode(b"", True)
        self._decoder.reset()
        return broken + self._add_spaces(MARKERS.get(token, ""), is_marker=True) if self._keep_markers else broken

    def _add_spaces(self, text: str, *, is_marker: bool) -> str:
        if not self._is_spaced or not text:
            return text
        text = f" {text}" if is_marker or self._was_marker else text
        self._was_marker = is_marker
        return text


def decode_tokens(ids: Iterable[int], *, keep_markers: bool = False) -> str:
    """Convert all token IDs to text. An incomplete last character becomes U+FFFD."""
    detokenizer = Detokenizer(keep_markers=keep_markers)
    text = "".join([detokenizer.feed(token) for token in ids])
    return text + detokenizer._decoder.decode(b"", True)


def render_chat(body: dict[str, Any], *, media: bool = True) -> list[int]:
    """Return the token IDs of a chat request, rendered with Kimi K2's template.

    `tools` are declared in a system turn unless `tool_choice` is "none". The generation prompt opens reasoning when
    `chat_template_kwargs.thinking` is true, and otherwise closes it at once. `media=False` drops media parts.
    """
    ids: list[int] = []
    if body.get("tools") and body.get("tool_choice") != "none":
        ids += [SYSTEM, *b"tool_declare", MIDDLE, *orjson.dumps(body["tools"]), END]
    for message in body["messages"]:
        ids += _render_message(message, media)
    if body.get("continue_final_message"):
        return ids[:-1]
    if body.get("add_generation_prompt", True):
        ids += [ASSISTANT, *b"assistant", MIDDLE, THINK]
        if not asks_for_thinking(body):
            ids.append(THINK_END)
    return ids


def asks_for_thinking(body: dict[str, Any]) -> bool:
    kwargs = body.get("chat_template_kwargs") or {}
    return bool(kwargs.get("thinking") or kwargs.get("enable_thinking"))


def _render_message(message: dict[str, Any], media: bool) -> list[int]:
    role = str(message.get("role", "user"))
    ids = [_ROLES.get(role, SYSTEM), *encode_text(role), MIDDLE]
    if role == "tool":
        ids += encode_text(f"## Return of {message.get('tool_call_id')}\n")
    content = message.get("content")
    if isinstance(content, str):
        ids += encode_text(content)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            ids += encode_text(part)
        elif "text" in part:
            ids += encode_text(str(part["text"]))
        elif media:
            ids += [MEDIA] * MEDIA_TOKENS
    if calls := message.get("tool_calls"):
        ids.append(SECTION_BEGIN)
        for call in calls:
            function = call["function"]
            ids += [CALL_BEGIN, *encode_text(str(call.get("id"))), ARGUMENT_BEGIN]
            ids += [*encode_text(str(function.get("arguments", ""))), CALL_END]
        ids.append(SECTION_END)
    ids.append(END)
    return ids
