"""What every worker tells of its requests: metrics, and the access line."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import TYPE_CHECKING

from proxy.logs import access_lines
from proxy.observe.observers import RequestListener

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.observe.metrics import Metrics
    from proxy.observe.outcome import Outcome
    from proxy.observe.record import RequestRecord
    from proxy.terms import Stage


class RequestMetrics(RequestListener):
    """Counts requests, times their stages, and adds up their tokens."""

    def __init__(self, metrics: Metrics, labels: Iterable[str]) -> None:
        """`labels`: of the dialects that are served."""
        metrics.show_generation_series(labels)
        # Finding a series by its labels costs more than counting with it, and there are few.
        self._requests = cache(metrics.requests_total.labels)
        self._ends = cache(metrics.request_end_total.labels)
        self._durations = cache(metrics.request_duration_seconds.labels)
        self._first_tokens = cache(metrics.time_to_first_token_seconds.labels)
        self._stages = cache(metrics.stage_duration_seconds.labels)
        self._tokens = cache(metrics.tokens_total.labels)
        self._inflight = cache(metrics.inflight_requests.labels)
        self._broken = metrics.streams_broken_total

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        """See RequestListener. Every series is touched once."""
        in_flight = Counter([record.api for record in began])
        in_flight.subtract([record.api for record, _ in ended])
        for api, change in in_flight.items():
            self._inflight(api).inc(change)
        for (api, status), count in Counter([(record.api, outcome.status) for record, outcome in ended]).items():
            self._requests(api, status).inc(count)
        for term, count in Counter([outcome.term for _, outcome in ended]).items():
            self._ends(term).inc(count)
        for broken, count in Counter([outcome.broken for _, outcome in ended]).items():
            if broken is not None:
                self._broken.labels(*broken).inc(count)
        self._observe_times(ended)
        tokens = [record.tokens() for record, _ in ended]
        for kind, counts in zip(("prompt", "cached", "completion"), zip(*tokens, strict=True), strict=False):
            self._tokens(kind).inc(sum(counts))

    def _observe_times(self, ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        durations: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
        first_tokens: defaultdict[str, list[float]] = defaultdict(list)
        stages: defaultdict[Stage, list[float]] = defaultdict(list)
        for record, outcome in ended:
            durations[record.api, record.stream].append(outcome.duration_seconds)
            if record.first_token_seconds is not None:
                first_tokens[record.api].append(record.first_token_seconds)
            for timeline in record.timelines:
                for stage, seconds in timeline.seconds.items():
                    stages[stage].append(seconds)
        for (api, stream), times in durations.items():
            self._durations(api, "true" if stream else "false").observe_all(times)
        for api, times in first_tokens.items():
            self._first_tokens(api).observe_all(times)
        for stage, times in stages.items():
            self._stages(stage.label).observe_all(times)


class AccessLog(RequestListener):
    """Writes a line for each request."""

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        """See RequestListener."""
        access_lines((record.ended, record.fields(outcome)) for record, outcome in ended)
