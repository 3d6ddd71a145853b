"""What happened to one request, for whoever listens. No prompt and no completion in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.observe.timeline import Journey
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.observe.outcome import Outcome
    from proxy.observe.timeline import StageListener

_STAGE_FIELDS: Final = tuple((f"t_{stage.label}", stage) for stage in Stage)


@dataclass(slots=True)
class Record:
    """One client request, with a Journey for each unit it was split into."""

    api: str
    """The dialect's label."""
    request_id: str
    key: str = "-"
    """The name of the key that the client showed; `-` when clients need none."""
    stream: bool = False
    stage_listeners: Sequence[StageListener] = ()
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    first_token_seconds: float | None = None
    journeys: list[Journey] = field(default_factory=list)
    error: BaseException | None = None
    """What ended the request before its answer was complete."""
    lost_engines: int = 0
    """Engines that went down under it, or under the same request before, and perhaps because of it."""
    committed: bool = False
    """A streamed answer's status and headers went out."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    def journey(self) -> Journey:
        """The record of one more unit."""
        journey = Journey(self.clock, listeners=self.stage_listeners)
        self.journeys.append(journey)
        return journey

    def first_token(self) -> None:
        """The client was sent the first part of the answer; later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The earliest stage any unit has not left: where a request that ends now was stuck."""
        order = list(Stage)
        stages = [journey.stage for journey in self.journeys if journey.stage is not None]
        return min(stages, key=order.index, default=None)

    def tokens(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens as far as engines reported them."""
        prompt = cached = completion = 0
        for journey in self.journeys:
            usage = journey.usage
            prompt += usage.prompt_tokens or 0
            cached += usage.cached_tokens or 0
            completion += usage.completion_tokens or 0
        return prompt, cached, completion

    def fields(self, outcome: Outcome) -> dict[str, object]:
        """The access line. With several units: the first one's backends, the sum of attempts, the longest stages."""
        journeys = self.journeys or [Journey(self.clock)]
        first, *others = journeys
        seconds = first.seconds
        if others:
            spent = {stage for journey in journeys for stage in journey.seconds}
            seconds = {stage: max(journey.seconds.get(stage, 0.0) for journey in journeys) for stage in spent}
        prompt, cached, completion = self.tokens()
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
            "units": len(self.journeys),
            "attempts": sum(journey.attempts for journey in self.journeys),
            "resumes": sum(journey.resumes for journey in self.journeys),
            **{
                name: round(seconds.get(stage, 0.0), 4)
                for name, stage in _STAGE_FIELDS
                if stage is not Stage.ENCODE or stage in seconds  # few have encoders
            },
            "ttft": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "dur": round(outcome.duration_seconds, 4),
            "tokens_in": prompt,
            "tokens_cached": cached,
            "tokens_out": completion,
            **({"lost_engines": self.lost_engines} if self.lost_engines else {}),
            "error": getattr(self.error, "message", None),
        }
