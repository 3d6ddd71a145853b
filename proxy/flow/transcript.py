"""What decoders have told of an answer, and what each of their events means for the client. No IO.

A Segment is one decoder's stream. A Transcript is the client's answer so far, over all segments: what it takes to go on
with it elsewhere.

An answer is complete only when every choice has a finish reason and the stream said `[DONE]`. vLLM 0.18 to 0.30 ends a
choice that was preempted or failed before its first token without any finish chunk, so a clean end of the HTTP body
proves nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire import kimi
from proxy.wire.openai import DONE
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier

if TYPE_CHECKING:
    from proxy.wire.sse import Event

_PROMPT_IDS: Final = b'"prompt_token_ids":['
_MAX_TOOL_CALLS: Final = 4096


class Meaning(Enum):
    """What an event is, for the relay."""

    OTHER = auto()  # a comment or an object nobody here knows: passed on untouched
    OPENING = auto()  # the role chunk: nothing of the answer yet
    CONTENT = auto()  # part of the answer
    USAGE = auto()  # the usage chunk, without choices
    DONE = auto()  # `[DONE]`
    ERROR = auto()  # the engine's error event
    RECOMPUTED = auto()  # the decoder gives up and asks for a new prefill; not a finish, whatever finish_reason says
    MALFORMED = auto()  # data that is not JSON, or choices that are none


class Segment:
    """State of one decoder stream; one choice, or the several an engine streams side by side."""

    __slots__ = ("data", "done", "finish_reasons", "is_mute", "open_choices", "payload", "prompt_ids", "usage")

    def __init__(self) -> None:
        self.payload: Any = None
        """The parsed data of the last event read; None when it was not JSON. Without the prompt's token ids."""
        self.data: bytes | None = None
        """The bytes of that data, likewise."""
        self.prompt_ids: bytes | None = None
        """The token ids of the prompt as the JSON array that the engine wrote; None until it does."""
        self.finish_reasons: dict[int, str] = {}
        self.open_choices: set[int] = set()
        self.usage: dict[str, Any] | None = None
        """The last usage seen."""
        self.done = False
        self.is_mute = False
        """The last chunk had neither text nor token ids nor a finish, nor anything else of an answer."""

    @property
    def is_finished(self) -> bool:
        """Every choice that began has finished, and at least one did."""
        return bool(self.finish_reasons) and not self.open_choices

    @property
    def is_complete(self) -> bool:
        """It is finished, and the stream said so."""
        return self.done and self.is_finished

    def read(self, event: Event) -> Meaning:
        """Take the next event."""
        self.payload = None
        self.data = data = event.data
        if data is None:
            return Meaning.OTHER
        if data == DONE:
            self.done = True
            return Meaning.DONE
        if self.prompt_ids is None and (begin := data.find(_PROMPT_IDS)) >= 0:
            # As long as the prompt, and needed only if the decoder is lost: cut out unparsed. The bytes cannot occur
            # inside a JSON string, where the quotes would be escaped.
            begin += len(_PROMPT_IDS) - 1
            end = data.find(b"]", begin) + 1
            if end:
                self.prompt_ids = data[begin:end]
                self.data = data = b"%bnull%b" % (data[:begin], data[end:])
        if len(data) > LONG_BYTES and is_heavier(data, MAX_ANSWER_ELEMENTS):
            return Meaning.MALFORMED
        try:
            self.payload = payload = orjson.loads(data)
        except orjson.JSONDecodeError:
            return Meaning.MALFORMED
        if not isinstance(payload, dict):
            return Meaning.OTHER
        usage = payload.get("usage")
        has_usage = isinstance(usage, dict) and bool(usage)
        if has_usage:
            self.usage = usage
        choices = payload.get("choices")
        if choices:
            try:
                return self._read_choices(choices)
            except (AttributeError, TypeError):  # not a list of objects
                return Meaning.MALFORMED
        if payload.get("error"):
            return Meaning.ERROR
        return Meaning.USAGE if has_usage else Meaning.OTHER

    def _read_choices(self, choices: list[dict[str, Any]]) -> Meaning:
        has_content = False
        self.is_mute = True
        for choice in choices:
            index = choice.get("index", 0)
            reason = choice.get("finish_reason")
            if choice.get("stop_reason") == "recomputed":
                return Meaning.RECOMPUTED
            if reason is not None:
                self.finish_reasons[index] = reason
                self.open_choices.discard(index)
                has_content = True
                self.is_mute = False
                continue
            if index not in self.finish_reasons:  # SGLang sends hidden states after the finish
                self.open_choices.add(index)
            if _is_mute(choice):
                # The chunk `{"delta": {"role": "assistant", "content": ""}}` precedes a chat choice's first token.
                has_content |= "role" not in (choice.get("delta") or ())
            else:
                has_content = True
                self.is_mute = False
        return Meaning.CONTENT if has_content else Meaning.OPENING


@dataclass(slots=True)
class ToolCall:
    """A tool call as far as the client has it."""

    id: str
    name: str
    written: bytearray = field(default_factory=bytearray)
    """The arguments, UTF-8."""

    @property
    def arguments(self) -> str:
        """JSON, as far as it goes."""
        return self.written.decode()


