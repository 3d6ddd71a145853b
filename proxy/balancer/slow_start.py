"""A backend that came back gets a growing share of the requests: caches are cold, and graphs are still to be compiled.

The share grows in a straight line from 10 to 100 %, as in Envoy with aggression 1, and is kept in whole per cent so
that weights stay integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

FULL: Final = 100
_FIRST: Final = 10

Candidate = TypeVar("Candidate")


def percent(elapsed_seconds: float, slow_start_seconds: float) -> int:
    """The share of a backend that came back `elapsed_seconds` ago."""
    if elapsed_seconds >= slow_start_seconds:
        return FULL
    return _FIRST + int((FULL - _FIRST) * elapsed_seconds / slow_start_seconds)


def slowed(weights: Sequence[int], percents: Sequence[int], cost: int) -> list[int]:
    """Weights with which a backend is as loaded by its share of the work as another by all of it.

    `cost` is the weight of the request that is to be placed. Without it an idle backend would weigh nothing, whatever
    its share.
    """
    return [(weight + cost) * FULL // share for weight, share in zip(weights, percents, strict=True)]


def taking_part(candidates: Sequence[Candidate], percents: Sequence[int], rng: random.Random) -> Sequence[Candidate]:
    """For policies that do not look at weights: each candidate with the probability of its share, compared with the
    largest that there is, so that somebody always takes part, and all do where all came back together.
    """
    largest = max(percents)
    return [candidate for candidate, share in zip(candidates, percents, strict=True) if rng.randrange(largest) < share]
