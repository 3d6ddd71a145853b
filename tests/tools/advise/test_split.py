"""What another split of the instances would carry."""

from __future__ import annotations

import pytest

from proxy.balancer.split import RoleSplit, recommend_split
from proxy.tools.advise import recommendation_text


def test_sides_work_spreads_over_more_instances_and_piles_up_on_fewer() -> None:
    now, more, fewer = RoleSplit(4, 5, 0.8, 0.4).neighbour_splits()
    assert (now.load_capacity, now.busier_role) == (pytest.approx(1.25), "prefill")
    assert (more.split_name, more.prefill_busy, more.decode_busy) == ("5P4D", pytest.approx(0.64), pytest.approx(0.5))
    assert (fewer.split_name, fewer.prefill_busy, fewer.decode_busy) == (
        "3P6D",
        pytest.approx(0.8 * 4 / 3),
        pytest.approx(1 / 3),
    )


@pytest.mark.parametrize(
    ("now", "best"),
    [
        (RoleSplit(4, 4, 0.9, 0.3), "5P3D"),
        (RoleSplit(4, 4, 0.3, 0.9), "3P5D"),
        (RoleSplit(4, 4, 0.9, 0.8), "4P4D"),
        (RoleSplit(8, 8, 1.4, 0.3), "9P7D"),
        (RoleSplit(4, 1, 0.9, 0.1), "4P1D"),
        (RoleSplit(1, 4, 0.1, 0.9), "1P4D"),
        (RoleSplit(4, 4, 0.0, 0.0), "4P4D"),
    ],
)
def test_recommended_split_carries_more_and_keeps_both_roles(now: RoleSplit, best: str) -> None:
    assert recommend_split(now).split_name == best


def test_verdict_is_a_sentence() -> None:
    assert recommendation_text(RoleSplit(4, 4, 0.9, 0.3)) == (
        "Prefillers are the bottleneck: moving a decoder to prefill (5P3D) would carry 25% more load."
    )
    assert recommendation_text(RoleSplit(4, 4, 0.3, 0.9)).startswith(
        "Decoders are the bottleneck: moving a prefiller to decode (3P5D)"
    )
    assert recommendation_text(RoleSplit(4, 4, 0.9, 0.8)).endswith("leave it at 4P4D.")
    assert "nothing to advise" in recommendation_text(RoleSplit(4, 4, 0.0, 0.0))
