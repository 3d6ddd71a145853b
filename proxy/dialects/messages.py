"""POST /v1/messages, Anthropic's Messages API: its dialect, its answers, and the events of streamed answers.

Events follow docs.anthropic.com, "Streaming messages", and errors follow "Errors" there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.errors import GatewayError, UnknownFinish
from proxy.dialects.messages_request import translate_to_chat
from proxy.dialects.translated import (
    AnswerPart,
    AnswerParts,
    ChatCompletion,
    CompletionHead,
    PartKind,
    TranslatedDialect,
    ensure_call_id,
    error_text,
    event,
)
from proxy.wire.chat_members import ControlCharacterEscaper, JsonNesting, arguments_as_object, is_json_object
from proxy.wire.ids import make_request_id
from proxy.wire.openai import is_complete_reason, read_usage_counts
from proxy.wire.python_json import dumps, encode_utf8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.base import AnsweredAttempt, Rendering, Unit
    from proxy.dialects.call import Call
    from proxy.dialects.left_out import OmittedParts


class Messages(TranslatedDialect):
    """Anthropic's Messages API.

    A message is the answer of a chat, and its content blocks are the parts of the answer.
    """

    path = "/v1/messages"
    label = "messages"
    request_id_header = "request-id"
    keep_alive_event = event("ping", {"type": "ping"})

    def make_chat(self, values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
        return translate_to_chat(values, left_out)

    def make_prompt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add `max_tokens`, which a message must have, and which requests that count tokens lack."""
        return super().make_prompt({**values, "max_tokens": 1})

    def make_answer(self, call: Call, completion: ChatCompletion) -> dict[str, Any]:
        return make_message(call, completion)

    def make_rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        return MessageEvents(call)

    def error_body(self, error: GatewayError) -> bytes:
        return error_body(error)


_STOP_SEQUENCE_REASON: Final = event("message_stop", {"type": "message_stop"})
_STOP_REASONS: Final = {"length": "max_tokens", "repetition": "max_tokens", "content_filter": "refusal"}
_EMPTY_BLOCKS: Final[Mapping[PartKind, dict[str, Any]]] = {
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    PartKind.TEXT: {"type": "text", "text": ""},
}
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def make_message(call: Call, completion: ChatCompletion) -> dict[str, Any]:
    """Convert a chat completion that is not streamed to a message."""
    content: list[dict[str, Any]] = []
    if completion.reasoning:
        content.append({"type": "thinking", "thinking": completion.reasoning, "signature": make_request_id()})
    if completion.content or not (content or completion.calls):
        content.append({"type": "text", "text": completion.content})
    arguments = completion.calls[-1].arguments if completion.calls else None
    ending = _MessageEnding(call, completion.finish_reason, completion.matched_stop_string, arguments, completion.usage)
    for each in completion.calls:
        is_cut = ending.is_cut_off and each is completion.calls[-1]
        block = _tool_use_block(ensure_call_id(each), each.name)
        content.append(block if is_cut else {**block, "input": orjson.Fragment(arguments_as_object(each.arguments))})
    return {
        **_message_head(call, completion.head),
        "content": content,
        **ending.stop(),
        "usage": _message_usage(completion.usage),
    }


