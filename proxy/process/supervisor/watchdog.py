"""Detects frozen workers: stopped by a signal, or in a call that does not return.

Each worker's event loop counts its turns in shared memory (`shared.Heartbeats`). A worker is frozen if its count does
not change for too long. Its clients wait, and its load stays on the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class _Watched:
    count: int
    since: float


class Watchdog:
    """Compares the counts at intervals. Pure: all times are the supervisor's clock seconds.

    Time in which the supervisor itself did not run does not count: a stopped container, or a busy machine, stops all
    processes.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._look_seconds = min(1.0, timeout_seconds / 4)
        self._watched: dict[int, _Watched] = {}
        self.next_look = now + self._look_seconds

    def look(self, now: float, counts: Mapping[int, int]) -> list[int]:
        """Take the counts of the living workers, and return the frozen ones.

        A worker that stays frozen is returned again after the same time.
        """
        late_seconds = now - self.next_look
        lost_seconds = late_seconds if late_seconds > self._look_seconds else 0.0
        self.next_look = now + self._look_seconds
        frozen = []
        for worker in self._watched.keys() - counts.keys():
            del self._watched[worker]
        for worker, count in counts.items():
            watched = self._watched.get(worker)
            if watched is None or watched.count != count:
                self._watched[worker] = _Watched(count, now)
                continue
            watched.since += lost_seconds
            if now - watched.since > self._timeout_seconds:
                frozen.append(worker)
                watched.since = now
        return frozen
