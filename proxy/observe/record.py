"""Course and outcome of one request, without prompt and completion."""

from __future__ import annotations

import time
from asyncio import CancelledError
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.common.errors import ClientStalled, Failure, GatewayError, ShuttingDown, UpstreamError
from proxy.common.terms import Stage
from proxy.observe.access_line import AccessFacts
from proxy.observe.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.observe.trace import Trace


_TOLD_FAILURES: Final = (Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.RECOMPUTED)


class Outcome(NamedTuple):
    """The outcome of one request."""

    term: str
    """Termination state of two letters: the side that ended the request, and the stage.

    The first letter: `-` complete; C the client left; c the client stalled; S an engine failed; s an engine was too
    slow; P the gateway refused; K a shutdown cut the answer. The second is the stage; R while the request was read.
    """
    status: int
    """Status for log and metrics; 499 if the client left before there was one."""
    broken: tuple[str, str] | None = None
    """The side that broke off an answer after its status was sent, and the reason.

    None: the answer is complete, or nothing was sent.
    """


COMPLETE: Final = Outcome("--", 200)


def outcome_of(record: RequestRecord, error: BaseException) -> Outcome:
    """Return the outcome of a request that this error has ended."""
    term, status = _term_and_status(record, error)
    return Outcome(term, status, _broken(error) if record.committed else None)


def _term_and_status(record: RequestRecord, error: BaseException) -> tuple[str, int]:
    stage = record.stage.value if record.stage else "R"
    if isinstance(error, ClientStalled):
        return "cD", 200
    if isinstance(error, ShuttingDown) and record.committed:
        return "KD", 200
    if isinstance(
        error, CancelledError | ConnectionError
    ):  # the two errors are equivalent: either may be noticed first
        return "C" + stage, 200 if record.committed else 499
    if isinstance(error, UpstreamError):
        who = "s" if error.failure is Failure.TIMEOUT else "S"
        return who + stage, 200 if record.committed else error.status
    # GatewayError and aiohttp's HTTPException have a status. Any other error is a defect of the gateway.
    return "P" + stage, 200 if record.committed else getattr(error, "status", 500)


def _broken(error: BaseException) -> tuple[str, str]:
    if isinstance(error, UpstreamError):
        return "engine", (error.failure if error.failure in _TOLD_FAILURES else Failure.BROKEN).value
    if isinstance(error, ClientStalled):
        return "client", "write_timeout"
    if isinstance(error, ShuttingDown):
        return "gateway", "draining"
    if isinstance(error, GatewayError):
        return "gateway", "refused"
    return "client", "left"


_PLACES: Final = {stage: place for place, stage in enumerate(Stage)}


class RequestRecord:
    """One client request, with a Timeline for each of its units.

    While the request runs, only times are noted. All conclusions are drawn after its end.
    """

    key: str = "-"
    """Name of the client's key; `-` if clients need no key."""
    model: object = None
    """The client's name of the model, of any type; None if the request names none."""
    served_model: str | None = None
    """The instances' name of the model; None if all instances serve the same model, or none serves this one."""
    stream: bool = False
    first_token_seconds: float | None = None
    ended: float = 0.0
    """Clock seconds of the end; 0 before."""
    error: BaseException | None
    """The error that ended the request before its answer was complete; None if there was none."""
    lost_engines: int
    """Number of engines that went down under this request, or under an earlier copy of it, perhaps because of it."""
    committed: bool = False
    """Whether the status and headers of a streamed answer were sent."""
    context: Mapping[str, str] | None
    """Headers that pass the trace context to engines; None: the client's headers."""
    trace: Trace | None
    """Trace of the request; None if it is not sampled."""
    outcome: Outcome
    """Set by `close`, like `facts`."""
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
        self.error = self.context = self.trace = None
        self.lost_engines = 0

    def timeline(self) -> Timeline:
        """Create the record of one more unit."""
        timeline = Timeline(self.clock)
        self.timelines.append(timeline)
        return timeline

    def first_token(self) -> None:
        """Note that the client was sent the first part of the answer. Later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """Return the earliest stage that a unit is in: the stage of a request that ends now."""
        stages = [stage for timeline in self.timelines if (stage := timeline.stage) is not None]
        return min(stages, key=_PLACES.__getitem__, default=None)

    def close(self) -> None:
        """Determine the outcome and the facts of a request that has ended."""
        error = self.error
        self.outcome = outcome = COMPLETE if error is None else outcome_of(self, error)
        timelines, trace = self.timelines, self.trace
        prompt = cached = completion = attempts = resumes = 0
        for timeline in timelines:
            for attempt in timeline.past:
                attempt.close()
            timeline.close()
            attempts += timeline.attempts
            resumes += timeline.resumes
            usage = timeline.usage
            prompt += usage.prompt_tokens or 0
            cached += usage.cached_tokens or 0
            completion += usage.completion_tokens or 0
        if len(timelines) == 1:
            (first,) = timelines
            course, spent = first.course, first.spent
        else:
            first = timelines[0] if timelines else Timeline(self.clock)
            seconds = longest([timeline.seconds for timeline in timelines])
            course, spent = "".join([stage.value for stage in seconds]), [*seconds.values()]
        prediction = first.prediction
        prefill_reason, decode_reason = first.reasons
        self.facts = AccessFacts(
            request_id=self.request_id,
            key=self.key,
            api=self.api,
            stream=self.stream,
            code=outcome.status,
            term=outcome.term,
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
            predicted_seconds=None if prediction is None else prediction.seconds,
            predicted_cached_tokens=None if prediction is None else prediction.cached_tokens,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            trace_id=None if trace is None else trace.id,
            lost_engines=self.lost_engines,
            error=None if error is None else getattr(error, "message", None),
        )


def longest(units: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    """Return the longest time in each stage over all units. `units`: seconds in each stage, by unit."""
    found = dict(units[0]) if units else {}
    for seconds in units[1:]:
        for stage, spent in seconds.items():
            found[stage] = max(spent, found.get(stage, 0.0))
    return found
