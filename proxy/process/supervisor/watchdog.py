"""Which workers live without working: stopped by a signal, or in a call that does not come back.

Each worker's event loop counts its turns in shared memory (`shared.Heartbeats`). A worker whose count stands still for
too long is frozen, and is of no use to anybody: its clients wait, and what it charged to the engines stays charged.
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
    """Compares the counts from time to time. Pure: the supervisor has the clock, whose seconds all times are.

    Time in which the supervisor itself did not run says nothing about workers: a container that was stopped, or a
    machine that was busy with something else, stops all of them together.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._look_seconds = min(1.0, timeout_seconds / 4)
        self._watched: dict[int, _Watched] = {}
        self.next_look = now + self._look_seconds

    def look(self, now: float, counts: Mapping[int, int]) -> list[int]:
        """Take in the counts of the workers that live; those of them that are frozen.

        One that stays frozen is told again after as long.
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
