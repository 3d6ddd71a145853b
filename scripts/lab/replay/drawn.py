"""Loads that are drawn from distributions, for cases that public traces do not have."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from lab.replay.trace import BLOCK_TOKENS, Request

_SEED: Final = 33
_MAX_PROMPT_TOKENS: Final = 120_000

Lengths = tuple[int, int]
"""Tokens of a prompt and of its answer."""


def _log_normal(rng: random.Random, median: float, p99: float) -> float:
    return median * math.exp(rng.gauss(0.0, math.log(p99 / median) / 2.326))


def _reasoning(rng: random.Random) -> Lengths:
    """Short questions with long answers: 8,000 to 30,000 tokens."""
    return round(_log_normal(rng, 700, 4000)), rng.randint(8000, 30_000)


def _mixed(rng: random.Random) -> Lengths:
    """30 % long prompts with short answers, 70 % short prompts with answers of up to 16,000 tokens."""
    if rng.random() < 0.3:
        return round(_log_normal(rng, 20_000, 90_000)), rng.randint(50, 500)
    return round(_log_normal(rng, 600, 4000)), min(16_000, round(_log_normal(rng, 1500, 16_000)))


def _conversation(rng: random.Random) -> Lengths:
    """Lengths of Mooncake's conversation trace, without its prefixes."""
    return round(_log_normal(rng, 6900, 85_000)), min(2000, round(_log_normal(rng, 350, 1120)))


def _coding(rng: random.Random) -> Lengths:
    """Agents that write code: long prompts and short answers, without their prefixes."""
    return round(_log_normal(rng, 20_000, 90_000)), min(1000, round(_log_normal(rng, 180, 900)))


DRAWN: Final[dict[str, Callable[[random.Random], Lengths]]] = {
    "reasoning": _reasoning,
    "mixed": _mixed,
    "conversation": _conversation,
    "coding": _coding,
}
"""Functions that draw the lengths of one request, by the name of the load."""


def drawn(name: str, count: int) -> list[Request]:
    """Return requests of a load with random times, at one request per second. Their prompts share nothing."""
    rng = random.Random(f"{_SEED} {name}")
    requests = []
    at, block = 0.0, 1
    for _ in range(count):
        prompt_tokens, answer_tokens = DRAWN[name](rng)
        prompt_tokens = max(16, min(_MAX_PROMPT_TOKENS, prompt_tokens))
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        requests.append(Request(at, prompt_tokens, max(2, answer_tokens), tuple(range(block, block + blocks))))
        block += blocks
        at += rng.expovariate(1.0)
    return requests
