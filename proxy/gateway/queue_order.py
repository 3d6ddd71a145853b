"""In which order those who wait are served: more urgent priorities first, then fairly among keys, then the shorter.

What a key was served is counted in predicted seconds of the engines, as in VTC (Sheng et al., OSDI'24) in tokens: a key
that comes back begins where the one that was served least stands now, so nobody saves up, and nobody loses what he
owes by leaving for a moment. Keys whose services are near each other compete by their work: served strictly in turn,
many keys would have the shortest wait behind the longest. Where nothing is predicted, keys take turns.
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

    from proxy.balancer.pick import PickRequest
    from proxy.common.errors import GatewayError


# Keys whose services differ by no more are equal.
_EQUAL_SECONDS: Final = 2.0
_ARRIVALS: Final = count()  # in turn among equals


class LineUp(Protocol):
    """In which order those who wait are served, and who of them now: the pool of prefillers."""

    @property
    def holds_queue(self) -> bool:
        """Whether it has a say in that now: otherwise they go in turn, and it is not asked for more."""

    def work_seconds(self, request: PickRequest) -> float:
        """What a request takes: of one key's units those with less work go first, see AGEING."""

    def left_queue(self, request: PickRequest) -> None:
        """One whose `work_seconds` were asked for has left the queue: to be served, or for good."""

    def first_to_go(self, waiting: Sequence[PickRequest]) -> int | None:
        """The first that should go now, to where there is room; None: all had better wait."""


class InTurn:
    """In the order of their arrival."""

    holds_queue: ClassVar[bool] = False

    def work_seconds(self, request: PickRequest) -> float:
        """All the same."""
        return 0.0

    def left_queue(self, request: PickRequest) -> None:
        """Nothing was worked out."""

    def first_to_go(self, waiting: Sequence[PickRequest]) -> int | None:
        """The first."""
        return 0


_place = attrgetter("place")


@dataclass(slots=True, eq=False)
class Waiter:
    """One unit that waits."""

    key: str
    arrived: float
    turn: asyncio.Future[None]
    """Done when it may go, or was refused."""
    request: PickRequest | None = None
    """What it will lease; None: not known, so it goes in turn."""
    is_patient: bool = False
    """It is not refused any more."""
    is_let_go: bool = False
    """Limits that were learned do not hold it any more."""
    priority: int = 0
    """Lower goes first."""
    work_seconds: float = 0.0
    """By which the shorter goes first."""
    cost_seconds: float = 0.0
    """What its key is charged with; 0: not known."""
    wanted_seconds: float | None = None
    """How soon the client wants the first token; None: it does not say."""
    late_at: float = math.inf
    """The clock's time from which on that is impossible."""
    refusal: GatewayError | None = None
    place: tuple[int, float, int] = field(init=False, repr=False)
    """Among those of its key."""

    def __post_init__(self) -> None:
        self.place = self.priority, self.work_seconds + AGEING * self.arrived, next(_ARRIVALS)

    @property
    def is_refused(self) -> bool:
        """It need not wait any longer."""
        return self.refusal is not None

    @property
    def rank(self) -> tuple[int, float]:
        """Where it stands among those of all queues: its priority, and then its work and how long it waits."""
        return self.place[:2]

    @property
    def amount(self) -> float:
        """What counts of it for how fast the queue is served: its cost, or one where that is not known."""
        return self.cost_seconds or 1.0


class Line:
    """One key's units that wait. `requests`: those of them that may be refused."""

    __slots__ = ("key", "waiters", "requests", "served_seconds", "last_service", "_ranked")

    def __init__(self, key: str, served_seconds: float, last_service: int) -> None:
        self.key = key
        self.waiters: dict[Waiter, None] = {}  # in the order of their arrival
        self.requests = 0
        self.served_seconds = served_seconds
        self.last_service = last_service
        self._ranked: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        """It waits."""
        self.waiters[waiter] = None
        self.requests += not waiter.is_patient
        insort(self._ranked, waiter, key=_place)

    def remove(self, waiter: Waiter) -> None:
        """It does not wait any more."""
        del self.waiters[waiter]
        self.requests -= not waiter.is_patient
        del self._ranked[bisect_left(self._ranked, waiter.place, key=_place)]

    @property
    def first(self) -> Waiter:
        """The next one."""
        return self._ranked[0]

    def amount_before(self, waiter: Waiter) -> float:
        """Of those that go before one that is not here yet."""
        return sum(before.amount for before in self._ranked[: bisect_left(self._ranked, waiter.place, key=_place)])

    def amounts(self, priority: int) -> tuple[float, float]:
        """Of those that are more urgent than this, and of those that are equally so."""
        urgent = sum(waiter.amount for waiter in self.waiters if waiter.priority < priority)
        return urgent, sum(waiter.amount for waiter in self.waiters if waiter.priority == priority)

    def next(self, most: int) -> list[Waiter]:
        """The first, so many at most."""
        return self._ranked[:most]


