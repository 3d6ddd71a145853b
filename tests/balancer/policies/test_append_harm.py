"""Tests of the learned harm of prompts to running answers."""

from __future__ import annotations

import pytest

from proxy.balancer.policies.append_harm import AppendHarm


def learned(
    harm: float, answers: int = 200, seconds_computing: float = 2.0, gaps_per_second: float = 5.0
) -> AppendHarm:
    """Return what answers of 10 s have taught that lose `harm` of the time of prompts. Their paces differ."""
    made = AppendHarm()
    for number in range(answers):
        pace = gaps_per_second * (1 + number % 3)
        during = round(pace * seconds_computing * (1 - harm))
        usual = round(pace * (10.0 - seconds_computing))
        made.learn_from_answer(usual + during, 10.0, gaps_computing=during, seconds_computing=seconds_computing)
    return made


@pytest.mark.parametrize("harm", [0.0, 0.4, 1.0])
def test_harm_is_the_share_of_gaps_that_are_missing_beside_prompts(harm: float) -> None:
    share = learned(harm).harm_per_second
    assert share is not None
    assert harm <= share <= min(1.0, harm + 0.1)


def test_harm_is_unknown_without_enough_gaps() -> None:
    assert AppendHarm().harm_per_second is None
    assert learned(0.5, answers=2).harm_per_second is None
    assert learned(0.5, seconds_computing=0.0).harm_per_second is None
    assert learned(0.5, gaps_per_second=0.1).harm_per_second is None
    assert learned(0.5, seconds_computing=10.0).harm_per_second is None


def test_newer_answers_replace_the_learned_harm() -> None:
    made = learned(0.9)
    for _ in range(3000):
        made.learn_from_answer(50, 10.0, gaps_computing=8, seconds_computing=2.0)
    assert made.harm_per_second is not None
    assert made.harm_per_second < 0.3
