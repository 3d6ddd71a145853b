"""Tests of the pace of decoders, learned from answers that differ or are all equal."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping

import pytest

from proxy.balancer.policies.decode_pace import DOUBT_SECONDS, PLACES, SIZES, TRUSTED_SECONDS, DecodePace

Step = Callable[[int], float]


def on_an_a3(answers: int) -> float:
    """Seconds of a step: Kimi-K2-Thinking on A3, as published, with a saturation point at 8."""
    return (0.054 + 0.00415 * answers) * (2.1 if answers > 8 else 1.0)


def on_an_h200(answers: int) -> float:
    """Kimi-K2.5 on H200: no saturation point was seen."""
    return 0.0079 + 0.00082 * answers


def constant(answers: int) -> float:
    """Return the step time of a decoder whose pace does not depend on its number of answers."""
    return 0.02


def bound_by_compute(answers: int) -> float:
    """Return the step time of a decoder with constant throughput from 16 answers on."""
    return max(0.02, 0.00125 * answers)


def answer(pace: DecodePace, step: Step, spent: Mapping[int, float], now: float = 0.0, backend: str = "d") -> None:
    """Teach an answer that spent some seconds at each number of concurrent answers, including itself."""
    tokens = round(sum(seconds / step(answers) for answers, seconds in spent.items()))
    places: dict[int, float] = {}
    for answers, seconds in sorted(spent.items()):
        places[PLACES[answers]] = places.get(PLACES[answers], 0.0) + seconds
    pace.learn_from_answer(backend, list(places.items()), tokens, now)


def taught(step: Step, least: int, most: int, answers: int = 300, now: float = 0.0) -> DecodePace:
    """Teach by answers that each saw some numbers of answers in a row."""
    pace, rng = DecodePace(), random.Random(1)
    for _ in range(answers):
        first = rng.randint(least, most)
        seen = range(first, min(most, first + 3) + 1)
        answer(pace, step, {number: rng.uniform(1, 20) for number in seen}, now)
    pace.update_saturation(now)
    return pace


def beside(numbers: Iterable[float], seconds: float) -> dict[int, float]:
    """Equal times beside each of these numbers."""
    spent: dict[int, float] = {}
    for number in numbers:
        spent[max(1, round(number))] = spent.get(max(1, round(number)), 0.0) + seconds
    return spent


def ramp_and_steady_load(pace: DecodePace, step: Step, mean: int, tokens: int) -> None:
    """Equal answers, as of a benchmark with a fixed rate: the load rises, and then all answers see the same mixture."""
    rng = random.Random(1)
    for number in range(600):
        level = min(mean, 1 + number)
        numbers = [level + rng.gauss(0, math.sqrt(mean) / 2) for _ in range(20)]
        seconds = tokens * step(level) / len(numbers)
        answer(pace, step, beside(numbers, seconds), number / 20)
        if number % 20 == 0:
            pace.update_saturation(number / 20)
            assert pace.saturation_answers == math.inf, number


def test_each_number_of_answers_is_in_one_bucket() -> None:
    assert all(SIZES[PLACES[answers]] >= answers for answers in range(1, SIZES[-1] + 1))
    assert all(SIZES[PLACES[answers] - 1] < answers for answers in range(1, SIZES[-1] + 1))
    assert len(PLACES) == SIZES[-1] + 1


def test_rates_are_separated_by_answers_with_different_mixtures() -> None:
    pace = taught(on_an_a3, 1, 12)
    for answers in range(2, 12):
        assert pace.rates_by_bucket[PLACES[answers]] == pytest.approx(1 / on_an_a3(answers), rel=0.1)


def test_rates_are_flat_where_all_mixtures_are_equal() -> None:
    """These answers fit a steep curve as well as a flat one."""
    pace = DecodePace()
    for _ in range(1000):
        answer(pace, constant, dict.fromkeys(range(80, 120), 0.1))
    pace.update_saturation(0.0)
    rates = pace.rates_by_bucket[PLACES[80] : PLACES[120] + 1]
    assert min(rates) == pytest.approx(max(rates), rel=0.02)
    assert pace.saturation_answers == math.inf


@pytest.mark.parametrize("step", [constant, on_an_h200, bound_by_compute])
@pytest.mark.parametrize("mean", [8, 64, 100, 250])
@pytest.mark.parametrize("tokens", [32, 128, 1000])
def test_equal_answers_under_steady_load_show_no_saturation_point(step: Step, mean: int, tokens: int) -> None:
    ramp_and_steady_load(DecodePace(), step, mean, tokens)


def test_saturation_point_is_found_by_nearly_equal_mixtures() -> None:
    """Most answers are written beside 7 to 10 others: only the filter's own covariance shows how certain they are."""
    pace, rng = DecodePace(), random.Random(1)
    for number in range(400):
        low = rng.randint(3, 9)
        answer(pace, on_an_a3, beside(range(low, low + 4), rng.uniform(2, 4)), float(number))
    pace.update_saturation(400.0)
    assert pace.saturation_answers == 8


