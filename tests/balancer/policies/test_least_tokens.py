"""Tests of the policies without predictions: choices and turns."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from proxy.balancer.pick import Candidate, PickRequest, Policy, PolicyContext
from proxy.balancer.policies.least_tokens import (
    WEIGHTS,
    LeastTokens,
    LengthGroups,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    make_policy,
    nearness_to_range,
)
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.settings import POLICIES, Balance
from proxy.wire.prefix import NO_PREFIX_KEYS
from tests.balancer.policies.test_least_seconds import Subject

EIGHT = [Backend(Role.DECODE, "d", port, slot=port) for port in range(8)]
IDLE = [0] * 8
BOARD = Scoreboard(slots=8)
SHORT, LONG = 1_000, 60_000


def choose(policy: Policy, backends: Sequence[Backend], weights: Sequence[int]) -> Backend:
    candidates = [Candidate(backend, None, BOARD) for backend in backends]
    return policy.choose_candidate(candidates, weights, PickRequest.make_for_load(Load())).backend


def drawing(seed: int) -> PolicyContext:
    return PolicyContext(random_source=random.Random(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_single_candidate_is_chosen(name: str) -> None:
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
    policy = RandomChoice(drawing(1))
    chosen = Counter(choose(policy, EIGHT, [100, 0, 0, 0, 0, 0, 0, 0]) for _ in range(8000))
    assert all(800 < chosen[backend] < 1200 for backend in EIGHT)


def test_power_of_two_never_takes_the_most_loaded_and_prefers_the_freer() -> None:
    policy = PowerOfTwo(drawing(1))
    chosen = Counter(choose(policy, EIGHT, list(range(8))).port for _ in range(28_000))
    # Backend i wins against the 7 - i behind it: (7 - i) of 28 pairs.
    assert chosen[7] == 0
    assert all(abs(chosen[port] - 1000 * (7 - port)) < 300 for port in range(7))


def test_seed_makes_random_choices_repeatable() -> None:
    for kind in (RandomChoice, PowerOfTwo):
        one, other = kind(drawing(7)), kind(drawing(7))
        assert [choose(one, EIGHT, IDLE) for _ in range(50)] == [choose(other, EIGHT, IDLE) for _ in range(50)]


def test_waiting_kv_weighs_less_than_work_on_a_prefiller_and_the_same_on_a_decoder() -> None:
    assert WEIGHTS == {Role.PREFILL: (10, 3), Role.DECODE: (1, 1), Role.ENCODE: (1, 1)}


def chosen(weights: list[int], prompt_tokens: int, policy: LengthGroups | None = None) -> int:
    candidates = [Candidate(Backend(Role.DECODE, "d", port, slot=port), None, BOARD) for port in range(len(weights))]
    request = PickRequest(Load(), Load(), Subject(prompt_tokens, NO_PREFIX_KEYS))
    return (policy or LengthGroups()).choose_candidate(candidates, weights, request).backend.port


@pytest.mark.parametrize(("prompt_tokens", "half"), [(SHORT, {0, 1}), (LONG, {2, 3}), (32 * 1024, {2, 3})])
def test_each_length_group_takes_turns_in_its_half(prompt_tokens: int, half: set[int]) -> None:
    policy = LengthGroups()
    assert {chosen([0, 0, 0, 0], prompt_tokens, policy) for _ in range(4)} == half


def test_least_loaded_backend_of_the_half_is_chosen() -> None:
    assert chosen([5, 4, 0, 9], SHORT) == 1
    assert chosen([8, 9, 9, 8], LONG) == 3


def test_odd_backend_belongs_to_short_prompts() -> None:
    assert chosen([2, 2, 1, 9, 9], SHORT) == 2


@pytest.mark.parametrize("prompt_tokens", [SHORT, LONG])
def test_single_backend_takes_all_lengths(prompt_tokens: int) -> None:
    assert chosen([100], prompt_tokens) == 0


def test_much_freer_half_takes_prompts_of_the_other_length() -> None:
    assert chosen([100, 100, 10, 20], SHORT) == 2
    assert chosen([20, 10, 100, 100], LONG) == 1


def test_slightly_freer_half_keeps_its_length() -> None:
    assert chosen([100, 100, 90, 95], SHORT) == 0


def test_prompt_far_from_the_other_length_overflows_later() -> None:
    weights = [85, 85, 100, 100]  # 15 % freer
    assert chosen(weights, 33_000) == 0
    assert chosen(weights, 128 * 1024) == 2


def test_length_bounds_come_from_the_settings() -> None:
    settings = Balance(long_prompt_tokens=500, longest_prompt_tokens=2_000)
    policy = LengthGroups(PolicyContext(get_balance_options=lambda: settings))
    assert chosen([9, 9, 8, 9], SHORT, policy) == 2
    settings = Balance(long_prompt_tokens=5_000, longest_prompt_tokens=20_000)
    assert chosen([9, 8, 7, 9], SHORT, policy) == 1


def test_nearness_is_one_at_the_edge_and_falls_with_the_distance() -> None:
    # As `_calculate_length_affinity` has it for buckets (0, 32 K) and (32 K, 128 K).
    assert nearness_to_range(32 * 1024, 0, 32 * 1024) == 1.0
    assert nearness_to_range(96 * 1024, 0, 32 * 1024) == pytest.approx(math.exp(-0.1 * 4))
    assert nearness_to_range(0, 32 * 1024, 128 * 1024) == pytest.approx(math.exp(-0.1 * 2 / 3))
