"""One unit's way through its stages and attempts."""

from __future__ import annotations

import time
from functools import lru_cache
from operator import sub
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.pick import reason
from proxy.common.terms import Stage
from proxy.wire.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pick import Pick, Prediction
    from proxy.common.errors import UpstreamError

    Marks = list[tuple[Stage | None, float]]
    """The stages that an attempt has entered, None where it left one for no other, each with the clock's second."""


NO_STAGE: Final = "-"
"""In a course, where a stage was left for no other."""


OF_AN_ATTEMPT: Final = (
    *("prefiller", "decoder", "prefill_id", "decode_id", "kv", "prefill_pick", "decode_pick", "left", "continues"),
    *("failure", "stages", "times", "reasons"),
)
"""What is noted in an AttemptRecord."""


class AttemptFailure(NamedTuple):
    """What an instance has ended an attempt by."""

    kind: str
    """A `Failure`."""
    instance: str


class LeftLeg(NamedTuple):
    """What was sent to an instance, and then, in the same attempt, to another one instead."""

    instance: str
    id: str


class AttemptRecord:
    """One attempt, over or under way."""

    prefiller: str = "-"
    decoder: str = "-"
    prefill_id: str = "-"
    decode_id: str = "-"
    """What each leg was sent as X-Request-Id, or as SGLang's `rid`: the engines' logs have it in their names for the
    request."""
    kv: str = "-"
    """Where the decoder has KV from, as far as is known of it: `transferred`, `computed` once more although it was
    handed over, `unknown`; `local`: nothing was handed over. `-`: it has not answered, or there are no prefillers."""
    prefill_pick: Pick | None = None
    decode_pick: Pick | None = None
    """Why the backends were chosen; None: there is none of that role."""
    left: Sequence[LeftLeg] = ()
    continues: bool = False
    """It goes on with the answer that the one before was broken off in."""
    failure: AttemptFailure | None = None
    """None: it succeeded, or its end was no instance's doing, or it has not ended."""
    stages: list[Stage | None]
    """Those that it has entered, in order, None where it left one for no other."""
    times: list[float]
    """When it did, each the clock's second. Whoever knows them all at once may set both."""
    reasons: tuple[str | None, str | None] = (None, None)
    """What the picks of prefiller and decoder come to, in one of choice.REASONS each: there when it is closed."""

    def __init__(self) -> None:
        self.stages, self.times = [], []

    @property
    def marks(self) -> Marks:
        """Its stages with their times."""
        return list(zip(self.stages, self.times, strict=True))

    def close(self) -> None:
        """It is over: work out what all who tell of it ask for."""
        prefill, decode = self.prefill_pick, self.decode_pick
        self.reasons = None if prefill is None else reason(prefill), None if decode is None else reason(decode)

    def move_out(self) -> AttemptRecord:
        """All of it as a record of its own, which leaves this one as if nothing had been noted in it."""
        moved, new = AttemptRecord(), AttemptRecord()
        for name in OF_AN_ATTEMPT:
            setattr(moved, name, getattr(self, name))
            setattr(self, name, getattr(new, name))
        return moved


@lru_cache(maxsize=64)  # nearly all attempts take one of a few courses
def course_of(stages: tuple[Stage | None, ...]) -> tuple[str, bool]:
    """The letters of stages that were entered, NO_STAGE for none; and whether it is a plain course: it has entered each
    once, from the one before, and has left the last.
    """
    is_plain = len(stages) > 1 and len(set(stages)) == len(stages) and stages[-1] is None
    return "".join([NO_STAGE if stage is None else stage.value for stage in stages]), is_plain


def seconds_of(marks: Marks, before: Mapping[Stage, float]) -> dict[Stage, float]:
    """Spent in each stage that was left, and before."""
    spent = dict(before) if before else {}
    stage, entered = None, 0.0
    for following, at in marks:
        if stage is not None:
            spent[stage] = spent.get(stage, 0.0) + (at - entered)
        stage, entered = following, at
    return spent


