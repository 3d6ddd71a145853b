"""The reasons for which engines end an answer, as `finish_reason` names them.

vLLM: `FINISH_REASON_STRINGS` in v1/engine/__init__.py; for chats also `tool_calls`. SGLang: the `to_json` methods in
managers/schedule_batch.py, which the native API shows as objects with a `type`, and `finish_reason` in
entrypoints/openai/protocol.py. vLLM's `error` should never reach a client, as the engine turns it into a 500.
"""

from __future__ import annotations

from typing import Any, Final

WHOLE: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"})
"""The reasons of an answer that ends where the engine or the request wanted it to end."""
GIVEN_UP: Final = frozenset({"abort", "error"})
"""The reasons of an answer that the engine stopped working on: at SIGTERM, `/pause`, `/sleep`, or after a failure."""


def word_of(reason: Any) -> Any:
    """The reason itself, or the `type` of one in the shape of SGLang's native API."""
    return reason.get("type") if isinstance(reason, dict) else reason


def is_given_up(reason: Any) -> bool:
    """Return whether the engine stopped working on the answer before it was whole."""
    word = word_of(reason)
    return isinstance(word, str) and word in GIVEN_UP


def is_whole(reason: Any) -> bool:
    """Return whether the reason is known to be that of a whole answer."""
    return isinstance(reason, str) and reason in WHOLE
