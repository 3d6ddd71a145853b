"""The order of the queue: more urgent priorities first, then fairly among client keys, then shorter requests.

The service of a key is counted in predicted engine seconds, as VTC does in tokens (Sheng et al., OSDI'24). A key that
returns starts with the service of the key that was served least. So absent keys do not save service, and a short
absence does not cancel service already used.

Keys with nearly equal service compete by their work. With strict turns, short requests of many keys would wait behind
long ones. If nothing can be predicted, keys take turns.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, count, islice
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from proxy.balancer.shared.memory import AGEING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from proxy.balancer.pick import PickRequest, SessionLimits
    from proxy.common.errors import GatewayError


# Keys are treated as equal if their services differ by no more than this.
_EQUAL_SECONDS: Final = 2.0
# Numbers the waiters, so that equal waiters go in the order of their arrival.
_ARRIVALS: Final = count()


class LineUp(Protocol):
    """Predicts the work of requests, and chooses the next one. The pool of prefillers implements it."""

    @property
    def working_sets(self) -> SessionLimits | None:
        """Working sets that hold back turns of sessions. None: nothing holds them back."""

    @property
    def holds_queue(self) -> bool:
        """Whether it orders the queue now. Otherwise requests go in turn, and no other method is called."""

    def work_seconds(self, request: PickRequest) -> float:
        """Return the predicted work of a request. Of the units of one key, shorter ones go first, see AGEING."""

    def left_queue(self, request: PickRequest) -> None:
        """Forget a request that has left the queue. Call this once for each call of `work_seconds`."""

    def first_to_admit(self, waiting: Sequence[PickRequest]) -> int | None:
        """Return the index of the request that should go now, or None if all should wait for a better instance."""


class InTurn:
    """Serves requests in the order of their arrival."""

    holds_queue: ClassVar[bool] = False
    working_sets: ClassVar[SessionLimits | None] = None

    def work_seconds(self, request: PickRequest) -> float:
        """Return the predicted work of a request. Of the units of one key, shorter ones go first, see AGEING.

        Nothing is predicted.
        """
        return 0.0

    def left_queue(self, request: PickRequest) -> None:
        """Forget a request that has left the queue. Call this once for each call of `work_seconds`.

        Nothing was stored.
        """

    def first_to_admit(self, waiting: Sequence[PickRequest]) -> int | None:
        return 0


_place = attrgetter("place")


@dataclass(slots=True, eq=False)
class Waiter:
    """One unit in the admission queue."""

    key: str
    """The name of the client key."""
    arrived: float
    """Clock time at which the unit joined the queue."""
    turn: asyncio.Future[None]
    """Done when the unit may go, or was rejected."""
    request: PickRequest | None = None
    """The lease that the unit will request. None: unknown, so the unit goes in turn."""
    is_patient: bool = False
    """Whether the unit waits without limits, because its client request was admitted already."""
    skips_learned_limits: bool = False
    """Whether learned limits do not hold the unit back any more."""
    priority: int = 0
    """Units with lower values go first."""
    work_seconds: float = 0.0
    """Predicted work. Shorter units go first."""
    cost_seconds: float = 0.0
    """Predicted engine seconds, charged to the key. 0: unknown."""
    first_token_seconds: float | None = None
    """Longest time to the first token that the client accepts. None: no limit."""
    late_at: float = math.inf
    """Clock time from which the first token cannot be in time."""
    rejection: GatewayError | None = None
    """Why the unit was rejected. None: it was not."""
    place: tuple[int, float, int] = field(init=False, repr=False)
    """Sort key among the units of one client key."""

    def __post_init__(self) -> None:
        self.place = self.priority, self.work_seconds + AGEING * self.arrived, next(_ARRIVALS)

    def rank_by(self, work_seconds: float) -> None:
        """Set the predicted work of a unit that has no place in the queue yet."""
        self.cost_seconds += work_seconds - self.work_seconds
        self.work_seconds = work_seconds
        self.place = self.priority, work_seconds + AGEING * self.arrived, next(_ARRIVALS)

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key among the queues of all workers: the priority, then the work and the arrival."""
        return self.place[:2]

    @property
    def amount(self) -> float:
        """The share of the unit in the drain rate: its cost, or 1 if the cost is unknown."""
        return self.cost_seconds or 1.0


