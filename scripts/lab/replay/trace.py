"""Traces of requests in Mooncake's format or in Azure's of 2023.

Mooncake's format is a JSON object per line, with `timestamp` in milliseconds, `input_length` and `output_length` in
tokens, and `hash_ids`, one per 512 tokens of the prompt. Equal ids mean equal prefixes up to that block.
Azure's format is CSV with a time and two numbers of tokens. A prompt without ids shares no blocks with others.
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
    """A trace cannot be read. The text names the line and the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at: float
    """Seconds since the beginning of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of the prompt's blocks. The last block may be partial."""


def read(path: Path) -> list[Request]:
    """Read the requests in the order of their arrival. Raises InvalidTrace and OSError."""
    lines = path.read_text(errors="replace").splitlines()
    is_azure = lines[:1] == [_AZURE_HEAD]
    names = count(-1, -1)  # for blocks without ids; ids of traces are not negative
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (is_azure and number == 1):
            continue
        try:
            requests.append(_azure(line, names) if is_azure else _mooncake(line, names))
        except (ValueError, TypeError, KeyError) as error:
            form = "Azure's" if is_azure else "Mooncake's"
            raise InvalidTrace(f"{path.name}, line {number}: not a request of {form} format: {error}") from None
    if not requests:
        raise InvalidTrace(f"{path.name} has no requests")
    requests.sort(key=lambda request: request.at)
    return [replace(request, at=request.at - requests[0].at) for request in requests] if is_azure else requests


def _mooncake(line: str, names: Iterator[int]) -> Request:
    row: Any = orjson.loads(line)
    return _request(row["timestamp"] / 1000, row["input_length"], row["output_length"], row.get("hash_ids"), names)


def _azure(line: str, names: Iterator[int]) -> Request:
    at, tokens, answer = line.split(",")
    # Azure writes seven digits of a second, and datetime reads six.
    return _request(datetime.fromisoformat(at[:26]).timestamp(), tokens, answer, None, names)


def _request(at: float, prompt: Any, answer: Any, ids: Any, names: Iterator[int]) -> Request:
    tokens, answer_tokens = int(prompt), int(answer)
    if at < 0 or tokens < 1 or answer_tokens < 0:
        raise ValueError("a negative number, or an empty prompt")
    if ids is None:
        ids = [next(names) for _ in range(-(-tokens // BLOCK_TOKENS))]
    return Request(at, tokens, max(1, answer_tokens), tuple(map(int, ids)))


def spread(requests: Sequence[Request], rng: random.Random) -> list[Request]:
    """Spread arrivals at one timestamp evenly until the next one.

    Traces have coarse timestamps, of 3 s in Mooncake's, but clients do not send bursts every 3 s.
    """
    times = sorted({request.at for request in requests})
    until = dict(zip(times, [*times[1:], times[-1]], strict=True))
    moved = [replace(request, at=rng.uniform(request.at, until[request.at])) for request in requests]
    return sorted(moved, key=lambda request: request.at)


def faster(requests: Sequence[Request], factor: float) -> list[Request]:
    """Return the requests at `factor` times the rate."""
    return [replace(request, at=request.at / factor) for request in requests]


def bursty(requests: Sequence[Request], size: int) -> list[Request]:
    """Return the requests in bursts of `size`, each compressed into the first third of its time."""
    moved = []
    for first in range(0, len(requests), size):
        burst = requests[first : first + size]
        moved += [replace(request, at=burst[0].at + (request.at - burst[0].at) / 3) for request in burst]
    return moved
