"""What every worker tells of its requests: metrics, and the access line."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from proxy.logs import access_line
from proxy.observe.observers import RequestListener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.observe.metrics import Metrics
    from proxy.observe.outcome import Outcome
    from proxy.observe.record import RequestRecord


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

    def request_began(self, record: RequestRecord) -> None:
        """See RequestListener."""
        self._inflight(record.api).inc()

    def request_ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """See RequestListener."""
        api = record.api
        self._inflight(api).dec()
        self._requests(api, outcome.status).inc()
        self._ends(outcome.term).inc()
        self._durations(api, "true" if record.stream else "false").observe(outcome.duration_seconds)
        if record.first_token_seconds is not None:
            self._first_tokens(api).observe(record.first_token_seconds)
        prompt, cached, completion = record.tokens()
        self._tokens("prompt").inc(prompt)
        self._tokens("cached").inc(cached)
        self._tokens("completion").inc(completion)
        for timeline in record.timelines:
            for stage, seconds in timeline.seconds.items():
                self._stages(stage.label).observe(seconds)
        if outcome.broken is not None:
            self._broken.labels(*outcome.broken).inc()


class AccessLog(RequestListener):
    """Writes a line for each request."""

    def request_ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """See RequestListener."""
        access_line(record.fields(outcome))
