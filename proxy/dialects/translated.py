"""The base of APIs that the gateway translates to chats. Bodies become chat bodies, and chunks become parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.errors import BadRequest, GatewayError, UpstreamError
from proxy.dialects.left_out import OmittedParts
from proxy.dialects.openai import ChatCompletions
from proxy.wire.chat_members import (
    ToolCall,
    ToolCalls,
    UnreadableMember,
    read_complete_calls,
    read_object_member,
    read_objects,
    read_reasoning,
    read_text,
)
from proxy.wire.document import Document
from proxy.wire.ids import make_request_id
from proxy.wire.python_json import dumps, loads, replace_surrogates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.base import AnsweredAttempt, CompleteAnswer, EngineAnswer, Unit, UnitRendering
    from proxy.dialects.call import Call
    from proxy.settings import Cost

_PROMPT_MEMBERS: Final = (
    *("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
)
# Bytes of an engine's error body that is not JSON.
_MAX_ERROR_LENGTH: Final = 1000
_MAX_REASON_LENGTH: Final = 64
# The end of the year 9999, in seconds since 1970.
_MAX_TIMESTAMP: Final = 253_402_300_800


class TranslatedDialect(ChatCompletions):
    """The base of dialects whose requests are translated to chats with one answer each."""

    uses_engine_format = False
    stream_end_event = b""  # each API's `render_final_events` writes the last event

    def parse_request(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return the call of the translated chat; see Dialect."""
        left_out = OmittedParts()
        chat = self.make_chat(document.values, left_out)
        context = self.answer_context(document.values)
        for name, value in chat.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number, and would lose it
                raise BadRequest(f"{name} must be a finite number", param=name)
        try:
            raw = dumps(chat)
        except orjson.JSONEncodeError:
            raise BadRequest("the body is nested too deeply", code="invalid_json") from None
        call = super().parse_request(Document(raw), cost, headers)
        return replace(call, answer_context=context, omitted_kinds=left_out.listed_kinds)

    @abstractmethod
    def make_chat(self, values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
        """Return the body of the equivalent chat completion. Raises BadRequest.

        Kinds of tools and content that no engine can serve are added to `left_out`.
        """

    def make_prompt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of the chat that make its prompt, as in vLLM's TokenizeChatRequest. Raises BadRequest."""
        chat = self.make_chat(values, OmittedParts())
        return {name: chat[name] for name in _PROMPT_MEMBERS if name in chat}

    def answer_context(self, values: Mapping[str, Any]) -> Any:
        """Return the facts about the request that are needed to write its answer; see Call."""
        return None

    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Check every member of the chat's answer, because each contributes to the client's answer."""
        super().check_answer(response, values)
        try:
            ChatCompletion.read_answer(values)
        except UnreadableMember as odd:
            raise response.make_unreadable_error(f"answered with a message that cannot be translated: {odd}") from None

    def render_complete_body(self, call: Call, units: Sequence[Unit], answers: Sequence[CompleteAnswer]) -> bytes:
        (answer,) = answers
        return dumps(self.make_answer(call, ChatCompletion.read_answer(answer.parsed_body())))

    @abstractmethod
    def make_answer(self, call: Call, completion: ChatCompletion) -> dict[str, Any]:
        """Convert a chat completion to an answer of this API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """The ID and time of a chat completion. A member of the wrong type counts as missing."""

    completion_id: str
    """The engine's id without its prefix. The engine logs the same id. A random id if the engine sent none."""
    model: str | None
    created: int
    """The time of the answer, in seconds since 1970; 0 if the engine did not report it."""

    @classmethod
    def read_from(cls, payload: Mapping[str, Any]) -> CompletionHead:
        """Read the head of a chat completion or of one of its chunks."""
        name, model, created = payload.get("id"), payload.get("model"), payload.get("created")
        return cls(
            completion_id=name.removeprefix("chatcmpl-") if isinstance(name, str) and name else make_request_id(),
            model=model if isinstance(model, str) else None,
            created=int(created) if isinstance(created, int | float) and 0 < created < _MAX_TIMESTAMP else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatCompletion:
    """A chat completion with one choice. The types of its members have been checked."""

    head: CompletionHead
    reasoning: str
    content: str
    calls: Sequence[ToolCall]
    finish_reason: str
    matched_stop_string: object
    usage: dict[str, Any] | None
    """The usage as the engine sent it; None if it sent none."""

    @classmethod
    def read_answer(cls, values: Mapping[str, Any]) -> ChatCompletion:
        """Read an engine's answer. Raises UnreadableMember."""
        choice = _read_only_choice(values)
        message = read_object_member(choice.get("message"), "message")
        usage = values.get("usage")
        return cls(
            head=CompletionHead.read_from(values),
            reasoning=read_reasoning(message),
            content=read_text(message.get("content"), "content"),
            calls=read_complete_calls(message.get("tool_calls")),
            finish_reason=_read_finish_reason(choice),
            matched_stop_string=read_matched_stop(choice),
            usage=usage if isinstance(usage, dict) else None,
        )


def _read_only_choice(payload: Mapping[str, Any]) -> dict[str, Any]:
    choices = payload.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise UnreadableMember("choices is not a list of one object")
    return choices[0]


def _read_finish_reason(choice: Mapping[str, Any]) -> str:
    """Return the finish reason of a choice. A reason that is not text is converted to text for the error message."""
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) else str(reason)[:_MAX_REASON_LENGTH]


def ensure_call_id(call: ToolCall) -> str:
    """Return the id of a tool call. A missing id is replaced by a random one, because clients name results by it."""
    return call.id or f"call_{make_request_id()}"


class PartKind(StrEnum):
    """The kind of a part of an answer: reasoning, text, or a tool call."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class AnswerPart:
    """A part of an answer: a stretch of reasoning, a stretch of text, or one tool call."""

    index: int
    """The position of this part in the answer; -1 until the part begins."""
    kind: PartKind
    call: ToolCall | None = None
    """The tool call, as far as the engine has written it; None for reasoning and text."""
    id: str = ""
    """The id of a tool call."""
    name: str = ""
    written_bytes: bytearray = field(default_factory=bytearray)
    """The text of the part, or the arguments of its tool call, in UTF-8.

    Dialects that do not need it again leave it empty.
    """
    held_fragments: list[str] = field(default_factory=list)
    """Texts that wait until an earlier part has ended."""
    has_ended: bool = False

    @property
    def text(self) -> str:
        """The text of an answer part, decoded from its bytes."""
        return replace_surrogates(self.written_bytes)


class AnswerParts(ABC):
    """Cuts a stream of chat chunks into answer parts. It is the Rendering of a single unit, and also its UnitRendering.

    Each part ends before the next one begins. A part that begins before a tool call is complete waits for that call.
    """

    def __init__(self) -> None:
        self._drop_parts()

    def _drop_parts(self) -> None:
        self.finish_reason: str | None = None
        self.matched_stop: object = None
        """The stop string or token id at which the engine stopped; None if there is none."""
        self._open: AnswerPart | None = None
        self._waiting: deque[AnswerPart] = deque()
        self._first: dict[str, Any] | None = None
        self._next_index = 0
        self._calls = ToolCalls()
        self._parts_of_calls: list[AnswerPart] = []
        self.has_begun = False
        self.unsent: Sequence[bytes] = ()
        """Events that precede an unreadable member of the same chunk. They are sent before the error event."""

    # Rendering

    def make_unit_rendering(self, unit: Unit) -> UnitRendering | None:
        """Return this object, because a translated request has only one sample."""
        return self

    def begin_decoder_answer(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        if not goes_on:
            self._drop_parts()
            self.restart_answer(attempt)

    def render(self, payload: dict[str, Any]) -> bytes:
        """Return the client's bytes for one parsed event. Raises UnreadableMember."""
        events: list[bytes] = []
        try:
            choice = _read_only_choice(payload)
            delta = read_object_member(choice.get("delta"), "delta")
            if not self.has_begun:
                self._first = self._first or payload
            if text := delta.get("reasoning") or delta.get("reasoning_content"):
                self._add_text(PartKind.REASONING, text if type(text) is str else read_text(text, "reasoning"), events)
            if text := delta.get("content"):
                self._add_text(PartKind.TEXT, text if type(text) is str else read_text(text, "content"), events)
            if calls := delta.get("tool_calls"):
                for fragment in read_objects(calls, "tool_calls"):
                    self._add_to_call(fragment, events)
            if choice.get("finish_reason") is not None:
                self.finish_reason = _read_finish_reason(choice)
                self.matched_stop = read_matched_stop(choice)
                events.append(self._start_answer())
            if self.finish_reason is not None:  # an odd engine adds parts after its finish reason
                self._advance_parts(events, at_end=True)
        except UnreadableMember:
            self.unsent = events
            raise
        return b"".join(events)

    async def wait_for_remaining_events(self) -> bytes:
        """Return nothing, because no event waits for another engine."""
        return b""

    @abstractmethod
    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return the events that follow the streams of all units and precede `Dialect.stream_end_event`."""

    @abstractmethod
    def error_event(self, error: GatewayError) -> bytes:
        """Return the event that reports an error to a client that has received only a part of its answer."""

    # Events of an API

    @abstractmethod
    def restart_answer(self, attempt: AnsweredAttempt) -> None:
        """Begin a new answer. Called when an engine begins to answer and the client has not received anything."""

    @abstractmethod
    def start_events(self, payload: dict[str, Any]) -> bytes:
        """Return the events that precede all parts. `payload` is the first chunk."""

    @abstractmethod
    def open_events(self, part: AnswerPart) -> bytes:
        """Return the events with which a part begins."""

    @abstractmethod
    def text_events(self, part: AnswerPart, text: str) -> bytes:
        """Return the events for more text of the open part, or more arguments of its tool call.

        `part.written` of a tool call already contains the new arguments.
        """

    @abstractmethod
    def close_events(self, part: AnswerPart) -> bytes:
        """Return the events with which a part ends. Each part is closed before the next one is opened."""

    def end_open_part(self) -> bytes:
        """End the open part and return its events; empty if no part is open."""
        part, self._open = self._open, None
        if part is None:
            return b""
        part.has_ended = True
        return self.close_events(part)

    def begin_part(self, part: AnswerPart) -> bytes:
        """End the open part, begin another one, and return the events of both."""
        before = self._start_answer() + self.end_open_part()
        part.index = self._next_index
        self._next_index += 1
        self._open = part
        return before + self.open_events(part)

    def _start_answer(self) -> bytes:
        """Return the events that precede all parts when the first part begins, and nothing later."""
        first, self._first = self._first, None
        if self.has_begun or first is None:
            return b""
        self.has_begun = True
        return self.start_events(first)

    @property
    def is_empty(self) -> bool:
        """Whether the answer has no part yet."""
        return self._next_index == 0

    def _add_text(self, kind: PartKind, text: str, events: list[bytes]) -> None:
        part = self._open
        if part is not None and part.kind is kind and not self._waiting:
            if text:
                events.append(self.text_events(part, text))
            return
        if not text:
            return
        if not self._waiting or self._waiting[-1].kind is not kind:
            self._waiting.append(AnswerPart(-1, kind))
        self._waiting[-1].held_fragments.append(text)
        self._advance_parts(events)

    def _add_to_call(self, fragment: dict[str, Any], events: list[bytes]) -> None:
        call, text = self._calls.add_fragment(fragment)
        if call.call_number == len(self._parts_of_calls):
            part = AnswerPart(-1, PartKind.CALL, call, written_bytes=call.written_arguments)
            self._parts_of_calls.append(part)
            self._waiting.append(part)
        else:
            part = self._parts_of_calls[call.call_number]
        if part.has_ended:
            if text.strip():
                raise UnreadableMember("a tool call went on after its arguments had ended")
            return
        if part is not self._open:
            part.held_fragments.append(text)
        elif text:
            events.append(self.text_events(part, text))
        if self._waiting:
            self._advance_parts(events)

    def _advance_parts(self, events: list[bytes], *, at_end: bool = False) -> None:
        """Add the events of waiting parts, until a part cannot begin or end yet. Raises UnreadableMember."""
        waiting = self._waiting
        while waiting:
            part, before = waiting[0], self._open
            if before is not None and before.call is not None and not (at_end or before.call.is_complete):
                return
            if part.call is not None:
                if not part.call.name:
                    if at_end:
                        raise UnreadableMember("a tool call has no name")
                    return
                part.id, part.name = ensure_call_id(part.call), part.call.name
            waiting.popleft()
            events.append(self.begin_part(part))
            if text := "".join(part.held_fragments):
                events.append(self.text_events(part, text))
            part.held_fragments.clear()


def read_matched_stop(choice: Mapping[str, Any]) -> object:
    """Return the stop string or token id at which the engine stopped, or None. vLLM and SGLang name it differently."""
    return choice.get("stop_reason") or choice.get("matched_stop")


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name and JSON data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(data))


def error_text(error: GatewayError) -> str:
    """Return the text of an error: the message in the engine's error body if there is one."""
    body = error.body if isinstance(error, UpstreamError) else None
    if body is None:
        return error.message
    try:
        message = loads(body)
    except orjson.JSONDecodeError:
        return body[:_MAX_ERROR_LENGTH].decode("utf-8", "replace") or error.message
    message = message.get("error", message) if isinstance(message, dict) else message
    message = message.get("message") if isinstance(message, dict) else message
    return message if isinstance(message, str) and message else error.message
