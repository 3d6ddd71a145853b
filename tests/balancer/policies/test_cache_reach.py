"""Tests of CacheReach, which has a value only while it explains hits and misses."""

from __future__ import annotations

import random

import pytest

from proxy.balancer.policies.prefixes import CacheReach


def shown(
    reach: CacheReach, found_up_to: float, *, answers: int = 400, most: float = 10_000_000, seed: int = 1
) -> None:
    """Show answers whose prefixes have ages up to `most`, and are found up to an age."""
    rng = random.Random(1)
    for _ in range(answers):
        age = most * rng.random() ** 3
        if age <= found_up_to:
            reach.note(age, None)
        else:
            reach.note(1000.0, age)  # the common prefix of all prompts is found


@pytest.mark.parametrize("tokens", [100_000, 300_000, 1_000_000, 4_000_000])
def test_reach_is_the_age_beyond_which_prefixes_are_missed(tokens: int) -> None:
    reach = CacheReach()
    shown(reach, tokens)
    assert reach.tokens == pytest.approx(tokens, rel=0.3)


def test_reach_is_unknown_while_everything_is_found() -> None:
    reach = CacheReach()
    shown(reach, 10_000_000)
    assert reach.tokens is None
    assert reach.longest_found == pytest.approx(10_000_000, rel=0.3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_reach_is_unknown_when_misses_do_not_depend_on_the_age(share: float) -> None:
    rng = random.Random(1)
    reach = CacheReach()
    for _ in range(2000):
        age = 10_000_000 * rng.random() ** 3
        reach.note(None, age) if rng.random() < share else reach.note(age, None)
        assert reach.tokens is None


def test_reach_is_unknown_when_each_answer_finds_most_and_misses_the_end() -> None:
    rng = random.Random(1)
    reach = CacheReach()
    for _ in range(2000):
        age = 10_000_000 * rng.random() ** 3
        reach.note(age, age + 500)
        assert reach.tokens is None


def test_reach_is_dropped_when_prefixes_beyond_it_are_found() -> None:
    reach = CacheReach()
    shown(reach, 300_000)
    assert reach.tokens is not None
    shown(reach, 10_000_000, answers=100)
    assert reach.tokens is None or reach.tokens > 5_000_000


def test_reach_follows_a_cache_that_becomes_smaller() -> None:
    reach = CacheReach()
    shown(reach, 2_000_000)
    shown(reach, 200_000, answers=1500)
    assert reach.tokens == pytest.approx(200_000, rel=0.3)
