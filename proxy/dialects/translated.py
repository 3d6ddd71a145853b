"""What APIs have in common that are translated to chats: a body becomes a chat's, and chat chunks become parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.left_out import LeftOut
from proxy.dialects.openai import ChatCompletions
from proxy.errors import BadRequest, UpstreamError
from proxy.wire.document import Document
from proxy.wire.python_json import dumps, loads, utf8_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.answers import AnsweredAttempt
    from proxy.call import Call
    from proxy.dialects.base import Unit, UnitRendering, Whole
    from proxy.errors import GatewayError
    from proxy.settings import Cost

_OF_THE_PROMPT: Final = (
    *("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
)
# Of an engine's words that are no JSON.
_MAX_WORDS: Final = 1000


class Translated(ChatCompletions):
    """An API whose requests are chats in other words, with one answer each."""

    speaks_as_engines = False
    done_event = b""  # they have last events of their own

    def parse(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """The chat that engines are asked for; see Dialect."""
        left_out = LeftOut()
        chat = self.chat(document.values, left_out)
        asked = self.asked(document.values)
        try:
            raw = dumps(chat)
        except orjson.JSONEncodeError:
            raise BadRequest("the body is nested too deeply", code="invalid_json") from None
        call = super().parse(Document(raw), cost, headers)
        return replace(call, asked=asked, left_out=left_out.kinds)

    @abstractmethod
    def chat(self, values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
        """The body of a chat completion that asks for the same. Raises BadRequest.

        Kinds of tools and content that cannot be served are added to `left_out`.
        """

    def prompt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The members of that chat which make its prompt, as vLLM's tokenizer takes them (TokenizeChatRequest). Raises
        BadRequest.
        """
        chat = self.chat(values, LeftOut())
        return {name: chat[name] for name in _OF_THE_PROMPT if name in chat}

    def asked(self, values: Mapping[str, Any]) -> Any:
        """What the answer needs of the body; see Call."""
        return None

    def whole(self, call: Call, units: Sequence[Unit], answers: Sequence[Whole]) -> bytes:
        """See Dialect."""
        (answer,) = answers
        return dumps(self.answer(call, answer.values()))

    @abstractmethod
    def answer(self, call: Call, completion: dict[str, Any]) -> dict[str, Any]:
        """A chat completion in the words of this API."""


class Kind(StrEnum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A stretch of an answer that is of one kind, or one tool call. `index`: of the part in its answer."""

    index: int
    kind: Kind
    call_index: int = -1
    id: str = ""
    """The engine's, of a tool call."""
    name: str = ""
    written: bytearray = field(default_factory=bytearray)
    """What it says, or the arguments of a tool call, UTF-8. Left empty by those who need it only once."""

    @property
    def text(self) -> str:
        """`written` as text."""
        return utf8_text(self.written)


class Parts(ABC):
    """Cuts a stream of chat chunks into parts, one after the other: the Rendering of a single unit, and its
    UnitRendering.
    """

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.matched_stop: object = None
        """What the engine names as the reason of its stop, such as a stop string."""
        self._forget()

    def _forget(self) -> None:
        self._open: Part | None = None
        self._first: dict[str, Any] | None = None
        self._next_index = 0
        self.called: set[int] = set()
        """The indexes of the tool calls that have begun."""
        self.has_begun = False

    # What the port asks for

    def unit(self, unit: Unit) -> UnitRendering | None:
        """There is only one."""
        return self

    def begin(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        """See UnitRendering."""
        if not goes_on:
            self._forget()
            self.anew(attempt)

    def render(self, payload: dict[str, Any]) -> bytes:
        """See UnitRendering."""
        (choice,) = payload["choices"]
        delta = choice.get("delta") or {}
        if not self.has_begun:
            self._first = self._first or payload
        events: list[bytes] = []
        if text := delta.get("reasoning") or delta.get("reasoning_content"):
            self._say(Kind.REASONING, text, events)
        if text := delta.get("content"):
            self._say(Kind.TEXT, text, events)
        for call in delta.get("tool_calls") or ():
            self._say_of_call(call, events)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
            self.matched_stop = matched_stop(choice)
            events.append(self._start())
        return b"".join(events)

    async def rest(self) -> bytes:
        """Nothing waits."""
        return b""

    @abstractmethod
    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """See Rendering."""

    @abstractmethod
    def error_event(self, error: GatewayError) -> bytes:
        """See Rendering."""

    # What an API says

    @abstractmethod
    def anew(self, attempt: AnsweredAttempt) -> None:
        """An engine begins to answer, and the client has nothing."""

    @abstractmethod
    def started(self, payload: dict[str, Any]) -> bytes:
        """What comes before all parts; the first chunk is given."""

    @abstractmethod
    def opened(self, part: Part) -> bytes:
        """The events that begin a part."""

    @abstractmethod
    def said(self, part: Part, text: str) -> bytes:
        """The events for more text of the part that is open, or more of its arguments if it is a tool call."""

    @abstractmethod
    def closed(self, part: Part) -> bytes:
        """The events that end a part. Each part that was opened is closed before the next one is opened."""

    def close(self) -> bytes:
        """The last part is complete."""
        part, self._open = self._open, None
        return b"" if part is None else self.closed(part)

    def open(self, part: Part) -> bytes:
        """Another part begins, which ends the one before."""
        before = self._start() + self.close()
        self._open = part
        self._next_index = part.index + 1
        return before + self.opened(part)

    def _start(self) -> bytes:
        """Once, and not before there is something that the client gets at once."""
        first, self._first = self._first, None
        if self.has_begun or first is None:
            return b""
        self.has_begun = True
        return self.started(first)

    def next_part(self, kind: Kind) -> Part:
        """To be opened."""
        return Part(self._next_index, kind)

    @property
    def is_empty(self) -> bool:
        """No part has begun."""
        return self._next_index == 0

    def _say(self, kind: Kind, text: str, events: list[bytes]) -> None:
        part = self._open
        if part is None or part.kind is not kind:
            part = self.next_part(kind)
            events.append(self.open(part))
        events.append(self.said(part, text))

    def _say_of_call(self, call: dict[str, Any], events: list[bytes]) -> None:
        index, function = call.get("index", 0), call.get("function") or {}
        part = self._open
        if part is None or part.call_index != index:
            if index in self.called:
                raise ValueError("arguments of a tool call that has ended")
            self.called.add(index)
            part = Part(self._next_index, Kind.CALL, index, call["id"], function["name"])
            events.append(self.open(part))
        if text := function.get("arguments"):
            events.append(self.said(part, text))


def matched_stop(choice: Mapping[str, Any]) -> object:
    """Why the engine stopped: a stop string, a token id, or None; vLLM and SGLang call it differently."""
    return choice.get("stop_reason") or choice.get("matched_stop")


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A named event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(data))


def words(error: GatewayError) -> str:
    """What an error says, be it the engine's own words."""
    told = error.body if isinstance(error, UpstreamError) else None
    if told is None:
        return error.message
    try:
        said = loads(told)
    except orjson.JSONDecodeError:
        return told[:_MAX_WORDS].decode("utf-8", "replace") or error.message
    said = said.get("error", said) if isinstance(said, dict) else said
    said = said.get("message") if isinstance(said, dict) else said
    return said if isinstance(said, str) and said else error.message
