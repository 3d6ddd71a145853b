"""What chat and completion answers have in common, in the OpenAI format as vLLM serialises it.

Field order and explicit nulls follow vLLM's response models dumped with `exclude_unset`: what a handler sets appears
even when null. A choice that ends without any token has no chunk in the versions that swallow it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from proxy.sim.model.logprobs import prompt_logprobs
from proxy.sim.model.sequence import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from proxy.sim.model.ask import Ask
    from proxy.sim.model.sequence import Sequence
    from proxy.sim.options import Options

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def fingerprint(options: Options) -> str | None:
    return f"vllm-{options.profile.version}-sim" if options.profile.has_fingerprint else None


class Collector:
    """Puts the deltas of a whole answer together, one per choice."""

    def __init__(self, choices: int) -> None:
        self.deltas = [Delta(index, "", []) for index in range(choices)]

    def on_delta(self, delta: Delta) -> None:
        self.deltas[delta.index].merge(delta)


class Answer:
    """What chat and completions have in common: the head of every body and chunk, and the token counts."""

    kind = ""
    chunk_kind = ""

    def __init__(self, ask: Ask, options: Options, answer_id: str) -> None:
        self.ask = ask
        self.options = options
        self.answer_id = answer_id
        self.created = int(time.time())
        self.sent_tokens = [0] * (len(ask.prompts) * ask.samples)
        self.prompt_tokens = sum(map(len, ask.prompts))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.ask.model}

    @property
    def unknown_tokens(self) -> int:
        """How many tokens at the beginning of each prompt have no log probabilities: the first, and whatever was not
        computed here.
        """
        if self.options.profile.is_sglang:
            is_foreign = self.options.role == "decode"
        else:
            is_foreign = bool(self.ask.kv_params.get("do_remote_prefill"))
        return self.prompt_tokens if is_foreign else 1

    def prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None] | None:
        top = self.ask.prompt_logprobs
        return None if top is None else prompt_logprobs(prompt, top, unknown=min(self.unknown_tokens, len(prompt)))

    def events(self, delta: Delta) -> list[bytes]:
        raise NotImplementedError

    def whole(
        self, sequences: Seq[Sequence], texts: Seq[Delta], cached_tokens: int, kv_params: dict[str, Any] | None
    ) -> dict[str, Any]:
        raise NotImplementedError

    def completion_details(self, index: int | None = None) -> dict[str, Any]:
        """What usage says about the tokens of one choice, or of all, in the versions that say it."""
        return {}

    def closing(self, cached_tokens: int) -> list[bytes]:
        """What follows the last choice: usage if asked for, then the end."""
        if not self.ask.include_usage:
            return [DONE]
        counts = usage(self.prompt_tokens, sum(self.sent_tokens), self._details(cached_tokens))
        counts |= {name: details for name, details in self.completion_details().items() if details is not None}
        chunk = self.head(self.chunk_kind) | {"choices": [], "usage": counts}
        if name := fingerprint(self.options):
            chunk["system_fingerprint"] = name
        return [event(chunk), DONE]

    def _details(self, cached_tokens: int) -> int | None:
        return cached_tokens if self.options.prompt_tokens_details else None

    def _whole_usage(self, sequences: Seq[Sequence], cached_tokens: int) -> dict[str, Any]:
        tokens = sum(len(sequence.output) for sequence in sequences)
        counts = usage(self.prompt_tokens, tokens, self._details(cached_tokens))
        counts.setdefault("prompt_tokens_details", None)
        return counts | self.completion_details()

    def _is_swallowed(self, delta: Delta) -> bool:
        """A chunk without text or tokens before the first token is not sent, whatever else it says."""
        if delta.text or delta.token_ids or self.sent_tokens[delta.index]:
            return False
        return delta.finish_reason is None or self.options.profile.swallows_empty_finish

    def _chunk(self, choice: dict[str, Any], index: int) -> bytes:
        chunk: dict[str, Any] = self.head(self.chunk_kind) | {"choices": [choice]}
        if self.ask.continuous_usage:
            prompt = self.ask.prompts[index // self.ask.samples]
            chunk["usage"] = usage(len(prompt), self.sent_tokens[index]) | self.completion_details(index)
        elif self.options.profile.explicit_nulls and not self.ask.is_chat:
            chunk["usage"] = None
        name = fingerprint(self.options)
        if name and choice["finish_reason"] and not self.ask.include_usage:
            chunk["system_fingerprint"] = name
        if self.options.profile.streams_kv_params:
            chunk["kv_transfer_params"] = self.own_kv_params() if choice["finish_reason"] else None
        return event(chunk)

    def own_kv_params(self) -> dict[str, Any] | None:
        """What a prefiller needs to fetch a decoder's KV cache; None unless the decoder offers it."""
        options = self.options
        if not (options.bidirectional_kv_xfer and options.profile.streams_kv_params) or options.role == "prefill":
            return None
        blocks = -(-(self.prompt_tokens + sum(self.sent_tokens)) // options.block_size)
        where = {"remote_engine_id": "decoder", "remote_request_id": self.answer_id, "tp_size": 1}
        where |= {"remote_host": options.kv_host or "decoder.internal", "remote_port": 5600}
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [*range(blocks)], **where}