def test_saturation_point_is_where_throughput_declines() -> None:
    pace = taught(on_an_a3, 1, 12)
    assert pace.saturation_answers == 8
    assert pace.greatest_gain_at(8) == pace.greatest_gain_at(9) == pace.idle_gain_seconds
    assert pace.idle_gain_seconds == pytest.approx(on_an_a3(9) / 9 - on_an_a3(8) / 8, rel=0.2)


def test_saturation_point_gains_more_where_throughput_falls_further() -> None:
    pace = taught(lambda answers: 0.05 * max(1.0, (answers / 8) ** 2), 1, 16)
    gains = [pace.greatest_gain_at(answers) for answers in (1, 12, 16, 500)]
    assert 0 < pace.idle_gain_seconds == gains[0] < gains[1] < gains[2] <= gains[3]


def test_decoders_that_only_get_faster_have_no_saturation_point() -> None:
    pace = taught(on_an_h200, 1, 60, answers=2000)
    assert pace.saturation_answers == pace.scout_max_answers == math.inf
    assert pace.idle_gain_seconds == 0.0
    assert pace.slope / pace.step == pytest.approx(0.00082 / 0.0079, rel=0.25)


@pytest.mark.parametrize("differs", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_answers_that_differ_show_no_saturation_point(seed: int, differs: float) -> None:
    pace, rng = DecodePace(), random.Random(seed)
    history = [(1, 0.3)]
    for number in range(400):
        answers = max(1, min(24, history[-1][0] + rng.choice((-1, 1, 1) if number < 40 else (-1, 1))))
        history.append((answers, rng.uniform(0.1, 0.5)))
        spent: dict[int, float] = {}
        for each, seconds in history[-rng.randint(1, 20) :]:
            spent[each] = spent.get(each, 0.0) + seconds
        factor = math.exp(rng.gauss(0, differs))  # as speculative tokens are accepted more or less often
        answer(pace, lambda n, factor=factor: factor * on_an_h200(n), spent)
        pace.update_saturation(0.0)
        assert pace.saturation_answers == math.inf, number


def test_saturation_point_requires_enough_answers() -> None:
    pace = DecodePace()
    answer(pace, on_an_a3, {6: 20.0})
    answer(pace, on_an_a3, {12: 20.0})
    pace.update_saturation(0.0)
    assert pace.saturation_answers == math.inf


def test_saturation_point_requires_answers_wholly_beyond_it() -> None:
    """Answers that spent little time beyond the point show a decline by the filter's word alone."""
    pace, rng = DecodePace(), random.Random(1)
    for number in range(400):
        low = rng.randint(3, 8)
        answer(pace, on_an_a3, {**beside(range(low, 9), 4.0), 9: rng.uniform(0.5, 2.5)}, float(number))
    pace.update_saturation(400.0)
    assert pace.rates_by_bucket[9] < 0.6 * pace.rates_by_bucket[8]
    assert pace.saturation_answers == math.inf


def test_one_decoder_gets_fewer_answers_when_all_had_many_from_the_start() -> None:
    pace = taught(on_an_a3, 12, 12, answers=20)
    assert (pace.saturation_answers, pace.scout_max_answers, pace.scout_preferred_answers) == (math.inf, math.inf, 8)
    for _ in range(40):
        answer(pace, on_an_a3, {8: 30.0})
    pace.update_saturation(0.0)
    assert 8 <= pace.saturation_answers <= 11, "nothing was seen between 8 and 12"


def test_saturation_point_is_tested_by_one_decoder_and_dropped_if_exceeded() -> None:
    pace = taught(on_an_a3, 1, 12)
    for _ in range(5):
        answer(pace, on_an_a3, {6: 30.0}, TRUSTED_SECONDS)
    pace.update_saturation(TRUSTED_SECONDS + 1)
    assert (pace.saturation_answers, pace.scout_max_answers) == (8, 9)
    now = TRUSTED_SECONDS + 1
    for number in range(400):
        now += 1.0
        answer(pace, on_an_h200, {1 + number % 12: 30.0}, now)
        pace.update_saturation(now)
    assert pace.saturation_answers == math.inf


def held_at_the_point(pace: DecodePace, step: Step, now: float, answers: int = 12) -> float:
    """Let answers be written at the saturation point of 8, and return when they ended."""
    for _ in range(answers):
        now += 5.0
        answer(pace, step, {7: 1.0, 8: 3.0}, now)
        pace.update_saturation(now)
    return now


def test_saturation_point_is_kept_while_throughput_at_it_is_higher_than_beyond() -> None:
    pace = taught(on_an_a3, 1, 12)
    held_at_the_point(pace, on_an_a3, 10.0, answers=60)
    assert pace.saturation_answers == 8


def test_saturation_point_is_dropped_for_an_hour_when_throughput_at_it_is_not_higher() -> None:
    pace = taught(on_an_a3, 1, 12)
    now = held_at_the_point(pace, lambda n: 2 * on_an_a3(n), 10.0)
    assert pace.saturation_answers == math.inf
    assert pace.is_saturation_doubted
    # Whatever answers show: the answers before showed it, too, and were wrong.
    rng = random.Random(2)
    while now < DOUBT_SECONDS - 100:
        now += 20.0
        answer(pace, on_an_a3, {rng.randint(1, 12): 10.0}, now)
        pace.update_saturation(now)
        assert pace.saturation_answers == math.inf
    for _ in range(200):
        now += 20.0
        answer(pace, on_an_a3, {rng.randint(1, 12): 10.0}, now)
        pace.update_saturation(now)
    assert pace.saturation_answers == 8, "an hour is over"


def test_slow_clients_do_not_show_a_saturation_point() -> None:
    pace, rng = taught(on_an_h200, 1, 40, answers=1000), random.Random(2)
    for _ in range(300):
        answers = rng.randint(1, 40)
        answer(pace, lambda n: on_an_h200(n) * rng.choice((1, 1, 1, 1, 30)), {answers: 20.0})
    pace.update_saturation(0.0)
    assert pace.saturation_answers == math.inf


def test_slow_decoder_does_not_change_the_pace_of_all() -> None:
    pace, rng = DecodePace(), random.Random(1)
    for number in range(600):
        spent = {rng.randint(1, 8): 10.0}
        answer(pace, on_an_h200, spent, backend="first")
        answer(pace, on_an_h200, spent, backend="second")
        answer(pace, lambda n: 2 * on_an_h200(n), spent, backend="slow")
        if number % 10 == 0:
            pace.update_saturation(0.0)
    ratio = pace.slowness_of("slow") / pace.slowness_of("first")
    assert ratio == pytest.approx(2, rel=0.1)
    assert pace.slowness_of("first") == pytest.approx(pace.slowness_of("second"), rel=0.01)
    pace.forget_backend("slow")
    assert pace.slowness_of("slow") == 1.0


def test_answer_without_tokens_or_duration_is_not_learned() -> None:
    pace = DecodePace()
    pace.learn_from_answer("d", [(1, 0.0)], 5, 0.0)
    pace.learn_from_answer("d", [(1, 0.05), (2, 0.04)], 20, 0.0)
    pace.learn_from_answer("d", [], 5, 0.0)
    pace.learn_from_answer("d", [(1, 1.0)], 0, 0.0)
    assert not pace.sample_count
