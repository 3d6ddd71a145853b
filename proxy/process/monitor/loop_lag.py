"""How late the event loop was, for those who measure times on it."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

_MEMORY_SECONDS: Final = 900.0


class LoopLag:
    """The delays of one event loop in the last quarter of an hour. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._measured_at = 0.0
        self._notes: deque[tuple[float, float, float]] = deque()
        """Of each measurement the time of the one before it, its own time, and the delay. The oldest comes first."""

    def note(self, now: float, lag: float) -> None:
        """Note by how many seconds the loop is late now."""
        notes = self._notes
        notes.append((self._measured_at, now, lag))
        while notes[0][1] < now - _MEMORY_SECONDS:
            notes.popleft()
        self._measured_at = now

    def since(self, at: float) -> float:
        """Return the longest delay that was noted since a time."""
        return self._longest(at, inf)

    def within(self, began: float, ended: float) -> float | None:
        """Return the longest delay between two times, or None if it was not measured after the second one yet.

        The first measurement after the second time counts, too: it is not known when its delay began.
        """
        return None if self._measured_at < ended else self._longest(began, ended)

    def _longest(self, began: float, ended: float) -> float:
        longest = 0.0
        for before, noted_at, lag in reversed(self._notes):
            if noted_at < began:
                break
            if lag > longest and before < ended:
                longest = lag
        return longest
