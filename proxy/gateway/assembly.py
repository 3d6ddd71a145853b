"""Assembles answers that are not streamed to the client from a decoder's stream."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from proxy.wire.chat_members import UnreadableMember, drop_unnamed_calls, read_object_member
from proxy.wire.ids import make_request_id
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from proxy.gateway.delivery import Delivery


class StreamAssembly:
    """Collects the members of a stream that the transcript of the Delivery does not have.

    The result equals the answer of an engine to the same call that is not streamed. It has the members of the engine's
    ChatCompletionResponse or CompletionResponse in the same order.

    Streams have no `routed_experts`, so this member is null. A call that requests them is not answered from a stream.
    """

    def __init__(self, *, has_routed_experts: bool = False) -> None:
        """`has_routed_experts`: whether whole answers of these engines have `routed_experts` and `metrics`."""
        self._has_routed_experts = has_routed_experts
        self._last_choice: dict[str, Any] = {}
        self._collected_logprobs: dict[str, list[Any]] | None = None

    def add_chunk(self, payload: dict[str, Any]) -> bytes:
        """Take the next chunk. Return no bytes, because the client gets nothing yet. Raises UnreadableMember."""
        for choice in payload["choices"]:
            self._last_choice = choice
            if choice.get("logprobs") is not None:
                self._add_logprobs(choice["logprobs"])
        return b""

    @property
    def finish_reason(self) -> Any:
        """The finish reason. None: the answer has not ended."""
        return self._last_choice.get("finish_reason")

    def has_model_ended(self, stop_reason: str) -> bool:
        """Return whether the model has ended the answer, and not a limit or a stop string.

        `stop_reason`: the engines' name of the member that has the stop string.
        """
        if self.finish_reason == "tool_calls":
            return True
        return self.finish_reason == "stop" and self._last_choice.get(stop_reason) is None

    def truncate_to_tokens(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""
        for entries in (self._collected_logprobs or {}).values():
            del entries[tokens:]

    def make_answer_values(self, delivery: Delivery) -> dict[str, Any]:
        """Return the answer as parsed JSON, except for the ids of the prompt, which are a Fragment."""
        call, transcript, engine = delivery.call, delivery.transcript, delivery.engine
        head = {name: value for name, value in delivery.head.items() if name != "object"}
        wants_ids = bool(call.values.get("return_token_ids"))
        hides = call.values.get("include_reasoning") is False and bool(transcript.reasoning_text)
        prompt_ids = orjson.Fragment(transcript.prompt_ids) if wants_ids and transcript.prompt_ids else None
        logprobs = None if hides else self._collected_logprobs
        if logprobs is not None and "text_offset" in logprobs and engine.reports_offsets:
            # In a stream, the offsets begin again with the text of each chunk, which stop strings may delay.
            lengths = [len(token) for token in logprobs.get("tokens", ())]
            logprobs["text_offset"] = list(accumulate(lengths[:-1], initial=0)) if lengths else []
        ending = {
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            engine.stop_member: self._last_choice.get(engine.stop_member),
            "token_ids": transcript.ids.tolist() if wants_ids and not hides else None,
        }
        if call.api is Api.CHAT:
            choice = {"index": 0, "message": _make_message(delivery, hides_reasoning=hides), **ending}
            rest = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, **delivery.tail}
        else:
            choice = engine.make_complete_choice({"text": transcript.content_text}, ending, prompt_ids)
            rest = {**delivery.tail}
        if self._has_routed_experts:
            choice["routed_experts"] = None
            rest.setdefault("metrics", None)
        return {
            "id": head.pop("id", None),
            "object": "chat.completion" if call.api is Api.CHAT else "text_completion",
            **head,
            "choices": [choice],
            **engine.make_final_members(delivery.system_fingerprint, delivery.last_usage),
            **rest,
        }

    def _add_logprobs(self, value: object) -> None:
        """Add the member `logprobs` of a choice. Raises UnreadableMember."""
        logprobs = read_object_member(value, "logprobs")
        if not all(entries is None or isinstance(entries, list) for entries in logprobs.values()):
            raise UnreadableMember("a member of logprobs is not a list")
        if not all(isinstance(token, str) for token in logprobs.get("tokens") or ()):
            raise UnreadableMember("a token of logprobs is not text")
        if self._collected_logprobs is None:
            self._collected_logprobs = {
                name: list(entries) for name, entries in logprobs.items() if entries is not None
            }
            return
        for name, entries in self._collected_logprobs.items():
            entries += logprobs.get(name) or ()


def _make_message(delivery: Delivery, *, hides_reasoning: bool) -> dict[str, Any]:
    """Return the message of a chat that is not streamed."""
    transcript = delivery.transcript
    message: dict[str, Any] = {
        "role": "assistant",
        # Empty text stays empty text if there is nothing else.
        "content": transcript.content_text or (None if transcript.reasoning_text or transcript.tools else ""),
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
    }
    if transcript.tools:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{make_request_id()}",
                "type": "function",
                # In a whole answer, missing arguments are an empty object (vLLM `parser/kimi_k2.py`).
                "function": {"name": call.name, "arguments": call.arguments or "{}"},
            }
            for call in drop_unnamed_calls(transcript.tools)
        ]
    message[transcript.reasoning_field] = None if hides_reasoning else transcript.reasoning_text or None
    return message
