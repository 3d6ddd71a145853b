"""Reads one decoder's stream and determines what each event means to the relay. No IO.

An answer is complete only if every choice has a finish reason and the stream ended with `[DONE]`. vLLM 0.18 to 0.30
ends a choice that was preempted, or that failed before its first token, without any finish chunk. So a clean end of the
HTTP body proves nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from proxy.wire.openai import DONE_DATA as END_MARK
from proxy.wire.openai import has_engine_members, is_abort_reason, remove_engine_members
from proxy.wire.python_json import loads
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier_json

if TYPE_CHECKING:
    from proxy.wire.sse import Event

_BLANK_VALUES: Final = 0x20

PROMPT_IDS: Final = b'"prompt_token_ids":['
"""The bytes before the token ids of the prompt. They cannot occur inside a JSON string, where quotes are escaped."""


class Meaning(Enum):
    """The meaning of one event of a decoder's stream for the relay."""

    OTHER = auto()
    """A comment or an unknown object, which is forwarded unchanged."""
    OPENING = auto()
    """The chunk with the role of the message, which has no part of the answer."""
    CONTENT = auto()
    """A part of the answer."""
    USAGE = auto()
    """The usage chunk, without choices."""
    DONE = auto()
    """The end mark `[DONE]` of a stream."""
    ERROR = auto()
    """An error that the engine reports in its stream."""
    RECOMPUTED = auto()
    """The decoder gave up and asks for a new prefill. The answer is not finished, even if it has a `finish_reason`."""
    ABORTED = auto()
    """The decoder aborted the answer, because it is being stopped or paused."""
    MALFORMED = auto()
    """Data that cannot be parsed. It may have contained a part of the answer."""


# Each event reads several of them, and a constant is faster to read than a member of a class.
OTHER: Final = Meaning.OTHER
OPENING: Final = Meaning.OPENING
CONTENT: Final = Meaning.CONTENT
USAGE: Final = Meaning.USAGE
DONE: Final = Meaning.DONE
ERROR: Final = Meaning.ERROR
RECOMPUTED: Final = Meaning.RECOMPUTED
ABORTED: Final = Meaning.ABORTED
MALFORMED: Final = Meaning.MALFORMED


class Segment:
    """The reader of one decoder's stream, and its state. The stream has one or more choices."""

    has_usage_chunk: ClassVar[bool] = True
    """Whether the usage comes in a separate chunk. Otherwise each event has it."""

    def __init__(self) -> None:
        self.payload: Any = None
        """The parsed data of the last event, without the prompt's token ids; None if it was not JSON."""
        self.event_data: bytes | None = None
        """The bytes of the last event's data, without the prompt's token ids; None if there are none."""
        self.prompt_ids: bytes | None = None
        """The token ids of the prompt, as the engine's JSON array; None until they arrive."""
        self.has_engine_only_members = False
        """Whether the last event had members that are only for engines. They are removed from `payload`."""
        self.kept_kv_params: Any = None
        """The KV parameters with which the decoder names the cache of its answer, of any type; None: there are none."""
        self.finish_reasons: dict[int, str] = {}
        self.unfinished_choices: set[int] = set()
        self.usage: dict[str, Any] | None = None
        """The last usage seen."""
        self.has_done_event = False
        self.is_empty_event = False
        """Whether the last chunk had no part of the answer: no text, no token ids, and no finish reason."""

    @property
    def is_finished(self) -> bool:
        """Whether every choice that began has finished, and at least one choice has begun."""
        return bool(self.finish_reasons) and not self.unfinished_choices

    @property
    def is_complete(self) -> bool:
        """Whether the answer is finished and the stream ended with `[DONE]`."""
        return self.has_done_event and self.is_finished

    def read_event(self, event: Event) -> Meaning:
        """Read the next event of a decoder's stream, and return its meaning."""
        self.payload = None
        self.has_engine_only_members = False
        self.event_data = data = event.data
        if data is None:
            return OTHER
        if data == END_MARK:
            self.has_done_event = True
            return DONE
        if not data or (data[0] <= _BLANK_VALUES and data.isspace()):  # some proxies send these to keep a stream open
            return OTHER
        if self.prompt_ids is None and (begin := data.find(PROMPT_IDS)) >= 0:
            # The ids are as long as the prompt and needed only if the decoder is lost, so they are not parsed.
            begin += len(PROMPT_IDS) - 1
            end = data.find(b"]", begin) + 1
            if end:
                self.prompt_ids = data[begin:end]
                self.event_data = data = b"%bnull%b" % (data[:begin], data[end:])
        if len(data) > LONG_BYTES and is_heavier_json(data, MAX_ANSWER_ELEMENTS):
            return MALFORMED
        try:
            self.payload = payload = loads(data)
        except orjson.JSONDecodeError:
            return MALFORMED
        if not isinstance(payload, dict):
            return MALFORMED if payload else OTHER
        self.has_engine_only_members = has_engine_members(payload)
        if self.has_engine_only_members:
            self.kept_kv_params = payload.get("kv_transfer_params")
            remove_engine_members(payload)
        usage = payload.get("usage")
        has_usage = isinstance(usage, dict) and bool(usage)
        if has_usage:
            self.usage = usage
        choices = payload.get("choices")
        if choices:
            try:
                return self._classify_choices(choices)
            except (AttributeError, TypeError):  # not a list of objects
                return MALFORMED
        if payload.get("error"):
            return ERROR
        return USAGE if has_usage else OTHER

    def forget_event(self) -> None:
        """Drop the last event that was read from the stream, to free its memory."""
        self.payload = self.event_data = None

    def _classify_choices(self, choices: list[dict[str, Any]]) -> Meaning:
        has_content = False
        self.is_empty_event = True
        for choice in choices:
            index = choice.get("index", 0)
            reason = choice.get("finish_reason")
            if choice.get("stop_reason") == "recomputed":
                return RECOMPUTED
            if reason is not None and not reason:  # some engines send "" until the answer ends
                reason = choice["finish_reason"] = None
            if reason is not None:
                if is_abort_reason(reason):
                    self.is_empty_event = is_empty_choice(choice)
                    return ABORTED
                self.finish_reasons[index] = reason
                self.unfinished_choices.discard(index)
                has_content = True
                self.is_empty_event = False
                continue
            if index not in self.finish_reasons:  # SGLang sends hidden states after the finish
                self.unfinished_choices.add(index)
            if is_empty_choice(choice):
                # The chunk `{"delta": {"role": "assistant", "content": ""}}` precedes a chat choice's first token.
                has_content |= "role" not in (choice.get("delta") or ())
            else:
                has_content = True
                self.is_empty_event = False
        return CONTENT if has_content else OPENING


def is_empty_choice(choice: dict[str, Any]) -> bool:
    """Return whether a choice of a chunk has no part of the answer."""
    if choice.get("token_ids") or choice.get("text") or choice.get("logprobs"):
        return False
    for name, value in (choice.get("delta") or {}).items():  # noqa: SIM110 - a generator takes longer
        if value and name != "role":
            return False
    return True
