"""A prompt that no cache holds, and whose greedy continuation is beyond doubt.

A dozen words drawn at random, repeated until the prompt is long enough: any model goes on with the pattern, without a
near tie that the order of additions could decide, and one that was handed another prompt's KV cache cannot.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.wire.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable

ANSWER_TOKENS: Final = 12

_LEAST_BYTES: Final = 256
_ANSWER_ROOM: Final = 64

_WORDS: Final = (
    *("apple", "beach", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kitchen"),
    *("ladder", "market", "needle", "orange", "pencil", "queen", "river", "silver", "table", "umbrella", "valley"),
    *("window", "yellow", "zebra", "bridge", "cloud", "dragon", "eagle", "flower", "guitar", "honey", "iron", "jungle"),
    *("lemon", "mirror", "night", "ocean", "paper", "rocket", "spider", "train", "village", "water"),
)
_DRAWN: Final = 12


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """One for all canaries of a round, so that their answers can be compared. Each is sent with a `cache_salt` of its
    own, which keeps engines from finding it in a cache (vLLM `hash_request_tokens`, SGLang `extra_key`).
    """

    model: str
    text: str

    @classmethod
    def of(cls, model: str, size_bytes: int, rng: random.Random | None = None) -> CanaryPrompt:
        """A fresh one of about so many bytes."""
        line = " ".join((rng or random.SystemRandom()).sample(_WORDS, _DRAWN)) + "\n"
        return cls(model, line * max(1, size_bytes // len(line)))

    def body(self) -> dict[str, object]:
        """The request, as of a client."""
        return {
            "model": self.model,
            "prompt": self.text,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": new_id(),
        }


def prompt_bytes(tokens: int, bytes_per_token: int, max_lengths: Iterable[int]) -> int:
    """How long a prompt of about so many tokens is. It fits into sequences of all these lengths, in tokens, even if
    every byte is a token.
    """
    return max(_LEAST_BYTES, min((tokens * bytes_per_token, *(length - _ANSWER_ROOM for length in max_lengths))))
