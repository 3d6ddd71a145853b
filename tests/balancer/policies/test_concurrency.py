"""Tests of the learned number of prompts that a prefiller computes side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import pytest

from proxy.balancer.policies.concurrency import DOUBT_SECONDS, ConcurrencyEstimate, seconds_until_lane_free
from proxy.balancer.policies.prefill_cost import PrefillSample

Rule = Callable[[Sequence[float], random.Random], int]


def soonest(free: Sequence[float], rng: random.Random) -> int:
    """Assign a prompt to the rank that is free first."""
    return free.index(min(free))


def blindly(free: Sequence[float], rng: random.Random) -> int:
    """Assign a prompt to a random rank."""
    return rng.randrange(len(free))


@dataclass
class Prompts:
    """Lengths of prompts, and their additional time in seconds."""

    tokens: Callable[[random.Random], float]
    noise: float = 0.05

    def draw(self, rng: random.Random) -> tuple[float, float]:
        tokens = self.tokens(rng)
        return tokens, (0.2 + tokens / 1000) * rng.lognormvariate(0, self.noise)


SHAPE = (0.2, 0.001, 0.0)


OF_ALL_LENGTHS = Prompts(lambda rng: rng.uniform(300, 8000))
SHORT_AND_LONG = Prompts(lambda rng: rng.choice((300.0, 300.0, 12_000.0)))
EQUAL = Prompts(lambda rng: 3000.0)
UNLIKE_PREDICTED = Prompts(lambda rng: rng.uniform(300, 8000), noise=0.3)


def shown(
    concurrency: ConcurrencyEstimate,
    lanes: int,
    rule: Rule = soonest,
    *,
    answers: int = 100,
    waiting: int = 8,
    prompts: Prompts = OF_ALL_LENGTHS,
    batches: bool = False,
    began: float = 0.0,
) -> None:
    """Teach with an engine of `lanes` lanes.

    It always has as many prompts as are wanted, but at most `waiting` for each lane. `batches`: prompts that are in
    flight when a step begins are computed in one step.
    """
    rng = random.Random(1)
    now = answered = began
    free = [began] * lanes
    under_way: list[tuple[float, float, int, float, float, int]] = []
    """Prompts: end, random tie-break, number, time of sending, tokens, and prompts in flight at that time."""
    gathered: tuple[float, float] | None = None  # begin and end of the next step
    for number in range(answers):
        while len(under_way) >= min(concurrency.target_in_flight, waiting * lanes):
            under_way.sort()
            fill = len(under_way) / lanes
            now, _, place, at, tokens, ahead = under_way.pop(0)
            overtook = any(each[2] < place for each in under_way)
            sample = PrefillSample(tokens, 0.0, now - max(at, answered), now - at, ahead, 0.0, float(overtook), fill)
            answered = now
            concurrency.learn_from_sample(sample, SHAPE, now)
        tokens, work = prompts.draw(rng)
        place = rule(free, rng)
        begins = max(now, free[place])
        if batches and gathered is not None and gathered[0] > now:
            begins, ends = gathered[0], gathered[1] + work - 0.2
            under_way = [(ends if each[0] == gathered[1] else each[0], *each[1:]) for each in under_way]
        else:
            ends = begins + work
        gathered = begins, ends
        free[place] = ends
        under_way.append((ends, rng.random(), number, now, tokens, len(under_way)))


EVERY_KIND = pytest.mark.parametrize("prompts", [OF_ALL_LENGTHS, SHORT_AND_LONG, EQUAL])


@pytest.mark.parametrize("prompts", [OF_ALL_LENGTHS, SHORT_AND_LONG])
@pytest.mark.parametrize("batches", [False, True])
def test_serial_engine_is_recognized_after_few_answers(prompts: Prompts, batches: bool) -> None:
    concurrency = ConcurrencyEstimate()
    assert not concurrency.computes_in_order
    assert concurrency.target_in_flight == inf
    shown(concurrency, 1, prompts=prompts, batches=batches, answers=40)
    assert concurrency.computes_in_order
    assert concurrency.target_in_flight == 1


@EVERY_KIND
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.parametrize("rule", [soonest, blindly])
def test_no_queueing_when_unreported_engines_share_an_address(rule: Rule, lanes: int, prompts: Prompts) -> None:
    concurrency = ConcurrencyEstimate()
    for answers in (30, 60, 300):
        shown(concurrency, lanes, rule, answers=answers + 8 * lanes, prompts=prompts)
        assert concurrency.target_in_flight == inf


@EVERY_KIND
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_evenly_loaded_dp_ranks_get_one_prompt_each(lanes: int, prompts: Prompts) -> None:
    concurrency = ConcurrencyEstimate(lanes)
    assert concurrency.target_in_flight == inf, "nothing is known yet"
    shown(concurrency, lanes, waiting=1, answers=40 * lanes, prompts=prompts)
    assert concurrency.target_in_flight == inf, "the ranks may batch prompts"
    shown(concurrency, lanes, answers=800, prompts=prompts)
    shown(concurrency, lanes, waiting=1, answers=200 * lanes, prompts=prompts)
    assert lanes <= concurrency.target_in_flight <= 3 * lanes


@pytest.mark.parametrize("prompts", [OF_ALL_LENGTHS, SHORT_AND_LONG])
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_no_queueing_when_dp_ranks_are_unevenly_loaded(lanes: int, prompts: Prompts) -> None:
    concurrency = ConcurrencyEstimate(lanes)
    shown(concurrency, lanes, blindly, answers=160, prompts=prompts)
    assert concurrency.target_in_flight == inf


def test_no_queueing_when_no_costs_explain_the_answers() -> None:
    concurrency = ConcurrencyEstimate(4)
    shown(concurrency, 4, prompts=UNLIKE_PREDICTED)
    assert concurrency.target_in_flight == inf


def test_single_reported_rank_is_tested_for_hidden_engines() -> None:
    concurrency = ConcurrencyEstimate(1)
    shown(concurrency, 4)
    assert concurrency.target_in_flight == inf


def test_confirmed_concurrency_is_tested_less_and_less_often() -> None:
    concurrency = ConcurrencyEstimate()
    shown(concurrency, 1, answers=30)
    looks = 0
    for _ in range(4):
        shown(concurrency, 1, answers=500)
        looks += concurrency.target_in_flight > 1
        assert concurrency.computes_in_order
    assert looks < 4
    for _ in range(1100):
        concurrency.learn_from_sample(PrefillSample(1000.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0))
    assert concurrency.target_in_flight == 3


def test_engine_that_begins_to_compute_in_parallel_is_recognized() -> None:
    concurrency = ConcurrencyEstimate()
    shown(concurrency, 1, answers=30)
    assert concurrency.computes_in_order
    shown(concurrency, 4, answers=300)
    assert concurrency.target_in_flight == inf


def answered(concurrency: ConcurrencyEstimate, fill: float, seconds: float, now: float) -> None:
    """Teach prompts of a fixed duration with a fixed number of prompts per lane."""
    for number in range(100):
        tokens = 1000.0 + 10 * (number % 5)
        concurrency.learn_from_sample(PrefillSample(tokens, 0.0, seconds, 3.0, 1.0, 0.0, 0.0, fill), SHAPE, now)


@pytest.mark.parametrize(("alone", "beyond", "is_kept"), [(1.2, 1.2, True), (0.6, 1.2, True), (1.2, 1.0, False)])
def test_no_queueing_for_an_hour_when_more_prompts_raise_throughput(alone: float, beyond: float, is_kept: bool) -> None:
    concurrency = ConcurrencyEstimate()
    shown(concurrency, 1, answers=60)
    assert concurrency.computes_in_order
    answered(concurrency, 3.0, beyond, 1000.0)
    answered(concurrency, 1.0, alone, 1100.0)
    assert concurrency.computes_in_order is is_kept
    if not is_kept:
        shown(concurrency, 1, answers=300, began=1200.0)
        assert concurrency.target_in_flight == inf
        shown(concurrency, 1, answers=100, began=1100.0 + DOUBT_SECONDS)
        assert concurrency.computes_in_order


def test_prompts_computed_alone_do_not_show_concurrency() -> None:
    concurrency = ConcurrencyEstimate()
    for tokens in range(200, 2000):
        concurrency.learn_from_sample(PrefillSample(float(tokens), 0.0, tokens / 1000, tokens / 1000, 0.0, 0.0, 0.0))
    assert concurrency.computes_in_order is None


def test_soonest_free_is_when_the_first_lane_completes() -> None:
    assert seconds_until_lane_free([3.0, 1.0], []) == 1.0
    assert seconds_until_lane_free([3.0, 1.0], [1.0]) == 2.0
    assert seconds_until_lane_free([3.0, 1.0], [5.0]) == 3.0
    assert seconds_until_lane_free([3.0, 1.0], [5.0, 1.0]) == 4.0
