"""Load per backend, shared by all workers.

One row per worker, written only by that worker, so there are no locks; a backend's load is the sum of its column over
the rows. Cells are aligned 64-bit integers, so a reader sees the old or the new number and never a mixture. The
supervisor erases the row of a worker that died. Create it before forking: the memory is anonymous and inherited.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from proxy.balancer.backend import Load

if TYPE_CHECKING:
    from collections.abc import Iterable

_CELLS_PER_SLOT = 3  # requests, compute, kv
_REQUESTS, _COMPUTE, _KV = range(_CELLS_PER_SLOT)
_CELL_BYTES = 8


class Row:
    """The part of the scoreboard that one worker writes."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[int]) -> None:
        self._cells = cells

    def add(self, slot: int, *, requests: int = 0, compute: int = 0, kv: int = 0) -> None:
        """Charge a slot; negative numbers give back."""
        cells = self._cells
        first = _CELLS_PER_SLOT * slot
        if requests:
            cells[first + _REQUESTS] += requests
        if compute:
            cells[first + _COMPUTE] += compute
        if kv:
            cells[first + _KV] += kv


class Scoreboard:
    """All rows. Every worker may read all of it and write its own `row`."""

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self.workers = workers
        self.slots = slots
        self._width = _CELLS_PER_SLOT * slots
        self._cells = memoryview(mmap.mmap(-1, workers * self._width * _CELL_BYTES)).cast("q")

    def row(self, worker: int) -> Row:
        return Row(self._cells_of(worker))

    def load(self, slot: int) -> Load:
        return Load(compute=self._sum(slot, _COMPUTE), kv=self._sum(slot, _KV))

    def requests(self, slot: int) -> int:
        return self._sum(slot, _REQUESTS)

    def weigh(self, slots: Iterable[int], per_compute: int, per_kv: int) -> list[int]:
        """`per_compute * compute + per_kv * kv` of every slot asked for.

        One pass over plain integers, because every pick pays for it: a Load per candidate would triple its price.
        """
        cells, width = self._cells, self._width
        firsts = [_CELLS_PER_SLOT * slot for slot in slots]
        if self.workers == 1:
            return [per_compute * cells[first + _COMPUTE] + per_kv * cells[first + _KV] for first in firsts]
        return [
            per_compute * sum(cells[first + _COMPUTE :: width]) + per_kv * sum(cells[first + _KV :: width])
            for first in firsts
        ]

    def erase(self, worker: int) -> None:
        """Forget what a worker had charged. Only for a worker that is dead: it would go on from zero."""
        cells = self._cells_of(worker)
        for index in range(self._width):
            cells[index] = 0

    def _cells_of(self, worker: int) -> memoryview[int]:
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker {worker} of {self.workers}")
        return self._cells[worker * self._width : (worker + 1) * self._width]

    def _sum(self, slot: int, kind: int) -> int:
        return sum(self._cells[_CELLS_PER_SLOT * slot + kind :: self._width])
