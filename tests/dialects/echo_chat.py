"""A client dialect that is not in the table: another body shape, another stream, errors in its own words.

POST /v1/echo-chat {"say": "Hello", "tokens": 8, "stream": true}

event: hello    {"id": "…"}
event: said     {"text": "…"}, as often as there is more of it
event: bye      {"reason": "stop", "tokens": 8}
event: sorry    {"why": "…", "kind": "…"}, in place of the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.common.errors import BadRequest, GatewayError
from proxy.dialects.base import AnsweredAttempt, CompleteAnswer, Rendering, Unit, UnitRendering
from proxy.dialects.call import Call
from proxy.dialects.openai import ChatCompletions
from proxy.settings import Cost
from proxy.wire.document import Document


class EchoChat(ChatCompletions):
    """A chat with one message."""

    path = "/v1/echo-chat"
    label = "echo_chat"
    stream_end_event = b""  # `bye` is the last one

    def parse_request(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return the chat that engines get."""
        if not isinstance(document.values.get("say"), str):
            raise BadRequest("say must be text", param="say")
        chat: dict[str, Any] = {
            "model": document.values.get("model"),
            "messages": [{"role": "user", "content": document.values["say"]}],
            "max_tokens": document.values.get("tokens"),
            "stream": document.values.get("stream"),
        }
        return super().parse_request(Document(orjson.dumps(chat)), cost, headers)

    def render_complete_body(self, call: Call, units: Sequence[Unit], answers: Sequence[CompleteAnswer]) -> bytes:
        """Return the text, the finish reason and the number of tokens."""
        (answer,) = answers
        values = answer.parsed_body()
        (choice,) = values["choices"]
        text, tokens = choice["message"]["content"], values["usage"]["completion_tokens"]
        return orjson.dumps({"said": text, "reason": choice["finish_reason"], "tokens": tokens})

    def make_rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """Named events."""
        return _Events()

    def error_body(self, error: GatewayError) -> bytes:
        """Return the body of an error."""
        return orjson.dumps(_apology(error))


class _Events:
    """The events of the only unit."""

    def __init__(self) -> None:
        self._has_begun = False
        self._reason = ""

    def make_unit_rendering(self, unit: Unit) -> UnitRendering:
        return self

    def begin_decoder_answer(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        self._has_begun &= goes_on

    def render(self, payload: dict[str, Any]) -> bytes:
        events = []
        if not self._has_begun:
            self._has_begun = True
            events.append(_event("hello", {"id": payload["id"]}))
        (choice,) = payload["choices"]
        if text := choice["delta"].get("content"):
            events.append(_event("said", {"text": text}))
        self._reason = choice.get("finish_reason") or self._reason
        return b"".join(events)

    async def wait_for_remaining_events(self) -> bytes:
        return b""

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        (usage,) = usages
        return _event("bye", {"reason": self._reason, "tokens": (usage or {}).get("completion_tokens")})

    def error_event(self, error: GatewayError) -> bytes:
        return _event("sorry", _apology(error))


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _apology(error: GatewayError) -> dict[str, Any]:
    return {"why": error.message, "kind": error.code}
