"""The split of instances among prefill and decode, and the load that another split would carry. Arithmetic only.

The work of each side is constant and spread over its instances: a side that is 80 % busy with 4 is 64 % busy with 5.
The fleet carries more load until its busier side is full, so the best split is the one whose busier side is least busy.
An instance is assumed to be as good in its new role as the others there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 0.05
"""Minimum gain of a move, as a share of the present load."""


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of instances by role, and their utilisation: 1.0 is full, and more means that demand exceeds capacity."""

    prefillers: int
    decoders: int
    prefill_busy: float
    decode_busy: float

    @property
    def name(self) -> str:
        return f"{self.prefillers}P{self.decoders}D"

    @property
    def carries(self) -> float:
        """Return the load that fills the busier side, as a multiple of the present load; infinite without load."""
        busiest = max(self.prefill_busy, self.decode_busy)
        return 1 / busiest if busiest else float("inf")

    @property
    def bottleneck(self) -> str:
        """Return the busier role."""
        return "prefill" if self.prefill_busy >= self.decode_busy else "decode"

    def moved(self, prefillers: int) -> Split | None:
        """Return the split with `count` more prefillers from the decoders, or fewer; None if a role would be empty."""
        left = self.prefillers + prefillers, self.decoders - prefillers
        if min(left) < 1:
            return None
        return Split(*left, self.prefill_busy * self.prefillers / left[0], self.decode_busy * self.decoders / left[1])

    def alternatives(self) -> list[Split]:
        """Return this split and those that differ by one instance."""
        return [self, *(each for each in (self.moved(1), self.moved(-1)) if each is not None)]


def advised(now: Split) -> Split:
    """Return the recommended split, which differs only if it carries at least LEAST_GAIN more."""
    best = max(now.alternatives(), key=lambda split: split.carries)
    return best if best.carries >= (1 + LEAST_GAIN) * now.carries else now


def verdict(now: Split) -> str:
    """Return the recommendation as a sentence."""
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
