"""The prediction of other splits, and the decisions of the controller of elastic instances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.balancer.split import FleetSample, MoveAdvice, MovePlanner, RoleSplit, measure_split
from proxy.common.backend import Role
from proxy.settings.fleet import Elastic

IDLE = FleetSample(
    taken_at=0.0,
    prefiller_count=4,
    decoder_count=4,
    computing_prompts=2,
    running_answers=20,
    full_answers=10.0,
    waiting_requests=0,
    handoff_count=0,
)


def samples(count: int = 61, *, began: float = 0.0, rate: int = 10, growth: int = 0, **more: Any) -> list[FleetSample]:
    """Return a sample each second, with answers that begin at this rate, and a queue that grows."""
    return [
        replace(IDLE, taken_at=began + second, handoff_count=rate * second, waiting_requests=growth * second, **more)
        for second in range(count)
    ]


def planner(**options: Any) -> MovePlanner:
    elastic = Elastic(**options)
    return MovePlanner(lambda: elastic)


def proposals(plan: MovePlanner, samples: list[FleetSample]) -> list[MoveAdvice]:
    """Return the moves that the planner proposes. None of them is made."""
    return [advice for sample in samples if (advice := plan.add_sample(sample)) is not None]


def test_split_has_the_mean_use_of_both_roles() -> None:
    split = measure_split(samples(), 900.0)
    assert split is not None
    # Decoders have 40 places. Two are those of prompts that are computed, and 18 those of answers.
    assert (split.split_name, split.prefill_busy, split.decode_busy) == ("4P4D", 0.5, pytest.approx(18 / 38))
    assert split.served_share == 1.0
    assert split.desired_instances() == {Role.PREFILL: 3, Role.DECODE: 3}


def test_prompts_alone_do_not_make_decoders_busy() -> None:
    """A decoder has eight places, and each prompt that is computed holds one of them."""
    fleet = {"prefiller_count": 7, "decoder_count": 1, "computing_prompts": 6, "running_answers": 6}
    split = measure_split(samples(full_answers=8.0, **fleet), 900.0)
    assert split is not None
    assert (split.prefill_busy, split.decode_busy) == (pytest.approx(6 / 7), 0.0)
    assert not proposals(planner(), samples(600, full_answers=8.0, **fleet))


def test_split_without_places_for_its_prompts_serves_less() -> None:
    """Ten prompts need the places of more than one decoder of eight."""
    present = RoleSplit(9, 2, prefill_busy=0.95, decode_busy=0.06, decoders_for_prompts=1.07)
    after = present.copy_with_prefillers(1)
    assert after is not None
    assert after.served_share < 0.2 < present.served_share
    assert after.copy_with_prefillers(1) is None


def test_queue_that_grows_is_demand_for_both_roles() -> None:
    split = measure_split(samples(computing_prompts=4, growth=5), 1e9)
    assert split is not None
    assert (split.prefill_busy, split.decode_busy) == (pytest.approx(1.5), pytest.approx(1.5 * 16 / 36))
    assert split.served_share == pytest.approx(0.8 / 1.5)  # 80 % of four instances can be busy


def test_queue_that_shrinks_is_load_of_an_earlier_demand() -> None:
    shrinking = [
        replace(each, waiting_requests=500 - 5 * second) for second, each in enumerate(samples(computing_prompts=4))
    ]
    split = measure_split(shrinking, 1e9)
    assert split is not None
    assert split.prefill_busy == pytest.approx(0.5)


@pytest.mark.parametrize(("busy", "count"), [(0.0, 1), (0.6, 1), (0.61, 2), (1.4343, 2), (3.2, 4), (14.4, 16)])
def test_more_instances_can_be_busier(busy: float, count: int) -> None:
    assert RoleSplit(1, 1, busy, 0.0).desired_instances()[Role.PREFILL] == count


def test_long_queue_that_does_not_grow_counts_in_part() -> None:
    split = measure_split([replace(each, waiting_requests=900) for each in samples(computing_prompts=4)], 900.0)
    assert split is not None
    assert split.prefill_busy == pytest.approx(1.1)


@pytest.mark.parametrize(
    "more",
    [{"rate": 0, "running_answers": 0}, {"full_answers": math.inf}, {"prefiller_count": 0}, {"decoder_count": 0}],
)
def test_split_is_unknown_without_answers_or_limits(more: dict[str, Any]) -> None:
    assert measure_split(samples(**more), 900.0) is None


def first_proposal(seconds: int, **more: Any) -> tuple[float, MoveAdvice]:
    plan = planner()
    for sample in samples(seconds, **more):
        if (advice := plan.add_sample(sample)) is not None:
            return sample.taken_at, advice
    raise AssertionError("no move is proposed")


def test_heavy_losses_cause_a_move_sooner_than_slight_ones() -> None:
    at, advice = first_proposal(300, computing_prompts=4, growth=5)
    assert advice.new_role is Role.PREFILL
    assert (advice.present_split.split_name, advice.future_split.split_name) == ("4P4D", "5P3D")
    assert advice.predicted_gain == pytest.approx(0.145, abs=0.01)
    assert 30 < at < 75
    assert at < first_proposal(900, computing_prompts=4, running_answers=26)[0]


@pytest.mark.parametrize(
    "more",
    [
        {},  # neither is full
        {"computing_prompts": 4, "running_answers": 40},  # both are
        {"computing_prompts": 4, "running_answers": 36, "growth": 5},
    ],
)
def test_no_move_is_proposed_that_gains_nothing(more: dict[str, Any]) -> None:
    assert not proposals(planner(), samples(300, **more))


def test_minimum_of_a_role_is_kept() -> None:
    assert not proposals(planner(min_decode=4), samples(300, computing_prompts=4, growth=2))


def test_short_peak_is_no_reason_for_a_move() -> None:
    plan = planner()
    calm, peak = samples(70), samples(14, began=70.0, computing_prompts=4)
    peak = [replace(each, handoff_count=each.handoff_count + 700) for each in peak]
    assert not proposals(plan, [*calm, *peak])


def test_expensive_moves_are_not_proposed() -> None:
    load = samples(130, computing_prompts=4, growth=1)
    assert proposals(planner(), load)
    assert not proposals(planner(evacuate_after_seconds=None, drain_seconds=3600.0), load)


def play(
    plan: MovePlanner, demand: Callable[[float], tuple[float, float]], seconds: int, prefillers: int = 8
) -> list[tuple[int, Role]]:
    """Let the planner move instances of 16 for some time, and return its moves.

    `demand` returns the instances that both roles need at a time. Requests that are not served wait.
    """
    moves: list[tuple[int, Role]] = []
    waiting, handoffs = 0.0, 0.0
    for second in range(seconds):
        needs = demand(float(second))
        decoders = 16 - prefillers
        served = min(1.0, prefillers / max(needs[0], 1e-9), decoders / max(needs[1], 1e-9))
        waiting = min(600.0, max(0.0, waiting + 10 * (1 - served) - (0.5 if served == 1.0 else 0.0)))
        handoffs += 10 * served
        sample = FleetSample(
            taken_at=float(second),
            prefiller_count=prefillers,
            decoder_count=decoders,
            computing_prompts=round(min(prefillers, needs[0] * served)),
            running_answers=round(10 * min(decoders, needs[1] * served)),
            full_answers=10.0,
            waiting_requests=round(waiting),
            handoff_count=round(handoffs),
        )
        advice = plan.add_sample(sample)
        if advice is not None:
            plan.record_move(advice)
            prefillers += 1 if advice.new_role is Role.PREFILL else -1
            moves.append((second, advice.new_role))
    return moves


def test_moves_follow_the_demand_and_end() -> None:
    moves = play(planner(), lambda at: (12.0, 3.0) if at < 3600 else (2.0, 12.0), 7200)
    first, second = (
        [to for at, to in moves if at < 3600],
        [to for at, to in moves if at >= 3600],
    )
    assert set(first) == {Role.PREFILL}
    assert 4 <= len(first) <= 5
    assert set(second) == {Role.DECODE}
    assert 9 <= len(second) <= 11
    assert max(at for at, to in moves) < 3600 + 2000


def test_steady_demand_that_fits_causes_no_moves() -> None:
    assert play(planner(), lambda at: (6.5, 6.8), 7200) == []


@pytest.mark.parametrize("period", [60, 120, 450, 900, 1800])
def test_square_waves_cause_no_oscillation(period: int) -> None:
    """Each reversal doubles the loss that the next move needs."""
    moves = play(planner(), lambda at: (9.5, 6.0) if int(at) % period < period / 2 else (6.0, 9.5), 7200)
    turns = sum(before[1] is not after[1] for before, after in itertools.pairwise(moves))
    # Halves of 15 minutes are long enough to follow.
    assert turns <= (7 if period == 1800 else 5)
    assert len(moves) <= 24


def test_flood_of_one_key_causes_few_moves() -> None:
    """It asks for four times as many prefillers as there are, for ten minutes."""
    moves = play(planner(), lambda at: (32.0, 6.0) if 3600 <= at < 4200 else (6.5, 6.8), 10_800)
    assert len(moves) <= 12
    assert sum(before[1] is not after[1] for before, after in itertools.pairwise(moves)) <= 1
    assert not [at for at, _ in moves if not 3600 <= at < 7200]


def test_load_that_ends_causes_no_moves() -> None:
    moves = play(planner(), lambda at: (12.0, 3.0) if at < 3600 else (0.0, 0.0), 10_800)
    assert moves
    assert not [at for at, _ in moves if at >= 3600]


def test_gain_that_does_not_come_true_pauses_such_moves() -> None:
    """More prefillers do not help: for example, half of the engines are slow."""
    plan = planner()

    def overloaded() -> Iterator[FleetSample]:
        for second in range(4000):
            yield replace(
                IDLE,
                taken_at=float(second),
                prefiller_count=4 + len(made),
                decoder_count=12 - len(made),
                computing_prompts=4 + len(made),
                running_answers=10,
                waiting_requests=2 * second,
                handoff_count=10 * second,
            )

    made: list[MoveAdvice] = []
    for sample in overloaded():
        advice = plan.add_sample(sample)
        if advice is not None:
            plan.record_move(advice)
            made.append(advice)
    assert 1 <= len(made) <= 4
    assert plan.outcome is False


def test_advice_prints_its_numbers() -> None:
    now = RoleSplit(8, 8, 1.18, 0.57)
    then = now.copy_with_prefillers(1)
    assert then is not None
    assert str(MoveAdvice(Role.PREFILL, now, then, 0.005, 12.0)) == (
        "8P8D to 9P7D: prefillers 118% to 105% busy, decoders 57% to 65%, served in time 73% to 83%, cost 0.5%, "
        "lost 12 s of the demand"
    )
