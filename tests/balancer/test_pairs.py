"""Pairs: who is kept apart from whom, for how long, and what ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.backend import Backend, Role
from proxy.balancer.pairs import Pairs

if TYPE_CHECKING:
    from tests.clock import Clock

P1, P2 = (Backend(Role.PREFILL, "p", port) for port in (1, 2))
D1, D2 = (Backend(Role.DECODE, "d", port) for port in (1, 2))
NOBODY: frozenset[Backend] = frozenset()


@pytest.fixture
def pairs(clock: Clock) -> Pairs:
    return Pairs(after=2, seconds=60.0, clock=clock)


def test_two_failed_hand_overs_in_a_row_part_a_pair_and_no_other(pairs: Pairs) -> None:
    assert not pairs.failed(P1, D1)
    assert pairs.partners_to_avoid(P1) == NOBODY
    assert pairs.failed(P1, D1)
    assert (pairs.partners_to_avoid(P1), pairs.partners_to_avoid(D1)) == ({D1}, {P1})
    assert (pairs.partners_to_avoid(P2), pairs.partners_to_avoid(D2)) == (NOBODY, NOBODY)


def test_hand_overs_with_others_do_not_count(pairs: Pairs) -> None:
    assert not any(pairs.failed(*pair) for pair in ((P1, D1), (P1, D2), (P2, D1), (P2, D2)))


def test_a_success_parts_two_failures(pairs: Pairs) -> None:
    pairs.failed(P1, D1)
    pairs.succeeded(P1, D1)
    pairs.succeeded(P1, D1)
    assert not pairs.failed(P1, D1)
    pairs.succeeded(P2, D1)
    assert pairs.failed(P1, D1)


def test_a_bad_prefiller_is_kept_apart_from_every_decoder(pairs: Pairs) -> None:
    for decoder in (D1, D2, D1, D2):
        pairs.failed(P1, decoder)
        pairs.succeeded(P2, decoder)
    assert pairs.partners_to_avoid(P1) == {D1, D2}
    assert pairs.partners_to_avoid(D1) == pairs.partners_to_avoid(D2) == {P1}


def test_a_quarantine_ends_and_the_next_failure_begins_a_longer_one(pairs: Pairs, clock: Clock) -> None:
    pairs.failed(P1, D1)
    lengths = []
    for _ in range(12):
        assert pairs.failed(P1, D1)
        began = clock.now
        assert not pairs.failed(P1, D1)
        while pairs.partners_to_avoid(P1):
            clock.now += 30.0
        lengths.append(clock.now - began)
    assert lengths == [60.0 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10)]


def test_a_success_ends_a_quarantine_and_forgets_how_many_there_were(pairs: Pairs, clock: Clock) -> None:
    for _ in range(2):
        pairs.failed(P1, D1)
    clock.now += 60.0
    assert pairs.failed(P1, D1)
    pairs.succeeded(P1, D1)
    assert (pairs.partners_to_avoid(P1), pairs.partners_to_avoid(D1)) == (NOBODY, NOBODY)
    assert [pairs.failed(P1, D1), pairs.failed(P1, D1)] == [False, True]
    clock.now += 60.0
    assert pairs.partners_to_avoid(P1) == NOBODY


def test_a_backend_that_left_is_forgotten_on_both_sides(pairs: Pairs) -> None:
    for pair in ((P1, D1), (P1, D2), (P2, D1)):
        pairs.failed(*pair)
        pairs.failed(*pair)
    pairs.failed(P2, D2)
    pairs.forget(P1)
    assert pairs.partners_to_avoid(D1) == {P2}
    assert (pairs.partners_to_avoid(P1), pairs.partners_to_avoid(D2)) == (NOBODY, NOBODY)
    assert not pairs.failed(P1, D1)
    assert pairs.failed(P2, D2)


def test_changed_settings_count_from_now_on(pairs: Pairs, clock: Clock) -> None:
    pairs.configure(after=1, seconds=5.0)
    assert pairs.failed(P1, D1)
    clock.now += 5.0
    assert pairs.partners_to_avoid(P1) == NOBODY
