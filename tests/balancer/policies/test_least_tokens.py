"""Tests of the policies without predictions: choices and turns."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
from proxy.balancer.policies.least_tokens import WEIGHTS, LeastTokens, PowerOfTwo, Random, RoundRobin, make_policy
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.settings import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import Policy

EIGHT = [Backend(Role.DECODE, "d", port, slot=port) for port in range(8)]
IDLE = [0] * 8
BOARD = Scoreboard(slots=8)


def choose(policy: Policy, backends: Sequence[Backend], weights: Sequence[int]) -> Backend:
    candidates = [Candidate(backend, None, BOARD) for backend in backends]
    return policy.choose(candidates, weights, PickRequest.of(Load())).backend


def drawing(seed: int) -> PolicyContext:
    return PolicyContext(rng=random.Random(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_a_single_candidate_is_chosen(name: str) -> None:
    policy = make_policy(name)
    assert [choose(policy, EIGHT[3:4], [99]) for _ in range(3)] == EIGHT[3:4] * 3


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "length_groups"])
def test_idle_backends_all_get_work(name: str) -> None:
    policy = make_policy(name)
    assert {choose(policy, EIGHT, IDLE) for _ in range(500)} == set(EIGHT)


def test_least_tokens_takes_the_lowest_weight() -> None:
    assert choose(LeastTokens(), EIGHT, [5, 4, 3, 2, 1, 2, 3, 4]) == EIGHT[4]


def test_least_tokens_takes_equal_backends_in_turn() -> None:
    policy = LeastTokens()
    assert [choose(policy, EIGHT, IDLE) for _ in range(16)] == EIGHT * 2


def test_least_tokens_takes_turns_only_among_the_least_loaded() -> None:
    policy = LeastTokens()
    weights = [7, 0, 7, 0, 7, 7, 7, 0]
    assert [choose(policy, EIGHT, weights).port for _ in range(5)] == [1, 3, 7, 1, 3]


@pytest.mark.parametrize("policy", [LeastTokens(), RoundRobin()])
def test_turns_continue_when_candidates_leave_and_return(policy: LeastTokens | RoundRobin) -> None:
    assert [choose(policy, EIGHT, IDLE).port for _ in range(3)] == [0, 1, 2]
    fewer = EIGHT[:3] + EIGHT[5:]
    assert choose(policy, fewer, [0] * 6).port == 5
    assert [choose(policy, EIGHT, IDLE).port for _ in range(4)] == [6, 7, 0, 1]
    assert choose(policy, EIGHT[:2], [0, 0]).port == 0


def test_round_robin_does_not_look_at_loads() -> None:
    policy = RoundRobin()
    assert [choose(policy, EIGHT, [9, 0, 9, 9, 9, 9, 9, 9]) for _ in range(8)] == EIGHT


def test_random_is_even() -> None:
    policy = Random(drawing(1))
    chosen = Counter(choose(policy, EIGHT, [100, 0, 0, 0, 0, 0, 0, 0]) for _ in range(8000))
    assert all(800 < chosen[backend] < 1200 for backend in EIGHT)


def test_power_of_two_never_takes_the_most_loaded_and_prefers_the_freer() -> None:
    policy = PowerOfTwo(drawing(1))
    chosen = Counter(choose(policy, EIGHT, list(range(8))).port for _ in range(28_000))
    # Backend i wins against the 7 - i behind it: (7 - i) of 28 pairs.
    assert chosen[7] == 0
    assert all(abs(chosen[port] - 1000 * (7 - port)) < 300 for port in range(7))


def test_a_seed_makes_random_choices_repeatable() -> None:
    for kind in (Random, PowerOfTwo):
        one, other = kind(drawing(7)), kind(drawing(7))
        assert [choose(one, EIGHT, IDLE) for _ in range(50)] == [choose(other, EIGHT, IDLE) for _ in range(50)]


def test_waiting_kv_weighs_less_than_work_on_a_prefiller_and_the_same_on_a_decoder() -> None:
    assert WEIGHTS == {Role.PREFILL: (10, 3), Role.DECODE: (1, 1), Role.ENCODE: (1, 1)}
