"""One attempt at a unit, as it is told of when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """One attempt: as a Timeline has it while it is under way."""

    prefiller: str
    decoder: str
    prefill_id: str
    decode_id: str
    kv: str
    picks: tuple[Pick | None, Pick | None]
    """Why prefiller and decoder were chosen; None: there is none."""
    left: Sequence[LeftLeg]
    continues: bool
    """It goes on with the answer that the one before was broken off in."""
    failure: AttemptFailure | None
    """None: it succeeded, or its end was no instance's doing."""
    marks: Marks
    reasons: tuple[str | None, str | None] = field(init=False)
    """What `picks` come to, in one of choice.REASONS each."""

    def __post_init__(self) -> None:
        prefill, decode = self.picks
        self.reasons = (None if prefill is None else reason(prefill), None if decode is None else reason(decode))

    @property
    def seconds(self) -> dict[Stage, float]:
        """Spent in each stage."""
        return seconds_of(self.marks, {})


def seconds_of(marks: Marks, before: Mapping[Stage, float]) -> dict[Stage, float]:
    """Spent in each stage that was left, and before."""
    spent = dict(before)
    stage, began = None, 0.0
    for entered, at in marks:
        if stage is not None:
            spent[stage] = spent.get(stage, 0.0) + (at - began)
        stage, began = entered, at
    return spent
