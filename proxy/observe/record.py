"""Course and outcome of one request, without prompt and completion."""

from __future__ import annotations

import time
from asyncio import CancelledError
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.common.errors import ClientStalled, Failure, GatewayError, ShuttingDown, UpstreamError
from proxy.common.terms import Stage
from proxy.observe.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.common.backend import Backend

    Traces = dict[str, "RequestTrace"]
    """Traces of the running sampled requests, by `traceparent`."""


_REPORTED_FAILURES: Final = (Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.RECOMPUTED)


class RequestOutcome(NamedTuple):
    """The outcome of one request."""

    termination_code: str
    """Termination state of two letters: the side that ended the request, and the stage.

    The first letter: `-` complete; C the client left; c the client stalled; S an engine failed; s an engine was too
    slow; P the gateway refused; K a shutdown cut the answer. The second is the stage; R while the request was read.
    """
    status: int
    """Status for log and metrics; 499 if the client left before there was one."""
    broken_stream_labels: tuple[str, str] | None = None
    """The side that broke off an answer after its status was sent, and the reason.

    None: the answer is complete, or nothing was sent.
    """


COMPLETE: Final = RequestOutcome("--", 200)


def outcome_of(record: RequestRecord, error: BaseException) -> RequestOutcome:
    """Return the outcome of a request that this error has ended."""
    term, status = _term_and_status(record, error)
    return RequestOutcome(term, status, _broken_stream_labels(error) if record.is_answer_begun else None)


def _term_and_status(record: RequestRecord, error: BaseException) -> tuple[str, int]:
    stage = record.current_stage.value if record.current_stage else "R"
    if isinstance(error, ClientStalled):
        return "cD", 200
    if isinstance(error, ShuttingDown) and record.is_answer_begun:
        return "KD", 200
    if isinstance(error, CancelledError | ConnectionError):  # either may be noticed first
        return "C" + stage, 200 if record.is_answer_begun else 499
    if isinstance(error, UpstreamError):
        who = "s" if error.failure is Failure.TIMEOUT else "S"
        return who + stage, 200 if record.is_answer_begun else error.status
    # GatewayError and aiohttp's HTTPException have a status. Any other error is a defect of the gateway.
    return "P" + stage, 200 if record.is_answer_begun else getattr(error, "status", 500)


def _broken_stream_labels(error: BaseException) -> tuple[str, str]:
    if isinstance(error, UpstreamError):
        return "engine", (error.failure if error.failure in _REPORTED_FAILURES else Failure.BROKEN).value
    if isinstance(error, ClientStalled):
        return "client", "write_timeout"
    if isinstance(error, ShuttingDown):
        return "gateway", "draining"
    if isinstance(error, GatewayError):
        return "gateway", "refused"
    return "client", "left"


@dataclass(slots=True, eq=False, kw_only=True)
class AccessFacts:
    """Facts about one finished request, for the access line, the receipt, the metrics and the spans.

    All values are plain, so that a receipt can keep them. A request with several units has the backends of its first
    unit, the sums of attempts, resumes and tokens, and the longest time in each stage.
    """

    request_id: str
    key: str
    """Name of the client's key; `-` if clients need no key."""
    client: str
    """Address of the client; `-` if it is unknown."""
    api: str
    """Label of the dialect."""
    stream: bool
    code: int
    """HTTP status; 499 if the client left before there was one."""
    term: str
    """Termination state; see RequestOutcome.termination_code."""
    prefiller: str
    """`host:port`; `-` if no prefiller was asked. The next three fields use `-` in the same way."""
    decoder: str
    prefill_id: str
    """Id of the request at the prefiller."""
    decode_id: str
    kv: str
    """See AttemptRecord."""
    prefill_reason: str | None
    """Reason for choosing the prefiller, one of pick.REASONS; None if none was chosen."""
    decode_reason: str | None
    units: int
    attempts: int
    resumes: int
    course: str
    """Letters of the stages that the request was in."""
    stage_seconds: Sequence[float]
    """Seconds in each stage of `course`."""
    first_token_seconds: float | None
    """Time from the request to the first part of a streamed answer; None if no part was sent."""
    duration_seconds: float
    predicted_seconds: float | None
    """Predicted time of the prefill; None if there was no prediction."""
    predicted_cached_tokens: float | None
    prompt_tokens: int
    """Tokens of the prompt. Like the next two fields, as far as engines reported them."""
    cached_tokens: int
    completion_tokens: int
    trace_id: str | None
    """None if the request is not sampled."""
    lost_engines: int
    """Number of engines that went down while serving the request."""
    error: str | None
    """Message of the error that ended the request; None if there was none."""


