"""What is in a span, by the names that others look for.

Of requests and legs those of OpenTelemetry's semantic conventions for HTTP and for generative AI
(opentelemetry.io/docs/specs/semconv); of what is particular to prefill and decode llm-d's, where it has a name for the
same thing (llm-d-router: pkg/telemetry); the rest begins with `pdproxy.`. No prompt and no completion.
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
class Traced:
    """What is true of all requests of a gateway."""

    connector: str
    engine: str | None
    """The software behind the connector; None: any."""
    routes: Mapping[str, str]
    """The path of each dialect, by its label."""


# Requests


def operation(api: str) -> str:
    """GenAI's `gen_ai.operation.name` for a dialect's label."""
    return _OPERATIONS.get(api, "chat")


def beginning(traced: Traced, api: str) -> Attributes:
    """What is known of a request when it comes: samplers may look at it."""
    route = traced.routes.get(api, "")
    return {
        "http.request.method": "POST",
        "http.route": route,
        "url.path": route,
        "gen_ai.operation.name": operation(api),
    }


def model_of(record: RequestRecord) -> str | None:
    """The model's name, if it is one that can be told."""
    return record.model[:_MAX_MODEL_CHARS] if isinstance(record.model, str) and record.model else None


def of_request(traced: Traced, record: RequestRecord, legs: Sequence[TracedLeg]) -> Attributes:
    """The attributes of a request's own span when it has ended: tokens, attempts and outcome."""
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
        # As llm-d has it: until the decoder is asked.
        found["llm_d.pd_proxy.true_ttft_ms"] = (min(decodes) - record.started) * _MS
    if facts.lost_engines:
        found["pdproxy.lost_engines"] = facts.lost_engines
    return found


def error_type(error: BaseException) -> str:
    """`error.type` of a request that ended by this: the code of the error where clients are told one."""
    if isinstance(error, GatewayError):
        return error.code
    if isinstance(error, ClientStalled):
        return "client_stalled"
    if isinstance(error, CancelledError | ConnectionError):
        return "client_left"
    return type(error).__name__


def is_failure(outcome: Outcome) -> bool:
    """Whether a request that ended by an error has failed, and was not only refused for what the client sent: as the
    conventions have it, a status 4xx of a server is no failure, and an answer that the client did not wait for is one.
    """
    return outcome.term[0] in "Cc" or outcome.broken is not None or outcome.status >= 500


# Attempts


def of_attempt(traced: Traced, attempt: AttemptRecord, number: int, unit: int) -> Attributes:
    """`number`: from 1. `unit`: which of the request's, from 0."""
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


def stretches(marks: Marks, over: float) -> Iterator[tuple[Stage, float, float]]:
    """The stages of an attempt, each with the clock's seconds from which and until when. `over`: where none is told."""
    for (stage, began), (_, ended) in zip(marks, (*marks[1:], (None, over)), strict=True):
        if stage is not None:
            yield stage, began, ended


def waits(timeline: Timeline, over: float) -> Iterator[tuple[float, float]]:
    """When a unit was in the queue."""
    every = [stretch for attempt in timeline.history or (timeline,) for stretch in stretches(attempt.marks, over)]
    queued = [(began, ended) for stage, began, ended in every if stage is Stage.QUEUE]
    # Of the wait before the first attempt only its length is kept.
    before = timeline.seconds.get(Stage.QUEUE, 0.0) - sum(ended - began for began, ended in queued)
    if timeline.attempts and every and before > 1e-6:
        first = every[0][1]
        yield first - before, first
    yield from queued


# Legs


def is_sent_in(leg: TracedLeg, attempt: AttemptRecord, began: float, ended: float, *, is_only_unit: bool) -> bool:
    """Whether a leg was sent in this attempt, which is told by its id; of what is asked under other ids, an encoder or
    another prefiller, by the time.
    """
    if leg.request_id is None:
        return False
    if leg.request_id in (attempt.prefill_id, attempt.decode_id):
        return True
    return is_only_unit and leg.backend.role is not Role.DECODE and began <= leg.began <= ended


def of_leg(traced: Traced, record: RequestRecord, leg: TracedLeg, *, is_of_attempt: bool) -> Attributes:
    """The attributes of the span of one request to one engine. `is_of_attempt`: it belongs to an attempt, and is not an
    extra question such as the release of KV cache.
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


def _who(traced: Traced, record: RequestRecord) -> Attributes:
    found: Attributes = {}
    if (model := model_of(record)) is not None:
        found["gen_ai.request.model"] = model
    if traced.engine is not None:
        found["gen_ai.provider.name"] = traced.engine.lower()
    return found


def _hands_over(timeline: Timeline) -> bool:
    return timeline.prefiller != "-" and timeline.decoder != "-"


def failure_of(error: BaseException) -> tuple[str, str]:
    """`error.type` and a sentence for what ended the last attempt."""
    kind = error.failure.value if isinstance(error, UpstreamError) else error_type(error)
    return kind, str(getattr(error, "message", kind))
