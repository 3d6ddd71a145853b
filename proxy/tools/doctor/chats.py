"""Checks of the parsers of engines, based on the answers to one chat. Pure.

vLLM does not report its parsers. Without a parser of tool calls it rejects chats with tools, also on a prefiller, which
gets the same body as the decoder. Without a reasoning parser the text of the answer contains the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.common.backend import Role
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.tools.doctor.examined import Examined

_REASONING_FLAG: Final = "--reasoning-parser"
_ANSWER_TOKENS: Final = 8
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Notes a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswers:
    """The answers of an engine to the same chat with and without a tool."""

    engine: Examined
    rejects_tools: bool | None = None
    """Whether the engine has no parser of tool calls. None: unknown."""
    separates_reasoning: bool | None = None
    """Whether the engine returns reasoning apart from the text. None: unknown."""


def make_chat_body(model: str, role: Role, *, has_tool: bool) -> dict[str, Any]:
    """Return the body of a chat for an engine of this role."""
    tool = {"tools": [_TOOL], "tool_choice": "auto"} if has_tool else {}
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Reply with the word OK."}],
        "max_tokens": _ANSWER_TOKENS if role is Role.DECODE else 1,
        "temperature": 0.0,
        "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
        **tool,
    }


def rejects_tools(status: int, body: bytes) -> bool | None:
    """Return whether an engine rejected a chat because it cannot parse tool calls. None: unknown."""
    if status == 200:
        return False
    # The error of vLLM names the flags that are missing.
    return True if status == 400 and b"tool-call-parser" in body else None


def separates_reasoning(answer: Any) -> bool | None:
    """Return whether the answer to a chat has reasoning apart from its text. None: it has no text."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, dict):
        return None
    if message.get("reasoning") or message.get("reasoning_content"):
        return True
    return False if message.get("content") else None


def check_parsers(answers: Sequence[ChatAnswers]) -> Iterator[Finding]:
    """Check that the engines of one model have the same parsers. No finding if none has any."""
    if any(each.rejects_tools is False for each in answers):
        for each in answers:
            if each.rejects_tools:
                words = "rejects chats with tools, but other instances accept them"
                hint = "start it with the --enable-auto-tool-choice and --tool-call-parser of the others"
                yield Finding(Severity.WARNING, "parsers", each.engine.subject, words, hint)
    if any(each.separates_reasoning for each in answers):
        for each in answers:
            if each.separates_reasoning is False and not _is_known(each.engine.options):
                words = "returns reasoning as text of the answer, but other decode instances separate both"
                hint = f"start it with the {_REASONING_FLAG} of the others"
                yield Finding(Severity.WARNING, "parsers", each.engine.subject, words, hint)


def _is_known(options: Mapping[str, object]) -> bool:
    """Return whether the check of options compares the reasoning parser already."""
    return _REASONING_FLAG in options
