"""Quantiles of histograms with fixed buckets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Return a quantile of a histogram in its unit, interpolated as by Prometheus' histogram_quantile.

    Returns None if the histogram is empty.

    Args:
        bounds: Upper bounds of the buckets, ascending. The last one is infinite.
        counts: Number of values up to each bound, as in Prometheus' buckets.
        share: 0.99 is the 99th percentile.
    """
    rank = share * counts[-1] if counts else 0.0
    if not rank:
        return None
    lower = below = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
