"""Admission: one worker's queue in front of the pools, for requests that no instance has room for yet.

The pools know the room. AdmissionQueue asks them whether there is any. `queue_order` decides which request takes it.
The length of the queue, the time in it and the request bodies in memory are bounded; what exceeds these bounds is
refused at once and told when to come back.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Protocol, Self

from proxy.common.errors import RETRY_AFTER_SECONDS, GatewayError, NoBackendAvailable, Overloaded, overloaded
from proxy.gateway.queue_order import Deadlines, DrainRate, InTurn, Order, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from proxy.balancer.pick import PickRequest
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.backend import Role
    from proxy.gateway.queue_order import LineUp
    from proxy.observe.metrics import Metrics
    from proxy.settings.model import Admission as Limits


# What is predicted is told no earlier than it is, and up to this part later: those who are refused together must not
# return together.
_SPREAD: Final = 0.2


def queue_full() -> Overloaded:
    """As many wait as may."""
    return overloaded("queue_full", "too many requests are waiting for an instance")


def queue_timeout(wait_seconds: float, absent: Role | None) -> Overloaded | NoBackendAvailable:
    """For a unit that has waited as long as it may. `absent`: the role of which no backend is left, if that is why
    there was no room; None: there were backends, and all were full.
    """
    if absent is not None:
        nobody = NoBackendAvailable(absent)
        nobody.retry_after_seconds = random.uniform(*RETRY_AFTER_SECONDS)
        return nobody
    return overloaded("queue_timeout", f"no instance had room for this request within {wait_seconds:g} s")


def all_refuse(role: Role, seconds: float) -> Overloaded:
    """For a unit that would wait in vain: all instances of a role refuse requests by their own Retry-After, the first
    one for this time.
    """
    error = Overloaded(f"all {role.value} instances refuse requests, for another {seconds:.0f} s", code="all_refuse")
    error.retry_after_seconds = seconds * random.uniform(1.0, 1.0 + _SPREAD)
    return error


def too_late(wanted_seconds: float) -> GatewayError:
    """Its first token cannot come any more when the client wants it: to repeat it as it is cannot help."""
    message = f"the first token cannot come within {wanted_seconds:g} s any more, as x-ttft-deadline-ms asks for"
    return GatewayError(message, code="queue_deadline", status=504)


def too_long_a_wait(predicted_seconds: float, may_wait_seconds: float) -> GatewayError:
    """For a unit that is predicted to wait for longer than it may: 429, whose Retry-After is the difference."""
    error = GatewayError(
        f"this request would probably wait for {predicted_seconds:.1f} s, and {may_wait_seconds:.1f} s are the limit",
        code="queue_predicted",
        status=429,
    )
    error.retry_after_seconds = max(1.0, predicted_seconds - may_wait_seconds) * random.uniform(1.0, 1.0 + _SPREAD)
    return error


class HasRoom(Protocol):
    """See AdmissionParts."""

    def __call__(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """See AdmissionParts."""


# So many of those who wait are looked at for one to whom what is free is best.
_FRONT: Final = 64

# Other workers free room, too, and do not announce it.
_LOOK_AGAIN_SECONDS: Final = 0.02

# After this time it is looked again which units have waited for too long for a limit that was learned.
_LET_GO_SECONDS: Final = 0.25


class BodyBuffers:
    """One worker's request bodies."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The bytes of all bodies. Whoever has called `take` subtracts the bytes again."""

    def take(self, body_bytes: int) -> bool:
        """Account for so many bytes, until they are given back; False: there is no room for them. A single body always
        fits.
        """
        held = self.held_bytes
        if held and held + body_bytes > self.max_bytes:
            return False
        self.held_bytes = held + body_bytes
        return True

    def hold(self, body_bytes: int) -> Hold:
        """Account for a body of this length, which is about to be read, for as long as the block lasts."""
        return Hold(self, body_bytes)