class Line:
    """The queued units of one client key, in their order."""

    __slots__ = ("key", "waiters", "requests", "served_seconds", "last_service", "_ranked")

    def __init__(self, key: str, served_seconds: float, last_service: int) -> None:
        self.key = key
        self.waiters: dict[Waiter, None] = {}
        """The units in the order of their arrival."""
        self.requests = 0
        """The number of units that may be rejected."""
        self.served_seconds = served_seconds
        """The service of the key, in predicted engine seconds."""
        self.last_service = last_service
        """The number of the key's last service. Later services have higher numbers."""
        self._ranked: list[Waiter] = []
        """The units in the order in which they go."""

    def add(self, waiter: Waiter) -> None:
        """Add a unit to the queue of its client key."""
        self.waiters[waiter] = None
        self.requests += not waiter.is_patient
        insort(self._ranked, waiter, key=_place)

    def remove(self, waiter: Waiter) -> None:
        """Remove a unit from the queue of its client key."""
        del self.waiters[waiter]
        self.requests -= not waiter.is_patient
        del self._ranked[bisect_left(self._ranked, waiter.place, key=_place)]

    @property
    def head(self) -> Waiter:
        """The unit of a client key that goes next."""
        return self._ranked[0]

    def amount_before(self, waiter: Waiter) -> float:
        """Return the amount of the units that go before a new one."""
        return sum(before.amount for before in self._ranked[: bisect_left(self._ranked, waiter.place, key=_place)])

    def amounts(self, priority: int) -> tuple[float, float]:
        """Return the amount of the units with a more urgent priority, and of those with this priority."""
        urgent = sum(waiter.amount for waiter in self.waiters if waiter.priority < priority)
        return urgent, sum(waiter.amount for waiter in self.waiters if waiter.priority == priority)

    def first(self, count: int) -> list[Waiter]:
        """Return the first `count` units in the order in which they go."""
        return self._ranked[:count]


