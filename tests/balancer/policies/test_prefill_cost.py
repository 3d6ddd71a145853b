"""Tests of the learned cost of prefills."""

from __future__ import annotations

import math
import random

import pytest

from proxy.balancer.policies.prefill_cost import SECONDS_PER_LOAD, PrefillCost, mean_fit_error
from proxy.sim.hardware.machines import MACHINES


def taught(machine: str, samples: int, *, noise: float = 0.05, slow: float = 1.0) -> PrefillCost:
    """Teach prompts of mixed lengths, some partly cached. The instance "slow" takes a multiple of the time."""
    cost, rng, learned = MACHINES[machine].cost, random.Random(1), PrefillCost()
    for _ in range(samples):
        tokens = min(100_000, int(rng.lognormvariate(8.5, 1.2)) + 10)
        cached = int(tokens * rng.choice([0, 0, 0.3, 0.8]))
        for name, factor in (("one", 1.0), ("slow", slow)):
            seconds = factor * cost.prefill(tokens - cached, cached) * rng.lognormvariate(0, noise)
            learned.learn_prefill(name, tokens - cached, cached, seconds)
    return learned


def test_unlearned_cost_equals_the_prior() -> None:
    learned = PrefillCost()
    assert learned.predict_seconds(10_000, 0) == pytest.approx((3480 + 10_000) * SECONDS_PER_LOAD, rel=0.01)


@pytest.mark.parametrize("machine", MACHINES)
def test_predictions_are_within_a_few_percent_after_200_answers(machine: str) -> None:
    learned, cost = taught(machine, 200), MACHINES[machine].cost
    errors = sorted(
        abs(learned.predict_seconds(uncached, cached) / cost.prefill(uncached, cached) - 1)
        for uncached in (200, 1000, 5000, 20_000, 60_000)
        for cached in (0, 5000, 40_000)
    )
    assert errors[len(errors) // 2] < 0.08
    assert errors[-1] < 0.25


def test_instance_with_double_prefill_time_is_recognized() -> None:
    learned = taught("kimi-k2-thinking-a3", 300, slow=2.0)
    assert learned.slowness_of("slow") / learned.slowness_of("one") == pytest.approx(2.0, rel=0.15)


def test_few_outliers_change_little() -> None:
    learned = taught("kimi-k2-thinking-a3", 200)
    before = learned.predict_seconds(5000, 0)
    for _ in range(3):
        learned.learn_prefill("one", 5000, 0, 300.0)
    assert learned.predict_seconds(5000, 0) < 1.5 * before


def test_cost_follows_an_engine_that_becomes_slower() -> None:
    learned, cost = taught("kimi-k2.5-h200", 200), MACHINES["kimi-k2-thinking-a3"].cost
    rng = random.Random(2)
    for _ in range(2000):
        tokens = rng.randint(100, 40_000)
        learned.learn_prefill("one", tokens, 0, cost.prefill(tokens))
    assert learned.predict_seconds(10_000, 0) * learned.slowness_of("one") == pytest.approx(
        cost.prefill(10_000), rel=0.2
    )


def test_no_part_of_the_cost_is_ever_negative() -> None:
    rng, learned = random.Random(1), PrefillCost()
    for _ in range(500):
        learned.learn_prefill("one", rng.randint(1, 50_000), rng.choice([0, 1000]), rng.uniform(0.001, 5))
        assert min(learned.cost_shape) >= 0


def test_time_to_load_cached_tokens_from_a_lower_tier_is_learned() -> None:
    """A cached token in host memory takes a tenth of the time of a computed one, and one on the device none."""
    cost, rng, learned = MACHINES["kimi-k2.5-h200"].cost, random.Random(3), PrefillCost()
    per_token = cost.prefill(10_000) / 10_000 / 10
    for _ in range(300):
        uncached, cached = rng.randint(200, 8000), rng.choice([0, 5000, 40_000])
        loaded = rng.choice([0, cached // 2, cached])
        seconds = cost.prefill(uncached, cached) + per_token * loaded
        learned.learn_prefill("one", uncached, cached, seconds * rng.lognormvariate(0, 0.05), loaded)
    assert learned.cost_shape[3] == pytest.approx(per_token, rel=0.2)
    on_device, on_host = (learned.predict_seconds(1000, 40_000, loaded) for loaded in (0, 40_000))
    assert on_host - on_device == pytest.approx(40_000 * per_token, rel=0.2)


def test_samples_without_time_or_tokens_are_ignored() -> None:
    learned = PrefillCost()
    for uncached, seconds in ((0, 1.0), (100, 0.0), (100, -1.0)):
        learned.learn_prefill("one", uncached, 0, seconds)
    assert learned.sample_count == 0


def test_misfit_is_infinite_for_simultaneous_answers() -> None:
    assert mean_fit_error([(1000.0, 500_000.0, 0.0)] * 5) == math.inf
