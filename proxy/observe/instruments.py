"""Kinds of metrics, and rows of the metrics table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import prometheus_client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry

_Kind = TypeVar("_Kind", bound="Counter | Gauge | Histogram")


class Counter(prometheus_client.Counter):
    """A counter without the check for labels in each step, which takes longer than the step."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0:
            raise ValueError("a counter only goes up")
        self._value.inc(amount)

    def values(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the label values of each series, and its value in this process.

        `collect` takes a hundred times as long, because it builds a sample with all names for each series.
        """
        series: dict[Any, Any] = self._metrics.copy()
        for labels, each in series.items():
            yield labels, each._value.get()


class Gauge(prometheus_client.Gauge):
    """A gauge without the check for labels; see Counter."""

    def values(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the label values of each series, and its value in this process; see Counter."""
        series: dict[Any, Any] = self._metrics.copy()
        for labels, each in series.items():
            yield labels, each._value.get()

    def inc(self, amount: float = 1) -> None:
        self._value.inc(amount)

    def dec(self, amount: float = 1) -> None:
        self._value.inc(-amount)


class Histogram(prometheus_client.Histogram):
    """A histogram without the check for labels; see Counter."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)

    @property
    def bounds(self) -> Sequence[float]:
        """The upper bounds of the buckets. The last one is infinite."""
        return tuple(self._upper_bounds)

    def counts(self) -> list[float]:
        """Return the number of values in each bucket in this process, over all series. The last bucket has no bound."""
        series: dict[Any, Any] = self._metrics.copy()
        rows = [[bucket.get() for bucket in each._buckets] for each in series.values()]
        return [sum(column) for column in zip(*rows, strict=True)] or [0.0] * len(self._upper_bounds)

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe many values at once, at the cost of a few.

        The values are sorted, so one search finds all values of a bucket.
        """
        self._sum.inc(sum(amounts))
        ordered, bounds = sorted(amounts), self._upper_bounds
        counted = 0
        while counted < len(ordered):
            place = bisect_left(bounds, ordered[counted])
            upto = bisect_right(ordered, bounds[place], counted + 1)
            self._buckets[place].inc(upto - counted)
            counted = upto


class GatheringHistogram(Histogram):
    """A histogram without labels for values that are observed many times per request.

    Values are noted, and counted at the next `add_noted_values`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._noted_values: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._noted_values.append(amount)

    def add_noted_values(self) -> None:
        """Add the noted values to the histogram."""
        noted, self._noted_values = self._noted_values, []
        if noted:
            self.observe_all(noted)


class MetricRow(Generic[_Kind]):
    """One metric in the body of a class, named after its attribute.

    Instances of the class get the metric from `make_metric`.
    """

    def __init__(
        self,
        metric_type: type[_Kind],
        help_text: str,
        labels: Sequence[str] = (),
        *,
        series: Iterable[Sequence[str]] = (),
        **options: Any,
    ) -> None:
        """Describe a metric: its kind, help text and labels.

        Args:
            metric_type: Counter, Gauge or Histogram.
            help_text: The help text of the exposition, and of docs/reference/metrics.md.
            labels: The names of its labels.
            series: Label values whose series begin at 0, because a rate does not see the step from nothing to 1.
            options: See prometheus-client: `buckets` of histograms, `multiprocess_mode` of gauges.
        """
        self.name = ""
        self.known_series = tuple(series)
        self._metric_type = metric_type
        self._help_text = help_text
        self._label_names = labels
        self._metric_options = options

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, metrics: object, owner: type) -> _Kind:
        """Return the type of the metric for type checkers.

        Instances have the metric as an attribute, which takes precedence.
        """
        raise AttributeError(f"{owner.__name__}.{self.name} is not created yet")

    def make_metric(self, registry: CollectorRegistry) -> _Kind:
        """Create the metric of this row, with its known series."""
        metric = self._metric_type(
            self.name,
            self._help_text,
            self._label_names,
            namespace="pdproxy",
            registry=registry,
            **self._metric_options,
        )
        for values in self.known_series:
            metric.labels(*values)
        return metric
