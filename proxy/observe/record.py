"""What happened to one request, for whoever listens. No prompt and no completion in it."""

from __future__ import annotations

import time
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from proxy.observe.outcome import outcome_of
from proxy.observe.timeline import Timeline
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.observe.outcome import Outcome
    from proxy.observe.trace import Trace

_STAGES: Final = tuple(Stage)
_PLACES: Final = {stage: place for place, stage in enumerate(Stage)}
# Each as often as somebody asks.
_ZEROS: Final = repeat(0.0)
_DIGITS: Final = repeat(4)
_ATTEMPTS: Final = attrgetter("attempts")
_RESUMES: Final = attrgetter("resumes")


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
    error: BaseException | None = None
    """What ended the request before its answer was complete."""
    lost_engines: int = 0
    """Engines that went down under it, or under the same request before, and perhaps because of it."""
    committed: bool = False
    """A streamed answer's status and headers went out."""
    context: Mapping[str, str] | None = None
    """The headers that tell engines whose trace the request belongs to; None: those that the client sent."""
    trace: Trace | None = None
    """None: it is not sampled."""
    outcome: Outcome
    """This and the next three: there when it is closed."""
    stage_seconds: list[dict[Stage, float]]
    """Spent in each stage, of each unit."""
    tokens: tuple[int, int, int]
    """Prompt, cached and completion tokens as far as engines reported them."""
    fields: dict[str, object]
    """The access line, for all who tell of it, so it must not be changed. With several units: the first one's backends,
    the sum of attempts, the longest stages.
    """

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
        """It is over: work out what all who tell of it ask for."""
        self.outcome = outcome_of(self)
        self.stage_seconds = []
        prompt = cached = completion = 0
        for timeline in self.timelines:
            self.stage_seconds.append(timeline.seconds)
            usage = timeline.usage
            prompt += usage.prompt_tokens or 0
            cached += usage.cached_tokens or 0
            completion += usage.completion_tokens or 0
        self.tokens = prompt, cached, completion
        self.fields = self._access_line()

    def _access_line(self) -> dict[str, object]:
        outcome, timelines = self.outcome, self.timelines
        first = timelines[0] if timelines else Timeline(self.clock)
        prediction = first.prediction
        prefill_reason, decode_reason = first.reasons
        seconds = longest(self.stage_seconds)
        queue, encode, prefill, handoff, first_token, stream = map(round, map(seconds.get, _STAGES, _ZEROS), _DIGITS)
        prompt, cached, completion = self.tokens
        return {
            "id": self.request_id,
            "key": self.key,
            "api": self.api,
            "stream": self.stream,
            "code": outcome.status,
            "term": outcome.term,
            "p": first.prefiller,
            "d": first.decoder,
            "p_id": first.prefill_id,
            "d_id": first.decode_id,
            "kv": first.kv,
            **({"p_why": prefill_reason} if prefill_reason is not None else {}),
            **({"d_why": decode_reason} if decode_reason is not None else {}),
            "units": len(timelines),
            "attempts": sum(map(_ATTEMPTS, timelines)),
            "resumes": sum(map(_RESUMES, timelines)),
            "t_queue": queue,
            **({"t_encode": encode} if Stage.ENCODE in seconds else {}),  # few have encoders
            "t_prefill": prefill,
            "t_handoff": handoff,
            "t_first_token": first_token,
            "t_stream": stream,
            "ttft": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "dur": round(outcome.duration_seconds, 4),
            # What was thought would come of the prefill; `t_prefill` and `tokens_cached` say what came of it.
            **({"p_seconds": round(prediction.seconds, 4), "p_cached": prediction.cached_tokens} if prediction else {}),
            "tokens_in": prompt,
            "tokens_cached": cached,
            "tokens_out": completion,
            **({"trace_id": self.trace.id} if self.trace is not None else {}),
            **({"lost_engines": self.lost_engines} if self.lost_engines else {}),
            "error": getattr(self.error, "message", None),
        }


def longest(units: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    """Of each stage: how long it took in the unit in which it took longest. `units`: the seconds in each, of each."""
    found = dict(units[0]) if units else {}
    for seconds in units[1:]:
        for stage, spent in seconds.items():
            found[stage] = max(spent, found.get(stage, 0.0))
    return found