_NOTHING: Final[Mapping[Stage, float]] = MappingProxyType({})


class Timeline(AttemptRecord):
    """One unit's way through its stages and attempts; as a record it is that of the attempt under way. What follows
    from the marks is worked out when somebody asks.
    """

    prediction: Prediction | None = None
    """What was thought of the last attempt's prefill when its prefiller was chosen; None: nothing."""
    attempts: int
    resumes: int
    """How often its answer was broken off and taken up again."""
    past: Sequence[AttemptRecord]
    """The attempts before the one under way, in order."""
    course: str
    """The letters of the stages that it was in, with those of attempts before that count; and in `spent` the seconds
    in each of them. Both are there when it is closed."""
    spent: Sequence[float]
    _seen_resumes: int = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.stages, self.times = [], []
        self.usage = Usage()
        self.attempts = self.resumes = 0
        # What is asked of every attempt although hardly any has it: to find it in the class takes longer.
        self.past = self.left = ()
        self.failure, self.continues = None, False
        self._spent = _NOTHING  # seconds of the attempts before that count
        self._has_encoded = False

    @property
    def stage(self) -> Stage | None:
        """The one that the attempt under way is in or, if it is over, was in last; None: it has entered none."""
        return next((stage for stage in reversed(self.stages) if stage is not None), None)

    @property
    def seconds(self) -> dict[Stage, float]:
        """Spent in each stage by the attempt under way, without the one that it is in."""
        return seconds_of(self.marks, self._spent)

    @property
    def history(self) -> Sequence[AttemptRecord]:
        """All attempts, in order."""
        return (*self.past, self) if self.attempts else ()

    def begin_attempt(self) -> None:
        """A new attempt starts from nothing, unless it goes on with an answer, or has begun with its media."""
        if self._has_encoded:
            self._has_encoded = False
            return
        if self.attempts or self.stages:
            self._start_anew()
        self.attempts += 1

    def _start_anew(self) -> None:
        spent = self.seconds
        if not self.usage.is_resumed:
            spent = {stage: seconds for stage, seconds in spent.items() if stage is Stage.QUEUE}
        self._spent = spent
        if self.attempts:
            self.past = (*self.past, self.move_out())
            self.continues = self.resumes > self._seen_resumes
            self._seen_resumes = self.resumes
        else:
            self.stages, self.times = [], []

    def failed(self, error: UpstreamError) -> None:
        """The attempt under way was ended by this."""
        self.failure = AttemptFailure(error.failure.value, error.backend.name)

    def left_prefiller(self, pick: Pick) -> None:
        """The prefill leg, of which nothing came, is sent again, to this one."""
        self.left = (*self.left, LeftLeg(self.prefiller, self.prefill_id))
        self.prefill_pick = pick

    def left_decoder(self, pick: Pick) -> None:
        """The decode leg is sent to this one instead."""
        self.left = (*self.left, LeftLeg(self.decoder, self.decode_id))
        self.decode_pick = pick

    def begin_encoding(self) -> None:
        """A new attempt begins with its media."""
        self._has_encoded = False
        self.begin_attempt()
        self.enter(Stage.ENCODE)

    def end_encoding(self) -> None:
        """They are encoded: the attempt that begins next is still the same."""
        self.leave()
        self._has_encoded = True

    def enter(self, stage: Stage) -> None:
        """Leave the stage of now and enter the next."""
        self.stages.append(stage)
        self.times.append(self.clock())

    def leave(self) -> None:
        """The attempt has ended, well or not, in the stage of now. May be called again."""
        stages = self.stages
        if stages and stages[-1] is not None:
            stages.append(None)
            self.times.append(self.clock())

    def close(self) -> None:
        """See AttemptRecord."""
        super().close()
        times = self.times
        course, is_plain = course_of(tuple(self.stages))
        if is_plain and not self._spent:
            self.course, self.spent = course[:-1], [*map(sub, times[1:], times)]
        else:
            seconds = self.seconds
            self.course, self.spent = "".join([stage.value for stage in seconds]), [*seconds.values()]