class Order:
    """Those who wait."""

    def __init__(self, running: Mapping[str, int]) -> None:
        """`running`: units of each key that were let in and have not left, kept up to date by its owner."""
        self.lines: dict[str, Line] = {}
        """Of the keys under which units wait."""
        self._running = running
        self._services = count()
        self._served: dict[str, float] = {}  # of the keys without a line, since the first of the others waits

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in self.lines.values())

    def join(self, waiter: Waiter) -> None:
        """It waits from now on."""
        line = self.lines.get(waiter.key)
        if line is None:
            served = self._standing(waiter.key)
            self._served.pop(waiter.key, None)
            # As if it had just been served: a key whose requests come and go must not overtake those that stay.
            line = self.lines[waiter.key] = Line(waiter.key, served, next(self._services))
        line.add(waiter)

    def part(self, waiter: Waiter) -> None:
        """It waits no more, whatever the reason."""
        line = self.lines[waiter.key]
        line.remove(waiter)
        if not line.waiters:
            del self.lines[waiter.key]
            self._served[waiter.key] = line.served_seconds
            if not self.lines:
                self._served.clear()

    def serve(self, waiter: Waiter) -> None:
        """Its turn has come, right before it parts: its key is charged."""
        line = self.lines[waiter.key]
        line.served_seconds += waiter.cost_seconds
        line.last_service = next(self._services)

    def front(self, most: int) -> list[Waiter]:
        """The first of all, at least one if any waits, in order."""
        if len(self.lines) == 1:
            (line,) = self.lines.values()
            return line.next(most)
        lines = sorted(self.lines.values(), key=self._precedence)
        fronts: list[Iterable[Waiter]] = [line.next(most) for line in lines]
        head = lines[0].first
        if head.cost_seconds:
            highest = lines[0].served_seconds + _EQUAL_SECONDS
            equal = sum(line.first.priority == head.priority and line.served_seconds <= highest for line in lines)
            fronts[:equal] = [merge(*fronts[:equal], key=_place)]
        return list(islice(chain.from_iterable(fronts), most))

    def ahead(self, waiter: Waiter) -> float:
        """The amount of those who will probably be served before one that does not wait yet, if nobody else comes:
        those that go before it for certain, and of equals as much from each key as its own is served until then.
        """
        own = self.lines.get(waiter.key)
        before = own.amount_before(waiter) if own else 0.0
        share = self._standing(waiter.key) + before + waiter.amount
        for line in self.lines.values():
            if line is not own:
                urgent, equal = line.amounts(waiter.priority)
                before += urgent + min(equal, max(0.0, share - line.served_seconds))
        return before

    def _standing(self, key: str) -> float:
        """What a key was served, or counts as served because it was away."""
        if (line := self.lines.get(key)) is not None:
            return line.served_seconds
        least = min((line.served_seconds for line in self.lines.values()), default=0.0)
        return max(least, self._served.get(key, 0.0))

    def dispensable(self, key: str) -> Waiter | None:
        """Who gives way to a unit of this key when the queue is full: the youngest of the key that has most of it.
        None when that is this one.
        """
        greediest = max(self.lines.values(), key=lambda line: line.requests, default=None)
        own = self.lines.get(key)
        if greediest is None or greediest.requests <= (own.requests if own else 0):
            return None
        return next(waiter for waiter in reversed(greediest.waiters) if not waiter.is_patient)

    def _precedence(self, line: Line) -> tuple[int, float, int, int]:
        """Least first: of the more urgent the key that was served least; of equal ones the one that has least running,
        and of several the one whose last turn was longest ago.
        """
        return line.first.priority, line.served_seconds, self._running.get(line.key, 0), line.last_service


# The services of so many seconds count, and older ones ever less.
_MEMORY_SECONDS: Final = 30.0
# Before that many nothing is predicted.
_ENOUGH: Final = 8


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
