"""One scrape of a gateway's /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in the order of names."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples, by name and labels. `at`: seconds of the monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, exposition: str, at: float) -> Scrape:
        """Read Prometheus' text format. Raises ValueError for other texts."""
        samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(at, samples)

    def by_labels(self, name: str) -> Mapping[Labels, float]:
        """Return the samples of a metric; empty without such a metric."""
        return self.samples.get(name, {})

    def total(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        return sum(self.by_labels(name).values())


def growth(before: Scrape, after: Scrape, name: str) -> dict[Labels, float]:
    """Return the growth of each counter of a metric. A counter that was reset has grown by its value."""
    old = before.by_labels(name)
    grown = {}
    for labels, value in after.by_labels(name).items():
        earlier = old.get(labels, 0.0)
        grown[labels] = value - earlier if value >= earlier else value
    return grown


def rate(before: Scrape, after: Scrape, name: str, **wanted: str) -> float:
    """Return the growth per second of the counters of a metric with these labels."""
    grown = growth(before, after, name)
    part = sum(value for labels, value in grown.items() if wanted.items() <= dict(labels).items())
    return part / max(after.at - before.at, 1e-9)


def quantile(before: Scrape, after: Scrape, name: str, share: float) -> float | None:
    """Return a quantile of a histogram's values between two scrapes, in its unit; None without values.

    `share`: 0.99 is the 99th percentile. Interpolated as by Prometheus' histogram_quantile.
    """
    buckets: dict[float, float] = {}
    for labels, count in growth(before, after, f"{name}_bucket").items():
        bound = float(dict(labels)["le"])
        buckets[bound] = buckets.get(bound, 0.0) + count
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank = share * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / max(buckets[bound] - below, 1e-9)
        lower, below = bound, buckets[bound]
    return lower
