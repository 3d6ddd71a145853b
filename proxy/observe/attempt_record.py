"""One attempt at a unit, as others are told of it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.choice import reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.balancer.choice import Pick
    from proxy.terms import Stage

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
