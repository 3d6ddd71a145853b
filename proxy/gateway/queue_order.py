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


class QueueOrdering(Protocol):
    """Predicts the work of requests, and chooses the next one. The pool of prefillers implements it."""

    @property
    def working_sets(self) -> SessionLimits | None:
        """Working sets that hold back turns of sessions. None: nothing holds them back."""

    @property
    def holds_queue(self) -> bool:
        """Whether it orders the queue now. Otherwise requests go in turn, and no other method is called."""

    def predict_work_seconds(self, request: PickRequest) -> float:
        """Return the predicted work of a request. Of the units of one key, shorter ones go first, see AGEING."""

    def on_left_queue(self, request: PickRequest) -> None:
        """Forget a request that has left the queue. Call this once for each call of `predict_work_seconds`."""

    def index_to_admit(self, waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the index of the request that should go now, or None if all should wait for a better instance."""


class ArrivalOrdering:
    """Serves requests in the order of their arrival."""

    holds_queue: ClassVar[bool] = False
    working_sets: ClassVar[SessionLimits | None] = None

    def predict_work_seconds(self, request: PickRequest) -> float:
        """Return the predicted work of a request. Of the units of one key, shorter ones go first, see AGEING.

        Nothing is predicted.
        """
        return 0.0

    def on_left_queue(self, request: PickRequest) -> None:
        """Forget a request that has left the queue. Call this once for each call of `predict_work_seconds`.

        Nothing was stored.
        """

    def index_to_admit(self, waiting_requests: Sequence[PickRequest]) -> int | None:
        return 0


_place = attrgetter("place")


@dataclass(slots=True, eq=False)
class WaitingUnit:
    """One unit in the admission queue."""

    client_key: str
    """The name of the client key."""
    arrived_at: float
    """Clock time at which the unit joined the queue."""
    turn_future: asyncio.Future[None]
    """Done when the unit may go, or was rejected."""
    pick_request: PickRequest | None = None
    """The lease that the unit will request. None: unknown, so the unit goes in turn."""
    is_patient: bool = False
    """Whether the unit waits without limits, because its client request was admitted already."""
    skips_learned_limits: bool = False
    """Whether learned limits do not hold the unit back any more."""
    priority_number: int = 0
    """Units with lower values go first."""
    work_seconds: float = 0.0
    """Predicted work. Shorter units go first."""
    cost_seconds: float = 0.0
    """Predicted engine seconds, charged to the key. 0: unknown."""
    first_token_seconds: float | None = None
    """Longest time to the first token that the client accepts. None: no limit."""
    overdue_at: float = math.inf
    """Clock time from which the first token cannot be in time."""
    rejection_error: GatewayError | None = None
    """Why the unit was rejected. None: it was not."""
    place: tuple[int, float, int] = field(init=False, repr=False)
    """Sort key among the units of one client key."""

    def __post_init__(self) -> None:
        self.place = self.priority_number, self.work_seconds + AGEING * self.arrived_at, next(_ARRIVALS)

    def set_work_seconds(self, work_seconds: float) -> None:
        """Set the predicted work of a unit that has no place in the queue yet."""
        self.cost_seconds += work_seconds - self.work_seconds
        self.work_seconds = work_seconds
        self.place = self.priority_number, work_seconds + AGEING * self.arrived_at, next(_ARRIVALS)

    @property
    def rank_among_workers(self) -> tuple[int, float]:
        """Sort key among the queues of all workers: the priority, then the work and the arrival."""
        return self.place[:2]

    @property
    def drain_amount(self) -> float:
        """The share of the unit in the drain rate: its cost, or 1 if the cost is unknown."""
        return self.cost_seconds or 1.0


class KeyQueue:
    """The queued units of one client key, in their order."""

    def __init__(self, key: str, served_seconds: float, last_service: int) -> None:
        self.client_key = key
        self.queued_units: dict[WaitingUnit, None] = {}
        """The units in the order of their arrival."""
        self.request_count = 0
        """The number of units that may be rejected."""
        self.served_seconds = served_seconds
        """The service of the key, in predicted engine seconds."""
        self.last_service = last_service
        """The number of the key's last service. Later services have higher numbers."""
        self._ranked_units: list[WaitingUnit] = []
        """The units in the order in which they go."""

    def add_unit(self, waiter: WaitingUnit) -> None:
        """Add a unit to the queue of its client key."""
        self.queued_units[waiter] = None
        self.request_count += not waiter.is_patient
        insort(self._ranked_units, waiter, key=_place)

    def remove_unit(self, waiter: WaitingUnit) -> None:
        """Remove a unit from the queue of its client key."""
        del self.queued_units[waiter]
        self.request_count -= not waiter.is_patient
        del self._ranked_units[bisect_left(self._ranked_units, waiter.place, key=_place)]

    @property
    def first_unit(self) -> WaitingUnit:
        """The unit of a client key that goes next."""
        return self._ranked_units[0]

    def amount_before(self, waiter: WaitingUnit) -> float:
        """Return the amount of the units that go before a new one."""
        return sum(
            before.drain_amount
            for before in self._ranked_units[: bisect_left(self._ranked_units, waiter.place, key=_place)]
        )

    def amounts_by_urgency(self, priority: int) -> tuple[float, float]:
        """Return the amount of the units with a more urgent priority, and of those with this priority."""
        urgent = sum(waiter.drain_amount for waiter in self.queued_units if waiter.priority_number < priority)
        return urgent, sum(waiter.drain_amount for waiter in self.queued_units if waiter.priority_number == priority)

    def first_units(self, count: int) -> list[WaitingUnit]:
        """Return the first `count` units in the order in which they go."""
        return self._ranked_units[:count]


class FairQueue:
    """The queued units of all client keys, in order."""

    def __init__(self, running: Mapping[str, int]) -> None:
        """Begin without units. `running`: the number of running units of each key, which its owner updates."""
        self.lines_by_key: dict[str, KeyQueue] = {}
        """The lines by client key. Each has at least one unit."""
        self._running_by_key = running
        self._service_numbers = count()
        self._served_seconds_by_key: dict[str, float] = {}
        """The service of keys that have no line, since the queue was empty."""

    def __len__(self) -> int:
        return sum(len(line.queued_units) for line in self.lines_by_key.values())

    def add_unit(self, waiter: WaitingUnit) -> None:
        """Add a unit to the queue."""
        line = self.lines_by_key.get(waiter.client_key)
        if line is None:
            served = self._service_of_key(waiter.client_key)
            self._served_seconds_by_key.pop(waiter.client_key, None)
            # It counts as just served, so that a key with short visits does not overtake keys that wait.
            line = self.lines_by_key[waiter.client_key] = KeyQueue(
                waiter.client_key, served, next(self._service_numbers)
            )
        line.add_unit(waiter)

    def remove_unit(self, waiter: WaitingUnit) -> None:
        """Remove a unit from the queue."""
        line = self.lines_by_key[waiter.client_key]
        line.remove_unit(waiter)
        if not line.queued_units:
            del self.lines_by_key[waiter.client_key]
            self._served_seconds_by_key[waiter.client_key] = line.served_seconds
            if not self.lines_by_key:
                self._served_seconds_by_key.clear()

    def charge_key(self, waiter: WaitingUnit) -> None:
        """Charge the key of a unit that goes now. `remove_unit` must follow."""
        line = self.lines_by_key[waiter.client_key]
        line.served_seconds += waiter.cost_seconds
        line.last_service = next(self._service_numbers)

    def first_units(self, count: int) -> list[WaitingUnit]:
        """Return the first `count` units of all keys in order. At least one unit must wait."""
        if len(self.lines_by_key) == 1:
            (line,) = self.lines_by_key.values()
            return line.first_units(count)
        lines = sorted(self.lines_by_key.values(), key=self._sort_key_of_line)
        fronts: list[Iterable[WaitingUnit]] = [line.first_units(count) for line in lines]
        head = lines[0].first_unit
        if head.cost_seconds:
            highest = lines[0].served_seconds + _EQUAL_SECONDS
            equal = sum(
                line.first_unit.priority_number == head.priority_number and line.served_seconds <= highest
                for line in lines
            )
            fronts[:equal] = [merge(*fronts[:equal], key=_place)]
        return list(islice(chain.from_iterable(fronts), count))

    def amount_ahead(self, waiter: WaitingUnit) -> float:
        """Return the amount that will probably be served before a new unit, if no other unit arrives.

        This includes all units that go first for certain. Other keys of the same priority are each served as much as
        the key of the new unit until then.
        """
        own = self.lines_by_key.get(waiter.client_key)
        before = own.amount_before(waiter) if own else 0.0
        share = self._service_of_key(waiter.client_key) + before + waiter.drain_amount
        for line in self.lines_by_key.values():
            if line is not own:
                urgent, equal = line.amounts_by_urgency(waiter.priority_number)
                before += urgent + min(equal, max(0.0, share - line.served_seconds))
        return before

    def _service_of_key(self, client_key: str) -> float:
        """Return the service of a key. A key without a line has at least that of the key served least."""
        if (line := self.lines_by_key.get(client_key)) is not None:
            return line.served_seconds
        least = min((line.served_seconds for line in self.lines_by_key.values()), default=0.0)
        return max(least, self._served_seconds_by_key.get(client_key, 0.0))

    def find_unit_to_reject(self, client_key: str) -> WaitingUnit | None:
        """Return the unit to reject in a full queue in favor of a unit of this key.

        This is the last unit of the key with most requests. Return None if that is the given key.
        """
        greediest = max(self.lines_by_key.values(), key=lambda line: line.request_count, default=None)
        own = self.lines_by_key.get(client_key)
        if greediest is None or greediest.request_count <= (own.request_count if own else 0):
            return None
        return next(waiter for waiter in reversed(greediest.queued_units) if not waiter.is_patient)

    def _sort_key_of_line(self, line: KeyQueue) -> tuple[int, float, int, int]:
        """Return the sort key of a line: priority, service, running units, and the number of its last service."""
        return (
            line.first_unit.priority_number,
            line.served_seconds,
            self._running_by_key.get(line.client_key, 0),
            line.last_service,
        )


# Time constant with which past services lose weight.
_MEMORY_SECONDS: Final = 30.0
# Services needed before anything is predicted.
_MIN_SERVICES: Final = 8


class QueueDeadlines:
    """Deadlines of queued units, earliest first."""

    def __init__(self) -> None:
        self._sorted_deadlines: list[tuple[float, int, WaitingUnit]] = []
        self._deadline_by_unit: dict[WaitingUnit, tuple[float, int, WaitingUnit]] = {}

    def add_unit(self, waiter: WaitingUnit) -> None:
        """Add a unit that begins to wait. A unit without a deadline is ignored."""
        if waiter.overdue_at < math.inf:
            place = self._deadline_by_unit[waiter] = waiter.overdue_at, next(_ARRIVALS), waiter
            insort(self._sorted_deadlines, place)

    def remove_unit(self, waiter: WaitingUnit) -> None:
        """Remove the deadline of a unit, if it has one."""
        place = self._deadline_by_unit.pop(waiter, None)
        if place is not None:
            del self._sorted_deadlines[bisect_left(self._sorted_deadlines, place)]

    def first_overdue(self, now: float) -> WaitingUnit | None:
        """Return the unit whose deadline passed first, or None. `now`: clock time."""
        return self._sorted_deadlines[0][-1] if self._sorted_deadlines and self._sorted_deadlines[0][0] <= now else None


class DrainRate:
    """Measures how fast the queue is served, from one service to the next while units wait."""

    def __init__(self) -> None:
        self._served_count = 0
        self._served_amount = 0.0
        self._measured_seconds = 0.0
        self._measured_since: float | None = None
        """Clock time of the last service. None: the queue was empty since then."""

    def record_service(self, drain_amount: float, now: float) -> None:
        """Record the service of a queued unit. If it was the last one in the queue, `stop_measuring` must follow.

        Args:
            drain_amount: See `WaitingUnit.drain_amount`.
            now: Clock time.
        """
        if self._measured_since is not None:
            passed = max(0.0, now - self._measured_since)
            kept = math.exp(-passed / _MEMORY_SECONDS)
            self._measured_seconds = self._measured_seconds * kept + passed
            self._served_amount = self._served_amount * kept + drain_amount
            self._served_count += 1
        self._measured_since = now

    def stop_measuring(self) -> None:
        """Stop the measurement of how fast the queue empties."""
        self._measured_since = None

    def predict_seconds(self, drain_amount: float, now: float) -> float | None:
        """Return the predicted seconds to serve an amount, or None after fewer than 8 services.

        Args:
            drain_amount: The sum of `WaitingUnit.drain_amount`.
            now: Clock time.
        """
        if self._served_count < _MIN_SERVICES:
            return None
        standing = 0.0 if self._measured_since is None else max(0.0, now - self._measured_since)
        kept = math.exp(-standing / _MEMORY_SECONDS)
        return drain_amount * (self._measured_seconds * kept + standing) / max(1e-9, self._served_amount * kept)
