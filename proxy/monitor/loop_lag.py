"""How late the event loop was, for those who measure times on it."""

from __future__ import annotations

from collections import deque
from typing import Final

_MEMORY_SECONDS: Final = 900.0


class LoopLag:
    """The delays of one event loop in the last quarter of an hour. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._measured_at = 0.0
        self._lags: deque[tuple[float, float]] = deque()
        """When the loop was how late, as far as it was never as late since: the longest delay first."""

    def note(self, now: float, lag: float) -> None:
        """Note by how many seconds the loop is late now."""
        lags = self._lags
        while lags and lags[-1][1] <= lag:
            lags.pop()
        lags.append((now, lag))
        while lags[0][0] < now - _MEMORY_SECONDS:
            lags.popleft()
        self._measured_at = now

    def since(self, at: float) -> float:
        """Return the longest delay that was noted since a time."""
        for noted_at, lag in self._lags:
            if noted_at >= at:
                return lag
        return 0.0

    def within(self, began: float, ended: float) -> float | None:
        """Return the longest delay between two times, or None if it was not measured after the second one yet.

        Delays that were noted later count, too: it is not known when they began.
        """
        return None if self._measured_at < ended else self.since(began)
