"""Spans for OpenTelemetry: requests, attempts and legs, made from records after their end. Needs the extra `otel`.

Contents of spans have established names. Requests and legs use OpenTelemetry's semantic conventions for HTTP and
generative AI (opentelemetry.io/docs/specs/semconv). Prefill and decode use the names of llm-d where it has one
(llm-d-router: pkg/telemetry). Other names begin with `pdproxy.`. No span has a prompt or a completion.
"""

from __future__ import annotations

from asyncio import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.common.backend import Role
from proxy.common.errors import ClientStalled, GatewayError, UpstreamError
from proxy.common.terms import Stage
from proxy.observe.logs import monotonic_zero
from proxy.observe.observers import RequestListener
from proxy.observe.record import TRACEPARENT, RequestTrace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from proxy.observe.collector import SpanIds
    from proxy.observe.record import RequestOutcome, RequestRecord, TracedLeg, Traces
    from proxy.observe.timeline import AttemptRecord, Marks, Timeline

    Attributes = dict[str, str | int | float | bool]

_OPERATIONS: Final = {"completions": "text_completion", "generate": "text_completion"}
_MAX_MODEL_CHARS: Final = 256
_MS: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGateway:
    """Facts about all requests of a gateway."""

    connector_name: str
    engine_kind: str | None
    """Software of the engines; None if the connector serves several."""
    routes_by_api: Mapping[str, str]
    """Paths of the dialects, by label."""


# Requests


def operation_name(api: str) -> str:
    """Return `gen_ai.operation.name` for a dialect's label."""
    return _OPERATIONS.get(api, "chat")


def start_attributes(traced_gateway: TracedGateway, api: str) -> Attributes:
    """Return the attributes of a new request, which samplers can use."""
    route = traced_gateway.routes_by_api.get(api, "")
    return {
        "http.request.method": "POST",
        "http.route": route,
        "url.path": route,
        "gen_ai.operation.name": operation_name(api),
    }


def model_of(record: RequestRecord) -> str | None:
    """Return the name of the model, if it is a text."""
    return record.model[:_MAX_MODEL_CHARS] if isinstance(record.model, str) and record.model else None


def request_attributes(traced_gateway: TracedGateway, record: RequestRecord, legs: Sequence[TracedLeg]) -> Attributes:
    """Return the attributes of a finished request: tokens, attempts and outcome."""
    facts = record.facts
    attributes: Attributes = {
        "gen_ai.request.stream": facts.stream,
        "gen_ai.usage.input_tokens": facts.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": facts.cached_tokens,
        "gen_ai.usage.output_tokens": facts.completion_tokens,
        "http.response.status_code": facts.code,
        "llm_d.pd_proxy.connector": traced_gateway.connector_name,
        "llm_d.pd_proxy.disaggregation_used": any(
            timeline.prefiller != "-" and timeline.decoder != "-" for timeline in record.timelines
        ),
        "llm_d.pd_proxy.total_duration_ms": facts.duration_seconds * _MS,
        "pdproxy.request_id": facts.request_id,
        "pdproxy.term": facts.term,
        "pdproxy.units": facts.units,
        "pdproxy.attempts": facts.attempts,
        "pdproxy.resumes": facts.resumes,
        **_model_and_provider(traced_gateway, record),
    }
    if facts.key != "-":
        attributes["pdproxy.key"] = facts.key
    if facts.first_token_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = facts.first_token_seconds
    if decodes := [leg.began_at for leg in legs if leg.backend.role is Role.DECODE and leg.request_id]:
        # as in llm-d: the time until the decoder is asked
        attributes["llm_d.pd_proxy.true_ttft_ms"] = (min(decodes) - record.started) * _MS
    if facts.lost_engines:
        attributes["pdproxy.lost_engines"] = facts.lost_engines
    return attributes


