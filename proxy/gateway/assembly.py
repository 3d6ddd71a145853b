"""Answers that are not streamed to the client, put together from a decoder's stream."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from proxy.wire.chat_members import UnreadableMember, named, object_of
from proxy.wire.ids import new_id
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from proxy.gateway.delivery import Delivery


class Assembly:
    """Collects what a stream says besides its text: the Delivery's transcript has that.

    What it makes is what an engine would have answered to the same call, so it is in the shape of the call's `api`: a
    dialect cannot tell which of both it is given.

    The result has the members of the engine's ChatCompletionResponse and CompletionResponse in their order. Streams do
    not have `routed_experts`, so it is null, and the call that asks for them is not answered from a stream. Nor do they
    have `metrics` that are null.
    """

    def __init__(self, *, has_routed_experts: bool = False) -> None:
        """`has_routed_experts`: whole answers of these engines have both; see ROUTED_EXPERTS."""
        self._has_routed_experts = has_routed_experts
        self._last_choice: dict[str, Any] = {}
        self._logprobs: dict[str, list[Any]] | None = None

    def add(self, payload: dict[str, Any]) -> bytes:
        """Take the next chunk. Nothing of it goes to the client yet. Raises UnreadableMember."""
        for choice in payload["choices"]:
            self._last_choice = choice
            if choice.get("logprobs") is not None:
                self._add_logprobs(choice["logprobs"])
        return b""

    @property
    def finish_reason(self) -> Any:
        """Why the answer has ended; None before it has."""
        return self._last_choice.get("finish_reason")

    def is_complete(self, stop_member: str) -> bool:
        """Whether the model has ended the answer: no limit, no stop string. `stop_member`: what engines call that."""
        if self.finish_reason == "tool_calls":
            return True
        return self.finish_reason == "stop" and self._last_choice.get(stop_member) is None

    def cut(self, tokens: int) -> None:
        """Forget what belongs to tokens behind the first `tokens`."""
        for entries in (self._logprobs or {}).values():
            del entries[tokens:]

    def values(self, delivery: Delivery) -> dict[str, Any]:
        """The answer as parsed JSON, but for the prompt's ids, which are a Fragment."""
        call, transcript, engine = delivery.call, delivery.transcript, delivery.engine
        head = {name: value for name, value in delivery.head.items() if name != "object"}
        wants_ids = bool(call.values.get("return_token_ids"))
        hides = call.values.get("include_reasoning") is False and bool(transcript.reasoning)
        prompt_ids = orjson.Fragment(transcript.prompt_ids) if wants_ids and transcript.prompt_ids else None
        logprobs = None if hides else self._logprobs
        if logprobs is not None and "text_offset" in logprobs and engine.reports_offsets:
            # In a stream the offsets begin anew with each chunk, where its text does, which stop strings keep back.
            lengths = [len(token) for token in logprobs.get("tokens", ())]
            logprobs["text_offset"] = list(accumulate(lengths[:-1], initial=0)) if lengths else []
        ending = {
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            engine.stop_member: self._last_choice.get(engine.stop_member),
            "token_ids": transcript.ids.tolist() if wants_ids and not hides else None,
        }
        if call.api is Api.CHAT:
            choice = {"index": 0, "message": _message(delivery, hides_reasoning=hides), **ending}
            rest = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, **delivery.tail}
        else:
            choice = engine.whole_choice({"text": transcript.content}, ending, prompt_ids)
            rest = {**delivery.tail}
        if self._has_routed_experts:
            choice["routed_experts"] = None
            rest.setdefault("metrics", None)
        return {
            "id": head.pop("id", None),
            "object": "chat.completion" if call.api is Api.CHAT else "text_completion",
            **head,
            "choices": [choice],
            **engine.whole_tail(delivery.fingerprint, delivery.usage),
            **rest,
        }

    def _add_logprobs(self, told: object) -> None:
        logprobs = object_of(told, "logprobs")
        if not all(entries is None or isinstance(entries, list) for entries in logprobs.values()):
            raise UnreadableMember("a member of logprobs is no list")
        if not all(isinstance(token, str) for token in logprobs.get("tokens") or ()):
            raise UnreadableMember("a token of logprobs is no text")
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
                "id": call.id or f"call_{new_id()}",
                "type": "function",
                # Arguments that never began are told as none, but only in a whole answer (vLLM `parser/kimi_k2.py`).
                "function": {"name": call.name, "arguments": call.arguments or "{}"},
            }
            for call in named(transcript.tools)
        ]
    message[transcript.reasoning_field] = None if hides_reasoning else transcript.reasoning or None
    return message