FACTS: Final = tuple(AccessFacts.__dataclass_fields__)
"""Names of the facts, in the order of `fact_values_of`."""
fact_values_of: Final = attrgetter(*FACTS)
"""Return the values of an AccessFacts in the order of FACTS."""

TRACEPARENT: Final = "traceparent"
"""The header with the trace context of a request (W3C Trace Context)."""

# 00-<32 digits of the trace id>-<16 digits of the span id>-<flags>
_SPAN_ID: Final = slice(36, 52)


class TracedLeg:
    """One request to one engine, sent for a sampled request."""

    def __init__(self, span_id: int, backend: Backend, path: str, request_id: str | None, began: float) -> None:
        self.span_id = span_id
        self.backend = backend
        self.path = path
        self.request_id = request_id
        """X-Request-Id that the engine was sent; None if there was none."""
        self.began_at = began
        self.ended: float | None = None
        """Clock seconds of the end; None while it runs."""
        self.status = 0
        """Status of the engine's answer; 0 if there is none."""
        self.is_body_complete = False
        """Whether the whole answer has arrived. If not, and there is no error, the gateway stopped reading."""
        self.error: UpstreamError | None = None


class RequestTrace:
    """The trace of one sampled request."""

    def __init__(self, traceparent: str, clock: Callable[[], float], new_span_id: Callable[[], int]) -> None:
        """Start the trace. `traceparent`: value of this header on the request's calls. `clock`: clock of the record."""
        self.traceparent = traceparent
        self.traced_legs: list[TracedLeg] = []
        self._clock = clock
        self._new_span_id = new_span_id

    @property
    def trace_id(self) -> str:
        """Return the trace id as 32 hexadecimal digits, the form that people search for."""
        return self.traceparent[3:35]

    def begin_leg(self, backend: Backend, path: str, headers: Mapping[str, str]) -> TracedLeg:
        """Note the start of a leg. `headers` have lower-case names."""
        leg = TracedLeg(self._new_span_id(), backend, path, headers.get("x-request-id"), self._clock())
        self.traced_legs.append(leg)
        return leg

    def end_leg(self, leg: TracedLeg, status: int, *, is_whole: bool) -> None:
        """Record the end of a leg in the trace of its request."""
        leg.ended, leg.status, leg.is_body_complete = self._clock(), status, is_whole

    def make_child_header(self, leg: TracedLeg) -> str:
        """Return the header with which the engine continues this trace, below this leg."""
        return f"{self.traceparent[: _SPAN_ID.start]}{leg.span_id:016x}{self.traceparent[_SPAN_ID.stop :]}"


_PLACES: Final = {stage: place for place, stage in enumerate(Stage)}


