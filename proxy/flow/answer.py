"""Answers that are not streamed to the client: put together from a stream, or read whole and checked."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from proxy.connectors.base import parse_answer
from proxy.errors import Failure
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api, with_prompt_details

if TYPE_CHECKING:
    from proxy.connectors.base import Attempt
    from proxy.flow.delivery import Delivery
    from proxy.wire.document import Document


class WholeAnswer:
    """Collects what a stream says besides its text: the Delivery's transcript has that.

    The result has the members of vLLM's ChatCompletionResponse and CompletionResponse in their order.
    """

    def __init__(self) -> None:
        self._last_choice: dict[str, Any] = {}
        self._logprobs: dict[str, list[Any]] | None = None

    def add(self, payload: dict[str, Any]) -> bytes:
        """Take the next chunk. Nothing of it goes to the client yet."""
        for choice in payload["choices"]:
            self._last_choice = choice
            if choice.get("logprobs") is not None:
                self._add_logprobs(choice["logprobs"])
        return b""

    def cut(self, tokens: int) -> None:
        """Forget what belongs to tokens behind the first so many."""
        for entries in (self._logprobs or {}).values():
            del entries[tokens:]

    def values(self, delivery: Delivery) -> dict[str, Any]:
        """The answer as parsed JSON, but for the prompt's ids, which are a Fragment."""
        call, transcript = delivery.call, delivery.transcript
        head = {name: value for name, value in delivery.head.items() if name != "object"}
        wants_ids = bool(call.values.get("return_token_ids"))
        hides = call.values.get("include_reasoning") is False and bool(transcript.reasoning)
        prompt_ids = orjson.Fragment(transcript.prompt_ids) if wants_ids and transcript.prompt_ids else None
        logprobs = None if hides else self._logprobs
        if logprobs is not None and "text_offset" in logprobs:
            # In a stream the offsets begin anew with each chunk, where its text does, which stop strings keep back.
            lengths = [len(token) for token in logprobs["tokens"]]
            logprobs["text_offset"] = list(accumulate(lengths[:-1], initial=0)) if lengths else []
        ending = {
            "logprobs": logprobs,
            "finish_reason": self._last_choice.get("finish_reason"),
            "stop_reason": self._last_choice.get("stop_reason"),
            "token_ids": transcript.ids.tolist() if wants_ids and not hides else None,
        }
        if call.api is Api.CHAT:
            choice = {"index": 0, "message": _message(delivery, hides_reasoning=hides), **ending}
            rest = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
        else:
            choice = {"index": 0, "text": transcript.content, **ending}
            choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
            rest = {}
        return {
            "id": head.pop("id", None),
            "object": "chat.completion" if call.api is Api.CHAT else "text_completion",
            **head,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": delivery.fingerprint,
            "usage": delivery.usage,
            **rest,
        }

    def _add_logprobs(self, logprobs: dict[str, list[Any] | None]) -> None:
        if self._logprobs is None:
            self._logprobs = {name: list(entries) for name, entries in logprobs.items() if entries is not None}
            return
        for name, entries in self._logprobs.items():
            entries += logprobs.get(name) or ()


def _message(delivery: Delivery, *, hides_reasoning: bool) -> dict[str, Any]:
    transcript = delivery.transcript
    message: dict[str, Any] = {
        "role": "assistant",
        # Empty text is text, unless there is something else.
        "content": transcript.content or (None if transcript.reasoning or transcript.tools else ""),
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
    }
    if transcript.tools:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # Arguments that never began are told as none, but only in a whole answer (vLLM `parser/kimi_k2.py`).
                "function": {"name": call.name, "arguments": call.arguments or "{}"},
            }
            for call in transcript.tools
        ]
    message[transcript.reasoning_field] = None if hides_reasoning else transcript.reasoning or None
    return message


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
