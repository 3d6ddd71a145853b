"""Anthropic's Messages API, translated to chats."""

from __future__ import annotations

from proxy.dialects.messages.dialect import Messages
from proxy.dialects.messages.request import tokenizer_body

__all__ = ["Messages", "tokenizer_body"]
