"""What every worker tells of its requests: metrics, and the access line."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from proxy.logs import access_lines
from proxy.observe.metrics import CHOOSING_ROLES
from proxy.observe.observers import RequestListener

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.observe.metrics import Metrics
    from proxy.observe.outcome import Outcome
    from proxy.observe.record import RequestRecord
    from proxy.terms import Stage


_Item = TypeVar("_Item")


class RequestMetrics(RequestListener):
    """Counts requests, times their stages, and adds up their tokens."""

    def __init__(self, metrics: Metrics, labels: Iterable[str]) -> None:
        """`labels`: of the dialects that are served."""
        metrics.show_generation_series(labels)
        # Finding a series by its labels costs more than counting with it, and there are few.
        self._requests = cache(metrics.requests_total.labels)
        self._by_model = cache(metrics.model_requests_total.labels)
        self._ends = cache(metrics.request_end_total.labels)
        self._durations = cache(metrics.request_duration_seconds.labels)
        self._first_tokens = cache(metrics.time_to_first_token_seconds.labels)
        self._stages = cache(metrics.stage_duration_seconds.labels)
        self._tokens = cache(metrics.tokens_total.labels)
        self._inflight = cache(metrics.inflight_requests.labels)
        self._ratio = metrics.prefill_prediction_ratio
        self._hits = cache(metrics.prefill_hit_tokens_total.labels)
        self._broken = metrics.streams_broken_total
        self._choices = cache(metrics.choices_total.labels)

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        """See RequestListener. Each series is touched once."""
        in_flight = _tally(record.api for record in began)
        for record, _ in ended:
            in_flight[record.api] = in_flight.get(record.api, 0) - 1
        for api, change in in_flight.items():
            self._inflight(api).inc(change)
        for (api, status), count in _tally((record.api, outcome.status) for record, outcome in ended).items():
            self._requests(api, status).inc(count)
        for record, outcome in ended:
            if record.served_model is not None:
                self._by_model(record.served_model, outcome.status).inc()
        for (term, broken), count in _tally((outcome.term, outcome.broken) for _, outcome in ended).items():
            self._ends(term).inc(count)
            if broken is not None:
                self._broken.labels(*broken).inc(count)
        self._count_choices(ended)
        self._observe_times(ended)
        self._compare_predictions(ended)
        self._count_tokens(ended)

    def _count_choices(self, ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        chosen = (
            choice
            for record, _ in ended
            for timeline in record.timelines
            for attempt in timeline.history
            for choice in zip(CHOOSING_ROLES, attempt.reasons, strict=True)
        )
        for (role, reason), count in _tally(chosen).items():
            if reason is not None:
                self._choices(role, reason).inc(count)

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

    def _compare_predictions(self, ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        ratios: list[float] = []
        predicted = found = 0
        for record, _ in ended:
            for timeline in record.timelines:
                if timeline.prediction is None or (both := timeline.foretold) is None:
                    continue
                prediction, seconds = both
                ratios.append(seconds / max(1e-6, prediction.seconds))
                if (cached := timeline.usage.cached_tokens) is not None:
                    predicted += prediction.cached_tokens
                    found += cached
        if ratios:
            self._ratio.observe_all(ratios)
            self._hits("predicted").inc(predicted)
            self._hits("found").inc(found)

    def _count_tokens(self, ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        prompts = cached = completions = 0
        for record, _ in ended:
            prompt, cached_tokens, completion = record.tokens()
            prompts += prompt
            cached += cached_tokens
            completions += completion
        self._tokens("prompt").inc(prompts)
        self._tokens("cached").inc(cached)
        self._tokens("completion").inc(completions)


class AccessLog(RequestListener):
    """Writes a line for each request."""

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[tuple[RequestRecord, Outcome]]) -> None:
        """See RequestListener."""
        access_lines((record.ended, record.fields(outcome)) for record, outcome in ended)


def _tally(items: Iterable[_Item]) -> dict[_Item, int]:
    """How often each comes. For the few that there are at a time a Counter takes longer to make than to use."""
    counts: dict[_Item, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts
