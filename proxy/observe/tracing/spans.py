"""Contents of spans, under established names.

Requests and legs use OpenTelemetry's semantic conventions for HTTP and generative AI
(opentelemetry.io/docs/specs/semconv). Prefill and decode use the names of llm-d where it has one (llm-d-router:
pkg/telemetry). Other names begin with `pdproxy.`. No span has a prompt or a completion.
"""

from __future__ import annotations

from asyncio import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Role
from proxy.common.errors import ClientStalled, GatewayError, UpstreamError
from proxy.common.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.observe.record import Outcome, RequestRecord
    from proxy.observe.timeline import AttemptRecord, Marks, Timeline
    from proxy.observe.trace import TracedLeg

    Attributes = dict[str, str | int | float | bool]

_OPERATIONS: Final = {"completions": "text_completion", "generate": "text_completion"}
_MAX_MODEL_CHARS: Final = 256
_MS: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGateway:
    """Facts about all requests of a gateway."""

    connector: str
    engine: str | None
    """Software of the engines; None if the connector serves several."""
    routes: Mapping[str, str]
    """Paths of the dialects, by label."""


# Requests


def operation(api: str) -> str:
    """Return `gen_ai.operation.name` for a dialect's label."""
    return _OPERATIONS.get(api, "chat")


def request_start(traced: TracedGateway, api: str) -> Attributes:
    """Return the attributes of a new request, which samplers can use."""
    route = traced.routes.get(api, "")
    return {
        "http.request.method": "POST",
        "http.route": route,
        "url.path": route,
        "gen_ai.operation.name": operation(api),
    }


def model_of(record: RequestRecord) -> str | None:
    """Return the name of the model, if it is a text."""
    return record.model[:_MAX_MODEL_CHARS] if isinstance(record.model, str) and record.model else None


def of_request(traced: TracedGateway, record: RequestRecord, legs: Sequence[TracedLeg]) -> Attributes:
    """Return the attributes of a finished request: tokens, attempts and outcome."""
    facts = record.facts
    found: Attributes = {
        "gen_ai.request.stream": facts.stream,
        "gen_ai.usage.input_tokens": facts.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": facts.cached_tokens,
        "gen_ai.usage.output_tokens": facts.completion_tokens,
        "http.response.status_code": facts.code,
        "llm_d.pd_proxy.connector": traced.connector,
        "llm_d.pd_proxy.disaggregation_used": any(_hands_over(timeline) for timeline in record.timelines),
        "llm_d.pd_proxy.total_duration_ms": facts.duration_seconds * _MS,
        "pdproxy.request_id": facts.request_id,
        "pdproxy.term": facts.term,
        "pdproxy.units": facts.units,
        "pdproxy.attempts": facts.attempts,
        "pdproxy.resumes": facts.resumes,
        **_who(traced, record),
    }
    if facts.key != "-":
        found["pdproxy.key"] = facts.key
    if facts.first_token_seconds is not None:
        found["gen_ai.response.time_to_first_chunk"] = facts.first_token_seconds
    if decodes := [leg.began for leg in legs if leg.backend.role is Role.DECODE and leg.request_id]:
        # as in llm-d: the time until the decoder is asked
        found["llm_d.pd_proxy.true_ttft_ms"] = (min(decodes) - record.started) * _MS
    if facts.lost_engines:
        found["pdproxy.lost_engines"] = facts.lost_engines
    return found


def error_type(error: BaseException) -> str:
    """Return `error.type` of a request that ended with this error: the error code, if clients get one."""
    if isinstance(error, GatewayError):
        return error.code
    if isinstance(error, ClientStalled):
        return "client_stalled"
    if isinstance(error, CancelledError | ConnectionError):
        return "client_left"
    return type(error).__name__


def is_failure(outcome: Outcome) -> bool:
    """Return whether a request that ended with an error has failed, by the semantic conventions.

    A server's status 4xx is no failure. An answer that the client did not wait for is one.
    """
    return outcome.term[0] in "Cc" or outcome.broken is not None or outcome.status >= 500


# Attempts


