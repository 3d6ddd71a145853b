"""The few fields of OpenAI requests and answers that the gateway reads or writes; everything else passes untouched."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.errors import BadRequest, UpstreamError
from proxy.wire.python_json import dumps, loads

if TYPE_CHECKING:
    from proxy.common.errors import GatewayError


class Api(StrEnum):
    """The engines' generation endpoints, which go through prefill and decode; the value is the metric label."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    """SGLang's own."""

    path: str
    """The route, the same on the gateway and on the engines."""


Api.CHAT.path = "/v1/chat/completions"
Api.COMPLETIONS.path = "/v1/completions"
Api.GENERATE.path = "/generate"

OPENAI_APIS: Final = (Api.CHAT, Api.COMPLETIONS)
"""The endpoints of OpenAI's API."""

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
"""Fields that steer KV transfer or engine-internal routing. From a client they could point a decoder at any host, or
collide with a live request, so they are removed."""

ORDINARY_FIELDS: Final = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "stop", "user", "tools", "tool_choice", "response_format"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "chat_template_kwargs"),
        *("reasoning_effort", "metadata", "store", "service_tier", "prompt_cache_key", "session_id"),
    }
)
"""What nearly all requests have nothing beside. Whoever looks for what only few have need not look in these: see
`Call.is_ordinary`."""

DONE: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"


def error_type(status: int) -> str:
    """The `type` of an OpenAI error object for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if 400 <= status < 500 else "server_error"


def error_body(error: GatewayError) -> bytes:
    """The JSON body for one of our own errors."""
    param = error.param if isinstance(error, BadRequest) else None
    return dumps(
        {"error": {"message": error.message, "type": error_type(error.status), "param": param, "code": error.code}}
    )


def is_error_body(body: bytes) -> bool:
    """Whether a body is an error as this API tells one: an object with an `error` that has a message."""
    try:
        told = loads(body)
    except orjson.JSONDecodeError:
        return False
    told = told.get("error") if isinstance(told, dict) else None
    message = told.get("message") if isinstance(told, dict) else None
    return isinstance(message, str) and bool(message)


def error_event(error: GatewayError) -> bytes:
    """The event that tells a client in the middle of a stream that the answer is not complete.

    What an engine itself told stays in its own words. The OpenAI SDK raises APIError on an event whose object has an
    `error` member. No `[DONE]` follows: some clients count a stream with `[DONE]` as a success whatever came before.
    """
    told = error.body if isinstance(error, UpstreamError) else None
    if told is None or not _is_one_line_error(told):
        told = error_body(error)
    return b"data: " + told + b"\n\n"


def _is_one_line_error(body: bytes) -> bool:
    try:
        told = loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(told, dict) and bool(told.get("error")) and b"\n" not in body and b"\r" not in body


def data_event(payload: object) -> bytes:
    """An event that carries a JSON payload."""
    return b"data: " + dumps(payload) + b"\n\n"


def with_prompt_details(usage: dict[str, Any], prefillers: dict[str, Any] | None) -> dict[str, Any]:
    """A decoder's usage with what the prefiller reports of the prompt.

    A decoder that received its KV cache reports nearly the whole prompt as cached (vllm-ascend #8910); only the
    prefiller knows. None: the prefiller does not tell, and the decoder's figures are withdrawn rather than passed on.
    """
    if prefillers is None:
        withdrawn = usage.get("prompt_tokens_details") is not None
        return {**usage, "prompt_tokens_details": None} if withdrawn else usage
    details = usage.get("prompt_tokens_details")
    merged = {**details, **prefillers} if isinstance(details, dict) else prefillers
    return {**usage, "prompt_tokens_details": merged}
