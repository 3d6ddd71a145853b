"""How many prompts a prefiller computes side by side, learned from how long they wait."""

from __future__ import annotations

import random

import pytest

from proxy.balancer.concurrency import Concurrency, soonest_free


def shown(concurrency: Concurrency, lanes: int, *, prompts: int = 400) -> None:
    """By an engine with so many lanes, which always has as many prompts as are wanted."""
    rng = random.Random(1)
    now = 0.0
    free = [0.0] * lanes
    under_way: list[tuple[float, float, float, int, float]] = []
    """Of each its end, when it was sent, its work, and the number and the wait that were known when it was sent."""
    for _ in range(prompts):
        while len(under_way) >= concurrency.wanted:
            ended = min(under_way)
            under_way.remove(ended)
            now, at, work, ahead, thought = ended
            concurrency.saw(ahead, thought, work, now - at)
        work = rng.uniform(1.0, 3.0)
        lefts = [max(0.1 * each[2], each[2] - (now - each[1])) for each in under_way]
        most = concurrency.lanes
        thought = 0.0 if len(lefts) < most else soonest_free(lefts[:most], [each[2] for each in under_way[most:]])
        lane = free.index(min(free))
        free[lane] = max(now, free[lane]) + work * rng.lognormvariate(0, 0.1)
        under_way.append((free[lane], now, work, len(under_way), thought))


@pytest.mark.parametrize(("lanes", "least", "most"), [(1, 1, 1), (2, 2, 3), (4, 3, 6), (8, 6, 11)])
def test_it_finds_out_how_many_an_engine_computes_side_by_side(lanes: int, least: int, most: int) -> None:
    concurrency = Concurrency()
    shown(concurrency, lanes)
    assert least <= concurrency.lanes <= most


def test_an_engine_that_works_on_one_gets_no_more_for_long() -> None:
    concurrency = Concurrency()
    assert concurrency.wanted == 3
    shown(concurrency, 1, prompts=30)
    assert concurrency.is_serial
    assert concurrency.wanted == 1
    for _ in range(1000):
        concurrency.saw(0, 0.0, 1.0, 1.0)
    assert not concurrency.is_serial
    assert concurrency.wanted == 3


def test_an_engine_that_computes_fewer_than_before_is_followed() -> None:
    concurrency = Concurrency()
    shown(concurrency, 8)
    shown(concurrency, 1, prompts=6000)
    assert concurrency.lanes == 1


def test_several_ranks_of_which_it_tells_are_believed_in() -> None:
    concurrency = Concurrency(4)
    assert not concurrency.is_serial
    shown(concurrency, 1)
    assert concurrency.lanes == concurrency.wanted == 4


def test_behind_one_rank_of_which_it_tells_may_be_more() -> None:
    concurrency = Concurrency(1)
    shown(concurrency, 4)
    assert concurrency.lanes >= 3


def test_waits_that_are_short_tell_nothing() -> None:
    concurrency = Concurrency()
    for _ in range(100):
        concurrency.saw(2, 0.04, 0.01, 0.01)
        concurrency.saw(2, 0.4, 1.0, 1.0)
    assert concurrency.wanted == 3


def test_one_is_free_when_the_first_of_those_in_front_has_ended() -> None:
    assert soonest_free([3.0, 1.0], []) == 1.0
    assert soonest_free([3.0, 1.0], [1.0]) == 2.0
    assert soonest_free([3.0, 1.0], [5.0]) == 3.0
    assert soonest_free([3.0, 1.0], [5.0, 1.0]) == 4.0