def of_attempt(traced: TracedGateway, attempt: AttemptRecord, number: int, unit: int) -> Attributes:
    """Return the attributes of an attempt. `number`: counted from 1. `unit`: index of the request's unit."""
    found: Attributes = {
        "llm_d.pd_proxy.connector": traced.connector,
        "pdproxy.attempt.number": number,
        "pdproxy.attempt.kind": "resume" if attempt.continues else "retry" if number > 1 else "first",
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
            found[name] = value
    return found


def stages_of(marks: Marks, over: float) -> Iterator[tuple[Stage, float, float]]:
    """Yield the stages of an attempt, each with its start and end in clock seconds.

    `over`: end of the last stage, if it has none.
    """
    for (stage, began), (_, ended) in zip(marks, (*marks[1:], (None, over)), strict=True):
        if stage is not None:
            yield stage, began, ended


def queue_times(timeline: Timeline, over: float) -> Iterator[tuple[float, float]]:
    """Yield the times of a unit in the queue."""
    every = [stage for attempt in timeline.history or (timeline,) for stage in stages_of(attempt.marks, over)]
    queued = [(began, ended) for stage, began, ended in every if stage is Stage.QUEUE]
    # Of the wait before the first attempt, only the length is kept.
    before = timeline.seconds.get(Stage.QUEUE, 0.0) - sum(ended - began for began, ended in queued)
    if timeline.attempts and every and before > 1e-6:
        first = every[0][1]
        yield first - before, first
    yield from queued


# Legs


def is_sent_in(leg: TracedLeg, attempt: AttemptRecord, began: float, ended: float, *, is_only_unit: bool) -> bool:
    """Return whether a leg was sent in this attempt.

    The id of the leg shows it. Requests with other ids, to an encoder or another prefiller, are assigned by their time.
    """
    if leg.request_id is None:
        return False
    if leg.request_id in (attempt.prefill_id, attempt.decode_id):
        return True
    return is_only_unit and leg.backend.role is not Role.DECODE and began <= leg.began <= ended


def of_leg(traced: TracedGateway, record: RequestRecord, leg: TracedLeg, *, is_of_attempt: bool) -> Attributes:
    """Return the attributes of one request to one engine.

    `is_of_attempt`: the request belongs to an attempt, and is not a side request such as a release of KV cache.
    """
    backend, role = leg.backend, leg.backend.role
    found: Attributes = {
        "http.request.method": "POST",
        "url.full": f"{backend.url}{leg.path}",
        "server.address": backend.host,
        "server.port": backend.port,
        "pdproxy.role": role.value,
    }
    if leg.status:
        found["http.response.status_code"] = leg.status
    if leg.error is not None:
        found["error.type"] = leg.error.failure.value
    elif leg.status >= 400:
        found["error.type"] = str(leg.status)
    elif not leg.is_whole:
        found["pdproxy.cancelled"] = True
    if not is_of_attempt:
        return found
    assert leg.request_id is not None
    found |= {
        "gen_ai.operation.name": operation(record.api),
        "llm_d.pd_proxy.request_id": leg.request_id,
        **_who(traced, record),
    }
    duration_ms = ((leg.ended or record.ended) - leg.began) * _MS
    if role is Role.PREFILL:
        found["llm_d.pd_proxy.prefill.duration_ms"] = duration_ms
        if leg.status:
            found["llm_d.pd_proxy.prefill.status_code"] = leg.status
    elif role is Role.DECODE:
        found["llm_d.pd_proxy.decode.duration_ms"] = duration_ms
        found["llm_d.pd_proxy.decode.streaming"] = record.stream
    return found


def _who(traced: TracedGateway, record: RequestRecord) -> Attributes:
    found: Attributes = {}
    if (model := model_of(record)) is not None:
        found["gen_ai.request.model"] = model
    if traced.engine is not None:
        found["gen_ai.provider.name"] = traced.engine.lower()
    return found


def _hands_over(timeline: Timeline) -> bool:
    return timeline.prefiller != "-" and timeline.decoder != "-"


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return `error.type` and a sentence for the failure of the last attempt."""
    kind = error.failure.value if isinstance(error, UpstreamError) else error_type(error)
    return kind, str(getattr(error, "message", kind))
