"""Tests of length_groups: short and long prompts have separate halves, until one half is much freer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
from proxy.balancer.policies.least_tokens import LengthGroups, nearness
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.settings import Balance
from proxy.wire.prefix import NO_KEYS, PrefixKeys

BOARD = Scoreboard(slots=8)
SHORT, LONG = 1_000, 60_000


@dataclass
class Prompt:
    prompt_tokens: int
    output_tokens: int = 16
    session: str | None = None
    first_token_seconds: float | None = None

    @property
    def prefix_keys(self) -> PrefixKeys:
        return NO_KEYS

    def priority(self, *, lower_first: bool) -> int | None:
        return None


def chosen(weights: list[int], prompt_tokens: int, policy: LengthGroups | None = None) -> int:
    candidates = [Candidate(Backend(Role.DECODE, "d", port, slot=port), None, BOARD) for port in range(len(weights))]
    request = PickRequest(Load(), Load(), Prompt(prompt_tokens))
    return (policy or LengthGroups()).choose(candidates, weights, request).backend.port


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
    policy = LengthGroups(PolicyContext(balance=lambda: settings))
    assert chosen([9, 9, 8, 9], SHORT, policy) == 2
    settings = Balance(long_prompt_tokens=5_000, longest_prompt_tokens=20_000)
    assert chosen([9, 8, 7, 9], SHORT, policy) == 1


def test_nearness_is_one_at_the_edge_and_falls_with_the_distance() -> None:
    # As `_calculate_length_affinity` has it for buckets (0, 32 K) and (32 K, 128 K).
    assert nearness(32 * 1024, 0, 32 * 1024) == 1.0
    assert nearness(96 * 1024, 0, 32 * 1024) == pytest.approx(math.exp(-0.1 * 4))
    assert nearness(0, 32 * 1024, 128 * 1024) == pytest.approx(math.exp(-0.1 * 2 / 3))
