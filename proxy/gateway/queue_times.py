"""Who of those who wait can have no answer in time any more, and how long one will probably wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import count
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.gateway.queue_order import Waiter

# The services of so many seconds count, and older ones ever less.
_MEMORY_SECONDS: Final = 30.0
# Before that many nothing is predicted.
_ENOUGH: Final = 8
_ARRIVALS: Final = count()


class Deadlines:
    """Of those who wait and have one, the soonest first."""

    def __init__(self) -> None:
        self._places: list[tuple[float, int, Waiter]] = []
        self._of: dict[Waiter, tuple[float, int, Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Note a unit that begins to wait. One without a deadline is never late."""
        if waiter.late_at < math.inf:
            place = self._of[waiter] = waiter.late_at, next(_ARRIVALS), waiter
            insort(self._places, place)

    def remove(self, waiter: Waiter) -> None:
        """Forget a unit that waits no more. Does nothing for one without a deadline."""
        place = self._of.pop(waiter, None)
        if place is not None:
            del self._places[bisect_left(self._places, place)]

    def missed(self, now: float) -> Waiter | None:
        """The unit whose deadline passed first; None: no deadline has passed. `now`: seconds of the monotonic clock."""
        return self._places[0][-1] if self._places and self._places[0][0] <= now else None


class DrainRate:
    """How much of what waits is served in a second, whatever it is that holds it up: from one service to the next,
    while somebody waited all the time.
    """

    def __init__(self) -> None:
        self._served = 0
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # the last service; None: nobody has waited all the time since then

    def serve(self, amount: float, now: float) -> None:
        """A unit that had to wait is served. `amount`: its predicted seconds, or 1; `now`: seconds of the monotonic
        clock. If it was the last that waited, `stop` must follow.
        """
        if self._since is not None:
            passed = max(0.0, now - self._since)
            kept = math.exp(-passed / _MEMORY_SECONDS)
            self._seconds = self._seconds * kept + passed
            self._amount = self._amount * kept + amount
            self._served += 1
        self._since = now

    def stop(self) -> None:
        """Nobody waits any more."""
        self._since = None

    def seconds(self, amount: float, now: float) -> float | None:
        """How many seconds it will probably take to serve this amount, in the unit of `serve`; None: fewer than 8
        services were seen.
        """
        if self._served < _ENOUGH:
            return None
        standing = 0.0 if self._since is None else max(0.0, now - self._since)
        kept = math.exp(-standing / _MEMORY_SECONDS)
        return amount * (self._seconds * kept + standing) / max(1e-9, self._amount * kept)
