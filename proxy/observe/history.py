"""The traffic of the last five minutes, over all workers, for the charts of the status page.

Each worker reports its counters once a second. One worker samples their growth every five seconds and publishes the
samples in shared memory, so that all workers can show them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from proxy.balancer.shared.memory import SharedValue
from proxy.common.histograms import quantile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STEP_SECONDS: Final = 5.0
SAMPLES: Final = 60
NAMES: Final = ("tokens_per_second", "in_flight", "queued", "first_token_seconds")
"""Values of a sample. The last one is the 95th percentile; None: no request got its first token."""
_SHARE: Final = 0.95
_MAX_BYTES: Final = 512 * 1024  # 1,024 instances take 60 KiB
_NO_HISTORY: Final[dict[str, Any]] = {
    "at": None,
    "step_seconds": STEP_SECONDS,
    "names": NAMES,
    "samples": [],
    "instances": {},
}


class WorkerTraffic(NamedTuple):
    """The part of a worker's report from which the history is made."""

    in_flight: float
    """Requests in flight."""
    queued: int
    """Requests in the queue."""
    tokens: float
    """Tokens of answers since the start of the worker."""
    first_tokens: Sequence[float]
    """First tokens since the start, by bucket of the time to first token."""
    streamed: Mapping[str, int]
    """Tokens that instances have streamed since the start, by the name of the instance."""


class TrafficHistory:
    """Samples the traffic of all workers."""

    def __init__(self, bounds: Sequence[float], earlier: Mapping[str, Any] | None = None) -> None:
        """Begin a history, or continue that of a worker that was replaced.

        Args:
            bounds: Upper bounds of the buckets of the time to first token, in seconds. The last one is infinite.
            earlier: The history that was published. None: there is none.
        """
        self._bucket_bounds = tuple(bounds)
        self._samples: deque[Sequence[float | None]] = deque(() if earlier is None else earlier["samples"], SAMPLES)
        self._sampled_at: float | None = None if earlier is None else earlier["sampled_at"]
        self._counted_at: float | None = None
        self._last_counts: Mapping[tuple[str, str, int], float] = {}

    def is_due(self, now: float) -> bool:
        """Return whether it is time for another sample. `now`: monotonic seconds."""
        return self._counted_at is None or now - self._counted_at >= STEP_SECONDS

    def add_sample(
        self, reports: Mapping[int, WorkerTraffic], now: float, wall_seconds: float
    ) -> Mapping[str, Any] | None:
        """Add a sample, and return the history. None: this was the first count, from which the next sample is made.

        Args:
            reports: The traffic of each worker, by its number.
            now: Monotonic seconds.
            wall_seconds: Seconds since the Unix epoch.
        """
        grown, counted_at = self._measure_growth(reports), self._counted_at
        self._counted_at = now
        if counted_at is None:
            return None
        seconds = now - counted_at
        # Samples are missing if the event loop was blocked or the worker was replaced.
        missing = 0 if self._sampled_at is None else round((now - self._sampled_at) / STEP_SECONDS) - 1
        self._samples.extend([(None,) * len(NAMES)] * min(missing, SAMPLES))
        self._sampled_at = now
        first_tokens = list(accumulate(grown["first_tokens", str(place)] for place in range(len(self._bucket_bounds))))
        self._samples.append(
            (
                round(grown["tokens", ""] / seconds, 1),
                sum(report.in_flight for report in reports.values()),
                sum(report.queued for report in reports.values()),
                quantile(self._bucket_bounds, first_tokens, _SHARE),
            )
        )
        rates = {name: round(count / seconds, 1) for (kind, name), count in grown.items() if kind == "streamed"}
        return {
            **_NO_HISTORY,
            "at": round(wall_seconds, 3),
            "sampled_at": now,
            "samples": list(self._samples),
            "instances": rates,
        }

    def _measure_growth(self, reports: Mapping[int, WorkerTraffic]) -> Mapping[tuple[str, str], float]:
        """Return the growth of each count since the last call. Counts of a replaced worker begin again at 0."""
        counts: dict[tuple[str, str, int], float] = {}
        for number, report in reports.items():
            counts["tokens", "", number] = report.tokens
            counts.update({("first_tokens", str(place), number): n for place, n in enumerate(report.first_tokens)})
            counts.update({("streamed", name, number): count for name, count in report.streamed.items()})
        grown: defaultdict[tuple[str, str], float] = defaultdict(float)
        for series, count in counts.items():
            before = self._last_counts.get(series, 0.0)
            grown[series[:2]] += count - before if count >= before else count
        self._last_counts = counts
        return grown


class HistoryBoard:
    """The history in memory that all workers share. Create it before forking."""

    def __init__(self) -> None:
        self._shared_value = SharedValue("history", _MAX_BYTES)
        self._shared_value.write_value(None)

    def publish_history(self, history: Mapping[str, Any]) -> None:
        """Replace the history. With too many instances, their rates are left out."""
        with self._shared_value.hold_writer_lock():
            try:
                self._shared_value.write_value(history)
            except ValueError:
                self._shared_value.write_value({**history, "instances": {}})

    def published_history(self) -> Mapping[str, Any] | None:
        """Return the history as it was published, for the worker that continues it. None: there is none."""
        return cast("Mapping[str, Any] | None", self._shared_value.current_value)

    def history_for_clients(self) -> Mapping[str, Any]:
        """Return the history without the time of this host's monotonic clock."""
        published = self.published_history()
        if published is None:
            return _NO_HISTORY
        return {name: value for name, value in published.items() if name != "sampled_at"}

    def rates_by_instance(self) -> Mapping[str, float]:
        """Return the tokens per second that each instance streamed in the last step, by its name."""
        return cast("Mapping[str, float]", self.history_for_clients()["instances"])
