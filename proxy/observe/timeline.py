"""Stages and attempts of one unit."""

from __future__ import annotations

import time
from functools import lru_cache
from operator import sub
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.pick import pick_reason
from proxy.common.terms import Stage
from proxy.wire.openai import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pick import Pick, PickPrediction
    from proxy.common.errors import UpstreamError

    Marks = list[tuple[Stage | None, float]]
    """Stages that an attempt has entered, each with clock seconds; None: it left a stage without entering another."""


NO_STAGE: Final = "-"
"""Mark in a course: a stage was left without entering another."""


ATTEMPT_ATTRIBUTES: Final = (
    *(
        "prefiller",
        "decoder",
        "prefill_id",
        "decode_id",
        "kv",
        "kv_verdict",
        "prefill_pick",
        "decode_pick",
        "replaced_legs",
    ),
    *("continues_answer", "failure", "entered_stages", "stage_times", "reasons"),
)
"""Attributes that belong to an AttemptRecord."""


class AttemptFailure(NamedTuple):
    """The failure of an instance that ended an attempt."""

    kind: str
    """The value of a `Failure`."""
    instance: str
    message: str
    """The problem, with the first words of an error that the engine reported."""


class ReplacedLeg(NamedTuple):
    """A leg that was replaced: the attempt sent it to another instance afterwards."""

    instance: str
    id: str


class AttemptRecord:
    """One attempt at a unit, finished or running."""

    prefiller: str = "-"
    decoder: str = "-"
    prefill_id: str = "-"
    decode_id: str = "-"
    """Id that each leg was sent with as X-Request-Id, or as SGLang's `rid`.

    Engines' logs have it in their names of the request.
    """
    kv: str = "-"
    """Source of the decoder's KV cache.

    `transferred`; `computed` again although it was handed over; `unknown`; `local` if nothing was handed over; `-` if
    the decoder has not answered, or there are no prefillers.
    """
    kv_verdict: Callable[[], str] | None = None
    """Returns `kv` as known later, if it was unknown when the decoder answered."""
    prefill_pick: Pick | None = None
    decode_pick: Pick | None = None
    """Reason for choosing this backend; None without a backend of that role."""
    replaced_legs: Sequence[ReplacedLeg] = ()
    continues_answer: bool = False
    """Whether the attempt continues the broken answer of the previous one."""
    failure: AttemptFailure | None = None
    """Failure that ended the attempt; None if it succeeded, is running, or no instance caused its end."""
    entered_stages: list[Stage | None]
    """Stages that the attempt has entered, in order; None: it left a stage without entering another."""
    stage_times: list[float]
    """Clock seconds of each entry in `entered_stages`. A caller that knows all may set both lists."""
    reasons: tuple[str | None, str | None] = (None, None)
    """Reasons of the picks of prefiller and decoder, each one of pick.REASONS; set when the attempt is closed."""

    def __init__(self) -> None:
        self.entered_stages, self.stage_times = [], []

    @property
    def stage_marks(self) -> Marks:
        """Return the stages of the attempt with their times."""
        return list(zip(self.entered_stages, self.stage_times, strict=True))

    def close_attempt(self) -> None:
        """Close the attempt: determine the values that several listeners read."""
        if self.kv_verdict is not None:
            self.kv = self.kv_verdict()
        prefill, decode = self.prefill_pick, self.decode_pick
        self.reasons = (
            None if prefill is None else pick_reason(prefill),
            None if decode is None else pick_reason(decode),
        )

    def move_to_new_record(self) -> AttemptRecord:
        """Move all values into a new record, and reset this one."""
        moved, new = AttemptRecord(), AttemptRecord()
        for name in ATTEMPT_ATTRIBUTES:
            setattr(moved, name, getattr(self, name))
            setattr(self, name, getattr(new, name))
        return moved


@lru_cache(maxsize=64)  # nearly all attempts have one of a few courses
def stage_letters(entered_stages: tuple[Stage | None, ...]) -> tuple[str, bool]:
    """Return the letters of the entered stages, with NO_STAGE for none, and whether the course is plain.

    A plain course enters each stage once, from the one before, and has left the last.
    """
    is_plain = (
        len(entered_stages) > 1 and len(set(entered_stages)) == len(entered_stages) and entered_stages[-1] is None
    )
    return "".join([NO_STAGE if stage is None else stage.value for stage in entered_stages]), is_plain


def stage_seconds(stage_marks: Marks, seconds_before: Mapping[Stage, float]) -> dict[Stage, float]:
    """Return the seconds in each stage that was left, added to those in `seconds_before`."""
    spent = dict(seconds_before) if seconds_before else {}
    stage, entered = None, 0.0
    for following, at in stage_marks:
        if stage is not None:
            spent[stage] = spent.get(stage, 0.0) + (at - entered)
        stage, entered = following, at
    return spent


