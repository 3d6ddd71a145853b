"""The chunk with which a decoder gives up for lack of KV memory: its text counts, its finish does not. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.call import Call


def unfinished(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a payload, and of its only choice, without a finish."""
    choice = {**payload["choices"][0], "finish_reason": None}
    choice.pop("stop_reason", None)
    return {**payload, "choices": [choice]}, choice


def without_tool_calls(choice: dict[str, Any]) -> None:
    """Remove what a chat's choice says of tool calls: old parsers make up what closes the arguments (vLLM 0.18
    `chat_completion/serving.py`).
    """
    if "delta" in choice:
        choice["delta"] = {name: value for name, value in choice["delta"].items() if name != "tool_calls"}


def withhold(choices: Sequence[dict[str, Any]], call: Call) -> None:
    """Remove the end of the text, as the engine kept it back until it gave up: a stop string may begin there."""
    if call.values.get("include_stop_str_in_output"):
        return
    missing = max(map(len, call.stops), default=1) - 1
    for choice in reversed(choices):
        fields = choice.get("delta", choice)
        name = next((name for name in ("text", "content", "reasoning", "reasoning_content") if fields.get(name)), "")
        if name and missing:
            cut = max(0, len(fields[name]) - missing)
            missing -= len(fields[name]) - cut
            fields[name] = fields[name][:cut]
