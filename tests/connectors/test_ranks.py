"""Data-parallel ranks: which one a leg is for, and that a claim on it ends with the leg."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.backend import Backend, Role
from proxy.connectors.legs import RANK_HEADER, RankCounts

ONE = Backend(Role.DECODE, "10.0.0.1", 7100, slot=0)
OTHER = Backend(Role.DECODE, "10.0.0.2", 7100, slot=1)


def legs(ranks: RankCounts, backend: Backend, count: int) -> list[int]:
    """How many are in flight on each rank; the look itself is over again."""
    in_flight, rank = ranks.take_rank(backend, count)
    in_flight[rank] -= 1
    return in_flight[:count]


def test_ranks_take_turns_when_nothing_is_in_flight() -> None:
    ranks = RankCounts()
    taken = []
    for _ in range(7):
        with ranks.start_claim() as claim:
            taken.append(claim.claim_rank(ONE, 3))
    assert taken == [0, 1, 2, 0, 1, 2, 0]


def test_every_backend_has_separate_turns() -> None:
    """Backends that are chosen in turn would otherwise get the same rank each time."""
    ranks = RankCounts()
    taken = []
    for backend in (ONE, OTHER) * 3:
        with ranks.start_claim() as claim:
            taken.append(claim.claim_rank(backend, 2))
    assert taken == [0, 0, 1, 1, 0, 0]


def test_rank_with_the_fewest_legs_is_taken() -> None:
    ranks = RankCounts()
    with ranks.start_claim() as long:
        assert long.claim_rank(ONE, 2) == 0
        taken = []
        for _ in range(3):
            with ranks.start_claim() as claim:
                taken.append(claim.claim_rank(ONE, 2))
    assert taken == [1, 1, 1]


def test_claim_that_moves_gives_back_what_it_left() -> None:
    ranks = RankCounts()
    with ranks.start_claim() as claim:
        claim.claim_rank(ONE, 2)
        claim.claim_rank(OTHER, 2)
        assert legs(ranks, ONE, 2) == [0, 0]
        assert legs(ranks, OTHER, 2) == [1, 0]
        claim.release_ranks()
        claim.release_ranks()
        assert legs(ranks, OTHER, 2) == [0, 0]
    assert legs(ranks, OTHER, 2) == [0, 0]


def test_leg_that_fails_gives_its_rank_back() -> None:
    ranks = RankCounts()

    def leg() -> None:
        with ranks.start_claim() as claim:
            claim.claim_rank(ONE, 2)
            raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        leg()
    assert legs(ranks, ONE, 2) == [0, 0]


@pytest.mark.parametrize(("count", "header"), [(1, {}), (2, {RANK_HEADER: "0"})])
def test_rank_header_is_sent_only_for_several_ranks(count: int, header: dict[str, str]) -> None:
    with RankCounts().start_claim() as claim:
        assert claim.rank_header(ONE, count) == header


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=60))
def test_no_rank_is_out_of_range_or_overlooked_and_nothing_is_left(steps: list[tuple[int, int]]) -> None:
    """The number of ranks may change at a reload."""
    ranks = RankCounts()
    claims = [ranks.start_claim() for _ in range(10)]
    for which, count in steps:
        claims[which].release_ranks()
        before = legs(ranks, ONE, count)
        rank = claims[which].claim_rank(ONE, count)
        assert 0 <= rank < count
        assert before[rank] == min(before)
    for claim in claims:
        claim.release_ranks()
    assert legs(ranks, ONE, 5) == [0] * 5
