"""Adds up the metrics of all workers from the files of prometheus-client.

The library parses the names and labels of each series in each file, at each scrape. This module first adds equal
series, and parses each one once. With 64 instances and four workers this takes half of the CPU time.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_SERIES: Final = 32_768
"""Maximum number of series whose names and labels are kept. With 512 instances there are 12,000."""

Labels = tuple[tuple[str, str], ...]


@lru_cache(maxsize=_MAX_SERIES)
def _parse(key: str) -> tuple[str, str, Labels, str]:
    """Return the name of the metric, the name of the sample, its labels and the help text."""
    metric_name, name, labels, meaning = json.loads(key)
    return metric_name, name, tuple(sorted(labels.items())), meaning


def merge(files: Iterable[str]) -> Iterable[Metric]:
    """Return the metrics in these files, as `MultiProcessCollector.merge` does. Raises FileNotFoundError."""
    metrics: dict[str, Metric] = {}
    sums: dict[str, dict[str, float]] = {}
    for file in files:
        kind, *mode = PurePath(file).stem.split("_")
        values = MmapedDict.read_all_values_from_file(file)  # type: ignore[no-untyped-call]
        if kind == "gauge":  # their values are not always added
            for key, value, timestamp, _ in values:
                metric, name, labels = _series(metrics, kind, key)
                metric._multiprocess_mode = mode[0]  # type: ignore[attr-defined]
                metric.add_sample(name, (*labels, ("pid", mode[1])), value, timestamp)  # type: ignore[arg-type]
            continue
        totals = sums.setdefault(kind, {})
        for key, value, _, _ in values:
            totals[key] = totals.get(key, 0.0) + value
    for kind, totals in sums.items():
        for key, value in totals.items():
            metric, name, labels = _series(metrics, kind, key)
            metric.add_sample(name, labels, value)  # type: ignore[arg-type]
    return MultiProcessCollector._accumulate_metrics(metrics, True)  # type: ignore[no-any-return,no-untyped-call]


def _series(metrics: dict[str, Metric], kind: str, key: str) -> tuple[Metric, str, Labels]:
    """Return the metric of a series, the name of its sample, and its labels as the library sorts them."""
    metric_name, name, labels, meaning = _parse(key)
    metric = metrics.get(metric_name)
    if metric is None:
        metric = metrics[metric_name] = Metric(metric_name, meaning, kind)
    return metric, name, labels
