"""The fields of OpenAI requests and answers that the gateway reads or writes. It passes all other fields unchanged."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final, NamedTuple

import orjson

from proxy.common.errors import BadRequest, GatewayError, UpstreamError
from proxy.wire.document import REMOVED, Document, InvalidDocument, join_body
from proxy.wire.python_json import dumps, loads


class Api(StrEnum):
    """The generation endpoints of engines. The value is the metric label."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    """The native endpoint of SGLang."""

    path: str
    """The path of the route, which is the same on the gateway and on engines."""


Api.CHAT.path = "/v1/chat/completions"
Api.COMPLETIONS.path = "/v1/completions"
Api.GENERATE.path = "/generate"

OPENAI_APIS: Final = (Api.CHAT, Api.COMPLETIONS)
"""The generation endpoints of the OpenAI API."""

RESERVED_FIELDS: Final = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "kv_hints",
        "kv_router_hint",
        "request_id",
        "rid",
    }
)
"""Fields that control KV transfer or routing inside engines. The gateway removes them from clients' requests.

They could point a decoder at any host, or collide with another request.
"""

ORDINARY_FIELDS: Final = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "stop", "user", "tools", "tool_choice", "response_format"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "chat_template_kwargs"),
        *("reasoning_effort", "metadata", "store", "service_tier", "prompt_cache_key", "session_id"),
    }
)
"""The fields that nearly all requests use. Checks for rare fields skip requests with no other fields.

See `Call.is_ordinary`.
"""

DONE_DATA: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"


def error_type_of_status(status: int) -> str:
    """Return the `type` of an OpenAI error object for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if 400 <= status < 500 else "server_error"


_MAX_ERROR_LENGTH: Final = 200
_MAX_SCANNED_BYTES: Final = 2000
_QUOTATION_PATTERN: Final = re.compile(r"""[\[{"`]|(?<!\w)'[^']{24,}|input_value|\binput=""")


def error_body(error: GatewayError) -> bytes:
    """Return the JSON body for an error of the gateway."""
    param = error.param if isinstance(error, BadRequest) else None
    return dumps(
        {
            "error": {
                "message": error.message,
                "type": error_type_of_status(error.status),
                "param": param,
                "code": error.code,
            }
        }
    )


def is_error_body(body: bytes) -> bool:
    """Return whether a body is an OpenAI error: an object with an `error` that has a message."""
    try:
        answer = loads(body)
    except orjson.JSONDecodeError:
        return False
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and bool(message)


def engine_error_text(body: bytes) -> str:
    """Return the beginning of the message in an engine's error, for administrators. Empty: it has none.

    Engines quote parts of an invalid request, and so perhaps the prompt. So the text ends before the first bracket or
    long quotation, and no log has it.
    """
    try:
        answer = loads(body)
    except orjson.JSONDecodeError:
        return ""
    answer = answer if isinstance(answer, dict) else {}
    error = answer.get("error", answer.get("detail", answer))
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        return ""
    printable = "".join(letter if letter.isprintable() else " " for letter in message[:_MAX_SCANNED_BYTES])
    words = " ".join(_QUOTATION_PATTERN.split(printable, maxsplit=1)[0].split())
    return words[:_MAX_ERROR_LENGTH].rstrip(" :,;.")


def error_event(error: GatewayError) -> bytes:
    """Return the event that ends an incomplete stream with an error.

    The error of an engine is sent unchanged. The OpenAI SDK raises APIError for an event with an `error` member. No
    `[DONE]` follows, because some clients count every stream with `[DONE]` as a success.
    """
    body = error.body if isinstance(error, UpstreamError) else None
    if body is None or not _is_one_line_error(body):
        body = error_body(error)
    return b"data: " + body + b"\n\n"


def _is_one_line_error(body: bytes) -> bool:
    try:
        answer = loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(answer, dict) and bool(answer.get("error")) and b"\n" not in body and b"\r" not in body


def data_event(payload: object) -> bytes:
    """Return a server-sent event with a JSON payload."""
    return b"data: " + dumps(payload) + b"\n\n"


def replace_prompt_details(usage: dict[str, Any], prefillers: dict[str, Any] | None) -> dict[str, Any]:
    """Return the usage of a decoder with the prompt details of the prefiller.

    A decoder that received KV cache reports nearly the whole prompt as cached (vllm-ascend #8910). If the prefiller
    reports no details (None), those of the decoder are removed.
    """
    if prefillers is None:
        withdrawn = usage.get("prompt_tokens_details") is not None
        return {**usage, "prompt_tokens_details": None} if withdrawn else usage
    details = usage.get("prompt_tokens_details")
    merged = {**details, **prefillers} if isinstance(details, dict) else prefillers
    return {**usage, "prompt_tokens_details": merged}


# Reasons for the end of an answer, the values of `finish_reason`
#
# vLLM: `FINISH_REASON_STRINGS` in v1/engine/__init__.py, and `tool_calls` for chats. SGLang: the `to_json` methods in
# managers/schedule_batch.py, which the native API shows as objects with a `type`, and `finish_reason` in
# entrypoints/openai/protocol.py. The `error` of vLLM should not reach a client, because the engine returns a 500.

COMPLETE_REASONS: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"})
"""Finish reasons of complete answers."""
ABORT_REASONS: Final = frozenset({"abort", "error"})
"""Finish reasons of answers that the engine gave up: at SIGTERM, `/pause`, `/sleep`, or after a failure."""