def error_type(error: BaseException) -> str:
    """Return `error.type` of a request that ended with this error: the error code, if clients get one."""
    if isinstance(error, GatewayError):
        return error.code
    if isinstance(error, ClientStalled):
        return "client_stalled"
    if isinstance(error, CancelledError | ConnectionError):
        return "client_left"
    return type(error).__name__


def is_failure(outcome: RequestOutcome) -> bool:
    """Return whether a request that ended with an error has failed, by the semantic conventions.

    A server's status 4xx is no failure. An answer that the client did not wait for is one.
    """
    return outcome.termination_code[0] in "Cc" or outcome.broken_stream_labels is not None or outcome.status >= 500


# Attempts


def attempt_attributes(traced_gateway: TracedGateway, attempt: AttemptRecord, number: int, unit: int) -> Attributes:
    """Return the attributes of an attempt. `number`: counted from 1. `unit`: index of the request's unit."""
    attributes: Attributes = {
        "llm_d.pd_proxy.connector": traced_gateway.connector_name,
        "pdproxy.attempt.number": number,
        "pdproxy.attempt.kind": "resume" if attempt.continues_answer else "retry" if number > 1 else "first",
        "pdproxy.unit": unit,
    }
    for name, value in (
        ("llm_d.pd_proxy.prefill_target", attempt.prefiller),
        ("llm_d.pd_proxy.decode.target", attempt.decoder),
        ("pdproxy.prefill.request_id", attempt.prefill_id),
        ("pdproxy.decode.request_id", attempt.decode_id),
        ("pdproxy.kv", attempt.kv),
    ):
        if value != "-":
            attributes[name] = value
    return attributes


def stages_of(stage_marks: Marks, ended_at: float) -> Iterator[tuple[Stage, float, float]]:
    """Yield the stages of an attempt, each with its start and end in clock seconds.

    `ended_at`: end of the last stage, if it has none.
    """
    for (stage, began), (_, ended) in zip(stage_marks, (*stage_marks[1:], (None, ended_at)), strict=True):
        if stage is not None:
            yield stage, began, ended


def queue_times(timeline: Timeline, ended_at: float) -> Iterator[tuple[float, float]]:
    """Yield the times of a unit in the queue."""
    every = [stage for attempt in timeline.history or (timeline,) for stage in stages_of(attempt.stage_marks, ended_at)]
    queued = [(began, ended) for stage, began, ended in every if stage is Stage.QUEUE]
    # Of the wait before the first attempt, only the length is kept.
    before = timeline.seconds_by_stage.get(Stage.QUEUE, 0.0) - sum(ended - began for began, ended in queued)
    if timeline.attempts and every and before > 1e-6:
        first = every[0][1]
        yield first - before, first
    yield from queued


# Legs


def is_sent_in(leg: TracedLeg, attempt: AttemptRecord, began_at: float, ended_at: float, *, is_only_unit: bool) -> bool:
    """Return whether a leg was sent in this attempt.

    The id of the leg shows it. Requests with other ids, to an encoder or another prefiller, are assigned by their time.
    """
    if leg.request_id is None:
        return False
    if leg.request_id in (attempt.prefill_id, attempt.decode_id):
        return True
    return is_only_unit and leg.backend.role is not Role.DECODE and began_at <= leg.began_at <= ended_at


