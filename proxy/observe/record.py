"""What happened to one request, for whoever listens. No prompt and no completion in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.observe.timeline import Timeline
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.observe.outcome import Outcome
    from proxy.observe.timeline import StageListener

_STAGE_FIELDS: Final = tuple((f"t_{stage.label}", stage) for stage in Stage)


@dataclass(slots=True)
class RequestRecord:
    """One client request, with a Timeline for each unit it was split into."""

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
    timelines: list[Timeline] = field(default_factory=list)
    error: BaseException | None = None
    """What ended the request before its answer was complete."""
    lost_engines: int = 0
    """Engines that went down under it, or under the same request before, and perhaps because of it."""
    committed: bool = False
    """A streamed answer's status and headers went out."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    def timeline(self) -> Timeline:
        """The record of one more unit."""
        timeline = Timeline(self.clock, listeners=self.stage_listeners)
        self.timelines.append(timeline)
        return timeline

    def first_token(self) -> None:
        """The client was sent the first part of the answer; later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The earliest stage any unit has not left: where a request that ends now was stuck."""
        order = list(Stage)
        stages = [timeline.stage for timeline in self.timelines if timeline.stage is not None]
        return min(stages, key=order.index, default=None)

    def tokens(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens as far as engines reported them."""
        prompt = cached = completion = 0
        for timeline in self.timelines:
            usage = timeline.usage
            prompt += usage.prompt_tokens or 0
            cached += usage.cached_tokens or 0
            completion += usage.completion_tokens or 0
        return prompt, cached, completion

    def fields(self, outcome: Outcome) -> dict[str, object]:
        """The access line. With several units: the first one's backends, the sum of attempts, the longest stages."""
        timelines = self.timelines or [Timeline(self.clock)]
        first, *others = timelines
        seconds = first.seconds
        if others:
            spent = {stage for timeline in timelines for stage in timeline.seconds}
            seconds = {stage: max(timeline.seconds.get(stage, 0.0) for timeline in timelines) for stage in spent}
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
            "units": len(self.timelines),
            "attempts": sum(timeline.attempts for timeline in self.timelines),
            "resumes": sum(timeline.resumes for timeline in self.timelines),
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