class MessageEvents(AnswerParts):
    """The writer of the events of one message."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._prompt_usage: dict[str, Any] = {}
        self._arguments: str | None = None
        """The arguments of the last tool call that has ended; None if no call has ended."""
        self._checked_arguments: ControlCharacterEscaper | None = None
        """Escapes the arguments of the open tool call; None before the first call."""

    def restart_answer(self, attempt: AnsweredAttempt) -> None:
        """Set the prompt tokens of `message_start` to the prefiller's count, or otherwise to the estimate.

        The usage at the end of the message has the exact number.
        """
        self._arguments = None
        tokens = attempt.prompt_tokens
        if tokens is None:
            tokens = self._call.prompt_tokens
        self._prompt_usage = {"prompt_tokens": tokens, "prompt_tokens_details": attempt.prompt_tokens_details}

    def start_events(self, payload: dict[str, Any]) -> bytes:
        """Return `message_start`."""
        usage = {**_message_usage(self._prompt_usage), "output_tokens": 0}
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event(
            "message_start",
            {
                "type": "message_start",
                "message": {**_message_head(self._call, CompletionHead.read_from(payload)), **unknown},
            },
        )

    def open_events(self, part: AnswerPart) -> bytes:
        """Return `content_block_start` for a part."""
        if part.kind is PartKind.CALL:
            self._checked_arguments = ControlCharacterEscaper(part.written_bytes)
            block = _tool_use_block(part.id, part.name)
        else:
            block = _EMPTY_BLOCKS[part.kind]
        return event(
            "content_block_start", {"type": "content_block_start", "index": part.index, "content_block": block}
        )

    def text_events(self, part: AnswerPart, text: str) -> bytes:
        """Return `content_block_delta`."""
        match part.kind:
            case PartKind.REASONING:
                return _delta_event(part, {"type": "thinking_delta", "thinking": text})
            case PartKind.TEXT:
                return _delta_event(part, {"type": "text_delta", "text": text})
            case PartKind.CALL:
                assert self._checked_arguments is not None
                return _delta_event(
                    part, {"type": "input_json_delta", "partial_json": self._checked_arguments.escape_text(text)}
                )

    def close_events(self, part: AnswerPart) -> bytes:
        """Return `content_block_stop`. A block of thinking gets a signature before it."""
        signature = b""
        if part.kind is PartKind.CALL:
            self._arguments = part.text
        if part.kind is PartKind.REASONING:
            signature = _delta_event(part, {"type": "signature_delta", "signature": make_request_id()})
        return signature + event("content_block_stop", {"type": "content_block_stop", "index": part.index})

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return `message_delta` and `message_stop`."""
        (usage,) = usages
        events: list[bytes] = []
        self._advance_parts(events, at_end=True)
        if self.is_empty:
            events.append(self.begin_part(AnswerPart(-1, PartKind.TEXT)))
        events.append(self.end_open_part())
        ending = _MessageEnding(self._call, self.finish_reason or "", self.matched_stop, self._arguments, usage)
        delta = {"type": "message_delta", "delta": ending.stop(), "usage": _message_usage(usage or self._prompt_usage)}
        return b"".join((*events, event("message_delta", delta), _STOP_SEQUENCE_REASON))

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event `error`, with which the stream ends."""
        return b"".join((*self.unsent, event("error", make_error_object(error))))


def _message_head(call: Call, head: CompletionHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.completion_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model or head.model,
    }


def _tool_use_block(name: str, function: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": function, "input": {}}


class _MessageEnding:
    """The reason why a message ended.

    Raises UnknownFinish for an unknown finish reason.

    Args:
        call: The call.
        finish_reason: The finish reason of the chat.
        matched: The stop string or token id at which the engine stopped; None if there is none.
        arguments: The arguments of the last tool call; None if the message has no tool call.
        usage: The usage of the chat.
    """

    def __init__(
        self,
        call: Call,
        finish_reason: str,
        matched: object,
        arguments: str | None,
        usage: Mapping[str, Any] | None,
    ) -> None:
        if not is_complete_reason(finish_reason):
            raise UnknownFinish(finish_reason)
        self._reason = _STOP_REASONS.get(finish_reason)
        self._stop = matched if isinstance(matched, str) and matched in call.stop_strings else None
        self._has_calls = arguments is not None
        self.is_cut_off = False
        """Whether the answer ended inside the arguments of its last tool call.

        The client gets no arguments of such a call.
        """
        if arguments and not is_json_object(arguments):
            completion, limit = read_usage_counts(usage).completion_tokens, call.output_limit
            # Old engines report "tool_calls" even if the limit or a stop string cut the call off. But a model may also
            # have written arguments that are not JSON, and then nothing was cut off.
            is_at_limit = completion is not None and limit is not None and completion >= limit
            is_odd_end = finish_reason != "tool_calls" and not _is_complete_json(arguments)
            self.is_cut_off = self._reason is not None or self._stop is not None or is_at_limit or is_odd_end

    def stop(self) -> dict[str, str | None]:
        """Return the members `stop_reason` and `stop_sequence` of a message.

        The result depends on whether there are tool calls: a chat that must call a certain tool has the same finish
        reason as a chat without calls.
        """
        reason = self._reason
        if reason is None and self._has_calls and not self.is_cut_off:
            reason = "tool_use"
        if reason is None and self._stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        return {"stop_reason": reason or ("max_tokens" if self.is_cut_off else "end_turn"), "stop_sequence": None}


def _is_complete_json(arguments: str) -> bool:
    nesting = JsonNesting()
    nesting.scan(encode_utf8(arguments))
    return nesting.is_closed


def _message_usage(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Anthropic's usage, which counts the cached tokens of the prompt separately."""
    tokens = read_usage_counts(usage)
    cached = tokens.cached_tokens or 0
    return {
        "input_tokens": max(0, (tokens.prompt_tokens or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens.completion_tokens or 0,
    }


def _delta_event(part: AnswerPart, delta: dict[str, Any]) -> bytes:
    return event("content_block_delta", {"type": "content_block_delta", "index": part.index, "delta": delta})


def make_error_object(failed: GatewayError) -> dict[str, Any]:
    """Return the error object, which is both the body of an error and the data of the event `error`."""
    kind = _ERROR_TYPES.get(failed.status) or ("invalid_request_error" if failed.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error_text(failed)}}


def error_body(failed: GatewayError) -> bytes:
    """Return the body of an error."""
    return dumps(make_error_object(failed))
