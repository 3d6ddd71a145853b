"""How the instances are split among prefill and decode, and what another split would carry. Arithmetic alone.

Each side's work is taken to be what it is, spread over more or fewer instances: a side that is 80 % busy with 4 is 64 %
busy with 5. The fleet carries more load until its busier side is full, so the split that carries most is the one whose
busier side is least busy. An instance is taken to be as good in its new role as the others there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 0.05
"""What a move must bring to be worth its trouble, as a share of the load that is carried now."""


@dataclass(frozen=True, slots=True)
class Split:
    """So many instances of each role, and how busy they are: 1.0 is full, and more is asked for than there is."""

    prefillers: int
    decoders: int
    prefill_busy: float
    decode_busy: float

    @property
    def name(self) -> str:
        return f"{self.prefillers}P{self.decoders}D"

    @property
    def carries(self) -> float:
        """The load that fills its busier side, as a multiple of today's; infinite where there is none."""
        busiest = max(self.prefill_busy, self.decode_busy)
        return 1 / busiest if busiest else float("inf")

    @property
    def bottleneck(self) -> str:
        """The busier role."""
        return "prefill" if self.prefill_busy >= self.decode_busy else "decode"

    def moved(self, prefillers: int) -> Split | None:
        """With so many prefillers more, taken from the decoders, or fewer; None: a role would have nobody left."""
        left = self.prefillers + prefillers, self.decoders - prefillers
        if min(left) < 1:
            return None
        return Split(*left, self.prefill_busy * self.prefillers / left[0], self.decode_busy * self.decoders / left[1])

    def alternatives(self) -> list[Split]:
        """This one, and those that are one instance away from it."""
        return [self, *(each for each in (self.moved(1), self.moved(-1)) if each is not None)]


def advised(now: Split) -> Split:
    """The split to have: another one only if it carries at least LEAST_GAIN more."""
    best = max(now.alternatives(), key=lambda split: split.carries)
    return best if best.carries >= (1 + LEAST_GAIN) * now.carries else now


def verdict(now: Split) -> str:
    """In words."""
    roles = {"prefill": "Prefillers", "decode": "Decoders"}
    if not max(now.prefill_busy, now.decode_busy):
        return "Nothing was asked for, so there is nothing to advise."
    told = f"{roles[now.bottleneck]} are the bottleneck"
    best = advised(now)
    if best is now:
        return (
            f"{told}, and moving one instance would not carry at least {LEAST_GAIN:.0%} more: leave it at {now.name}."
        )
    move = "a decoder to prefill" if best.prefillers > now.prefillers else "a prefiller to decode"
    gain = best.carries / now.carries - 1
    return f"{told}: moving {move} ({best.name}) would carry {gain:.0%} more load."
