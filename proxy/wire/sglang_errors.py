"""How engines of SGLang tell of failures inside answers with status 200, those of OpenAI's API and of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from proxy.wire.python_json import dumps, loads
from proxy.wire.sse import EventSplitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ERROR_HEADERS: Final[Mapping[str, str]] = {"content-type": "application/json"}
"""Of an EngineError's body."""


class EngineError(NamedTuple):
    """What an engine told of a failure inside an answer with status 200. `body` is a JSON object with `error`."""

    status: int
    body: bytes
    is_wish: bool = False
    """The request was aborted by its name, or because the engine is paused: nothing broke."""


# SGLang 0.5.21 and later, `managers/schedule_batch.py`: with status 503, and with 500.
_LACKS_KV_MEMORY: Final = (b"Retracted under decode memory pressure", b"Retraction host KV pool exhausted")


def lacks_kv_memory(status: int, body: bytes | None) -> bool:
    """Whether an engine's error says that a decoder gave a request up for lack of KV memory."""
    return status >= 500 and body is not None and any(words in body for words in _LACKS_KV_MEMORY)


def error_in_answer(answer: bytes) -> EngineError | None:
    """The error that a prefiller's whole answer tells of, streamed or not; None when there is none.

    That somebody had its request aborted is one, too: no KV cache comes of it.
    """
    # The bytes cannot occur inside a JSON string, where the quotes would be escaped, so most answers are not parsed.
    if b'"error"' not in answer and b'"abort"' not in answer:
        return None
    for payload in payloads_of(answer):
        if error := error_of(payload):
            return error
        if isinstance(payload, dict) and any(map(_is_abort, _finishes(payload))):
            return _aborted({})._replace(is_wish=True)
    return None


def error_of(payload: Any) -> EngineError | None:
    """The error that an answer, or one event of it, stands for; None when it is none.

    `{"error": {..., "code": status}}` in a stream, or a finish `{"type": "abort", "message": ..., "status_code": ...}`
    of a native answer. Without a status it was somebody's wish, and is no error.
    """
    if not isinstance(payload, dict):
        return None
    told = payload.get("error")
    if told:
        return EngineError(_status(told.get("code") if isinstance(told, dict) else None), dumps(payload))
    meta = payload.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and _is_abort(reason) and reason.get("status_code") is not None:
        return _aborted(reason)
    return None


def payloads_of(answer: bytes) -> Iterator[Any]:
    """The JSON of a whole answer, or of the events of a stream; what is neither is left out."""
    for data in [event.data for event in EventSplitter().feed(answer)] if answer.startswith(b"data:") else [answer]:
        try:
            yield loads(data or b"null")
        except orjson.JSONDecodeError:
            continue


def _finishes(payload: dict[str, Any]) -> Iterator[Any]:
    meta, choices = payload.get("meta_info"), payload.get("choices")
    if isinstance(meta, dict):
        yield meta.get("finish_reason")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice.get("finish_reason")


def _is_abort(finish: Any) -> bool:
    return finish == "abort" or (isinstance(finish, dict) and finish.get("type") == "abort")


def _aborted(reason: dict[str, Any]) -> EngineError:
    status = _status(reason.get("status_code"))
    message = reason.get("message") or "the request was aborted"
    told = {"object": "error", "message": message, "type": reason.get("err_type") or "abort", "param": None}
    return EngineError(status, dumps({"error": {**told, "code": status}}))


def _status(code: Any) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
