"""Anthropic's Messages API, translated to chats."""

from __future__ import annotations

from proxy.dialects.messages.dialect import Messages

__all__ = ["Messages"]
