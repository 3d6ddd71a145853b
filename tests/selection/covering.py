"""Which rows of a table to run when all of them take too long."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

Row = TypeVar("Row")


def values(row: Iterable[object]) -> set[Hashable]:
    """What a row of a product shows, if it is enough to see every value once. They are told apart by their `repr`."""
    return set(enumerate(map(repr, row)))


def pairs(row: Iterable[object]) -> set[Hashable]:
    """What a row of a product shows: its values, and every two of them.

    Most faults need two values to meet, and hardly any three.
    """
    return set(combinations_with_replacement(enumerate(map(repr, row)), 2))


def covering(rows: Sequence[Row], shows: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Some of the rows, in their order, that together show whatever all of them show.

    Greedy: the row that shows most of what is still missing is next, the first of several. So the choice is always the
    same, small, and not always the smallest.
    """
    shown_by = [set(shows(row)) for row in rows]
    missing = set[object]().union(*shown_by)
    # By what each row can add at most: it never adds more than it would have before.
    heap = [(-len(shown), at) for at, shown in enumerate(shown_by)]
    heapify(heap)
    chosen = set[int]()
    while missing:
        bound, at = heap[0]
        adds = len(shown_by[at] & missing)
        if adds < -bound:
            heapreplace(heap, (-adds, at))
        else:
            heappop(heap)
            chosen.add(at)
            missing -= shown_by[at]
    return [row for at, row in enumerate(rows) if at in chosen]
