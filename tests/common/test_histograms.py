"""Quantiles of histograms."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest

from proxy.common.histograms import quantile

BOUNDS = (0.1, 1.0, math.inf)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((0, 0, 0), None), ((10, 0, 0), 0.095), ((0, 10, 0), 0.955), ((0, 0, 3), 1.0), ((90, 10, 0), 0.55)],
)
def test_quantile_is_interpolated(counts: tuple[float, ...], expected: float | None) -> None:
    assert quantile(BOUNDS, list(accumulate(counts)), 0.95) == (None if expected is None else pytest.approx(expected))
