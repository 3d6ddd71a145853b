"""Answers of `/v1/completions`: plain text, whole and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.sim.dialects.answers import Answer, fingerprint
from proxy.sim.model.logprobs import Speller, completion_logprobs
from proxy.sim.model.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from proxy.sim.model.ask import Ask
    from proxy.sim.model.sequence import Delta, Sequence
    from proxy.sim.options import Options


class CompletionAnswer(Answer):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, ask: Ask, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._has_begun = [False] * len(self.sent_tokens)
        self._text_offsets = [0] * len(self.sent_tokens)
        self._spellers = [Speller() for _ in self.sent_tokens] if ask.logprobs is not None else []

    def events(self, delta: Delta) -> list[bytes]:
        if self._is_swallowed(delta) or delta.finish_reason == "error" or delta.fault:
            return []
        choice = self._choice(delta)
        self.sent_tokens[delta.index] += len(delta.token_ids)
        return [self._chunk(choice, delta.index)]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        is_first = not self._has_begun[delta.index]
        self._has_begun[delta.index] = True
        prompt = self.ask.prompts[delta.index // self.ask.samples]
        echoed = prompt if self.ask.echo and is_first else []
        logprobs = None if self.ask.logprobs is None else self._logprobs(delta, self.ask.logprobs, echoed)
        return {
            "index": delta.index,
            "text": decode(echoed, keep_markers=True) + ("" if self.ask.echo_only else delta.text),
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt if self.ask.return_token_ids and is_first else None,
            "token_ids": delta.token_ids if self.ask.return_token_ids else None,
        }

    def _logprobs(self, delta: Delta, top: int, echoed: list[int]) -> dict[str, Any]:
        index = delta.index
        shown = echoed + ([] if self.ask.echo_only else delta.token_ids)
        unknown = min(self.unknown_tokens, len(echoed))
        offset, speller = self._text_offsets[index], self._spellers[index]
        logprobs = completion_logprobs(shown, top, offset, speller, unknown=unknown)
        if echoed:
            self._text_offsets[index] += len(decode(echoed, keep_markers=True))
        if self.options.profile.offsets_follow_tokens:
            self._text_offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        else:
            # Text held back for stop strings lags the tokens, so offsets of two chunks may overlap.
            self._text_offsets[index] += len(delta.text)
        return logprobs

    def whole(
        self, sequences: Seq[Sequence], texts: Seq[Delta], cached_tokens: int, kv_params: dict[str, Any] | None
    ) -> dict[str, Any]:
        choices = []
        for delta in texts:
            choice = self._choice(delta)
            token_ids, prompt_ids = choice.pop("token_ids"), choice.pop("prompt_token_ids")
            told = self.prompt_logprobs(self.ask.prompts[delta.index // self.ask.samples])
            choice |= {"token_ids": token_ids, "prompt_logprobs": told, "prompt_token_ids": prompt_ids}
            if self.options.profile.has_routed_experts:
                choice["routed_experts"] = None
            choices.append(choice)
        return self.head(self.kind) | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": fingerprint(self.options),
            "usage": self._whole_usage(sequences, cached_tokens),
            "kv_transfer_params": self.own_kv_params() if kv_params is None else kv_params,
            **({"metrics": None} if self.options.profile.has_routed_experts else {}),
        }
