"""`least_load` for prefillers beside `least_tokens`, which learns nothing: it does no harm."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.lab.replay.prefill_worlds import ARRIVALS, LENGTHS, PREFILLERS, RANKS_OF, PrefillWorld, prefilled

AT_MOST = 1.1
"""Maximum ratio of the mean time to the first token to that with `least_tokens`."""
AT_MOST_IN_ANY_ROW = 1.4
"""The same in rows of the full suite. Most are below 1.1; evenly spaced prompts gain by turns."""
AT_MOST_BEHIND_ONE_ADDRESS = 2.0
"""The same if several engines share an address and do not report it. At first they may seem to compute in turn."""
EQUAL_SECONDS = 0.005
"""Smaller differences of a mean do not count."""


WORSE = {PrefillWorld(prefillers="small steps", arrivals="evenly"): 1.2}
"""The only world with a longer time: evenly spaced prompts, two per step, for which turns are optimal."""


def assert_no_harm(its: PrefillWorld, *, is_full: bool = False) -> None:
    """Compare a run of the policy under test with one of `least_tokens`."""
    ours, plain = prefilled(its, "least_load"), prefilled(its, "least_tokens")
    at_most = WORSE.get(its, AT_MOST)
    if is_full:
        at_most = AT_MOST_BEHIND_ONE_ADDRESS if its.ranks in ("untold", "blind") else AT_MOST_IN_ANY_ROW
    assert ours.served >= plain.served
    assert ours.mean <= at_most * plain.mean + EQUAL_SECONDS


@pytest.fixture
def is_full(pytestconfig: pytest.Config) -> bool:
    """Whether all rows run."""
    return bool(pytestconfig.getoption("--full"))


@pytest.mark.parametrize("load", [0.4, 0.8, 0.9, 0.96])
def test_equal_prompts_on_batching_prefillers_wait_no_longer(load: float) -> None:
    assert_no_harm(PrefillWorld(load=load, requests=2000))


def world(**fields: Any) -> PrefillWorld:
    """Return a world with a load that its arrivals permit."""
    return PrefillWorld(load=0.6 if fields["arrivals"] == "bursts" else 0.8, **fields)


@pytest.mark.covering(
    "prefillers lengths arrivals count workers is_late",
    product(PREFILLERS, LENGTHS, ARRIVALS, (1, 4), (1, 2), (False, True)),
)
def test_prompts_wait_no_longer_than_with_a_policy_that_learns_nothing(
    prefillers: str, lengths: str, arrivals: str, count: int, workers: int, is_late: bool, is_full: bool
) -> None:
    fields = {"prefillers": prefillers, "lengths": lengths, "arrivals": arrivals, "count": count}
    assert_no_harm(world(**fields, workers=workers, is_late=is_late), is_full=is_full)


@pytest.mark.covering(
    "prefillers lengths arrivals ranks workers is_late",
    product(PREFILLERS, LENGTHS, ARRIVALS, RANKS_OF[1:], (1, 2), (False, True)),
)
def test_prompts_wait_no_longer_for_several_engines_behind_one_address(
    prefillers: str, lengths: str, arrivals: str, ranks: str, workers: int, is_late: bool, is_full: bool
) -> None:
    fields = {"prefillers": prefillers, "lengths": lengths, "arrivals": arrivals, "ranks": ranks, "count": 2}
    assert_no_harm(world(**fields, workers=workers, is_late=is_late), is_full=is_full)
