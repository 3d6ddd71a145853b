"""Selection of rows of a table for the short test suite."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations_with_replacement
from typing import TypeVar

Row = TypeVar("Row")


def values(row: Iterable[object]) -> set[Hashable]:
    """Return the values of a row, identified by their `repr`, if each value should be covered once."""
    return set(enumerate(map(repr, row)))


def pairs(row: Iterable[object]) -> set[Hashable]:
    """Return the values of a row and all pairs of them.

    Most faults need two values to meet, and hardly any three.
    """
    return set(combinations_with_replacement(enumerate(map(repr, row)), 2))


def covering(rows: Sequence[Row], shows: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Return rows, in their order, that together cover all evidence.

    Greedy: the next row is the first one with the most missing evidence. The result is deterministic and small, but not
    always the smallest.
    """
    shown_by = [set(shows(row)) for row in rows]
    missing = set[object]().union(*shown_by)
    # Ordered by an upper bound of the new evidence: a row never adds more than it would have earlier.
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