def is_abort_reason(reason: Any) -> bool:
    """Return whether the engine abandoned the answer before it was complete."""
    word = reason.get("type") if isinstance(reason, dict) else reason  # an object in the native API of SGLang
    return isinstance(word, str) and word in ABORT_REASONS


def is_complete_reason(reason: Any) -> bool:
    """Return whether a finish reason shows that the answer is complete."""
    return isinstance(reason, str) and reason in COMPLETE_REASONS


# Usage: token counts of one unit, combined from the answers to all of its legs and attempts

PromptCounts = tuple[int | None, int | None]
"""The number of tokens of a prompt, and how many were in the prefix cache; None for a number that is not reported."""
# A larger number is negative in an engine that counts without a sign. It would hide all later counts in a sum.
_MAX_TOKENS: Final = 1 << 40


class UsageCounts(NamedTuple):
    """The numbers of a usage object. None: the number is missing, or is not a number of tokens."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    """Tokens of the prompt that were in the prefix cache."""
    reasoning_tokens: int | None
    """Tokens of the completion that are reasoning."""


def read_usage_counts(usage: Any) -> UsageCounts:
    """Read the token counts of an answer's `usage`, whose value may be anything."""
    if not isinstance(usage, dict):
        return UsageCounts(None, None, None, None)
    prompt_details, completion_details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return UsageCounts(
        _read_count(usage.get("prompt_tokens")),
        _read_count(usage.get("completion_tokens")),
        _read_count(prompt_details.get("cached_tokens")) if isinstance(prompt_details, dict) else None,
        _read_count(completion_details.get("reasoning_tokens")) if isinstance(completion_details, dict) else None,
    )


class Usage:
    """Token counts of one unit of a request."""

    prompt_tokens: int | None = None
    """Tokens of the prompt; None: not reported yet."""
    completion_tokens: int | None = None
    """Tokens of the answer; None: not reported yet."""
    prompt_details: dict[str, Any] | None = None
    """The `prompt_tokens_details` of the prefiller; None: it reports none."""
    cached_tokens: int | None = None
    """Prompt tokens that were in the prefix cache; None: not reported."""
    counts_reasoning: bool | None = None
    """Whether the prefiller counts reasoning tokens, as the decoder then does in a chat. None: it sent no usage."""
    is_resumed: bool = False
    """Whether this attempt continues the answer of another attempt. Its prompt is then not the client's prompt."""

    def add_prompt_usage(self, usage: Any) -> PromptCounts:
        """Record the prompt counts of a usage member, and return them.

        Only the first report counts, because the first attempt fills the prefix cache for later ones.
        """
        counts = tokens, cached = read_prompt_counts(usage)
        if self.prompt_details is None and not self.is_resumed and isinstance(usage, dict):
            if tokens is not None:
                self.prompt_tokens = tokens
            details = usage.get("prompt_tokens_details")
            self.prompt_details = details if isinstance(details, dict) else None
            self.cached_tokens = cached
            self.counts_reasoning = usage.get("completion_tokens_details") is not None
        return counts

    def add_completion_usage(self, usage: Any) -> None:
        """Record the completion count of a usage member."""
        if isinstance(usage, dict) and (tokens := _read_count(usage.get("completion_tokens"))) is not None:
            self.completion_tokens = tokens


def read_prompt_counts(usage: Any) -> PromptCounts:
    """Read the prompt counts of a usage member. Costs less than `read_usage_counts`, and every request calls it."""
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _read_count(usage.get("prompt_tokens")), _read_count(cached)


def _read_count(value: object) -> int | None:
    """Return a value if it is a number of tokens, and None for any other value, such as a bool."""
    return value if type(value) is int and 0 <= value < _MAX_TOKENS else None


# Members for engines only
#
# They name the hosts, ports and KV blocks of engines, so clients do not receive them. vLLM 0.33 writes
# `kv_transfer_params` into every chunk of a stream. The value is null, except in the last chunk with
# `bidirectional_kv_xfer`: there it tells others how to fetch the KV cache of the decoder.

ENGINE_MEMBERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_ENGINE_MEMBER_REMOVALS: Final = dict.fromkeys(sorted(ENGINE_MEMBERS), REMOVED)
NO_KV_PARAMS: Final = b',"kv_transfer_params":null'
"""The empty `kv_transfer_params` that vLLM writes into each chunk. Inside a JSON string its quotes would be escaped."""


def has_engine_members(payload: dict[str, Any]) -> bool:
    """Return whether an answer, or one event of it, has a member that is only for engines."""
    return "kv_transfer_params" in payload or "ec_transfer_params" in payload


def names_engine_members(written: bytes) -> bool:
    """Return whether a JSON text may have a member that is only for engines."""
    return b'kv_transfer_params"' in written or b'ec_transfer_params"' in written


def remove_engine_members(chunk: dict[str, Any]) -> None:
    """Remove the members that are only for engines from an answer or from one event of it."""
    for name in ENGINE_MEMBERS:
        chunk.pop(name, None)


def cut_engine_members(data: bytes) -> bytes:
    """Return a JSON object without the members that are only for engines.

    The bytes of all other members stay the same.
    """
    shown = data.replace(NO_KV_PARAMS, b"")
    if shown is not data and not names_engine_members(shown):
        return shown
    try:
        return join_body(Document(data).make_changed_body(_ENGINE_MEMBER_REMOVALS))
    except InvalidDocument:  # it repeats a name
        payload = loads(data)
        remove_engine_members(payload)
        return dumps(payload)