def leg_attributes(
    traced_gateway: TracedGateway, record: RequestRecord, leg: TracedLeg, *, is_of_attempt: bool
) -> Attributes:
    """Return the attributes of one request to one engine.

    `is_of_attempt`: the request belongs to an attempt, and is not a side request such as a release of KV cache.
    """
    backend, role = leg.backend, leg.backend.role
    attributes: Attributes = {
        "http.request.method": "POST",
        "url.full": f"{backend.url}{leg.path}",
        "server.address": backend.host,
        "server.port": backend.port,
        "pdproxy.role": role.value,
    }
    if leg.status:
        attributes["http.response.status_code"] = leg.status
    if leg.error is not None:
        attributes["error.type"] = leg.error.failure.value
    elif leg.status >= 400:
        attributes["error.type"] = str(leg.status)
    elif not leg.is_body_complete:
        attributes["pdproxy.cancelled"] = True
    if not is_of_attempt:
        return attributes
    assert leg.request_id is not None
    attributes |= {
        "gen_ai.operation.name": operation_name(record.api),
        "llm_d.pd_proxy.request_id": leg.request_id,
        **_model_and_provider(traced_gateway, record),
    }
    duration_ms = ((leg.ended or record.ended) - leg.began_at) * _MS
    if role is Role.PREFILL:
        attributes["llm_d.pd_proxy.prefill.duration_ms"] = duration_ms
        if leg.status:
            attributes["llm_d.pd_proxy.prefill.status_code"] = leg.status
    elif role is Role.DECODE:
        attributes["llm_d.pd_proxy.decode.duration_ms"] = duration_ms
        attributes["llm_d.pd_proxy.decode.streaming"] = record.stream
    return attributes


