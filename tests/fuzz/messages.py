"""Anthropic's Messages API."""

from __future__ import annotations

from typing import Final

from proxy.dialects.messages import Messages
from tests.fuzz.translated import check_translated

_MESSAGES: Final = Messages()
_QUESTION: Final = b'{"model":"m","max_tokens":50,"stop_sequences":["END"],"messages":[{"role":"user","content":"Hi"}]}'


def check_messages(data: bytes) -> None:
    """Check the API by check_translated."""
    check_translated(_MESSAGES, _QUESTION, data)
