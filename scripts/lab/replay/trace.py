"""Traces in Mooncake's format: a JSON object a line, with `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, and `hash_ids`, one for each 512 tokens of the prompt: equal ids, equal prefix up to there.

And in that of Azure's traces of 2023, as CSV: when, and how many tokens. Of a prompt without ids nothing is known to be
in another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

import orjson

BLOCK_TOKENS: Final = 512
_AZURE_HEAD: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"


class InvalidTrace(Exception):
    """Says which line is wrong, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at: float
    """Seconds since the beginning."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of the prompt's blocks; those of the full ones come first, and the last may be of a part of one."""


def read(path: Path) -> list[Request]:
    """In the order of their arrival. Raises InvalidTrace, OSError."""
    lines = path.read_text(errors="replace").splitlines()
    is_azure = lines[:1] == [_AZURE_HEAD]
    names = count(-1, -1)  # for blocks without ids: below 0, where no trace has its own
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (is_azure and number == 1):
            continue
        try:
            requests.append(_azure(line, names) if is_azure else _mooncake(line, names))
        except (ValueError, TypeError, KeyError) as error:
            form = "Azure's" if is_azure else "Mooncake's"
            raise InvalidTrace(f"{path.name}, line {number}: no request of {form} format: {error}") from None
    if not requests:
        raise InvalidTrace(f"{path.name} has no requests")
    requests.sort(key=lambda request: request.at)
    return [replace(request, at=request.at - requests[0].at) for request in requests] if is_azure else requests


def _mooncake(line: str, names: Iterator[int]) -> Request:
    told: Any = orjson.loads(line)
    return _request(told["timestamp"] / 1000, told["input_length"], told["output_length"], told.get("hash_ids"), names)


def _azure(line: str, names: Iterator[int]) -> Request:
    at, tokens, answer = line.split(",")
    # Seven digits of a second are one more than a datetime has.
    return _request(datetime.fromisoformat(at[:26]).timestamp(), tokens, answer, None, names)


def _request(at: float, prompt: Any, answer: Any, ids: Any, names: Iterator[int]) -> Request:
    tokens, answer_tokens = int(prompt), int(answer)
    if at < 0 or tokens < 1 or answer_tokens < 0:
        raise ValueError("negative, or an empty prompt")
    if ids is None:
        ids = [next(names) for _ in range(-(-tokens // BLOCK_TOKENS))]
    return Request(at, tokens, max(1, answer_tokens), tuple(map(int, ids)))


def spread(requests: Sequence[Request], rng: random.Random) -> list[Request]:
    """Arrivals at one timestamp, drawn evenly over the time until the next: traces tell time in ticks, of 3 s in
    Mooncake's, and bursts every 3 s are nothing that clients do.
    """
    times = sorted({request.at for request in requests})
    until = dict(zip(times, [*times[1:], times[-1]], strict=True))
    moved = [replace(request, at=rng.uniform(request.at, until[request.at])) for request in requests]
    return sorted(moved, key=lambda request: request.at)


def faster(requests: Sequence[Request], factor: float) -> list[Request]:
    """The same requests, so many times as fast one after the other."""
    return [replace(request, at=request.at / factor) for request in requests]


def bursty(requests: Sequence[Request], size: int) -> list[Request]:
    """The same requests in bursts of so many: each comes in the first third of the time that it had."""
    moved = []
    for first in range(0, len(requests), size):
        burst = requests[first : first + size]
        moved += [replace(request, at=burst[0].at + (request.at - burst[0].at) / 3) for request in burst]
    return moved
