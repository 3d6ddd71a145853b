"""The state of every backend as each worker sees it. Decisions ask a worker's own Health; this is for those who look.

A worker writes its own row, whenever a state changes there, so there are no locks. Create it before forking.
"""

from __future__ import annotations

import mmap
import zlib
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import HealthState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.backend import Backend

_CELL_BYTES: Final = 8
_STATES: Final = tuple(HealthState)


class HealthBoard:
    """All rows, one for each worker."""

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self._slots = slots
        self._cells = memoryview(mmap.mmap(-1, workers * slots * _CELL_BYTES)).cast("q")

    def note(self, worker: int, backend: Backend, state: HealthState) -> None:
        """This worker sees the backend in this state from now on."""
        self._cells[worker * self._slots + backend.slot] = _cell(backend, state)

    def states(self, backend: Backend) -> Sequence[HealthState]:
        """By worker; UNKNOWN where one has not seen it in another state."""
        by_cell = {_cell(backend, state): state for state in _STATES}
        return [by_cell.get(cell, HealthState.UNKNOWN) for cell in self._cells[backend.slot :: self._slots]]

    def erase(self, worker: int) -> None:
        """Forget what a worker that is dead has seen."""
        first = worker * self._slots
        self._cells[first : first + self._slots] = memoryview(bytes(self._slots * _CELL_BYTES)).cast("q")


def _cell(backend: Backend, state: HealthState) -> int:
    """Never 0, and another one for who has the slot later."""
    return zlib.crc32(backend.key.encode()) * len(_STATES) + _STATES.index(state) + 1
