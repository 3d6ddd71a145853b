"""OpenAI's Responses API as far as it needs no store, translated to chats."""

from __future__ import annotations

from proxy.dialects.responses.dialect import Responses

__all__ = ["Responses"]