class RequestRecord:
    """One client request, with a Timeline for each of its units.

    While the request runs, only times are noted. All conclusions are drawn after its end.
    """

    key: str = "-"
    """Name of the client's key; `-` if clients need no key."""
    client: str = "-"
    """Address of the client, behind the trusted proxies; `-` if it is unknown."""
    model: object = None
    """The client's name of the model, of any type; None if the request names none."""
    served_model: str | None = None
    """The instances' name of the model; None if all instances serve the same model, or none serves this one."""
    stream: bool = False
    samples_per_prompt: int = 1
    """Number of answers to each prompt. Each is a unit, while the client's usage counts the prompt once."""
    first_token_seconds: float | None = None
    ended: float = 0.0
    """Clock seconds of the end; 0 before."""
    error: BaseException | None
    """The error that ended the request before its answer was complete; None if there was none."""
    lost_engines: int
    """Number of engines that went down under this request, or under an earlier copy of it, perhaps because of it."""
    is_answer_begun: bool = False
    """Whether the status and headers of a streamed answer were sent."""
    trace_context: Mapping[str, str] | None
    """Headers that pass the trace context to engines; None: the client's headers."""
    request_trace: RequestTrace | None
    """Trace of the request; None if it is not sampled."""
    outcome: RequestOutcome
    """Set by `close_record`, like `facts`."""
    facts: AccessFacts

    def __init__(
        self,
        api: str,
        request_id: str,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        """Create the record. `api`: label of the dialect. `started`: clock seconds of the request; None: now."""
        self.api = api
        self.request_id = request_id
        self.clock = clock
        self.started = clock() if started is None else started
        self.timelines: list[Timeline] = []
        # Attributes that are often read but rarely set: a class attribute takes longer to read.
        self.error = self.trace_context = self.request_trace = None
        self.lost_engines = 0

    def add_timeline(self) -> Timeline:
        """Create the timeline of one more unit of the request."""
        timeline = Timeline(self.clock)
        self.timelines.append(timeline)
        return timeline

    def record_first_token(self) -> None:
        """Note that the client was sent the first part of the answer. Later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all prompts and answers, as the client's usage counts them."""
        usages = [timeline.usage for timeline in self.timelines]
        prompts = sum([usage.prompt_tokens or 0 for usage in usages])
        return prompts // self.samples_per_prompt + sum([usage.completion_tokens or 0 for usage in usages])

    @property
    def current_stage(self) -> Stage | None:
        """Return the earliest stage that a unit is in: the stage of a request that ends now."""
        stages = [stage for timeline in self.timelines if (stage := timeline.current_stage) is not None]
        return min(stages, key=_PLACES.__getitem__, default=None)

    def close_record(self) -> None:
        """Determine the outcome and the facts of a request that has ended."""
        error = self.error
        self.outcome = outcome = COMPLETE if error is None else outcome_of(self, error)
        timelines, trace = self.timelines, self.request_trace
        prompt = cached = completion = attempts = resumes = 0
        for timeline in timelines:
            for attempt in timeline.past_attempts:
                attempt.close_attempt()
            timeline.close_attempt()
            attempts += timeline.attempts
            resumes += timeline.resumes
            usage = timeline.usage
            prompt += usage.prompt_tokens or 0
            cached += usage.cached_tokens or 0
            completion += usage.completion_tokens or 0
        if len(timelines) == 1:
            (first,) = timelines
            course, spent = first.course, first.spent_seconds_by_stage
        else:
            first = timelines[0] if timelines else Timeline(self.clock)
            seconds = longest_stage_seconds([timeline.seconds_by_stage for timeline in timelines])
            course, spent = "".join([stage.value for stage in seconds]), [*seconds.values()]
        prediction = first.prediction
        prefill_reason, decode_reason = first.reasons
        self.facts = AccessFacts(
            request_id=self.request_id,
            key=self.key,
            client=self.client,
            api=self.api,
            stream=self.stream,
            code=outcome.status,
            term=outcome.termination_code,
            prefiller=first.prefiller,
            decoder=first.decoder,
            prefill_id=first.prefill_id,
            decode_id=first.decode_id,
            kv=str(first.kv),  # reading the value of an enum's member is slow
            prefill_reason=prefill_reason,
            decode_reason=decode_reason,
            units=len(timelines),
            attempts=attempts,
            resumes=resumes,
            course=course,
            stage_seconds=spent,
            first_token_seconds=self.first_token_seconds,
            duration_seconds=self.ended - self.started,
            predicted_seconds=None if prediction is None else prediction.predicted_seconds,
            predicted_cached_tokens=None if prediction is None else prediction.cached_tokens,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            trace_id=None if trace is None else trace.trace_id,
            lost_engines=self.lost_engines,
            error=None if error is None else getattr(error, "message", None),
        )


def longest_stage_seconds(stage_seconds_by_unit: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    """Return the longest time in each stage over all units. `stage_seconds_by_unit`: seconds in each stage, by unit."""
    longest_seconds = dict(stage_seconds_by_unit[0]) if stage_seconds_by_unit else {}
    for seconds in stage_seconds_by_unit[1:]:
        for stage, spent in seconds.items():
            longest_seconds[stage] = max(spent, longest_seconds.get(stage, 0.0))
    return longest_seconds


# All fields in the order of the line. To copy them and delete a few takes a third of the time of adding each.
_LINE: Final[dict[str, object]] = dict.fromkeys(
    (
        *("id", "key", "client", "api", "stream", "code", "term", "p", "d", "p_id", "d_id", "kv", "p_why", "d_why"),
        *("units", "attempts", "resumes", "t_queue", "t_encode", "t_prefill", "t_handoff", "t_first_token", "t_stream"),
        *("ttft", "dur", "p_seconds", "p_cached", "tokens_in", "tokens_cached", "tokens_out"),
        *("trace_id", "lost_engines", "error"),
    ),
    0.0,
)
_TIMES: Final = {stage.value: f"t_{stage.label}" for stage in Stage}
_ENCODE: Final = Stage.ENCODE.value
# Times have four digits. Adding a number of this size rounds, because it has no room for fractions. round() would take
# ten times as long, because it formats and parses text.
_SCALE: Final = 1e4
_WHOLE: Final = 3.0 * 2**51


def access_line(facts: AccessFacts) -> dict[str, object]:
    """Return the fields of the line. Times are rounded to four digits."""
    fields = _LINE.copy()
    fields["id"], fields["key"], fields["client"] = facts.request_id, facts.key, facts.client
    fields["api"], fields["stream"] = facts.api, facts.stream
    fields["code"], fields["term"] = facts.code, facts.term
    fields["p"], fields["d"], fields["p_id"], fields["d_id"] = (
        facts.prefiller,
        facts.decoder,
        facts.prefill_id,
        facts.decode_id,
    )
    fields["kv"] = facts.kv
    fields["units"], fields["attempts"], fields["resumes"] = facts.units, facts.attempts, facts.resumes
    course = facts.course
    for place, seconds in enumerate(facts.stage_seconds):
        fields[_TIMES[course[place]]] = (seconds * _SCALE + _WHOLE - _WHOLE) / _SCALE
    first_token = facts.first_token_seconds
    fields["ttft"] = None if first_token is None else (first_token * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["dur"] = (facts.duration_seconds * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["tokens_in"], fields["tokens_cached"], fields["tokens_out"] = (
        facts.prompt_tokens,
        facts.cached_tokens,
        facts.completion_tokens,
    )
    fields["error"] = facts.error
    if facts.prefill_reason is None:
        del fields["p_why"]
    else:
        fields["p_why"] = facts.prefill_reason
    if facts.decode_reason is None:
        del fields["d_why"]
    else:
        fields["d_why"] = facts.decode_reason
    if _ENCODE not in course:  # few fleets have encoders
        del fields["t_encode"]
    predicted = facts.predicted_seconds
    if predicted is None:
        del fields["p_seconds"], fields["p_cached"]
    else:
        # The prediction; `t_prefill` and `tokens_cached` have the real values.
        fields["p_seconds"] = (predicted * _SCALE + _WHOLE - _WHOLE) / _SCALE
        fields["p_cached"] = facts.predicted_cached_tokens
    if facts.trace_id is None:
        del fields["trace_id"]
    else:
        fields["trace_id"] = facts.trace_id
    if not facts.lost_engines:
        del fields["lost_engines"]
    else:
        fields["lost_engines"] = facts.lost_engines
    return fields
