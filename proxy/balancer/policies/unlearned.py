"""Samples that wait until it is known whether the event loop was late meanwhile: late ones teach nothing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.balancer.pick import PolicyContext

T = TypeVar("T")


class Unlearned(Generic[T]):
    """Samples of one kind, the oldest first."""

    def __init__(
        self, context: PolicyContext, *, most_lag_seconds: float, most_lag_share: float, capacity: int
    ) -> None:
        """Create an empty queue.

        Args:
            context: Knows how late the event loop was.
            most_lag_seconds: A sample is timely if the loop was never later than this while it was taken,
            most_lag_share: and never later than this share of the sample's time.
            capacity: With more samples that wait the oldest one counts as late.
        """
        self._context = context
        self._most_lag_seconds = most_lag_seconds
        self._most_lag_share = most_lag_share
        self._capacity = capacity
        self._waiting: deque[tuple[T, float, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sample: T, began: float, ended: float) -> None:
        """Add a sample that was taken between these times of the clock."""
        self._waiting.append((sample, began, ended))

    def known(self) -> Iterator[tuple[T, float, bool]]:
        """Remove the samples of which it is known; yield each, when it ended, and whether it is timely."""
        waiting, lag_within = self._waiting, self._context.lag_within
        while waiting:
            sample, began, ended = waiting[0]
            lag = lag_within(began, ended)
            if lag is None and len(waiting) <= self._capacity:
                return
            waiting.popleft()
            most = min(self._most_lag_seconds, self._most_lag_share * (ended - began))
            yield sample, ended, lag is not None and lag <= most
