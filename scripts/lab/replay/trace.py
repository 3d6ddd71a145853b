"""Traces in Mooncake's format: a JSON object a line, with `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, and `hash_ids`, one for each 512 tokens of the prompt: equal ids, equal prefix up to there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

BLOCK_TOKENS: Final = 512


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
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(orjson.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidTrace(f"{path.name}, line {number}: no request of Mooncake's format: {error}") from None
    if not requests:
        raise InvalidTrace(f"{path.name} has no requests")
    return sorted(requests, key=lambda request: request.at)


def _request(told: Any) -> Request:
    at, tokens, answer = told["timestamp"] / 1000, int(told["input_length"]), int(told["output_length"])
    blocks = tuple(map(int, told.get("hash_ids", ())))
    if at < 0 or tokens < 1 or answer < 0:
        raise ValueError("negative, or an empty prompt")
    return Request(at, tokens, max(1, answer), blocks)


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
