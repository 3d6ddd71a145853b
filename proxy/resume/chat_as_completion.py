"""Sends a chat to engines as a completion, and converts the completion's chunks to chat chunks. No IO.

A completion's stream has token ids in some cases where a chat's stream has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.segment import Meaning, Segment
from proxy.resume.engines import Engine, has_media_parts, may_call_tools, read_output_limit
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.dialects.call import Call
    from proxy.dialects.grammars import AnswerParser, Grammar
    from proxy.wire.sse import Event

_CHAT_ONLY_MEMBERS: Final = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "documents", "reasoning_effort"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("mm_processor_kwargs", "media_io_kwargs"),
    *("include_reasoning", "max_completion_tokens", "top_logprobs", "functions", "function_call"),
)
# Members that only the engine's own chats have.
_ENGINE_CHAT_MEMBERS: Final = (
    *("input_ids", "echo", "continue_final_message", "return_hidden_states", "return_routed_experts"),
    *("return_cached_tokens_details", "return_meta_info", "return_prompt_token_ids"),
)
# Members that are on by default.
_MEMBERS_ON_BY_DEFAULT: Final = ("separate_reasoning", "stream_reasoning", "include_reasoning", "parallel_tool_calls")
_SHAPE_ERRORS: Final = (AttributeError, LookupError, TypeError, ValueError)


def can_translate_to_completion(engine: Engine, call: Call) -> bool:
    """Return whether engines could get this chat as a completion, which can be continued from its token ids."""
    values = call.values
    return not (
        call.api is not Api.CHAT
        or call.shows_token_details
        or engine.is_structured(call)
        or engine.why_inexact(call) is not None
        or any(values.get(name) for name in _ENGINE_CHAT_MEMBERS)
        or any(values.get(name) is False for name in _MEMBERS_ON_BY_DEFAULT)
        or has_media_parts(call)
    )


def translate_to_completion(call: Call, limit: int | None, *, reads_markers: bool) -> dict[str, object]:
    """Return the changes that turn a chat into a completion of at most `limit` tokens.

    `reads_markers`: whether the engine must return the text with its special tokens.
    """
    values = call.values
    changes: dict[str, object] = {
        name: REMOVED for name in _CHAT_ONLY_MEMBERS if name in values or name in call.changes
    }
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
    """The prompt of a chat as its engines render it, and the settings that a completion needs to replace the chat."""

    engine: Engine
    raw_token_ids: bytes
    """The token ids of the prompt, as a JSON array."""
    prompt_tokens: int
    """The number of tokens in the prompt."""
    available_tokens: int
    """Maximum number of tokens of the answer that fit into an engine's context."""
    sampling: Mapping[str, float]
    """The engines' default sampling options for chats."""
    grammar: Grammar
    in_reasoning: bool
    """Whether the answer begins with reasoning."""
    keeps_length: bool
    """Whether engines report the finish reason `length` even for an answer with tool calls."""

    def make_completion_call(self, chat: Call) -> Call:
        """Return the call of a completion that has the same answer as a chat."""
        limit = read_output_limit(chat)
        changes = {
            **self.engine.completion_members(chat, self.sampling),
            **translate_to_completion(chat, self.available_tokens if limit is None else limit, reads_markers=True),
            "prompt": orjson.Fragment(self.raw_token_ids),
        }
        return replace(chat.copy_with_changes(changes, prompt_tokens=self.prompt_tokens), api=Api.COMPLETIONS)

    def segment(self, chat: Call) -> Segment:
        """Return the reader of the stream of the completion that replaces a chat."""
        parser = self.grammar.make_parser(
            in_reasoning=self.in_reasoning,
            calls_tools=may_call_tools(chat),
            shows_blanks=False,
            reports_half_calls=True,
            one_call=False,
        )
        field = self.engine.reasoning_field
        return CompletionStreamAsChat(CompletionToChat(parser, keeps_length=self.keeps_length, reasoning_field=field))


class CompletionStreamAsChat(Segment):
    """Reads a completion's stream and returns the chunks of the chat that it answers."""

    def __init__(self, translator: CompletionToChat) -> None:
        super().__init__()
        self._translator = translator
        self._has_role = False

    def read_event(self, event: Event) -> Meaning:
        """Read an event, and add the role to the first delta."""
        meaning = super().read_event(event)
        if meaning not in (Meaning.CONTENT, Meaning.USAGE):
            return meaning
        payload = self.payload
        payload["object"] = "chat.completion.chunk"
        if payload.get("usage") is None:
            payload.pop("usage", None)
        try:
            for choice in payload["choices"]:
                is_last = choice.get("finish_reason") is not None
                delta = self._translator.make_chat_delta(choice, is_last=is_last)
                if (delta or is_last) and not self._has_role:
                    self._has_role = True
                    delta = {"role": "assistant", **delta}
                choice["delta"] = delta
        except _SHAPE_ERRORS:
            return Meaning.MALFORMED
        return meaning


class CompletionToChat:
    """Converts the choices of one completion to choices of a chat.

    `parser`: reads the text; it has already read the answer so far. `calls_tools`: whether the answer so far has
    tool calls.
    `top_logprobs`: the number of alternatives that the chat wants for each token. `keeps_length`: whether engines
    report the finish reason `length` even for an answer with tool calls. `reasoning_field`: the member of a delta with
    reasoning.
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

    def make_chat_delta(self, choice: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Convert a completion's choice to a chat's choice, in place. Return its delta."""
        text = choice.pop("text", None) or ""
        delta = rename_reasoning_member(self._reasoning_field, self._parser.parse_text(text, finished=is_last))
        choice.pop("prompt_token_ids", None)
        if choice.get("logprobs") is not None:
            choice["logprobs"] = make_chat_logprobs(choice["logprobs"], self._top_logprobs)
        self._calls_tools |= "tool_calls" in delta
        if choice.get("finish_reason") in self._hidden_by_tools and self._calls_tools:
            choice["finish_reason"] = "tool_calls"
        return delta


def rename_reasoning_member(name: str, delta: dict[str, Any]) -> dict[str, Any]:
    """Return a parser's delta in which the member for reasoning has another name."""
    if name != "reasoning" and "reasoning" in delta:
        delta[name] = delta.pop("reasoning")
    return delta


def make_chat_logprobs(logprobs: dict[str, Any], top: int) -> dict[str, Any]:
    """Convert a completion's log probabilities to the form of a chat, with `top` alternatives for each token.

    The alternatives of both begin with the token itself, and a completion has one more (vLLM
    `_create_completion_logprobs`).
    """
    alternatives = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    content = [
        {
            **_logprob_entry(token, logprob),
            "top_logprobs": [_logprob_entry(*ranked) for ranked in _most_probable((others or {}).items(), top)],
        }
        for token, logprob, others in zip(logprobs["tokens"], logprobs["token_logprobs"], alternatives, strict=True)
    ]
    return {"content": content}


def _most_probable(ranked: Iterable[tuple[str, float]], count: int) -> list[tuple[str, float]]:
    """Return the first `count` alternatives of a token, by log probability; all of them if `count` is -1."""
    return list(ranked)[: None if count < 0 else count]


def _logprob_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