class Order:
    """The queued units of all client keys, in order."""

    def __init__(self, running: Mapping[str, int]) -> None:
        """Begin without units. `running`: the number of running units of each key, which its owner updates."""
        self.lines: dict[str, Line] = {}
        """The lines by client key. Each has at least one unit."""
        self._running = running
        self._services = count()
        self._served: dict[str, float] = {}
        """The service of keys that have no line, since the queue was empty."""

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in self.lines.values())

    def join(self, waiter: Waiter) -> None:
        """Add a unit to the queue."""
        line = self.lines.get(waiter.key)
        if line is None:
            served = self._service_of(waiter.key)
            self._served.pop(waiter.key, None)
            # It counts as just served, so that a key with short visits does not overtake keys that wait.
            line = self.lines[waiter.key] = Line(waiter.key, served, next(self._services))
        line.add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a unit from the queue."""
        line = self.lines[waiter.key]
        line.remove(waiter)
        if not line.waiters:
            del self.lines[waiter.key]
            self._served[waiter.key] = line.served_seconds
            if not self.lines:
                self._served.clear()

    def serve(self, waiter: Waiter) -> None:
        """Charge the key of a unit that goes now. `remove` must follow."""
        line = self.lines[waiter.key]
        line.served_seconds += waiter.cost_seconds
        line.last_service = next(self._services)

    def front(self, count: int) -> list[Waiter]:
        """Return the first `count` units of all keys in order. At least one unit must wait."""
        if len(self.lines) == 1:
            (line,) = self.lines.values()
            return line.first(count)
        lines = sorted(self.lines.values(), key=self._precedence)
        fronts: list[Iterable[Waiter]] = [line.first(count) for line in lines]
        head = lines[0].head
        if head.cost_seconds:
            highest = lines[0].served_seconds + _EQUAL_SECONDS
            equal = sum(line.head.priority == head.priority and line.served_seconds <= highest for line in lines)
            fronts[:equal] = [merge(*fronts[:equal], key=_place)]
        return list(islice(chain.from_iterable(fronts), count))

    def amount_ahead(self, waiter: Waiter) -> float:
        """Return the amount that will probably be served before a new unit, if no other unit arrives.

        This includes all units that go first for certain. Other keys of the same priority are each served as much as
        the key of the new unit until then.
        """
        own = self.lines.get(waiter.key)
        before = own.amount_before(waiter) if own else 0.0
        share = self._service_of(waiter.key) + before + waiter.amount
        for line in self.lines.values():
            if line is not own:
                urgent, equal = line.amounts(waiter.priority)
                before += urgent + min(equal, max(0.0, share - line.served_seconds))
        return before

    def _service_of(self, key: str) -> float:
        """Return the service of a key. A key without a line has at least that of the key served least."""
        if (line := self.lines.get(key)) is not None:
            return line.served_seconds
        least = min((line.served_seconds for line in self.lines.values()), default=0.0)
        return max(least, self._served.get(key, 0.0))

    def unit_to_reject(self, key: str) -> Waiter | None:
        """Return the unit to reject in a full queue in favor of a unit of this key.

        This is the last unit of the key with most requests. Return None if that is the given key.
        """
        greediest = max(self.lines.values(), key=lambda line: line.requests, default=None)
        own = self.lines.get(key)
        if greediest is None or greediest.requests <= (own.requests if own else 0):
            return None
        return next(waiter for waiter in reversed(greediest.waiters) if not waiter.is_patient)

    def _precedence(self, line: Line) -> tuple[int, float, int, int]:
        """Return the sort key of a line: priority, service, running units, and the number of its last service."""
        return line.head.priority, line.served_seconds, self._running.get(line.key, 0), line.last_service


# Time constant with which past services lose weight.
_MEMORY_SECONDS: Final = 30.0
# Services needed before anything is predicted.
_MIN_SERVICES: Final = 8


class Deadlines:
    """Deadlines of queued units, earliest first."""

    def __init__(self) -> None:
        self._places: list[tuple[float, int, Waiter]] = []
        self._place_of: dict[Waiter, tuple[float, int, Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Add a unit that begins to wait. A unit without a deadline is ignored."""
        if waiter.late_at < math.inf:
            place = self._place_of[waiter] = waiter.late_at, next(_ARRIVALS), waiter
            insort(self._places, place)

    def remove(self, waiter: Waiter) -> None:
        """Remove the deadline of a unit, if it has one."""
        place = self._place_of.pop(waiter, None)
        if place is not None:
            del self._places[bisect_left(self._places, place)]

    def first_overdue(self, now: float) -> Waiter | None:
        """Return the unit whose deadline passed first, or None. `now`: clock time."""
        return self._places[0][-1] if self._places and self._places[0][0] <= now else None


class DrainRate:
    """Measures how fast the queue is served, from one service to the next while units wait."""

    def __init__(self) -> None:
        self._served = 0
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """Clock time of the last service. None: the queue was empty since then."""

    def serve(self, amount: float, now: float) -> None:
        """Record the service of a queued unit. If it was the last one in the queue, `stop` must follow.

        Args:
            amount: See `Waiter.amount`.
            now: Clock time.
        """
        if self._since is not None:
            passed = max(0.0, now - self._since)
            kept = math.exp(-passed / _MEMORY_SECONDS)
            self._seconds = self._seconds * kept + passed
            self._amount = self._amount * kept + amount
            self._served += 1
        self._since = now

    def stop(self) -> None:
        """Stop the measurement of how fast the queue empties."""
        self._since = None

    def seconds(self, amount: float, now: float) -> float | None:
        """Return the predicted seconds to serve an amount, or None after fewer than 8 services.

        Args:
            amount: The sum of `Waiter.amount`.
            now: Clock time.
        """
        if self._served < _MIN_SERVICES:
            return None
        standing = 0.0 if self._since is None else max(0.0, now - self._since)
        kept = math.exp(-standing / _MEMORY_SECONDS)
        return amount * (self._seconds * kept + standing) / max(1e-9, self._amount * kept)
