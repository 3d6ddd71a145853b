"""POST /v1/responses, OpenAI's Responses API without storage: its dialect, its answers and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import GatewayError, UpstreamError
from proxy.dialects.responses_request import (
    RequestForResponse,
    ToolKind,
    decode_input_text,
    decode_search,
    seal_reasoning,
    translate_to_chat,
)
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
from proxy.wire.ids import make_request_id
from proxy.wire.openai import error_type_of_status, is_complete_reason, is_error_body, read_usage_counts
from proxy.wire.python_json import dumps, encode_utf8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.base import AnsweredAttempt, Rendering, Unit
    from proxy.dialects.call import Call
    from proxy.dialects.left_out import OmittedParts


class Responses(TranslatedDialect):
    """OpenAI's Responses API. A response is the answer of a chat, and its output items are the parts of the answer.

    Nothing is stored.
    """

    path = "/v1/responses"
    label = "responses"

    def make_chat(self, values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
        return translate_to_chat(values, left_out)

    def answer_context(self, values: Mapping[str, Any]) -> RequestForResponse:
        """Return the members of the request that its response repeats."""
        return RequestForResponse(values)

    def make_answer(self, call: Call, completion: ChatCompletion) -> dict[str, Any]:
        return make_response(call, call.answer_context, completion)

    def make_rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        return ResponseEvents(call, call.answer_context)

    def error_body(self, error: GatewayError) -> bytes | None:
        """Return a body for error pages of proxies in front of engines. Engines' errors have this API's form."""
        body = error.body if isinstance(error, UpstreamError) else None
        if body is None or is_error_body(body):
            return None
        members = {
            "message": error_text(error),
            "type": error_type_of_status(error.status),
            "param": None,
            "code": error.code,
        }
        return dumps({"error": members})


_INCOMPLETE_REASONS: Final = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
    "repetition": "repetition",
}
_MAX_REASON_LENGTH: Final = 64


def make_response(call: Call, request: RequestForResponse, completion: ChatCompletion) -> dict[str, Any]:
    """Convert a chat completion that is not streamed to a response."""
    parts: list[AnswerPart] = []
    for kind, text in ((PartKind.REASONING, completion.reasoning), (PartKind.TEXT, completion.content)):
        if text:
            parts.append(AnswerPart(len(parts), kind, written_bytes=bytearray(encode_utf8(text))))
    for each in completion.calls:
        parts.append(
            AnswerPart(len(parts), PartKind.CALL, each, ensure_call_id(each), each.name, each.written_arguments)
        )
    items = _OutputItems(request)
    is_cut = _incomplete_reason(completion.finish_reason) is not None
    output = [items.make_item(part, is_cut=is_cut and part is parts[-1]) for part in parts]
    return {
        **_response_head(call, request, completion.head),
        **_outcome_members(completion.finish_reason, output, completion.usage),
    }


class ResponseEvents(AnswerParts):
    """The writer of the numbered events of one response."""

    def __init__(self, call: Call, request: RequestForResponse) -> None:
        super().__init__()
        self._call = call
        self._request = request
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._items = _OutputItems(self._request)
        self._number = 0
        self._head: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    def restart_answer(self, attempt: AnsweredAttempt) -> None:
        self._reset_answer()

    def start_events(self, payload: dict[str, Any]) -> bytes:
        """Return `response.created` and `response.in_progress`."""
        self._head = _response_head(self._call, self._request, CompletionHead.read_from(payload))
        unknown = {**self._head, "status": "in_progress", "output": [], "error": None, "incomplete_details": None}
        unknown |= {"usage": None, "completed_at": None}
        return self._event("response.created", response=unknown) + self._event("response.in_progress", response=unknown)

    def open_events(self, part: AnswerPart) -> bytes:
        """Return the events that add an output item and its only content part."""
        added = self._event(
            "response.output_item.added", output_index=part.index, item=self._items.make_item(part, is_begun=True)
        )
        return (
            added
            if part.kind is PartKind.CALL
            else added + self._make_content_event("response.content_part.added", part)
        )

    def text_events(self, part: AnswerPart, text: str) -> bytes:
        """Return the event with a delta of the open part; empty for a custom tool or a search.

        Their input arrives as JSON and can be converted only when it is complete.
        """
        if part.call is None:
            part.written_bytes += encode_utf8(text)
        match part.kind:
            case PartKind.REASONING:
                return self._make_item_event("response.reasoning_text.delta", part, content_index=0, delta=text)
            case PartKind.TEXT:
                return self._make_item_event(
                    "response.output_text.delta", part, content_index=0, delta=text, logprobs=[]
                )
            case PartKind.CALL if self._request.tool_kind(part.name) is not ToolKind.FUNCTION:
                return b""
            case PartKind.CALL:
                return self._make_item_event("response.function_call_arguments.delta", part, delta=text)

    def close_events(self, part: AnswerPart) -> bytes:
        """Return the events that end a part. They have its whole text or arguments, and its complete output item."""
        is_cut = self.finish_reason is not None and _incomplete_reason(self.finish_reason) is not None
        item = self._items.make_item(part, is_cut=is_cut)
        self._output.append(item)
        text = part.text
        match part.kind:
            case PartKind.REASONING:
                done = self._make_item_event("response.reasoning_text.done", part, content_index=0, text=text)
                done += self._make_content_event("response.content_part.done", part)
            case PartKind.TEXT:
                done = self._make_item_event("response.output_text.done", part, content_index=0, text=text, logprobs=[])
                done += self._make_content_event("response.content_part.done", part)
            case PartKind.CALL if self._request.tool_kind(part.name) is ToolKind.TOOL_SEARCH:
                done = b""
            case PartKind.CALL if self._request.tool_kind(part.name) is ToolKind.CUSTOM:
                done = self._make_item_event("response.custom_tool_call_input.delta", part, delta=item["input"])
                done += self._make_item_event("response.custom_tool_call_input.done", part, input=item["input"])
            case PartKind.CALL:
                members = {"name": item["name"], "arguments": item["arguments"]}
                done = self._make_item_event("response.function_call_arguments.done", part, **members)
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return `response.completed` or `response.incomplete`."""
        (usage,) = usages
        events: list[bytes] = []
        self._advance_parts(events, at_end=True)
        events.append(self.end_open_part())
        whole = {**self._head, **_outcome_members(self.finish_reason, self._output, usage)}
        return b"".join(events) + self._event(f"response.{whole['status']}", response=whole)

    def error_event(self, error: GatewayError) -> bytes:
        """Return `response.failed`."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error_text(error)}, "output": self._output}
        head = self._head or _response_head(self._call, self._request, CompletionHead.read_from({}))
        last = self._event("response.failed", response={**head, **failed, "usage": None})
        return b"".join((*self.unsent, last))

    # Writing

    def _event(self, kind: str, **members: Any) -> bytes:
        numbered = event(kind, {"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return numbered

    def _make_item_event(self, kind: str, about: AnswerPart, /, **members: Any) -> bytes:
        return self._event(kind, item_id=self._items.item_id(about), output_index=about.index, **members)

    def _make_content_event(self, kind: str, part: AnswerPart) -> bytes:
        return self._make_item_event(kind, part, content_index=0, part=_content_part(part))


class _OutputItems:
    """Converts the parts of one answer to output items. An item has the same id in all events."""

    def __init__(self, request: RequestForResponse) -> None:
        self._request = request
        self._ids: list[str] = []

    def item_id(self, part: AnswerPart) -> str:
        """Return the id of a part's item. A new id is drawn at the first use, and the parts come in order."""
        if part.index == len(self._ids):
            prefix = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}[part.kind]
            self._ids.append(f"{prefix}_{make_request_id()}")
        return self._ids[part.index]

    def make_item(self, part: AnswerPart, *, is_begun: bool = False, is_cut: bool = False) -> dict[str, Any]:
        """Return a part's item so far.

        `is_begun`: the item has just begun and has no content. `is_cut`: the answer ended inside the item.
        """
        status = "in_progress" if is_begun else "incomplete" if is_cut else "completed"
        item: dict[str, Any] = {"id": self.item_id(part)}
        match part.kind:
            case PartKind.REASONING:
                thoughts = part.text
                seal = seal_reasoning(thoughts) if self._request.wants_sealed_reasoning and not is_begun else None
                content = [] if is_begun else [_content_part(part)]
                item |= {"type": "reasoning", "summary": [], "content": content, "encrypted_content": seal}
            case PartKind.TEXT:
                item |= {"type": "message", "role": "assistant", "content": [] if is_begun else [_content_part(part)]}
            case PartKind.CALL if self._request.tool_kind(part.name) is ToolKind.TOOL_SEARCH:
                arguments = {} if is_begun else decode_search(part.text)
                item |= {"type": "tool_search_call", "call_id": part.id, "execution": "client", "arguments": arguments}
            case PartKind.CALL if self._request.tool_kind(part.name) is ToolKind.CUSTOM:
                item |= {"type": "custom_tool_call", **self._call_members(part), "input": decode_input_text(part.text)}
            case PartKind.CALL:
                # A call without arguments gets an empty object, but only at its end.
                written = part.text or ("" if is_begun else "{}")
                item |= {"type": "function_call", **self._call_members(part), "arguments": written}
        return {**item, "status": status}

    def _call_members(self, part: AnswerPart) -> dict[str, str]:
        """Return the members that identify a tool call: its id, and the client's name and namespace of the tool."""
        tool = self._request.tools.get(part.name)
        if tool is None:
            return {"call_id": part.id, "name": part.name}
        inside = {} if tool.namespace is None else {"namespace": tool.namespace}
        return {"call_id": part.id, "name": tool.name, **inside}


def _content_part(part: AnswerPart) -> dict[str, Any]:
    text = part.text
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response_head(call: Call, request: RequestForResponse, head: CompletionHead) -> dict[str, Any]:
    model = call.model or head.model
    return {
        "id": f"resp_{head.completion_id}",
        "object": "response",
        "created_at": head.created,
        "model": model,
        **request.echoed_members,
    }


def _incomplete_reason(finish_reason: object) -> str | None:
    """Return the reason why a response is incomplete; None if it is complete.

    The reason is the engine's finish reason if that is unknown.
    """
    if is_complete_reason(finish_reason):
        return _INCOMPLETE_REASONS.get(str(finish_reason))
    return str(finish_reason)[:_MAX_REASON_LENGTH]


def _outcome_members(
    finish_reason: str | None, output: list[dict[str, Any]], usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    reason = _incomplete_reason(finish_reason)
    return {
        "status": "completed" if reason is None else "incomplete",
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": output,
        "usage": None if usage is None else _response_usage(usage),
    }


def _response_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    tokens = read_usage_counts(usage)
    prompt, completion = tokens.prompt_tokens or 0, tokens.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning_tokens or 0},
        "total_tokens": prompt + completion,
    }