class Transcript:
    """The answer of one choice so far: its text as the client knows it, and the token ids behind it."""

    __slots__ = (
        *("prompt_ids", "ids", "settled", "chunk_start", "tools"),
        *("began_in_reasoning", "reasoning_ids", "reasoning_field", "_reasoned", "_reasoning", "_content"),
        *("_offsets", "_offset_end"),
    )

    def __init__(self) -> None:
        self.prompt_ids: bytes | None = None
        """The prompt's token ids, a JSON array; None while no engine has told them."""
        self.ids = array("I")
        """Token ids of the answer."""
        self.settled = 0
        """So many of them have shown their text. What comes after them showed nothing: a marker, the beginning of a
        tool call, bytes of a character that is not complete."""
        self.chunk_start = 0
        """Ids before the last chunk that showed something."""
        self.began_in_reasoning = False
        self.reasoning_ids = 0
        """How many ids are reasoning."""
        self.reasoning_field = "reasoning"
        """What the engine calls it."""
        self.tools: list[ToolCall] = []
        self._offsets: list[int] = []  # of the ids in the text, as far as a completion's log probabilities tell
        self._offset_end = 0
        self._reasoned = 0  # reasoning_ids before the last chunk of reasoning
        # UTF-8. An io.StringIO of Python 3.11 keeps what it is given, which is ten times as much.
        self._reasoning = bytearray()
        self._content = bytearray()

    @property
    def reasoning(self) -> str:
        return self._reasoning.decode()

    @property
    def content(self) -> str:
        """The content of a chat, or the text of a completion."""
        return self._content.decode()

    @property
    def prompt_tokens(self) -> int | None:
        """How many token ids the prompt has; None while no engine has told them."""
        ids = self.prompt_ids
        return None if ids is None else ids.count(b",") + bool(ids.strip(b"[] \t\r\n"))

    @property
    def has_text(self) -> bool:
        """Is there anything that a client can see?"""
        return bool(self._content or self._reasoning or self.tools)

    def take(self, choice: dict[str, Any], ids: list[int] | None) -> bool:
        """Add one chunk's choice, which stands for these token ids. True when it shows anything."""
        before = len(self.ids)
        if ids:
            self.ids.extend(ids)
            if choice.get("logprobs") is not None and (offsets := choice["logprobs"].get("text_offset")):
                self._offsets += offsets[-len(ids) :]
                self._offset_end = offsets[-1] + len(choice["logprobs"]["tokens"][-1])
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
            if not text:
                return False
            self._content += text.encode()
        elif not self._take_delta(delta, before):
            return False
        self.chunk_start = before
        self.settled = len(self.ids)
        return True

    def take_token(self, text: bytes, token: int, *, is_reasoning: bool) -> None:
        """Add one more token that shows this text, UTF-8. Of its kind of text there is some already."""
        before = len(self.ids)
        self.ids.append(token)
        if is_reasoning:
            self._reasoning += text
            self._reasoned = self.reasoning_ids
            self.reasoning_ids = self._marker_behind(before, before + 1)
        else:
            self._content += text
        self.chunk_start = before
        self.settled = before + 1

    def offset_behind(self, kept: int) -> int | None:
        """Where in the text the log probabilities say that the first `kept` ids end; None if they do not say."""
        if len(self._offsets) != len(self.ids):
            return None
        return self._offsets[kept] if kept < len(self._offsets) else self._offset_end

    def reasoning_among(self, kept: int) -> int:
        """How many of the first `kept` ids are reasoning."""
        is_past_reasoning = bool(self._content or self.tools) or not self._reasoning
        return min(kept, self.reasoning_ids if is_past_reasoning else self._marker_behind(self._reasoned, kept))

    def cut(self, kept: int) -> None:
        """Forget the ids behind the first `kept` ones."""
        self.reasoning_ids = self.reasoning_among(kept)
        if kept < len(self._offsets):
            self._offset_end = self._offsets[kept]
            del self._offsets[kept:]
        del self.ids[kept:]
        self.settled = self.chunk_start = kept

    def _take_delta(self, delta: dict[str, Any], before: int) -> bool:
        shows = False
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            if not self.has_text:
                self.began_in_reasoning = True
                self.reasoning_field = "reasoning" if "reasoning" in delta else "reasoning_content"
            self._reasoning += reasoning.encode()
            self._reasoned = self.reasoning_ids
            self.reasoning_ids = self._marker_behind(before, len(self.ids))
            shows = True
        if content := delta.get("content"):
            if self._reasoning and not self._content:
                self._end_reasoning(before)
            self._content += content.encode()
            shows = True
        for part in delta.get("tool_calls") or ():
            if self._reasoning and not self._content and not self.tools:
                self._end_reasoning(before)
            self._take_tool_call(part)
            shows = True
        return shows

    def _end_reasoning(self, before: int) -> None:
        """Its last ids may be white space that showed nothing. `before`: ids before the chunk with what follows."""
        self.reasoning_ids = self._marker_behind(self._reasoned, max(self.reasoning_ids, before - 1))

    def _marker_behind(self, start: int, otherwise: int) -> int:
        """Where the marker is that ends reasoning and is none."""
        later = self.ids[start:].tolist()
        ends = [later.index(marker) for marker in (kimi.THINK_END_ID, kimi.SECTION_BEGIN_ID) if marker in later]
        return start + min(ends) if ends else otherwise

    def _take_tool_call(self, part: dict[str, Any]) -> None:
        index = part.get("index", 0)
        if not 0 <= index < _MAX_TOOL_CALLS:
            raise ValueError("no answer has so many tool calls")
        function = part.get("function") or {}
        while len(self.tools) <= index:
            self.tools.append(ToolCall("", ""))
        call = self.tools[index]
        call.id = part.get("id") or call.id
        call.name = function.get("name") or call.name
        call.written += (function.get("arguments") or "").encode()


def _is_mute(choice: dict[str, Any]) -> bool:
    """Does this choice of a chunk tell nothing?"""
    if choice.get("token_ids") or choice.get("text") or choice.get("logprobs"):
        return False
    return not any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
