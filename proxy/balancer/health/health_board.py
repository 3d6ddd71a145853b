"""The state of every backend as each worker sees it. Decisions ask a worker's own Health; this is for those who look.

A worker writes its own row, whenever a state changes there, so there are no locks. What other gateways have found has a
row behind those of the workers, with one writer. In the last row all workers write when a backend last produced
something. Create it before forking.
"""

from __future__ import annotations

import mmap
import zlib
from typing import TYPE_CHECKING, Final

from proxy.balancer.health.backend_health import HealthState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.common.backend import Backend

_CELL_BYTES: Final = 8
_TICKS_PER_SECOND: Final = 1_000_000
_STATES: Final = tuple(HealthState)


class HealthBoard:
    """All rows, one for each worker."""

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self._workers = workers
        self._slots = slots
        self._cells = memoryview(mmap.mmap(-1, (workers + 2) * slots * _CELL_BYTES)).cast("q")
        self._verdicts = self._cells[workers * slots : (workers + 1) * slots]
        self._worked = self._cells[(workers + 1) * slots :]

    def note(self, worker: int, backend: Backend, state: HealthState, *, is_heard: bool = False) -> None:
        """This worker sees the backend in this state from now on. `is_heard`: because another gateway does."""
        self._cells[worker * self._slots + backend.slot] = _cell(backend, state, is_heard)

    def states(self, backend: Backend) -> Sequence[HealthState]:
        """By worker; UNKNOWN where one has not seen it in another state."""
        by_cell = {_cell(backend, state, is_heard): state for state in _STATES for is_heard in (False, True)}
        return [by_cell.get(cell, HealthState.UNKNOWN) for cell in self._own(backend)]

    def is_of_no_use(self, backend: Backend) -> bool:
        """Whether a worker has found that out by itself."""
        bad = [_cell(backend, state, is_heard=False) for state in (HealthState.DOWN, HealthState.EJECTED)]
        return any(cell in bad for cell in self._own(backend))

    def note_work(self, backend: Backend, at: float) -> None:
        """A backend has produced something, in seconds of the system's monotonic clock."""
        self._worked[backend.slot] = round(at * _TICKS_PER_SECOND)

    def worked_at(self, backend: Backend) -> float:
        """When a backend last produced something, for any worker; 0.0: not yet."""
        return self._worked[backend.slot] / _TICKS_PER_SECOND

    def own_cells(self) -> bytes:
        """A copy of the states that this gateway's workers see: two copies are equal if nothing changed in between."""
        return self._cells[: self._workers * self._slots].tobytes()

    # What other gateways have found

    def pronounce(self, slot: int, number: int) -> None:
        """Another gateway has found who has this slot of no use: a verdict with a number of its own, which is not 0."""
        self._verdicts[slot] = number

    def absolve(self, slot: int) -> None:
        """No other gateway says so any more."""
        self._verdicts[slot] = 0

    def verdicts(self) -> list[int]:
        """By slot: the number of the verdict that stands; 0: none."""
        return self._verdicts.tolist()

    def forget_verdicts(self) -> None:
        """Nothing is known of other gateways."""
        self.erase(self._workers)

    def erase(self, worker: int) -> None:
        """Forget what a worker that is dead has seen."""
        first = worker * self._slots
        self._cells[first : first + self._slots] = memoryview(bytes(self._slots * _CELL_BYTES)).cast("q")

    def _own(self, backend: Backend) -> memoryview[int]:
        return self._cells[backend.slot : self._workers * self._slots : self._slots]


def _cell(backend: Backend, state: HealthState, is_heard: bool) -> int:
    """Never 0, and another one for who has the slot later."""
    return 2 * (zlib.crc32(backend.key.encode()) * len(_STATES) + _STATES.index(state) + 1) + is_heard