_NOTHING: Final[Mapping[Stage, float]] = MappingProxyType({})


class Timeline(AttemptRecord):
    """Stages and attempts of one unit. As an AttemptRecord, it is the record of the running attempt.

    Conclusions are drawn when a listener reads them.
    """

    prediction: PickPrediction | None = None
    """Prediction for the prefill of the last attempt; None if there is none."""
    attempts: int
    resumes: int
    """Number of times that the answer was broken and continued."""
    past_attempts: Sequence[AttemptRecord]
    """Attempts before the running one, in order."""
    course: str
    """Letters of the unit's stages, including earlier attempts that count, with seconds in `spent_seconds_by_stage`.

    Set when the unit is closed.
    """
    spent_seconds_by_stage: Sequence[float]
    _counted_resumes: int = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.entered_stages, self.stage_times = [], []
        self.usage = Usage()
        self.attempts = self.resumes = 0
        # Attributes that are often read but rarely set: a class attribute takes longer to read.
        self.past_attempts = self.replaced_legs = ()
        self.failure, self.continues_answer = None, False
        self._spent_by_stage = _NOTHING  # seconds of earlier attempts that count
        self._has_encoded = False

    @property
    def current_stage(self) -> Stage | None:
        """Return the stage of the running attempt, or the last stage of a finished one; None if it has entered none."""
        return next((stage for stage in reversed(self.entered_stages) if stage is not None), None)

    @property
    def seconds_by_stage(self) -> dict[Stage, float]:
        """Return the seconds of the running attempt in each stage, without its current one."""
        return stage_seconds(self.stage_marks, self._spent_by_stage)

    @property
    def history(self) -> Sequence[AttemptRecord]:
        """Return all attempts of the unit, in order."""
        return (*self.past_attempts, self) if self.attempts else ()

    def begin_attempt(self) -> None:
        """Begin an attempt: an empty one, unless it continues an answer or has begun with its media."""
        if self._has_encoded:
            self._has_encoded = False
            return
        if self.attempts or self.entered_stages:
            self._reset_attempt()
        self.attempts += 1

    def _reset_attempt(self) -> None:
        spent = self.seconds_by_stage
        if not self.usage.is_resumed:
            spent = {stage: seconds for stage, seconds in spent.items() if stage is Stage.QUEUE}
        self._spent_by_stage = spent
        if self.attempts:
            self.past_attempts = (*self.past_attempts, self.move_to_new_record())
            self.continues_answer = self.resumes > self._counted_resumes
            self._counted_resumes = self.resumes
        else:
            self.entered_stages, self.stage_times = [], []

    def record_failure(self, error: UpstreamError) -> None:
        """Note the failure that ended the running attempt."""
        self.failure = AttemptFailure(error.failure.value, error.backend.name, error.full_message)

    def record_prefiller_replaced(self, pick: Pick) -> None:
        """Note that the prefill leg, which produced nothing, is sent again, to this prefiller."""
        self.replaced_legs = (*self.replaced_legs, ReplacedLeg(self.prefiller, self.prefill_id))
        self.prefill_pick = pick

    def record_decoder_replaced(self, pick: Pick) -> None:
        """Note that the decode leg is sent to this decoder instead."""
        self.replaced_legs = (*self.replaced_legs, ReplacedLeg(self.decoder, self.decode_id))
        self.decode_pick = pick

    def begin_encoding_attempt(self) -> None:
        """Begin an attempt with the encoding of its media."""
        self._has_encoded = False
        self.begin_attempt()
        self.enter_stage(Stage.ENCODE)

    def end_encoding(self) -> None:
        """Note the end of encoding. The next `begin_attempt` continues the same attempt."""
        self.end_attempt()
        self._has_encoded = True

    def enter_stage(self, stage: Stage) -> None:
        """Leave the current stage of the attempt and enter the next."""
        self.entered_stages.append(stage)
        self.stage_times.append(self.clock())

    def end_attempt(self) -> None:
        """Note the end of the attempt, successful or not, in its current stage. May be called again."""
        stages = self.entered_stages
        if stages and stages[-1] is not None:
            stages.append(None)
            self.stage_times.append(self.clock())

    def close_attempt(self) -> None:
        """Close the unit; see AttemptRecord."""
        super().close_attempt()
        times = self.stage_times
        course, is_plain = stage_letters(tuple(self.entered_stages))
        if is_plain and not self._spent_by_stage:
            self.course, self.spent_seconds_by_stage = course[:-1], [*map(sub, times[1:], times)]
        else:
            seconds = self.seconds_by_stage
            self.course, self.spent_seconds_by_stage = "".join([stage.value for stage in seconds]), [*seconds.values()]
