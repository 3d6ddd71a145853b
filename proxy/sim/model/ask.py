"""One generation request, whatever the dialect it came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.sim.model.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One validated generation request, prompts already turned into ids."""

    is_chat: bool
    model: str
    prompts: list[list[int]]
    samples: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    ignore_eos: bool
    keep_markers: bool
    spaces_markers: bool
    """Whether markers that are shown stand between spaces; never in a chat, whose parsers want the text as it is."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """How many alternatives to report per token; None reports no logprobs at all."""
    return_token_ids: bool
    echo: bool
    kv_params: dict[str, Any]
    is_thinking: bool
    include_reasoning: bool
    calls_tools: bool
    names_tool: bool
    grammar: Grammar | None
    """What the answer is bound to; None: nothing."""
    one_call: bool
    """Of several tool calls only the first is told (`parallel_tool_calls` false)."""
    cache_salt: str = ""
    """Equal prompts with another one have no KV cache in common."""
    echo_only: bool = False
    """The prompt is all that is shown. One token is generated all the same (vLLM `CompletionRequest`)."""
    prompt_logprobs: int | None = None
    """How many alternatives to report per token of the prompt; None reports none."""
    phase_prompt: list[int] | None = None
    """In place of a chat's prompt for the question whether the answer begins in reasoning; None: the prompt tells."""
    dp_rank: int | None = None
    """The data-parallel rank that a vLLM engine is told to use; None lets it choose."""
    is_batch: bool = False
    """Of the native interface of SGLang: the answer is a list, whatever its length."""
    prompt_logprobs_from: int = -1
    """Likewise: the place in the prompt from which its own logprobs are told; -1 for nowhere."""

    @property
    def is_parsed(self) -> bool:
        """Whether the output can hold reasoning or tool calls that a parser separates from the content."""
        return self.is_chat and (self.is_thinking or self.calls_tools)
