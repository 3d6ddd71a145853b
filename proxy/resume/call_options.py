"""Options of a call that decide whether and how its answer can be continued. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.wire import sglang
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.dialects.call import Call

# What vLLM takes for the limit of a completion that names none, or null (`CompletionRequest`).
_COMPLETION_TOKENS: Final = 16


def output_limit(call: Call) -> int | None:
    """Return the largest number of tokens that the answer may have; None: as many as fit."""
    if call.api is Api.GENERATE:
        return sglang.output_limit(call.sampling)
    values = call.values
    limit = values.get("max_completion_tokens") if call.api is Api.CHAT else None
    if limit is None:
        limit = values.get("max_tokens")
    if limit is None and call.api is Api.COMPLETIONS:
        return _COMPLETION_TOKENS
    return limit if isinstance(limit, int) else None


def min_tokens(call: Call) -> int:
    """Return the least number of tokens that the answer must have; 0: it may be empty."""
    least = call.sampling.get("min_new_tokens" if call.api is Api.GENERATE else "min_tokens")
    return max(0, least) if isinstance(least, int) else 0


def calls_tools(call: Call) -> bool:
    """Return whether the answer may call tools."""
    return bool(call.values.get("tools")) and call.values.get("tool_choice") != "none"


def is_structured(call: Call, members: Collection[str]) -> bool:
    """Return whether the answer is bound to a grammar, which would start at its beginning again.

    `members`: those of the request that name a grammar, in addition to the API's own.
    """
    values = call.sampling
    form = values.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    if any(values.get(name) is not None for name in members):
        return True
    choice = values.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        return True
    functions = [tool.get("function") for tool in values.get("tools") or () if isinstance(tool, dict)]
    return any(isinstance(function, dict) and function.get("strict") for function in functions)


def has_media(call: Call) -> bool:
    """Return whether a chat's messages have anything but text."""
    messages = call.values.get("messages")
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
