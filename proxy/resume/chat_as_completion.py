"""A chat that engines get as a completion, and the completion's chunks as those of a chat. No IO.

A stream of a completion tells token ids where that of a chat does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.segment import Meaning, Segment
from proxy.resume.engines import calls_tools, has_media, output_limit
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.dialects.call import Call
    from proxy.dialects.grammars import AnswerParser, Grammar
    from proxy.resume.engines import Engine
    from proxy.wire.sse import Event

_CHAT_ONLY: Final = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "documents", "reasoning_effort"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("mm_processor_kwargs", "media_io_kwargs"),
    *("include_reasoning", "max_completion_tokens", "top_logprobs", "functions", "function_call"),
)
# Members that only the engine's own chats have.
_OF_THE_ENGINE: Final = (
    *("input_ids", "echo", "continue_final_message", "return_hidden_states", "return_routed_experts"),
    *("return_cached_tokens_details", "return_meta_info", "return_prompt_token_ids"),
)
# Members that are on by default.
_EXPECTED: Final = ("separate_reasoning", "stream_reasoning", "include_reasoning", "parallel_tool_calls")
_ODD_SHAPES: Final = (AttributeError, LookupError, TypeError, ValueError)


def may_be_completion(engine: Engine, call: Call) -> bool:
    """Return whether a chat could be a completion, which can be continued from its token ids."""
    values = call.values
    return not (
        call.api is not Api.CHAT
        or call.shows_single_tokens
        or engine.is_structured(call)
        or engine.reason_inexact(call) is not None
        or any(values.get(name) for name in _OF_THE_ENGINE)
        or any(values.get(name) is False for name in _EXPECTED)
        or has_media(call)
    )


def as_completion(call: Call, limit: int | None, *, reads_markers: bool) -> dict[str, object]:
    """Return the changes that make a completion of at most `limit` tokens of a chat.

    `reads_markers`: the text is to have special tokens.
    """
    values = call.values
    changes: dict[str, object] = {name: REMOVED for name in _CHAT_ONLY if name in values or name in call.changes}
    changes["max_tokens"] = limit  # without one a completion would end after 16 tokens
    changes["add_special_tokens"] = False
    if values.get("logprobs"):
        changes["logprobs"] = values.get("top_logprobs") or 0
    elif "logprobs" in values:
        changes["logprobs"] = REMOVED
    if reads_markers:
        changes.update(skip_special_tokens=False, spaces_between_special_tokens=False)
    return changes


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """The prompt of a chat as its engines render it, and the facts that a completion instead of the chat needs."""

    engine: Engine
    ids: bytes
    """Token ids, a JSON array."""
    tokens: int
    """How many."""
    room: int
    """Tokens that an answer may have at most, in an engine's context."""
    sampling: Mapping[str, float]
    """Sampling options of chats that do not set them."""
    grammar: Grammar
    in_reasoning: bool
    """The answer begins there."""
    keeps_length: bool
    """An answer that ends for length says so even if it calls tools."""

    def completion(self, chat: Call) -> Call:
        """Return the completion that has the same answer."""
        limit = output_limit(chat)
        changes = {
            **self.engine.as_completion(chat, self.sampling),
            **as_completion(chat, self.room if limit is None else limit, reads_markers=True),
            "prompt": orjson.Fragment(self.ids),
        }
        return replace(chat.changed(changes, prompt_tokens=self.tokens), api=Api.COMPLETIONS)

    def segment(self, chat: Call) -> Segment:
        """Return the reader of its stream."""
        parser = self.grammar.parser(
            in_reasoning=self.in_reasoning,
            calls_tools=calls_tools(chat),
            shows_blanks=False,
            reports_half_calls=True,
            one_call=False,
        )
        field = self.engine.reasoning_field
        return _CompletionStream(CompletionAsChat(parser, keeps_length=self.keeps_length, reasoning_field=field))


class _CompletionStream(Segment):
    """A completion's stream, read as that of the chat that it answers."""

    __slots__ = ("_as_chat", "_has_role")

    def __init__(self, as_chat: CompletionAsChat) -> None:
        super().__init__()
        self._as_chat = as_chat
        self._has_role = False

    def read(self, event: Event) -> Meaning:
        """See Segment. The first delta has the role."""
        meaning = super().read(event)
        if meaning not in (Meaning.CONTENT, Meaning.USAGE):
            return meaning
        payload = self.payload
        payload["object"] = "chat.completion.chunk"
        if payload.get("usage") is None:
            payload.pop("usage", None)
        try:
            for choice in payload["choices"]:
                is_last = choice.get("finish_reason") is not None
                delta = self._as_chat.delta(choice, is_last=is_last)
                if (delta or is_last) and not self._has_role:
                    self._has_role = True
                    delta = {"role": "assistant", **delta}
                choice["delta"] = delta
        except _ODD_SHAPES:
            return Meaning.MALFORMED
        return meaning


class CompletionAsChat:
    """Turns the choices of one completion into those of a chat.

    `parser` reads the text, and has read that of the answer so far. `calls_tools`: that had tool calls.
    `top_logprobs`: how many alternatives of each token the chat asks for. `keeps_length`: engines finish a chat by
    length even if it calls tools. `reasoning_field`: the member of a delta that holds reasoning.
    """

    def __init__(
        self,
        parser: AnswerParser,
        *,
        calls_tools: bool = False,
        top_logprobs: int = 0,
        keeps_length: bool = True,
        reasoning_field: str = "reasoning",
    ) -> None:
        self._parser = parser
        self._reasoning_field = reasoning_field
        self._calls_tools = calls_tools
        self._top_logprobs = top_logprobs
        self._hidden_by_tools = ("stop",) if keeps_length else ("stop", "length")

    def delta(self, choice: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Turn the choice of a completion into that of a chat, in place. Return its delta."""
        text = choice.pop("text", None) or ""
        delta = with_reasoning_as(self._reasoning_field, self._parser.feed(text, finished=is_last))
        choice.pop("prompt_token_ids", None)
        if choice.get("logprobs") is not None:
            choice["logprobs"] = chat_logprobs(choice["logprobs"], self._top_logprobs)
        self._calls_tools |= "tool_calls" in delta
        if choice.get("finish_reason") in self._hidden_by_tools and self._calls_tools:
            choice["finish_reason"] = "tool_calls"
        return delta


def with_reasoning_as(name: str, delta: dict[str, Any]) -> dict[str, Any]:
    """Return a parser's delta with another name for reasoning."""
    if name != "reasoning" and "reasoning" in delta:
        delta[name] = delta.pop("reasoning")
    return delta


def chat_logprobs(logprobs: dict[str, Any], top: int) -> dict[str, Any]:
    """Convert the log probabilities of a completion to those of a chat with `top` alternatives for each token.

    Both begin with the token itself, and a completion names one more (vLLM `_create_completion_logprobs`).
    """
    alternatives = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    content = [
        {**_entry(token, logprob), "top_logprobs": [_entry(*ranked) for ranked in _first((others or {}).items(), top)]}
        for token, logprob, others in zip(logprobs["tokens"], logprobs["token_logprobs"], alternatives, strict=True)
    ]
    return {"content": content}


def _first(ranked: Iterable[tuple[str, float]], count: int) -> list[tuple[str, float]]:
    """Return the first `count` entries; -1 means all."""
    return list(ranked)[: None if count < 0 else count]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
