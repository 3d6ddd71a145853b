"""A chat's answer as Anthropic's message: whole, and as events (docs.anthropic.com, "Streaming messages")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.messages import errors
from proxy.dialects.translated import Kind, Parts, event, matched_stop
from proxy.errors import UnknownFinish
from proxy.wire.finish import is_whole
from proxy.wire.ids import new_id
from proxy.wire.openai import prompt_details
from proxy.wire.python_json import loads, utf8

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from proxy.answers import AnsweredAttempt
    from proxy.call import Call
    from proxy.dialects.translated import Part
    from proxy.errors import GatewayError

_STOPPED: Final = event("message_stop", {"type": "message_stop"})
_STOP_REASONS: Final = {"length": "max_tokens", "repetition": "max_tokens", "content_filter": "refusal"}
_CUT_OFF: Final[dict[str, Any]] = {}
_BEGUN: Final[Mapping[Kind, dict[str, Any]]] = {
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    Kind.TEXT: {"type": "text", "text": ""},
}


def message(call: Call, completion: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed."""
    (choice,) = completion["choices"]
    told = choice["message"]
    content: list[dict[str, Any]] = []
    if thoughts := told.get("reasoning") or told.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thoughts, "signature": new_id()})
    calls = told.get("tool_calls") or ()
    if told.get("content") or not (content or calls):
        content.append({"type": "text", "text": told.get("content") or ""})
    uses = [_tool_use(each["id"], each["function"]["name"], each["function"].get("arguments")) for each in calls]
    return {
        **_head(call, completion),
        "content": [*content, *uses],
        **_stop(choice["finish_reason"], matched_stop(choice), call.stops, uses),
        "usage": _usage(completion.get("usage")),
    }


class MessageEvents(Parts):
    """The events of one message."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._prompt_usage: dict[str, Any] = {}
        self._uses: list[dict[str, Any]] = []

    def anew(self, attempt: AnsweredAttempt) -> None:
        """Begin anew with another attempt, and note the prompt tokens for `message_start`: as the prefiller told them,
        otherwise as they were estimated; the usage at the end has the true ones.
        """
        self._uses.clear()
        tokens = attempt.prompt_tokens
        known = self._call.prompt_tokens if tokens is None else tokens
        self._prompt_usage = {"prompt_tokens": known, "prompt_tokens_details": attempt.prompt_details}

    def started(self, payload: dict[str, Any]) -> bytes:
        """`message_start`."""
        usage = {**_usage(self._prompt_usage), "output_tokens": 0}
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", {"type": "message_start", "message": {**_head(self._call, payload), **unknown}})

    def opened(self, part: Part) -> bytes:
        """`content_block_start`."""
        block = _tool_use(part.id, part.name, None) if part.kind is Kind.CALL else _BEGUN[part.kind]
        return event(
            "content_block_start", {"type": "content_block_start", "index": part.index, "content_block": block}
        )

    def said(self, part: Part, text: str) -> bytes:
        """`content_block_delta`."""
        match part.kind:
            case Kind.REASONING:
                return _delta(part, {"type": "thinking_delta", "thinking": text})
            case Kind.TEXT:
                return _delta(part, {"type": "text_delta", "text": text})
            case Kind.CALL:
                part.written += utf8(text)
                return _delta(part, {"type": "input_json_delta", "partial_json": text})

    def closed(self, part: Part) -> bytes:
        """`content_block_stop`; thinking is signed before."""
        signed = b""
        if part.kind is Kind.CALL:
            self._uses.append(_tool_use(part.id, part.name, part.text))
        if part.kind is Kind.REASONING:
            signed = _delta(part, {"type": "signature_delta", "signature": new_id()})
        return signed + event("content_block_stop", {"type": "content_block_stop", "index": part.index})

    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """`message_delta` and `message_stop`."""
        (usage,) = usages
        empty = self.open(self.next_part(Kind.TEXT)) if self.is_empty else b""
        closed = self.close()
        stop = _stop(self.finish_reason, self.matched_stop, self._call.stops, self._uses)
        told = {"type": "message_delta", "delta": stop, "usage": _usage(usage or self._prompt_usage)}
        return b"".join((empty, closed, event("message_delta", told), _STOPPED))

    def error_event(self, error: GatewayError) -> bytes:
        """`error`, in place of the end."""
        return event("error", errors.error(error))


def _head(call: Call, completion: Mapping[str, Any]) -> dict[str, Any]:
    """With the engine's id, as far as it is one: its log has it, too."""
    name = str(completion.get("id") or new_id()).removeprefix("chatcmpl-")
    model = call.model or completion.get("model")
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}


def _tool_use(name: str, function: str, arguments: str | None) -> dict[str, Any]:
    """Nothing but an object may stand there: arguments that the limit of tokens cut off are left out."""
    try:
        read = loads(utf8(arguments or "{}"))
    except orjson.JSONDecodeError:
        read = None
    use = {"type": "tool_use", "id": name, "name": function, "input": read}
    return use if isinstance(read, dict) else {**use, "input": _CUT_OFF}


def _stop(
    finish_reason: str | None, matched: object, stops: Collection[str], uses: Sequence[dict[str, Any]]
) -> dict[str, str | None]:
    """What the message has counts: a chat that had to call a tool of a name ends like one that called none, and with
    old engines one that the limit cuts off in a call like one that is complete. A call that a stop string has cut off
    must not be run. Raises UnknownFinish.
    """
    if not is_whole(finish_reason):
        raise UnknownFinish(finish_reason)
    is_cut = bool(uses) and uses[-1]["input"] is _CUT_OFF
    reason = _STOP_REASONS.get(finish_reason or "")
    if reason is None and uses and not is_cut:
        reason = "tool_use"
    if reason is None and isinstance(matched, str) and matched in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": reason or ("max_tokens" if is_cut else "end_turn"), "stop_sequence": None}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of the prompt that were cached are counted apart."""
    told = usage or {}
    cached = (prompt_details(told) or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (told.get("prompt_tokens") or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": told.get("completion_tokens") or 0,
    }


def _delta(part: Part, delta: dict[str, Any]) -> bytes:
    return event("content_block_delta", {"type": "content_block_delta", "index": part.index, "delta": delta})
