"""Durations, counted in buckets: their number says nothing about the memory they take."""

from __future__ import annotations

_BUCKETS_PER_SECOND = 50_000
_LAST = 30 * _BUCKETS_PER_SECOND
"""Whatever takes longer than 30 s counts as 30 s."""


class Histogram:
    """Durations to the nearest 20 µs."""

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self.counts = {} if counts is None else counts

    def add(self, seconds: float) -> None:
        bucket = min(_LAST, round(seconds * _BUCKETS_PER_SECOND))
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def milliseconds(self, share: float) -> float:
        """The time below which this share of the durations lies, in ms; NaN when there is none."""
        left = share * sum(self.counts.values())
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return 1000 * bucket / _BUCKETS_PER_SECOND
        return float("nan")
