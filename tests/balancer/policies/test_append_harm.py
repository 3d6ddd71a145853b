"""Tests of the learned harm of prompts to running answers."""

from __future__ import annotations

import random

import pytest

from proxy.balancer.policies.append_harm import AppendHarm


def learned(harm: float, answers: int = 300, noise: float = 0.1, most: float = 0.5) -> AppendHarm:
    """Return what ended answers have taught, which lose `harm` of the time of prompts. Busy decoders are slower."""
    rng, made = random.Random(1), AppendHarm()
    for _ in range(answers):
        bucket = rng.randrange(4)
        computing = rng.uniform(0.0, most) * (1 + bucket) / 4
        made.learn_from_answer(bucket, computing, harm * computing + 0.1 * bucket + rng.gauss(0.0, noise))
    return made


@pytest.mark.parametrize("harm", [0.0, 0.4, 0.9])
def test_harm_is_learned_beside_the_effect_of_other_answers(harm: float) -> None:
    share = learned(harm).harm_per_second
    assert share is not None
    assert harm - 0.1 < share < harm + 0.25
    assert share <= 1.0


def test_harm_is_unknown_without_enough_answers_or_prompts() -> None:
    assert AppendHarm().harm_per_second is None
    assert learned(0.5, answers=20).harm_per_second is None
    assert learned(0.5, most=0.0).harm_per_second is None


def test_harm_is_unknown_while_answers_differ_too_much() -> None:
    assert learned(0.5, noise=2.0).harm_per_second is None


def test_newer_answers_replace_the_learned_harm() -> None:
    made, rng = learned(0.9), random.Random(2)
    for _ in range(3000):
        made.learn_from_answer(1, computing := rng.uniform(0.0, 0.5), 0.2 * computing)
    assert made.harm_per_second is not None
    assert made.harm_per_second < 0.3
