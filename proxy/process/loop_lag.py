"""Delays of the event loop, for code that measures times on it."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

_MEMORY_SECONDS: Final = 900.0


class LoopLag:
    """The delays of one event loop in the last quarter of an hour. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._measured_at = 0.0
        self._lag_measurements: deque[tuple[float, float, float]] = deque()
        """The start, end and delay of each measurement, the oldest first."""

    def add_lag(self, now: float, lag: float) -> None:
        """Note that the event loop is late by this number of seconds."""
        notes = self._lag_measurements
        notes.append((self._measured_at, now, lag))
        while notes[0][1] < now - _MEMORY_SECONDS:
            notes.popleft()
        self._measured_at = now

    def longest_lag_since(self, at: float) -> float:
        """Return the longest delay of the event loop, in seconds, since a time."""
        return self._longest_lag(at, inf)

    def longest_lag_within(self, began: float, ended: float) -> float | None:
        """Return the longest delay of the event loop between two times.

        None: nothing was measured after the second time yet. The first measurement after the second time counts, too,
        because the start of its delay is not known.
        """
        return None if self._measured_at < ended else self._longest_lag(began, ended)

    def _longest_lag(self, began: float, ended: float) -> float:
        longest = 0.0
        for before, noted_at, lag in reversed(self._lag_measurements):
            if noted_at < began:
                break
            if lag > longest and before < ended:
                longest = lag
        return longest
