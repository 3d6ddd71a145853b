"""Answers that are not streamed: checked for completeness, and corrected where only the gateway knows better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.connectors.base import parse_answer
from proxy.errors import Failure
from proxy.wire.document import REMOVED
from proxy.wire.openai import with_prompt_details

if TYPE_CHECKING:
    from proxy.connectors.base import Attempt
    from proxy.wire.document import Document


async def read_answer(attempt: Attempt) -> Document:
    """The decoder's whole answer. Raises UpstreamError when it is broken, incomplete or asks for recomputation."""
    response = attempt.response
    body = await response.read()
    attempt.kv_arrived()
    answer = parse_answer(response, body)
    choices = answer.values.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise response.fail(Failure.BAD_ANSWER, "the answer has no choices")
    for choice in choices:
        if choice.get("stop_reason") == "recomputed":
            raise response.fail(Failure.RECOMPUTED, "gave the request up for lack of KV memory")
        if choice.get("finish_reason") is None:
            raise response.fail(Failure.BROKEN, "the answer ended without a finish reason")
    return answer


def client_body(attempt: Attempt, answer: Document) -> bytes:
    """The bytes for the client: the engine's own, without KV parameters and with the prefiller's cached tokens."""
    return answer.with_changes(_corrections(attempt, answer))


def client_values(attempt: Attempt, answer: Document) -> dict[str, Any]:
    """The same as parsed values, for merging."""
    values = {**answer.values, **_corrections(attempt, answer)}
    return {name: value for name, value in values.items() if value is not REMOVED}


def _corrections(attempt: Attempt, answer: Document) -> dict[str, Any]:
    corrections: dict[str, Any] = {}
    if "kv_transfer_params" in answer.values:
        corrections["kv_transfer_params"] = REMOVED
    usage = answer.values.get("usage")
    if attempt.kv_handed_over and isinstance(usage, dict):
        corrected = with_prompt_details(usage, attempt.journey.prompt_details)
        if corrected is not usage:
            corrections["usage"] = corrected
    return corrections
