"""Generation endpoints of vLLM and SGLang, and the form of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proxy.sim.dialects.sglang_answers import GenerateAnswer, SglangChat, SglangCompletion
from proxy.sim.dialects.sglang_requests import read_generate_request, read_openai_request
from proxy.sim.dialects.vllm_answers import Answer, ChatAnswer, CompletionAnswer
from proxy.sim.dialects.vllm_requests import read_vllm_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.model.request import EngineError, GenerationRequest
    from proxy.sim.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEndpoint:
    """How the requests to one path are read, and how they are answered."""

    read: Callable[..., GenerationRequest]
    """Reads the body of a request. The options and headers are passed by name. Raises EngineError."""
    answer: type[Answer]
    id_prefix: str = ""
    refusal: Callable[[EngineError], dict[str, Any]]
    """Returns the body of the answer for an error."""
    error_event: Callable[[EngineError, str], dict[str, Any]]
    """Returns the event for an error in a stream. The text is the ID of the answer."""
    opens_late: bool = False
    """Whether a stream's status line waits for its first token (SGLang `_handle_streaming_request`)."""


def _make_vllm_error_body(error: EngineError) -> dict[str, Any]:
    return error.body()


def flat_error_body(error: EngineError) -> dict[str, Any]:
    """Return an error in SGLang's flat form (`entrypoints/openai/protocol.py`, ErrorResponse)."""
    kind = "BadRequestError" if error.status == 400 else error.kind
    return {"object": "error", "message": error.message, "type": kind, "param": error.param, "code": error.status}


def _native_error_body(error: EngineError) -> dict[str, Any]:
    if error.status >= 500:
        return flat_error_body(error)
    told = {"message": error.message, "type": "invalid_request_error", "code": error.status, "retryable": False}
    return {"error": told}


def _make_abort_event(error: EngineError, answer_id: str) -> dict[str, Any]:
    reason = {"type": "abort", "message": error.message, "status_code": error.status, "err_type": error.kind}
    return {"text": "", "output_ids": [], "meta_info": {"id": answer_id, "finish_reason": reason}}


_VLLM_ENDPOINTS: Final[dict[str, GenerationEndpoint]] = {
    "/v1/chat/completions": GenerationEndpoint(
        read=partial(read_vllm_request, is_chat=True),
        answer=ChatAnswer,
        id_prefix="chatcmpl-",
        refusal=_make_vllm_error_body,
        error_event=lambda error, _: error.body(),
    ),
    "/v1/completions": GenerationEndpoint(
        read=partial(read_vllm_request, is_chat=False),
        answer=CompletionAnswer,
        id_prefix="cmpl-",
        refusal=_make_vllm_error_body,
        error_event=lambda error, _: error.body(),
    ),
}
_SGLANG_ENDPOINTS: Final[dict[str, GenerationEndpoint]] = {
    "/v1/chat/completions": GenerationEndpoint(
        read=partial(read_openai_request, is_chat=True),
        answer=SglangChat,
        refusal=flat_error_body,
        error_event=lambda error, _: {"error": flat_error_body(error)},
        opens_late=True,
    ),
    "/v1/completions": GenerationEndpoint(
        read=partial(read_openai_request, is_chat=False),
        answer=SglangCompletion,
        refusal=flat_error_body,
        error_event=lambda error, _: {"error": flat_error_body(error)},
        opens_late=True,
    ),
    "/generate": GenerationEndpoint(
        read=read_generate_request, answer=GenerateAnswer, refusal=_native_error_body, error_event=_make_abort_event
    ),
}


def endpoints_of_profile(profile: Profile) -> Mapping[str, GenerationEndpoint]:
    """Return the endpoints that generate, by path."""
    return _SGLANG_ENDPOINTS if profile.is_sglang else _VLLM_ENDPOINTS


def error_body(error: EngineError, profile: Profile) -> dict[str, Any]:
    """Return an error in the form that all other routes use."""
    return flat_error_body(error) if profile.is_sglang else error.body()
