"""Data-parallel ranks: which of several engines behind one address a leg is for.

A vLLM server that runs several engines chooses among them itself, unless a request says which one it wants. A claim
takes the rank with the fewest legs of this worker in flight, of equal ones in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.common.backend import Backend

# vLLM `_get_data_parallel_rank`, since 0.11. A number of no rank is refused with 400 (v1/engine/input_processor.py):
# with one address per rank only 0 is good.
RANK_HEADER: Final = "x-data-parallel-rank"


@dataclass(slots=True)
class _Claimed:
    """The claims on one backend: legs in flight by rank, and the rank whose turn it is."""

    legs: list[int] = field(default_factory=list)
    turn: int = 0


class Ranks:
    """One worker's claims on ranks, and the only one who counts them."""

    def __init__(self) -> None:
        self._backends: dict[int, _Claimed] = {}  # by slot, which are as many as there can be backends

    def claim(self) -> RankClaim:
        """A claim for one leg: `with` it. Leaving gives the rank back, if one was taken."""
        return RankClaim(self)

    def take(self, backend: Backend, count: int) -> tuple[list[int], int]:
        """The legs of a backend, counted by rank, and the rank out of `count` that has one more now."""
        claimed = self._backends.setdefault(backend.slot, _Claimed())
        legs = claimed.legs
        legs.extend([0] * (count - len(legs)))
        fewest = min(legs[:count])
        turn = claimed.turn % count
        rank = legs.index(fewest, turn) if fewest in legs[turn:count] else legs.index(fewest)
        claimed.turn = rank + 1
        legs[rank] += 1
        return legs, rank


class RankClaim:
    """One leg's claim on a rank of the backend it is sent to."""

    __slots__ = ("_legs", "_rank", "_ranks")

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._legs: list[int] | None = None
        self._rank = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._legs is not None:
            self.free()

    def on(self, backend: Backend, count: int) -> int:
        """A rank of this backend, which has `count`, in place of the one that was taken before, if any."""
        self.free()
        self._legs, self._rank = self._ranks.take(backend, count)
        return self._rank

    def header(self, backend: Backend, count: int) -> dict[str, str]:
        """What asks for it; nothing where there is no choice."""
        return {RANK_HEADER: str(self.on(backend, count))} if count > 1 else {}

    def free(self) -> None:
        """The leg has ended before its claim. May be called again."""
        if self._legs is not None:
            self._legs[self._rank] -= 1
            self._legs = None
