"""How fast decoders write answers: what is learned of answers whose decoders had many and few streams meanwhile."""

from __future__ import annotations

import math
import random

import pytest

from proxy.balancer.policies.decode_pace import PLACES, SIZES, TRUSTED_SECONDS, DecodePace


def on_an_a3(streams: int) -> float:
    """Seconds of a step: Kimi-K2-Thinking on A3, as published, whose knee is at 8."""
    return (0.054 + 0.00415 * streams) * (2.1 if streams > 8 else 1.0)


def on_an_h200(streams: int) -> float:
    """Kimi-K2.5 on H200: no knee was seen."""
    return 0.0079 + 0.00082 * streams


def answer(pace: DecodePace, step: object, spent: dict[int, float], now: float = 0.0, backend: str = "d") -> None:
    """An answer that spent so many seconds beside so many streams, itself included."""
    assert callable(step)
    tokens = round(sum(seconds / step(streams) for streams, seconds in spent.items()))
    pace.learn(backend, [(PLACES[streams], seconds) for streams, seconds in spent.items()], tokens, now)


def taught(step: object, least: int, most: int, answers: int = 300, now: float = 0.0) -> DecodePace:
    """By answers that each saw some numbers of streams in a row."""
    pace, rng = DecodePace(), random.Random(1)
    for _ in range(answers):
        first = rng.randint(least, most)
        seen = range(first, min(most, first + 3) + 1)
        answer(pace, step, {streams: rng.uniform(1, 20) for streams in seen}, now)
    pace.look(now)
    return pace


def test_each_number_of_streams_is_in_one_bucket() -> None:
    assert all(SIZES[PLACES[streams]] >= streams for streams in range(1, SIZES[-1] + 1))
    assert all(SIZES[PLACES[streams] - 1] < streams for streams in range(1, SIZES[-1] + 1))
    assert len(PLACES) == SIZES[-1] + 1


def test_the_pace_is_told_apart_by_streams_of_answers_that_saw_several() -> None:
    pace = taught(on_an_a3, 1, 12)
    for streams in range(2, 12):
        assert pace.rates[PLACES[streams]] == pytest.approx(1 / on_an_a3(streams), rel=0.1)


def test_the_knee_is_where_throughput_declines() -> None:
    assert taught(on_an_a3, 1, 12).most == 8


def test_what_gets_ever_faster_has_no_knee() -> None:
    pace = taught(on_an_h200, 1, 60, answers=2000)
    assert pace.most == pace.scout == float("inf")
    assert pace.slope / pace.step == pytest.approx(0.00082 / 0.0079, rel=0.25)


@pytest.mark.parametrize("differs", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(4))
def test_what_answers_differ_by_does_not_make_a_knee(seed: int, differs: float) -> None:
    pace, rng = DecodePace(), random.Random(seed)
    history = [(1, 0.3)]
    for number in range(400):
        streams = max(1, min(24, history[-1][0] + rng.choice((-1, 1, 1) if number < 40 else (-1, 1))))
        history.append((streams, rng.uniform(0.1, 0.5)))
        spent: dict[int, float] = {}
        for each, seconds in history[-rng.randint(1, 20) :]:
            spent[each] = spent.get(each, 0.0) + seconds
        factor = math.exp(rng.gauss(0, differs))  # of tokens that are proposed not as many are accepted in each
        answer(pace, lambda n, factor=factor: factor * on_an_h200(n), spent)
        pace.look(0.0)
        assert pace.most == float("inf"), number


def test_nothing_is_believed_before_enough_was_seen() -> None:
    pace = DecodePace()
    answer(pace, on_an_a3, {6: 20.0})
    answer(pace, on_an_a3, {12: 20.0})
    pace.look(0.0)
    assert pace.most == float("inf")


def test_one_decoder_has_fewer_streams_for_a_while_where_all_have_had_many_from_the_beginning() -> None:
    pace = taught(on_an_a3, 12, 12, answers=20)
    assert (pace.most, pace.scout) == (float("inf"), 8)
    for _ in range(20):
        answer(pace, on_an_a3, {8: 30.0})
    pace.look(0.0)
    assert pace.most == 10, "half of the way between what is good and what is not"


def test_a_knee_seen_long_ago_is_tried_again_by_one_decoder() -> None:
    pace = taught(on_an_a3, 1, 12)
    pace.look(TRUSTED_SECONDS + 1)
    assert pace.most == 8
    for _ in range(5):
        answer(pace, on_an_a3, {6: 30.0}, TRUSTED_SECONDS)
    pace.look(TRUSTED_SECONDS + 1)
    assert (pace.most, pace.scout) == (8, 9)
    for number in range(120):
        answer(pace, on_an_h200, {9 + number % 4: 30.0}, TRUSTED_SECONDS)
    pace.look(TRUSTED_SECONDS + 1)
    assert pace.most == float("inf"), "it has become faster"


def test_slow_clients_do_not_make_a_knee() -> None:
    pace, rng = taught(on_an_h200, 1, 40, answers=1000), random.Random(2)
    for _ in range(300):
        streams = rng.randint(1, 40)
        answer(pace, lambda n: on_an_h200(n) * rng.choice((1, 1, 1, 1, 30)), {streams: 20.0})
    pace.look(0.0)
    assert pace.most == float("inf")


def test_a_slow_decoder_is_known_for_it_and_does_not_change_what_is_thought_of_all() -> None:
    pace, rng = DecodePace(), random.Random(1)
    for _ in range(600):
        spent = {rng.randint(1, 8): 10.0}
        answer(pace, on_an_h200, spent, backend="first")
        answer(pace, on_an_h200, spent, backend="second")
        answer(pace, lambda n: 2 * on_an_h200(n), spent, backend="slow")
    ratio = pace.slowness("slow") / pace.slowness("first")
    assert ratio == pytest.approx(2, rel=0.1)
    assert pace.slowness("first") == pytest.approx(pace.slowness("second"), rel=0.01)
    pace.forget("slow")
    assert pace.slowness("slow") == 1.0


def test_an_answer_without_tokens_or_in_next_to_no_time_teaches_nothing() -> None:
    pace = DecodePace()
    pace.learn("d", [(1, 0.0)], 5, 0.0)
    pace.learn("d", [(1, 0.05), (2, 0.04)], 20, 0.0)
    pace.learn("d", [], 5, 0.0)
    pace.learn("d", [(1, 1.0)], 0, 0.0)
    assert not pace.samples