class Hold:
    """One request body's part of the account. Get it from `hold`; `with`, as there is nothing to wait for."""

    __slots__ = ("_body_bytes", "_buffers", "_held_bytes")

    def __init__(self, buffers: BodyBuffers, body_bytes: int) -> None:
        self._buffers = buffers
        self._body_bytes = body_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        self.resize(self._body_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def resize(self, body_bytes: int) -> None:
        """Set the length of the body, for one that did not tell it. Raises Overloaded, and then holds what it held.

        A single body always fits, however long it is.
        """
        buffers = self._buffers
        others = buffers.held_bytes - self._held_bytes
        if others and body_bytes > self._held_bytes and others + body_bytes > buffers.max_bytes:
            raise overloaded("buffers_full", "the gateway has reached its limit of request bodies in memory")
        buffers.held_bytes = others + body_bytes
        self._held_bytes = body_bytes

    def add(self, body_bytes: int) -> None:
        """Hold that many bytes more. Raises Overloaded."""
        if body_bytes:
            self.resize(self._held_bytes + body_bytes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdmissionParts:
    """What an AdmissionQueue asks before it lets a unit in, and what it calls."""

    has_room: HasRoom
    """Returns whether a lease taken now would find room, or would fail because no backend is eligible.

    With a request that is first in the queue, it also returns whether this request need not wait for a better place.
    """
    metrics: Metrics
    """Metrics of this worker."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    absent: Callable[[], Role | None] = lambda: None
    """Returns the role, if any, all of whose backends are gone, so that there will be no room."""
    full: Callable[[], Role | None] = lambda: None
    """Returns the role, if any, in which there is no room."""
    refusing: Callable[[], tuple[Role, float] | None] = lambda: None
    """Returns a role all of whose backends refuse requests, and the clock's time until which they said to do so."""
    would_take: Callable[[], bool] = lambda: False
    """Returns whether only a learned limit leaves no room. Such a limit never refuses a unit."""
    hold_seconds: Callable[[PickRequest | None, int], float] = lambda _, waiting: math.inf
    """Returns the longest wait for a learned limit, of one of a number of waiting units."""
    on_wait: Callable[[bool], None] = lambda _: None
    """Called with True when a first unit waits, and with False when the last one stops. `notify` matters in between."""
    line_up: LineUp | None = None
    """Orders the units that wait; None: they go in turn."""
    answer_seconds: Callable[[PickRequest], float] = lambda _: 0.0
    """Returns the decoder time that an answer will probably take. Its key is charged for it."""
    lower_priority_first: bool = True
    """Whether engines serve a lower `priority` in the body first."""
    front: WorkerQueueHead | None = None
    """Serves the queues of several workers as one; None: there is no other queue."""


class AdmissionQueue:
    """Owns the queue and the account of what is held. One per worker."""

    def __init__(self, parts: AdmissionParts, limits: Limits) -> None:
        self._has_room = parts.has_room
        self._absent = parts.absent
        self._full = parts.full
        self._on_wait = parts.on_wait
        self._line_up = parts.line_up or InTurn()
        self._answer_seconds = parts.answer_seconds
        self._lower_priority_first = parts.lower_priority_first
        self._front = parts.front
        self._would_take = parts.would_take
        self._hold_seconds = parts.hold_seconds
        self._refusing = parts.refusing
        self._let_go_at = -math.inf  # when to look again for units that have waited for too long
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._running: dict[str, int] = {}  # units that were let in and have not left, by key
        self._order = Order(self._running)
        self._lines = self._order.lines
        self._queue: dict[Waiter, None] = {}  # all who wait and may be refused, the longest first
        self._deadlines = Deadlines()
        self._drain_rate = DrainRate()
        self._will_look = False
        self._timer: asyncio.TimerHandle | None = None  # ticks while somebody waits
        self.buffers = BodyBuffers(limits.max_buffered_bytes)
        self.is_short_of_memory = False
        """Every request is refused as long as this is set: there is no memory for its body."""
        self.priorities: Mapping[str, int] = {}
        """Of keys; lower goes first. A request may ask to go later than its key, and one without a key for anything."""
        self.configure(limits)

    def configure(self, limits: Limits) -> None:
        """Take other limits. A shorter wait holds for those who wait already; a shorter queue empties by itself."""
        self._max_waiting = limits.max_waiting
        self._wait_seconds = limits.wait_seconds
        self._max_predicted_seconds = limits.max_predicted_wait_seconds
        self.buffers.max_bytes = limits.max_buffered_bytes
        self.notify()

    @property
    def waiting(self) -> int:
        """Units that wait, the patient ones included."""
        return len(self._order)

    @property
    def running(self) -> int:
        """Units that were let in and have not left."""
        return sum(self._running.values())

    def check(self, key: str) -> None:
        """Raise Overloaded when a request of this key would find the queue full. Costs nothing worth mentioning, so
        that it can be asked before a body is read.
        """
        if self.is_short_of_memory:
            raise overloaded("memory", "the gateway is short of memory")
        if len(self._queue) < self._max_waiting or self._order.dispensable(key) is not None:
            return
        if (self._lines or not self._has_room()) and not self._would_take():
            raise queue_full()

    def admit(
        self,
        key: str,
        *,
        patient: bool = False,
        on_wait: Callable[[], None] | None = None,
        request: Callable[[], PickRequest] | None = None,
        since: float | None = None,
    ) -> Entry:
        """Let a unit in, or have it wait for its turn. Raises Overloaded when the queue is full or the wait too long,
        NoBackendAvailable when it was that because all of a role are gone, and other GatewayErrors when its first token
        cannot come in time any more, or the wait would probably be too long.

        The block must lease before its first await: only then is the room that was seen still there, and gone for the
        next. `patient`: a further unit of a request that was let in already, which is not refused any more. `on_wait`
        is called if there is a wait, when it begins. `request`: what it will lease, by which the line is ordered; None:
        it goes in turn, to wherever there is room. `since`: the clock's time from which on its client waits; None: now.
        """
        return Entry(self, key, patient, on_wait, request, since)

    def queue(
        self, key: str, request: Callable[[], PickRequest], since: float, on_turn: Callable[[GatewayError | None], None]
    ) -> QueuedUnit:
        """Queue a unit that `lets_in` does not let in. Raises as `admit`.

        Args:
            key: The name of its client key.
            request: What it will lease.
            since: The clock's time from which on its client waits.
            on_turn: Called once, with the error of a unit that is refused. Otherwise it must `enter` and lease at once.
        """
        self._count_wait()
        waiter = self._join(Entry(self, key, is_patient=False, on_wait=None, request=request, since=since))
        return QueuedUnit(self, waiter, on_turn)

    def enter(self, key: str) -> None:
        """Let a unit in that would find room at once; see `lets_in`. To be left by `leave`."""
        self._running[key] = self._running.get(key, 0) + 1

    def leave(self, key: str) -> None:
        """A unit that entered is done."""
        left = self._running[key] - 1
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def lets_in(self, request: Callable[[], PickRequest]) -> bool:
        """Whether a unit that came now would be let in at once."""
        return not self._lines and not self.is_short_of_memory and self._has_room(request)

    def notify(self) -> None:
        """There may be room now. May be called from the middle of what makes it."""
        if self._lines and not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_soon(self._look)

    def _count_wait(self) -> None:
        """One has to wait: count for what."""
        reason = "queue"
        if not self._lines:
            role = self._full()
            reason = "better" if role is None else role.value
        self._metrics.queue_waits_total.labels(reason).inc()

    async def _wait(self, entry: Entry) -> None:
        """Return when there is room and it is this one's turn."""
        waiter = self._join(entry)
        try:
            await waiter.turn
            while not self._take_turn(waiter):
                await waiter.turn
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _take_turn(self, waiter: Waiter) -> bool:
        """Leave the queue if there is still room. Raises the error of a unit that was refused."""
        if waiter.refusal is not None:  # it was taken out of the queue then
            raise waiter.refusal
        if not self._has_room() and not (waiter.is_let_go and self._would_take()):
            # A unit of another worker took the room, or one that does not queue. The place in front is kept.
            waiter.turn = asyncio.get_running_loop().create_future()
            return False
        now = self._clock()
        self._order.serve(waiter)
        self._drain_rate.serve(waiter.amount, now)
        self._part(waiter)
        self._metrics.queue_seconds.observe(now - waiter.arrived)
        return True

    def _give_up(self, waiter: Waiter) -> None:
        """Take a unit out of the queue that does not wait any longer."""
        if not waiter.is_refused:
            self._part(waiter)

    def _join(self, entry: Entry) -> Waiter:
        gives_way = None
        is_full = not entry.is_patient and len(self._queue) >= self._max_waiting
        if is_full:
            gives_way = self._order.dispensable(entry.key)
            if gives_way is None and not self._would_take():
                raise queue_full()
        waiter = self._waiter(entry)
        if not waiter.is_patient and (refusal := self._refusal(waiter)) is not None:
            if waiter.request is not None:
                self._line_up.left_queue(waiter.request)
            raise refusal
        if not self._lines:
            self._on_wait(True)
        self._order.join(waiter)
        if not waiter.is_patient:
            self._queue[waiter] = None
            self._deadlines.add(waiter)
            self._metrics.queued_requests.inc()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._tick)
        self.notify()  # it may be the first to whom what is free is best
        if is_full and self._would_take():
            self._let_go(next((each for each in self._queue if not each.is_let_go), waiter))
        elif gives_way is not None:
            self._refuse(gives_way, queue_full())  # last, so that its turn can pass to another one
        return waiter

    def _waiter(self, entry: Entry) -> Waiter:
        request = None if entry.request is None else entry.request()
        wanted = None if request is None else request.first_token_seconds
        asked = None if request is None else request.priority(lower_first=self._lower_priority_first)
        least = self.priorities.get(entry.key)
        priority = (asked or 0) if least is None else least if asked is None else max(least, asked)
        work = cost = 0.0
        if not self._line_up.holds_queue:
            request = None
        if request is not None:
            work = self._line_up.work_seconds(request)
            cost = work + self._answer_seconds(request)
        now = self._clock()
        return Waiter(
            key=entry.key,
            arrived=now,
            turn=asyncio.get_running_loop().create_future(),
            request=request,
            is_patient=entry.is_patient,
            priority=priority,
            work_seconds=work,
            cost_seconds=cost,
            wanted_seconds=wanted,
            late_at=math.inf if wanted is None else (now if entry.since is None else entry.since) + wanted - work,
        )

    def _refusal(self, waiter: Waiter) -> GatewayError | None:
        """Why one that has just come need not wait; None: it may."""
        if waiter.late_at <= waiter.arrived:
            return too_late(waiter.wanted_seconds or 0.0)
        refusing = self._refusing()
        if refusing is not None and refusing[1] > waiter.arrived + self._wait_seconds:
            return all_refuse(refusing[0], refusing[1] - waiter.arrived)
        if self._max_predicted_seconds is None or not self._lines or self._would_take():
            return None
        predicted = self._drain_rate.seconds(self._order.ahead(waiter), waiter.arrived)
        may_wait = min(self._max_predicted_seconds, waiter.late_at - waiter.arrived)
        return None if predicted is None or predicted <= may_wait else too_long_a_wait(predicted, may_wait)

    def _part(self, waiter: Waiter) -> None:
        """Take it out of the queue, whatever the reason."""
        if waiter.request is not None:
            self._line_up.left_queue(waiter.request)
        self._order.part(waiter)
        if not waiter.is_patient:
            del self._queue[waiter]
            self._deadlines.remove(waiter)
            self._metrics.queued_requests.dec()
        if not self._lines:
            if self._front is not None:
                self._front.publish_empty()
            self._drain_rate.stop()
            self._on_wait(False)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self.notify()  # if this was its turn, the next one's comes when this task has leased what it takes

    def _refuse(self, waiter: Waiter, refusal: GatewayError) -> None:
        self._part(waiter)
        waiter.refusal = refusal
        if not waiter.turn.done():
            waiter.turn.set_result(None)

    def _let_go(self, waiter: Waiter) -> None:
        """Have it go to an engine that would take it, whatever was learned."""
        waiter.is_let_go = True
        if not waiter.turn.done():
            waiter.turn.set_result(None)

    def _let_go_overdue(self, now: float) -> None:
        """Let those go that have waited for as long as they should for a limit that was learned."""
        if now < self._let_go_at or not self._would_take():
            return
        self._let_go_at = now + _LET_GO_SECONDS
        waiting = self.waiting
        overdue = [
            waiter
            for line in self._lines.values()
            for waiter in line.waiters
            # With a deadline at the latest half of the time before it.
            if now - waiter.arrived
            > min(self._hold_seconds(waiter.request, waiting), (waiter.late_at - waiter.arrived) / 2)
        ]
        for waiter in overdue:
            self._let_go(waiter)

    def _look(self) -> None:
        """Wake the next one if there is room. One at a time: how much room there is shows when it has leased."""
        self._will_look = False
        now = self._clock()
        while (late := self._deadlines.missed(now)) is not None:
            self._refuse(late, too_late(late.wanted_seconds or 0.0))
        if not self._lines:
            return
        has_room = self._has_room()
        if not has_room:
            self._let_go_overdue(now)
            if self._front is None:
                return
        front = self._order.front(_FRONT if has_room else 1)
        if self._front is not None:
            self._front.publish(*front[0].rank)
        if not has_room:
            return
        waiter = self._next(front)
        # One whose turn has come runs next: it is awake, or cancelled, and then it passes its turn on.
        if waiter is None or waiter.turn.done():
            return
        if self._front is None or not self._front.leaves_room(*waiter.rank, now):
            waiter.turn.set_result(None)

    def _next(self, front: Sequence[Waiter]) -> Waiter | None:
        """Whose turn it is. `front`: the first in line, at least one. None: they had better all wait for what is not
        free yet.
        """
        awake = next((waiter for waiter in front if waiter.turn.done()), None)
        if awake is not None:
            return awake
        if front[0].request is None:
            return front[0]
        known = [waiter for waiter in front if waiter.request is not None]
        place = self._line_up.first_to_go([waiter.request for waiter in known if waiter.request is not None])
        return None if place is None else known[place]

    def _tick(self) -> None:
        self._timer = None
        now = self._clock()
        latest = now - self._wait_seconds
        refusing = self._refusing()
        # Who came before this waits in vain.
        useless = latest if refusing is None else max(latest, refusing[1] - self._wait_seconds)
        try:
            for waiter in list(takewhile(lambda waiter: waiter.arrived <= useless, self._queue)):
                if refusing is not None and waiter.arrived > latest:
                    self._refuse(waiter, all_refuse(refusing[0], refusing[1] - now))
                elif self._would_take():
                    self._let_go(waiter)
                # A unit that was let go has its turn before all others, and that time once more.
                elif not waiter.is_let_go or waiter.arrived <= latest - self._wait_seconds:
                    self._refuse(waiter, queue_timeout(self._wait_seconds, self._absent()))
            self._look()
        finally:  # an error in one look must not end the looks at all others
            if self._lines:
                self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._tick)


