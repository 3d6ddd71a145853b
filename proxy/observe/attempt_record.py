"""One attempt at a unit, as others are told of it."""

from __future__ import annotations

from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from proxy.balancer.choice import reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.balancer.choice import Pick
    from proxy.terms import Stage

    Marks = list[tuple[Stage | None, float]]
    """The stages that an attempt has entered, None where it left one for no other, each with the clock's second."""


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
    marks: Marks
    """Whoever knows them all at once may set them."""
    _reasons: tuple[str | None, str | None] | None = None

    def __init__(self) -> None:
        self.marks = []

    @property
    def reasons(self) -> tuple[str | None, str | None]:
        """What the picks of prefiller and decoder come to, in one of choice.REASONS each. To be asked when it is over:
        it is worked out once.
        """
        if self._reasons is None:
            prefill, decode = self.prefill_pick, self.decode_pick
            self._reasons = (None if prefill is None else reason(prefill), None if decode is None else reason(decode))
        return self._reasons

    def move_out(self) -> AttemptRecord:
        """All of it as a record of its own, which leaves this one as if nothing had been noted in it."""
        moved, own = AttemptRecord(), vars(self)
        vars(moved).update({name: own.pop(name) for name in AttemptRecord.__annotations__ if name in own})
        self.marks = []
        return moved


def seconds_of(marks: Marks, before: Mapping[Stage, float]) -> dict[Stage, float]:
    """Spent in each stage that was left, and before."""
    if not marks:
        return dict(before)
    stages, times = zip(*marks, strict=True)
    stretches = list(zip(stages, map(sub, times[1:], times), strict=False))
    spent = dict(stretches)
    if before or len(spent) < len(stretches) or None in spent:  # most enter each stage once, and leave it for another
        spent = dict(before)
        for stage, seconds in stretches:
            if stage is not None:
                spent[stage] = spent.get(stage, 0.0) + seconds
    return spent
