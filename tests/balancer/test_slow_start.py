"""Slow start: a share that grows in a straight line, and what it does to weights and to candidates."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from proxy.balancer.backend_health import slow_start_percent
from proxy.balancer.chooser import Chooser, sample_by_share, weights_by_share
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.shared.back_offs import BackOffs
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.clock import Clock


@pytest.mark.parametrize(
    ("elapsed_seconds", "share"), [(0.0, 10), (10.0, 40), (15.0, 55), (29.9, 99), (30.0, 100), (1000.0, 100)]
)
def test_share_in_slow_start_grows_from_10_to_100_percent(elapsed_seconds: float, share: int) -> None:
    assert slow_start_percent(elapsed_seconds, 30.0) == share


def test_share_is_100_percent_without_a_slow_start() -> None:
    assert slow_start_percent(0.0, 0.0) == 100


def test_weight_of_a_backend_is_scaled_by_its_share() -> None:
    assert weights_by_share([900, 0, 50], [100, 10, 50], added_weight=100) == [1000, 1000, 300]


def test_candidate_takes_part_with_the_probability_of_its_share() -> None:
    rng = random.Random(1)
    present = Counter(name for _ in range(10_000) for name in sample_by_share("abc", [100, 10, 50], rng))
    assert present["a"] == 10_000
    assert 850 < present["b"] < 1150
    assert 4800 < present["c"] < 5200


@pytest.mark.parametrize("percents", [[10, 10], [55, 55], [100, 100]])
def test_all_candidates_take_part_if_all_have_the_same_share(percents: list[int]) -> None:
    rng = random.Random(1)
    assert all([*sample_by_share("ab", percents, rng)] == ["a", "b"] for _ in range(100))


def test_shares_are_relative_to_the_largest() -> None:
    rng = random.Random(1)
    present = Counter(name for _ in range(10_000) for name in sample_by_share("ab", [40, 10], rng))
    assert present["a"] == 10_000
    assert 2350 < present["b"] < 2650


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_shares_are_not_read_after_the_last_slow_start(policy: str) -> None:
    reads: list[Backend] = []
    share = 40

    def share_percent(backend: Backend) -> int:
        reads.append(backend)
        return share if backend.port == 2 else 100

    chooser = Chooser(
        Role.PREFILL, Scoreboard(slots=3), share_percent, BackOffs(3), clock=Clock(), random_source=random.Random(1)
    )
    chooser.use_policy(make_policy(policy))
    backends = [Backend(Role.PREFILL, "p", port, port) for port in range(3)]
    chooser.set_candidates(backends, [None] * 3)
    for _ in range(5):
        reads.clear()
        chooser.choose_backend(PickRequest.make_for_load(Load(1, 1)))
        assert set(reads) == set(backends)
    share = 100
    chooser.choose_backend(PickRequest.make_for_load(Load(1, 1)))
    reads.clear()
    assert {chooser.choose_backend(PickRequest.make_for_load(Load(1, 1))) for _ in range(3)} == set(backends)
    assert not reads
    share = 40
    chooser.set_candidates(backends, [None] * 3)
    reads.clear()
    chooser.choose_backend(PickRequest.make_for_load(Load(1, 1)))
    assert set(reads) == set(backends)
