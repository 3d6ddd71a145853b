"""A chat that goes on as a completion: what the completion's chunks are in a chat. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.dialects.grammars.base import Parser


class CompletionAsChat:
    """Turns the choices of one completion into those of a chat.

    `parser` reads the text, and has read that of the answer so far. `calls_tools`: that had tool calls.
    `top_logprobs`: how many alternatives of each token the chat asks for. `keeps_length`: engines finish a chat by
    length even if it calls tools. `reasoning_field`: the member of a delta that holds reasoning.
    """

    def __init__(
        self,
        parser: Parser,
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
        """The delta of the chat's choice that `choice`, a completion's, is turned into in place."""
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
    """What a parser said, with another name for reasoning."""
    if name != "reasoning" and "reasoning" in delta:
        delta[name] = delta.pop("reasoning")
    return delta


def chat_logprobs(logprobs: dict[str, Any], top: int) -> dict[str, Any]:
    """The log probabilities of a completion in the shape of a chat's that names `top` alternatives of each token.

    Both begin with the token itself, and a completion names one more (vLLM `_create_completion_logprobs`).
    """
    alternatives = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    content = [
        {**_entry(token, logprob), "top_logprobs": [_entry(*ranked) for ranked in _first((others or {}).items(), top)]}
        for token, logprob, others in zip(logprobs["tokens"], logprobs["token_logprobs"], alternatives, strict=True)
    ]
    return {"content": content}


def _first(ranked: Iterable[tuple[str, float]], count: int) -> list[tuple[str, float]]:
    """The first `count` entries; -1 means all."""
    return list(ranked)[: None if count < 0 else count]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
