"""Generation endpoints of vLLM and SGLang, and the form of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proxy.sim.dialects.sglang_answers import GenerateAnswer, SglangChat, SglangCompletion
from proxy.sim.dialects.sglang_requests import read_generate, read_openai
from proxy.sim.dialects.vllm_answers import ChatAnswer, CompletionAnswer
from proxy.sim.dialects.vllm_requests import read_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.dialects.vllm_answers import Answer
    from proxy.sim.model.request import Ask, EngineError
    from proxy.sim.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How the requests to one path are read, and how they are answered."""

    read: Callable[..., Ask]
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


def flat(error: EngineError) -> dict[str, Any]:
    """Return an error in SGLang's flat form (`entrypoints/openai/protocol.py`, ErrorResponse)."""
    kind = "BadRequestError" if error.status == 400 else error.kind
    return {"object": "error", "message": error.message, "type": kind, "param": error.param, "code": error.status}


def _native(error: EngineError) -> dict[str, Any]:
    if error.status >= 500:
        return flat(error)
    told = {"message": error.message, "type": "invalid_request_error", "code": error.status, "retryable": False}
    return {"error": told}


def _make_abort_event(error: EngineError, answer_id: str) -> dict[str, Any]:
    reason = {"type": "abort", "message": error.message, "status_code": error.status, "err_type": error.kind}
    return {"text": "", "output_ids": [], "meta_info": {"id": answer_id, "finish_reason": reason}}


_VLLM: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": Endpoint(
        read=partial(read_ask, is_chat=True),
        answer=ChatAnswer,
        id_prefix="chatcmpl-",
        refusal=_make_vllm_error_body,
        error_event=lambda error, _: error.body(),
    ),
    "/v1/completions": Endpoint(
        read=partial(read_ask, is_chat=False),
        answer=CompletionAnswer,
        id_prefix="cmpl-",
        refusal=_make_vllm_error_body,
        error_event=lambda error, _: error.body(),
    ),
}
_SGLANG: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": Endpoint(
        read=partial(read_openai, is_chat=True),
        answer=SglangChat,
        refusal=flat,
        error_event=lambda error, _: {"error": flat(error)},
        opens_late=True,
    ),
    "/v1/completions": Endpoint(
        read=partial(read_openai, is_chat=False),
        answer=SglangCompletion,
        refusal=flat,
        error_event=lambda error, _: {"error": flat(error)},
        opens_late=True,
    ),
    "/generate": Endpoint(read=read_generate, answer=GenerateAnswer, refusal=_native, error_event=_make_abort_event),
}


def endpoints(profile: Profile) -> Mapping[str, Endpoint]:
    """Return the endpoints that generate, by path."""
    return _SGLANG if profile.is_sglang else _VLLM


def error_body(error: EngineError, profile: Profile) -> dict[str, Any]:
    """Return an error in the form that all other routes use."""
    return flat(error) if profile.is_sglang else error.body()