def _model_and_provider(traced_gateway: TracedGateway, record: RequestRecord) -> Attributes:
    """Return the attributes that name the model and the software of the engines."""
    attributes: Attributes = {}
    if (model := model_of(record)) is not None:
        attributes["gen_ai.request.model"] = model
    if traced_gateway.engine_kind is not None:
        attributes["gen_ai.provider.name"] = traced_gateway.engine_kind.lower()
    return attributes


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Return `error.type` and a sentence for the failure of the last attempt."""
    kind = error.failure.value if isinstance(error, UpstreamError) else error_type(error)
    return kind, str(getattr(error, "message", kind))


_W3C: Final = TraceContextTextMapPropagator()


class RequestTracer(RequestListener):
    """Gives each request its place in a trace, and exports sampled ones.

    Only the ids must be known while a request runs. All spans are made from its record after its end.
    """

    def __init__(self, provider: TracerProvider, ids: SpanIds, traces: Traces, traced: TracedGateway) -> None:
        """Create the tracer.

        `provider` decides which requests are sampled. `traces`: running traces, which legs look up.
        """
        self._sdk_tracer = provider.get_tracer("pdproxy", __version__)
        self._span_ids = ids
        self._running_traces = traces
        self.traced_gateway = traced
        self._open_spans: dict[str, tuple[Span, float]] = {}
        """Spans of the requests in `traces`, each with the system time at 0 of its clock."""

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        zero = monotonic_zero()
        span = self._sdk_tracer.start_span(
            operation_name(record.api),
            _W3C.extract(headers, Context()),
            SpanKind.SERVER,
            start_attributes(self.traced_gateway, record.api),
            start_time=_nanoseconds(zero + record.started),
        )
        context: dict[str, str] = {}
        _W3C.inject(context, set_span_in_context(span, Context()))
        record.trace_context = context
        if span.is_recording():
            name = context[TRACEPARENT]
            record.request_trace = self._running_traces[name] = RequestTrace(
                name, record.clock, self._span_ids.generate_span_id
            )
            self._open_spans[name] = span, zero

    def request_ended(self, record: RequestRecord) -> None:
        trace = record.request_trace
        if trace is None:
            return
        del self._running_traces[trace.traceparent]
        span, zero = self._open_spans.pop(trace.traceparent)
        _RequestSpans(self, record, span, zero).make_spans(trace.traced_legs)

    def begin_span(
        self,
        name: str,
        parent: Span,
        started_ns: int,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        span_id: int | None = None,
    ) -> Span:
        """Start a span below another one. `span_id`: id that engines know; None: they know none."""
        self._span_ids.next_span_id = span_id
        return self._sdk_tracer.start_span(
            name, set_span_in_context(parent, Context()), kind, attributes, None, started_ns
        )


class _RequestSpans:
    """Makes the spans of one finished request."""

    def __init__(self, tracer: RequestTracer, record: RequestRecord, root: Span, zero: float) -> None:
        """Keep the parts. `root`: span of the request. `zero`: system time at 0 of its clock."""
        self._tracer = tracer
        self._record = record
        self._root_span = root
        self._clock_zero = zero

    def make_spans(self, legs: Sequence[TracedLeg]) -> None:
        """Make the spans of queueing, attempts and legs, and end the span of the request.

        `legs`: all requests to engines. The exporter gets each span at its end.
        """
        record, root, traced = self._record, self._root_span, self._tracer.traced_gateway
        left = list(legs)
        for unit, timeline in enumerate(record.timelines):
            for began, ended in queue_times(timeline, record.ended):
                self._tracer.begin_span("queue", root, self._to_nanoseconds(began)).end(self._to_nanoseconds(ended))
            each = timeline.history
            for number, attempt in enumerate(each, 1):
                attributes = attempt_attributes(traced, attempt, number, unit)
                left = self._make_attempt_span(attempt, attributes, left, is_last=number == len(each))
        for leg in left:
            self._make_leg_span(leg, root, is_of_attempt=False)
        if (model := model_of(record)) is not None:
            root.update_name(f"{operation_name(record.api)} {model}")
        root.set_attributes(request_attributes(traced, record, legs))
        if record.error is not None:
            root.set_attribute("error.type", error_type(record.error))
            if is_failure(record.outcome):
                root.set_status(_error_status(describe_failure(record.error)[1]))
        root.end(self._to_nanoseconds(record.ended))

    def _make_attempt_span(
        self, attempt: AttemptRecord, attributes: Attributes, legs: list[TracedLeg], *, is_last: bool
    ) -> list[TracedLeg]:
        """Make the span of an attempt and of its legs; return the other legs."""
        record = self._record
        course = [times for times in stages_of(attempt.stage_marks, record.ended) if times[0] is not Stage.QUEUE]
        if not course:
            return legs
        began, ended = course[0][1], course[-1][2]
        span = self._tracer.begin_span("attempt", self._root_span, self._to_nanoseconds(began), attributes=attributes)
        for stage, entered, _ in course:
            span.add_event(stage.label, timestamp=self._to_nanoseconds(entered))
        if (failure := self._describe_failure(attempt, is_last=is_last)) is not None:
            span.set_attribute("error.type", failure[0])
            span.set_status(_error_status(failure[1]))
        is_only_unit = len(record.timelines) == 1
        others = []
        for leg in legs:
            if is_sent_in(leg, attempt, began, ended, is_only_unit=is_only_unit):
                self._make_leg_span(leg, span, is_of_attempt=True)
            else:
                others.append(leg)
        span.end(self._to_nanoseconds(ended))
        return others

    def _describe_failure(self, attempt: AttemptRecord, *, is_last: bool) -> tuple[str, str] | None:
        """Return `error.type` and a sentence, or None if the attempt has not failed."""
        if attempt.failure is not None:
            kind, instance, message = attempt.failure
            return kind, f"{instance}: {message}"
        if not is_last:
            return "_OTHER", "no instance could go on with it"
        return None if self._record.error is None else describe_failure(self._record.error)

    def _make_leg_span(self, leg: TracedLeg, parent: Span, *, is_of_attempt: bool) -> None:
        attributes = leg_attributes(self._tracer.traced_gateway, self._record, leg, is_of_attempt=is_of_attempt)
        name = leg.backend.role.value if is_of_attempt else f"POST {leg.path}"
        span = self._tracer.begin_span(
            name, parent, self._to_nanoseconds(leg.began_at), SpanKind.CLIENT, attributes, leg.span_id
        )
        if (kind := attributes.get("error.type")) is not None:
            span.set_status(_error_status(getattr(leg.error, "message", f"the engine answered with status {kind}")))
        span.end(self._to_nanoseconds(self._record.ended if leg.ended is None else leg.ended))

    def _to_nanoseconds(self, seconds: float) -> int:
        return _nanoseconds(self._clock_zero + seconds)


def _error_status(description: str) -> Status:
    return Status(StatusCode.ERROR, description)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
