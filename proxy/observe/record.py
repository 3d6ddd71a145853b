"""What happened to one request, and how it ended, for whoever listens. No prompt and no completion in it."""

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
    """Of one request."""

    term: str
    """Two letters: who ended it, and the stage. The first: `-` nobody, it is complete; C the client left; c the client
    stalled; S an engine failed; s an engine was too slow; P the gateway refused; K it was cut off by a shutdown. The
    second is the stage, R while the request was being read."""
    status: int
    """For log and metrics; 499 where the client left before there was one."""
    broken: tuple[str, str] | None = None
    """Which side broke an answer off whose status had been sent, and why; None: it is whole, or nothing was sent."""


COMPLETE: Final = Outcome("--", 200)


def outcome_of(record: RequestRecord, error: BaseException) -> Outcome:
    """The outcome of a request that was ended by this error."""
    term, status = _term_and_status(record, error)
    return Outcome(term, status, _broken(error) if record.committed else None)


def _term_and_status(record: RequestRecord, error: BaseException) -> tuple[str, int]:
    stage = record.stage.value if record.stage else "R"
    if isinstance(error, ClientStalled):
        return "cD", 200
    if isinstance(error, ShuttingDown) and record.committed:
        return "KD", 200
    if isinstance(error, CancelledError | ConnectionError):  # whichever of the two is noticed first
        return "C" + stage, 200 if record.committed else 499
    if isinstance(error, UpstreamError):
        who = "s" if error.failure is Failure.TIMEOUT else "S"
        return who + stage, 200 if record.committed else error.status
    # GatewayError and aiohttp's HTTPException have one; what else ends a request is a mistake of ours.
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
    """One client request, with a Timeline for each unit it was split into.

    While the request runs, times are noted and nothing more: what follows from them is worked out after its end.
    """

    key: str = "-"
    """The name of the key that the client showed; `-` when clients need none."""
    model: object = None
    """The name of the model, as the client says it, whatever that is; None when it says none."""
    served_model: str | None = None
    """The same as instances call it; None: it was not looked at, as all instances serve the same, or none serves it."""
    stream: bool = False
    first_token_seconds: float | None = None
    ended: float = 0.0
    """The clock's second in which it was over; 0 before."""
    error: BaseException | None
    """What ended the request before its answer was complete."""
    lost_engines: int
    """Engines that went down under it, or under the same request before, and perhaps because of it."""
    committed: bool = False
    """A streamed answer's status and headers went out."""
    context: Mapping[str, str] | None
    """The headers that tell engines whose trace the request belongs to; None: those that the client sent."""
    trace: Trace | None
    """None: it is not sampled."""
    outcome: Outcome
    """Set by `close`, as `facts` is."""
    facts: AccessFacts

    def __init__(
        self,
        api: str,
        request_id: str,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        """`api`: the dialect's label. `started`: the clock's second in which it came; None: just now."""
        self.api = api
        self.request_id = request_id
        self.clock = clock
        self.started = clock() if started is None else started
        self.timelines: list[Timeline] = []
        # What is often asked for although nobody has set it: to find it in the class takes longer.
        self.error = self.context = self.trace = None
        self.lost_engines = 0

    def timeline(self) -> Timeline:
        """The record of one more unit."""
        timeline = Timeline(self.clock)
        self.timelines.append(timeline)
        return timeline

    def first_token(self) -> None:
        """The client was sent the first part of the answer; later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The earliest stage any unit has not left: where a request that ends now was stuck."""
        stages = [stage for timeline in self.timelines if (stage := timeline.stage) is not None]
        return min(stages, key=_PLACES.__getitem__, default=None)

    def close(self) -> None:
        """Work out the outcome and the facts of a request that is over."""
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
            kv=str(first.kv),  # an encoder takes long to ask an enum's member for its value
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
    """Of each stage: how long it took in the unit in which it took longest. `units`: the seconds in each, of each."""
    found = dict(units[0]) if units else {}
    for seconds in units[1:]:
        for stage, spent in seconds.items():
            found[stage] = max(spent, found.get(stage, 0.0))
    return found
