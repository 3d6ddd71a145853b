"""Listens to requests and makes their spans after their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.common.terms import Stage
from proxy.observe.logs import monotonic_zero
from proxy.observe.observers import RequestListener
from proxy.observe.trace import TRACEPARENT, Trace
from proxy.observe.tracing import spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import AttemptRecord
    from proxy.observe.trace import TracedLeg, Traces
    from proxy.observe.tracing.collector import SpanIds
    from proxy.observe.tracing.spans import Attributes, TracedGateway

_W3C: Final = TraceContextTextMapPropagator()


class Tracer(RequestListener):
    """Gives each request its place in a trace, and exports sampled ones.

    Only the ids must be known while a request runs. All spans are made from its record after its end.
    """

    def __init__(self, provider: TracerProvider, ids: SpanIds, traces: Traces, traced: TracedGateway) -> None:
        """Keep the parts.

        `provider` decides which requests are sampled. `traces`: running traces, which legs look up.
        """
        self._tracer = provider.get_tracer("pdproxy", __version__)
        self._ids = ids
        self._traces = traces
        self.traced = traced
        self._open: dict[str, tuple[Span, float]] = {}
        """Spans of the requests in `traces`, each with the system time at 0 of its clock."""

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """See RequestListener."""
        zero = monotonic_zero()
        span = self._tracer.start_span(
            spans.operation(record.api),
            _W3C.extract(headers, Context()),
            SpanKind.SERVER,
            spans.request_start(self.traced, record.api),
            start_time=_ns(zero + record.started),
        )
        context: dict[str, str] = {}
        _W3C.inject(context, set_span_in_context(span, Context()))
        record.context = context
        if span.is_recording():
            name = context[TRACEPARENT]
            record.trace = self._traces[name] = Trace(name, record.clock, self._ids.generate_span_id)
            self._open[name] = span, zero

    def request_ended(self, record: RequestRecord) -> None:
        """See RequestListener."""
        trace = record.trace
        if trace is None:
            return
        del self._traces[trace.traceparent]
        span, zero = self._open.pop(trace.traceparent)
        _RequestSpans(self, record, span, zero).make(trace.legs)

    def begin(
        self,
        name: str,
        parent: Span,
        kind: SpanKind,
        attributes: Attributes | None,
        started_ns: int,
        span_id: int | None = None,
    ) -> Span:
        """Start a span below another one. `span_id`: id that engines know; None: they know none."""
        self._ids.next_span_id = span_id
        return self._tracer.start_span(name, set_span_in_context(parent, Context()), kind, attributes, None, started_ns)


class _RequestSpans:
    """Makes the spans of one finished request."""

    def __init__(self, tracer: Tracer, record: RequestRecord, root: Span, zero: float) -> None:
        """Keep the parts. `root`: span of the request. `zero`: system time at 0 of its clock."""
        self._tracer = tracer
        self._record = record
        self._root = root
        self._zero = zero

    def make(self, legs: Sequence[TracedLeg]) -> None:
        """Make the spans of queueing, attempts and legs, and end the span of the request.

        `legs`: all requests to engines. The exporter gets each span at its end.
        """
        record, root, traced = self._record, self._root, self._tracer.traced
        left = list(legs)
        for unit, timeline in enumerate(record.timelines):
            for began, ended in spans.queue_times(timeline, record.ended):
                self._begin("queue", root, began).end(self._ns(ended))
            each = timeline.history
            for number, attempt in enumerate(each, 1):
                attributes = spans.of_attempt(traced, attempt, number, unit)
                left = self._attempt(attempt, attributes, left, is_last=number == len(each))
        for leg in left:
            self._leg(leg, root, is_of_attempt=False)
        if (model := spans.model_of(record)) is not None:
            root.update_name(f"{spans.operation(record.api)} {model}")
        root.set_attributes(spans.of_request(traced, record, legs))
        if record.error is not None:
            root.set_attribute("error.type", spans.error_type(record.error))
            if spans.is_failure(record.outcome):
                root.set_status(_error(spans.failure_of(record.error)[1]))
        root.end(self._ns(record.ended))

    def _attempt(
        self, attempt: AttemptRecord, attributes: Attributes, legs: list[TracedLeg], *, is_last: bool
    ) -> list[TracedLeg]:
        """Make the span of an attempt and of its legs; return the other legs."""
        record = self._record
        course = [times for times in spans.stages_of(attempt.marks, record.ended) if times[0] is not Stage.QUEUE]
        if not course:
            return legs
        began, ended = course[0][1], course[-1][2]
        span = self._begin("attempt", self._root, began, attributes=attributes)
        for stage, entered, _ in course:
            span.add_event(stage.label, timestamp=self._ns(entered))
        if (failure := self._failure(attempt, is_last=is_last)) is not None:
            span.set_attribute("error.type", failure[0])
            span.set_status(_error(failure[1]))
        is_only_unit = len(record.timelines) == 1
        others = []
        for leg in legs:
            if spans.is_sent_in(leg, attempt, began, ended, is_only_unit=is_only_unit):
                self._leg(leg, span, is_of_attempt=True)
            else:
                others.append(leg)
        span.end(self._ns(ended))
        return others

    def _failure(self, attempt: AttemptRecord, *, is_last: bool) -> tuple[str, str] | None:
        """Return `error.type` and a sentence, or None if the attempt has not failed."""
        if attempt.failure is not None:
            kind, instance = attempt.failure
            return kind, f"{instance}: {kind}"
        if not is_last:
            return "_OTHER", "no instance could go on with it"
        return None if self._record.error is None else spans.failure_of(self._record.error)

    def _leg(self, leg: TracedLeg, parent: Span, *, is_of_attempt: bool) -> None:
        attributes = spans.of_leg(self._tracer.traced, self._record, leg, is_of_attempt=is_of_attempt)
        name = leg.backend.role.value if is_of_attempt else f"POST {leg.path}"
        span = self._begin(name, parent, leg.began, SpanKind.CLIENT, attributes, leg.span_id)
        if (kind := attributes.get("error.type")) is not None:
            span.set_status(_error(getattr(leg.error, "message", f"the engine answered with status {kind}")))
        span.end(self._ns(self._record.ended if leg.ended is None else leg.ended))

    def _begin(
        self,
        name: str,
        parent: Span,
        began: float,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        span_id: int | None = None,
    ) -> Span:
        return self._tracer.begin(name, parent, kind, attributes, self._ns(began), span_id)

    def _ns(self, seconds: float) -> int:
        return _ns(self._zero + seconds)


def _error(description: str) -> Status:
    return Status(StatusCode.ERROR, description)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
