"""Writes answers in the form of SGLang: chats, completions and its native `/generate`, streamed or not.

From SGLang `entrypoints/openai/protocol.py`, `serving_chat.py` and `sse_utils.py`, and `managers/tokenizer_manager.py`.
The finish reasons of a chat's choices follow the content of all choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.sim.dialects.vllm_answers import DONE, Answer, ChatAnswer, CompletionAnswer, make_event, make_native_logprobs
from proxy.sim.model.tokenizer import END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.model.request import Delta, GenerationRequest, TokenSequence
    from proxy.sim.options import Options

_WEIGHTS_METADATA = {"weight_version": "default"}


def _sglang_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _find_stop_cause(delta: Delta) -> int | str | None:
    """Return what ended the answer: a stop string, or the ID of the stop token. None: neither."""
    return END if delta.finish_reason == "stop" and delta.stop_reason is None else delta.stop_reason


def _is_empty_delta(delta: Delta) -> bool:
    return delta.finish_reason == "error" or delta.fault is not None


class SglangChat(ChatAnswer):
    """The answers of `/v1/chat/completions`."""

    def __init__(self, ask: GenerationRequest, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._begun_choices: set[int] = set()
        self._ends: list[dict[str, Any]] = []

    def events(self, delta: Delta) -> list[bytes]:
        if _is_empty_delta(delta):
            return []
        self.sent_tokens[delta.index] += len(delta.token_ids)
        is_first = delta.index not in self._begun_choices
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if is_first else []
        self._begun_choices.add(delta.index)
        parts += _message_parts(self._parse_message(delta) or {})
        if self.ask.return_token_ids and not parts and delta.token_ids:
            parts.append({})  # what a parser keeps to itself has its ids told all the same
        chunks = [
            {"index": delta.index, "delta": part | _reasoning_members(part), "logprobs": None, "finish_reason": None}
            | {"matched_stop": None}
            for part in parts
        ]
        if chunks:
            chunks[-1]["logprobs"] = self._logprobs(delta)
        if chunks and self.ask.return_token_ids:
            chunks[-1]["token_ids"] = delta.token_ids
            if is_first:
                chunks[0]["prompt_token_ids"] = self.ask.prompts[0]
        if delta.finish_reason is not None:
            self._ends.append(self._final_choice(delta))
        return [self._chunk_event(chunk) for chunk in chunks]

    def _final_choice(self, delta: Delta) -> dict[str, Any]:
        called = bool(self._parsers) and self._parsers[delta.index].called_tools
        reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
        choice = {"index": delta.index, "delta": {"reasoning_content": None}, "logprobs": None}
        return choice | {"finish_reason": reason, "matched_stop": _find_stop_cause(delta)}

    def _chunk_event(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = self.chunk_head(self.chunk_kind) | {"choices": [choice]}
        if self.ask.continuous_usage:
            chunk["usage"] = _sglang_usage(len(self.ask.prompts[0]), self.sent_tokens[choice["index"]])
        return make_event(chunk)

    def closing(self, cached_tokens: int) -> list[bytes]:
        ends = [self._chunk_event(choice) for choice in self._ends]
        return [*ends, *_final_events(self, self.chunk_kind)]

    def whole(
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        choices = []
        for delta in texts:
            choice = self._whole_choice(delta)
            said = choice["message"]
            message = {"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning"]}
            choices.append(
                {
                    "index": choice["index"],
                    "message": message | {"tool_calls": said.get("tool_calls") or None},
                    "logprobs": choice["logprobs"],
                    "finish_reason": choice["finish_reason"],
                    "matched_stop": _find_stop_cause(delta),
                }
            )
        return _complete_answer(self, choices, sequences)


class SglangCompletion(CompletionAnswer):
    """The answers of `/v1/completions`."""

    def events(self, delta: Delta) -> list[bytes]:
        if _is_empty_delta(delta):
            return []
        choice = self._sglang_choice(delta)
        self.sent_tokens[delta.index] += len(delta.token_ids)
        chunk: dict[str, Any] = self.chunk_head(self.chunk_kind) | {"choices": [choice], "usage": None}
        if self.ask.continuous_usage:
            prompt = self.ask.prompts[delta.index // self.ask.samples]
            chunk["usage"] = _sglang_usage(len(prompt), self.sent_tokens[delta.index])
        return [make_event(chunk)]

    def _sglang_choice(self, delta: Delta) -> dict[str, Any]:
        choice = self._chunk_choice(delta)
        shown = {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason")}
        if shown["logprobs"] is not None:
            shown["logprobs"]["text_offset"] = [-1] * len(shown["logprobs"]["tokens"])
        ids = {name: choice[name] for name in ("token_ids", "prompt_token_ids") if choice[name] is not None}
        return shown | {"matched_stop": _find_stop_cause(delta)} | ids

    def closing(self, cached_tokens: int) -> list[bytes]:
        return _final_events(self, self.chunk_kind)

    def whole(
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return _complete_answer(self, [self._sglang_choice(delta) for delta in texts], sequences)


class GenerateAnswer(Answer):
    """The answers of `/generate`.

    Every chunk has the answer so far. Only the engine that computed a prompt has its logprobs.
    """

    def __init__(self, ask: GenerationRequest, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._texts = [""] * len(self.sent_tokens)
        self._ids: list[list[int]] = [[] for _ in self.sent_tokens]

    def events(self, delta: Delta) -> list[bytes]:
        if _is_empty_delta(delta):
            return []
        self.sent_tokens[delta.index] += len(delta.token_ids)
        said = self._answer_so_far(delta)
        return [make_event(said | {"index": delta.index} if self.ask.is_batch else said)]

    def closing(self, cached_tokens: int) -> list[bytes]:
        return [DONE]

    def whole(
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> Any:
        answers = [self._answer_so_far(delta) for delta in texts]
        return answers if self.ask.is_batch else answers[0]

    def _answer_so_far(self, delta: Delta) -> dict[str, Any]:
        index = delta.index
        if not self.ask.echo_only:
            self._texts[index] += delta.text
            self._ids[index] += delta.token_ids
        ids = self._ids[index]
        prompt = self.ask.prompts[index // self.ask.samples]
        meta: dict[str, Any] = {
            "id": f"{self.answer_id}_{index}" if self.ask.is_batch else self.answer_id,
            # A prefiller does not count the token that it gives for its decoder's.
            "finish_reason": _finish_reason(delta, 0 if self.options.role == "prefill" else len(ids)),
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        if self.ask.logprobs is not None:
            first = self.ask.prompt_logprobs_from
            knows_prompt = self.options.role != "decode" and first >= 0
            meta["input_token_logprobs"] = make_native_logprobs(prompt[first:]) if knows_prompt else []
            meta["output_token_logprobs"] = make_native_logprobs(ids)
        return {"text": self._texts[index], "output_ids": list(ids), "meta_info": meta}


def _finish_reason(delta: Delta, tokens: int) -> dict[str, Any] | None:
    match delta.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": tokens}
        case "abort":
            return {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}
    return {"type": "stop", "matched": _find_stop_cause(delta)}


def _message_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one delta for each kind of content in the additions of a step."""
    parts: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning"):
        parts.append({"reasoning_content": reasoning})
    if content := message.get("content"):
        parts.append({"content": content})
    if calls := message.get("tool_calls"):
        parts.append({"tool_calls": calls})
    return parts


def _reasoning_members(part: dict[str, Any]) -> dict[str, Any]:
    """Return the delta's member for reasoning. It is present even if it is null."""
    return {"reasoning_content": part.get("reasoning_content")}


def _final_events(answer: Answer, kind: str) -> list[bytes]:
    if not answer.ask.include_usage:
        return [DONE]
    counts = _sglang_usage(answer.prompt_tokens, sum(answer.sent_tokens))
    return [make_event(answer.chunk_head(kind) | {"choices": [], "usage": counts}), DONE]


def _complete_answer(
    answer: Answer, choices: list[dict[str, Any]], sequences: Sequence[TokenSequence]
) -> dict[str, Any]:
    tokens = sum(len(sequence.output) for sequence in sequences)
    counts = _sglang_usage(answer.prompt_tokens, tokens)
    return answer.chunk_head(answer.kind) | {"choices": choices, "usage": counts, "metadata": _WEIGHTS_METADATA}
