"""Policies that learn, beside one that does not: whatever the engines and the load, they do no harm."""

from __future__ import annotations

from itertools import product

import pytest

from lab.replay.no_harm import ARRIVALS, LENGTHS, STEPS, Outcome, World, compared

FLEETS = ((2, 2), (2, 8), (1, 1), (4, 1))
AT_MOST = 1.1
"""How many times as long as with `least_tokens` a mean may be."""
EQUAL_SECONDS = 0.005
"""Smaller differences of a mean do not count."""


def assert_no_harm(ours: Outcome, plain: Outcome) -> None:
    assert ours.served >= plain.served - 0.001
    assert ours.first_token_seconds <= AT_MOST * plain.first_token_seconds + EQUAL_SECONDS


@pytest.mark.covering("step lengths arrivals fleet is_late", product(STEPS, LENGTHS, ARRIVALS, FLEETS, (False, True)))
def test_worlds_serve_every_request(
    step: str, lengths: str, arrivals: str, fleet: tuple[int, int], is_late: bool
) -> None:
    world = World(
        step=step,
        lengths=lengths,
        arrivals=arrivals,
        prefillers=fleet[0],
        decoders=fleet[1],
        is_late=is_late,
        requests=200,
    )
    ours, plain = compared(world)
    assert ours == plain
    assert plain.served == 1.0
    assert_no_harm(ours, plain)