class QueuedUnit:
    """A unit in the queue that has no task. Get it from `AdmissionQueue.queue`."""

    __slots__ = ("_admission", "_on_turn", "_waiter")

    def __init__(
        self, admission: AdmissionQueue, waiter: Waiter, on_turn: Callable[[GatewayError | None], None]
    ) -> None:
        self._admission = admission
        self._waiter = waiter
        self._on_turn: Callable[[GatewayError | None], None] | None = on_turn
        waiter.turn.add_done_callback(self._look)

    def leave(self) -> None:
        """Leave the queue: the unit does not wait any longer."""
        if self._on_turn is not None:
            self._on_turn = None
            self._admission._give_up(self._waiter)

    def _look(self, _: asyncio.Future[None]) -> None:
        on_turn = self._on_turn
        if on_turn is None:
            return
        refusal: GatewayError | None = None
        try:
            if not self._admission._take_turn(self._waiter):
                self._waiter.turn.add_done_callback(self._look)
                return
        except GatewayError as error:
            refusal = error
        self._on_turn = None
        on_turn(refusal)


class Entry:
    """One unit's way through the gate. Get it from `AdmissionQueue.admit` and enter it, once."""

    __slots__ = (*("_admission", "_on_wait"), *("has_been_in", "is_patient", "key", "request", "since"))

    def __init__(
        self,
        admission: AdmissionQueue,
        key: str,
        is_patient: bool,
        on_wait: Callable[[], None] | None,
        request: Callable[[], PickRequest] | None = None,
        since: float | None = None,
    ) -> None:
        self._admission = admission
        self._on_wait = on_wait
        self.has_been_in = False
        """Whether it was let in before, and does not wait."""
        self.request = request
        self.since = since
        self.key = key
        self.is_patient = is_patient

    async def __aenter__(self) -> Self:
        admission, key, request = self._admission, self.key, self.request
        if not self.has_been_in and (admission._lines or not admission._has_room(request)):
            if self._on_wait is not None:
                self._on_wait()
            admission._count_wait()
            await admission._wait(self)
        # From here to the block's first await nothing can come in between, and no cancellation either.
        admission.enter(key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self.key)
