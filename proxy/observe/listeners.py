"""Listeners of each worker: metrics of requests, and the access log.

They stand apart from `observers`, which the supervisor imports through the receipts. The supervisor must not import
prometheus-client before it has set the directory of the workers' metrics.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

from proxy.common.terms import Stage
from proxy.observe.key_usage import TOKEN_KINDS
from proxy.observe.logs import access_lines
from proxy.observe.metrics import CHOOSING_ROLES
from proxy.observe.observers import RequestListener
from proxy.observe.record import access_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestOutcome, RequestRecord
    from proxy.observe.timeline import Timeline

_Item = TypeVar("_Item")

# Attributes of records, read without a step of the interpreter per record.
_API: Final = attrgetter("api")
_KIND: Final = attrgetter("api", "stream", "outcome", "served_model")
_TIMELINES: Final = attrgetter("timelines")
_TOKENS: Final = attrgetter("facts.prompt_tokens", "facts.cached_tokens", "facts.completion_tokens")
_DURATION: Final = attrgetter("facts.duration_seconds")
_FIRST_TOKEN: Final = attrgetter("first_token_seconds")
_ENDED: Final = attrgetter("ended")
_FACTS: Final = attrgetter("facts")
# Attributes of timelines and attempts, read in the same way.
_HISTORY: Final = attrgetter("history")
_REASONS: Final = attrgetter("reasons")

_PREFILL: Final = Stage.PREFILL.value


class RequestMetrics(RequestListener):
    """Counts requests, measures their stages, and sums up their tokens."""

    def __init__(self, metrics: Metrics, labels: Iterable[str]) -> None:
        """Keep the metrics. `labels`: labels of the served dialects."""
        metrics.show_generation_series(labels)
        # To find a series by its labels costs more than to count in it, and there are few series.
        self._request_counters = cache(metrics.requests_total.labels)
        self._model_counters = cache(metrics.model_requests_total.labels)
        self._end_counters = cache(metrics.request_end_total.labels)
        self._duration_histograms = cache(metrics.request_duration_seconds.labels)
        self._first_token_histograms = cache(metrics.time_to_first_token_seconds.labels)
        self._stage_histograms = cache(metrics.stage_duration_seconds.labels)
        self._tokens = cache(metrics.tokens_total.labels)
        self._inflight = cache(metrics.inflight_requests.labels)
        self._ratio = metrics.prefill_prediction_ratio
        self._hits = cache(metrics.prefill_hit_tokens_total.labels)
        self._broken = cache(metrics.streams_broken_total.labels)
        self._choices = cache(metrics.choices_total.labels)

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        """Take the requests of a batch, each list in the order of the events.

        Requests of the same series are counted together.
        """
        for api, count in count_values(map(_API, began)):
            self._inflight(api).inc(count)
        kinds: defaultdict[tuple[str, bool, RequestOutcome, str | None], list[RequestRecord]] = defaultdict(list)
        for record, kind in zip(ended, map(_KIND, ended), strict=True):
            kinds[kind].append(record)
        for (api, stream, (term, status, broken), model), records in kinds.items():
            count = len(records)
            self._inflight(api).dec(count)
            self._request_counters(api, status).inc(count)
            self._end_counters(term).inc(count)
            if model is not None:
                self._model_counters(model, status).inc(count)
            if broken is not None:
                self._broken(*broken).inc(count)
            self._duration_histograms(api, "true" if stream else "false").observe_all([*map(_DURATION, records)])
            if first_tokens := [seconds for seconds in map(_FIRST_TOKEN, records) if seconds is not None]:
                self._first_token_histograms(api).observe_all(first_tokens)
        for tokens, amount in zip(TOKEN_KINDS, map(sum, zip(*map(_TOKENS, ended), strict=True)), strict=False):
            self._tokens(tokens).inc(amount)
        units: list[Timeline] = [*chain.from_iterable(map(_TIMELINES, ended))]
        self._observe_stages(units)
        self._compare_predictions(units)
        self._count_choices(units)

    def _observe_stages(self, units: Iterable[Timeline]) -> None:
        courses: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
        for timeline in units:
            courses[timeline.course].append(timeline.spent_seconds_by_stage)
        for letters, all_seconds in courses.items():  # there are few different courses
            for letter, times in zip(letters, zip(*all_seconds, strict=True), strict=True):
                self._stage_histograms(Stage(letter).label).observe_all(times)

    def _compare_predictions(self, units: Iterable[Timeline]) -> None:
        """Compare prediction and result of prefills that succeeded at the first attempt."""
        ratios: list[float] = []
        predicted = found = 0
        for timeline in units:
            prediction, usage = timeline.prediction, timeline.usage
            if prediction is None or timeline.attempts != 1 or usage.prompt_tokens is None:
                continue
            if (place := timeline.course.find(_PREFILL)) < 0:
                continue
            ratios.append(timeline.spent_seconds_by_stage[place] / max(1e-6, prediction.predicted_seconds))
            if (cached := usage.cached_tokens) is not None:
                predicted += prediction.cached_tokens
                found += cached
        if ratios:
            self._ratio.observe_all(ratios)
            self._hits("predicted").inc(predicted)
            self._hits("found").inc(found)

    def _count_choices(self, units: Iterable[Timeline]) -> None:
        attempts = chain.from_iterable(map(_HISTORY, units))
        for reasons, count in count_values(map(_REASONS, attempts)):
            for role, reason in zip(CHOOSING_ROLES, reasons, strict=True):
                if reason is not None:
                    self._choices(role, reason).inc(count)


class AccessLog(RequestListener):
    """Writes the access line of each request."""

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        access_lines(map(_ENDED, ended), map(access_line, map(_FACTS, ended)))


def count_values(counted_items: Iterable[_Item]) -> list[tuple[_Item, int]]:
    """Return the number of each value. For some hundred values of few kinds, a Counter takes longer."""
    found = list(counted_items)
    kinds = set(found)
    return [*zip(kinds, map(found.count, kinds), strict=True)]
