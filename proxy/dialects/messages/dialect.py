"""POST /v1/messages, as Claude Code and Anthropic's SDKs ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.dialects.messages.answer import MessageEvents, error_body, message
from proxy.dialects.messages.request import chat_of
from proxy.dialects.translated import Translated, event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.errors import GatewayError
    from proxy.dialects.base import Rendering, Unit
    from proxy.dialects.call import Call
    from proxy.dialects.left_out import LeftOut
    from proxy.dialects.translated import Completion


class Messages(Translated):
    """A message is a chat's answer, and its content blocks are the parts of that."""

    path = "/v1/messages"
    label = "messages"
    request_id_header = "request-id"
    keep_alive = event("ping", {"type": "ping"})

    def chat(self, values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
        """See Translated."""
        return chat_of(values, left_out)

    def prompt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Translated. A request to count tokens has no limit."""
        return super().prompt({**values, "max_tokens": 1})

    def answer(self, call: Call, completion: Completion) -> dict[str, Any]:
        """See Translated."""
        return message(call, completion)

    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """See Dialect."""
        return MessageEvents(call)

    def error_body(self, error: GatewayError) -> bytes:
        """See Dialect."""
        return error_body(error)
