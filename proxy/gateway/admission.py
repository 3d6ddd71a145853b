"""The queue of one worker for requests that no instance has room for yet.

AdmissionQueue asks an EngineRoom for room. `queue_order` decides which request goes first. The length of the queue, the
time in it and the request bodies in memory are limited. Beyond a limit, requests are rejected with a Retry-After.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Self

from proxy.common.errors import RETRY_AFTER_SECONDS, GatewayError, NoBackendAvailable, Overloaded, make_overloaded_error
from proxy.gateway.queue_order import ArrivalOrdering, DrainRate, FairQueue, QueueDeadlines, WaitingUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from proxy.balancer.pick import PickRequest, SessionLimits
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.backend import Role
    from proxy.gateway.engine_room import EngineRoom
    from proxy.gateway.queue_order import QueueOrdering
    from proxy.observe.metrics import Metrics
    from proxy.settings.model import Admission as Limits


# Retry-After is up to this share longer than predicted, so that clients rejected together do not return together.
_SPREAD: Final = 0.2


def make_queue_full_error() -> Overloaded:
    """Return the error for a unit that finds the queue full."""
    return make_overloaded_error("queue_full", "too many requests are waiting for an instance")


def make_queue_timeout_error(wait_seconds: float, absent: Role | None) -> Overloaded | NoBackendAvailable:
    """Return the error for a unit that has waited for the longest time allowed.

    `absent`: the role without any backend left. None: all backends were full.
    """
    if absent is not None:
        error = NoBackendAvailable(absent)
        error.message = f"no healthy {absent.value} instance became available within {wait_seconds:g} s"
        error.retry_after_seconds = random.uniform(*RETRY_AFTER_SECONDS)
        return error
    return make_overloaded_error("queue_timeout", f"no instance had room for this request within {wait_seconds:g} s")


def make_all_refuse_error(role: Role, seconds: float) -> Overloaded:
    """Return the error for a unit when all instances of a role reject requests.

    `seconds`: the shortest remaining Retry-After of the instances.
    """
    error = Overloaded(f"all {role.value} instances reject requests; retry in {seconds:.0f} s", code="all_refuse")
    error.retry_after_seconds = seconds * random.uniform(1.0, 1.0 + _SPREAD)
    return error


def make_deadline_error(first_token_seconds: float) -> GatewayError:
    """Return the error for a unit whose deadline for the first token cannot be met. A retry cannot help."""
    message = (
        f"request dropped from the queue: the first token cannot be produced within the {first_token_seconds:g} s"
        " requested by x-ttft-deadline-ms"
    )
    return GatewayError(message, code="queue_deadline", status=504)


def make_long_wait_error(predicted_seconds: float, max_wait_seconds: float) -> GatewayError:
    """Return the error for a unit with a predicted wait above the limit. Retry-After is the difference."""
    error = GatewayError(
        f"the predicted wait of {predicted_seconds:.1f} s exceeds the limit of {max_wait_seconds:.1f} s",
        code="queue_predicted",
        status=429,
    )
    error.retry_after_seconds = max(1.0, predicted_seconds - max_wait_seconds) * random.uniform(1.0, 1.0 + _SPREAD)
    return error


# How many queued units to examine for one that suits the free instance.
_LOOKAHEAD: Final = 64

# The interval of checks for room, because other workers do not announce the room that they free.
_CHECK_SECONDS: Final = 0.02

# The interval of checks for units that have waited too long for a learned limit.
_LEARNED_LIMITS_SECONDS: Final = 0.25

# The interval of checks for room in working sets.
_SESSIONS_SECONDS: Final = 0.1


class BodyBuffers:
    """Counts the bytes of one worker's request bodies in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The bytes of all bodies. The caller of `reserve_bytes` subtracts its bytes again."""

    def reserve_bytes(self, body_bytes: int) -> bool:
        """Add the bytes of a body. Return False if there is no room for them. A single body always fits."""
        held = self.held_bytes
        if held and held + body_bytes > self.max_bytes:
            return False
        self.held_bytes = held + body_bytes
        return True

    def hold_body(self, body_bytes: int) -> BodyHold:
        """Return a context manager that counts a body of this length."""
        return BodyHold(self, body_bytes)


class BodyHold:
    """The part of one request body in BodyBuffers. `BodyBuffers.hold_body` returns it."""

    def __init__(self, buffers: BodyBuffers, body_bytes: int) -> None:
        self._body_buffers = buffers
        self._body_bytes = body_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        self.set_body_size(self._body_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body_buffers.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def set_body_size(self, body_bytes: int) -> None:
        """Change the length of the body. A single body always fits.

        Raises:
            Overloaded: There is no room for the new length. The old length still counts.
        """
        buffers = self._body_buffers
        others = buffers.held_bytes - self._held_bytes
        if others and body_bytes > self._held_bytes and others + body_bytes > buffers.max_bytes:
            raise make_overloaded_error("buffers_full", "the gateway has reached its limit of request bodies in memory")
        buffers.held_bytes = others + body_bytes
        self._held_bytes = body_bytes

    def add_bytes(self, body_bytes: int) -> None:
        """Add bytes of a request body to the buffered bytes. Raises Overloaded."""
        if body_bytes:
            self.set_body_size(self._held_bytes + body_bytes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdmissionParts:
    """The parts of an AdmissionQueue."""

    engine_room: EngineRoom
    """The room that queued units wait for."""
    metrics: Metrics
    """Metrics of this worker."""
    skips_queue: Callable[[PickRequest], bool] = lambda _: False
    """Returns whether a request should not wait, because a decoder computes its prompt without a prefiller."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    queue_order: QueueOrdering | None = None
    """Orders the queued units. None: they go in turn."""
    is_lower_priority_first: bool = True
    """Whether engines serve a lower `priority` in the body first."""
    queue_head: WorkerQueueHead | None = None
    """Coordinates the queues of all workers. None: there is no other queue."""


class AdmissionQueue:
    """The queue of one worker, and its count of running units and request bodies."""

    def __init__(self, parts: AdmissionParts, limits: Limits) -> None:
        self._engine_room = parts.engine_room
        self._skips_queue = parts.skips_queue
        self._queue_order = parts.queue_order or ArrivalOrdering()
        self._is_lower_priority_first = parts.is_lower_priority_first
        self._queue_head = parts.queue_head
        self._held_sessions: dict[WaitingUnit, Any] = {}
        """The units that wait until there is room for their sessions in a working set, in the order of arrival. They
        have no place in `_fair_queue`."""
        self._holding_sets: SessionLimits | None = None
        """The working sets that know the sessions of `_held_sessions`."""
        self._seen_shed_turns = 0
        self._next_session_check_at = -math.inf
        """Clock time of the next check for room in the working sets."""
        self._next_limit_check_at = -math.inf
        """Clock time of the next check for units that have waited too long for a learned limit."""
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._running: dict[str, int] = {}
        """The number of running units by client key."""
        self._fair_queue = FairQueue(self._running)
        self._lines_by_key = self._fair_queue.lines_by_key
        self._rejectable_units: dict[WaitingUnit, None] = {}
        """The queued units that may be rejected, in the order of their arrival."""
        self._deadlines = QueueDeadlines()
        self._drain_rate = DrainRate()
        self._is_check_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        """The next check. None while the queue is empty."""
        self.buffers = BodyBuffers(limits.max_buffered_bytes)
        self.is_short_of_memory = False
        """Whether to reject all requests, because there is no memory for their bodies."""
        self.priorities: Mapping[str, int] = {}
        """The priorities of client keys. Lower values go first. A request can only lower the urgency of its key."""
        self._limits = limits

    def set_limits(self, limits: Limits) -> None:
        """Change the limits. The longest wait also applies to queued units, the length only to new ones."""
        self._limits = limits
        self.buffers.max_bytes = limits.max_buffered_bytes
        self.check_soon()

    @property
    def waiting_count(self) -> int:
        """The number of queued units."""
        return len(self._fair_queue) + len(self._held_sessions)

    def summarize_queue(self) -> tuple[int, float, str]:
        """Return the number of queued requests, the longest wait in seconds, and the role without room.

        The role is empty if the requests wait for a better instance.
        """
        first = next(iter(self._rejectable_units), None)
        if first is None:
            return 0, 0.0, ""
        role = self._engine_room.find_full_role()
        return len(self._rejectable_units), self._clock() - first.arrived_at, "" if role is None else role.value

    def summarize_turns(self) -> tuple[int, float]:
        """Return the number of turns that wait for room in a prefix cache, and the longest wait in seconds."""
        oldest = min((waiter.arrived_at for waiter in self._held_sessions), default=None)
        return len(self._held_sessions), 0.0 if oldest is None else self._clock() - oldest

    @property
    def running_count(self) -> int:
        """The number of units that were admitted and have not left."""
        return sum(self._running.values())

    def check_queue_room(self, client_key: str) -> None:
        """Check whether a request of this key would find the queue full. Cheap enough to call before reading a body.

        Raises:
            Overloaded: The queue is full, or the gateway is short of memory.
        """
        if self.is_short_of_memory:
            raise make_overloaded_error("memory", "the gateway is short of memory")
        if (
            len(self._rejectable_units) < self._limits.max_waiting
            or self._fair_queue.find_unit_to_reject(client_key) is not None
        ):
            return
        if (self._lines_by_key or not self._engine_room.has_room()) and not self._engine_room.would_take_now():
            raise make_queue_full_error()

    def make_entry(
        self,
        client_key: str,
        *,
        is_patient: bool = False,
        on_wait: Callable[[], None] | None = None,
        request: Callable[[], PickRequest] | None = None,
        arrived_at: float | None = None,
    ) -> QueueEntry:
        """Return an asynchronous context manager that waits for room and admits a unit.

        The block must take its lease before its first await, while the room is certainly there.

        Args:
            client_key: The name of the client key.
            is_patient: Whether the unit is never rejected, because its client request was admitted already.
            on_wait: Called when a wait begins.
            request: Returns the lease that the unit will take. None: the unit goes in turn, to any free backend.
            arrived_at: Clock time at which the client began to wait. None: now.

        Raises:
            Overloaded: The queue is full, or the unit has waited too long.
            NoBackendAvailable: The unit has waited too long, and all backends of a role are gone.
            GatewayError: The deadline for the first token cannot be met, or the predicted wait is too long.
        """
        return QueueEntry(self, client_key, is_patient, on_wait, request, arrived_at)

    def queue_unit(
        self,
        client_key: str,
        request: Callable[[], PickRequest],
        arrived_at: float,
        on_turn: Callable[[GatewayError | None], None],
    ) -> QueuedUnit:
        """Queue a unit without a task, after `admits_at_once` has returned False. Raises the errors of `make_entry`.

        Args:
            client_key: The name of the client key.
            request: Returns the lease that the unit will take.
            arrived_at: Clock time at which the client began to wait.
            on_turn: Called once. With an error, the unit was rejected. With None, it must `admit_at_once` and lease at
            once.
        """
        waiter = self._add_to_queue(
            QueueEntry(self, client_key, is_patient=False, on_wait=None, request=request, since=arrived_at)
        )
        return QueuedUnit(self, waiter, on_turn)

    def admit_at_once(self, client_key: str) -> None:
        """Admit a unit that finds room at once, see `admits_at_once`. `end_unit` must follow at its end."""
        self._running[client_key] = self._running.get(client_key, 0) + 1

    def end_unit(self, client_key: str) -> None:
        """Count the end of an admitted unit of a client key."""
        left = self._running[client_key] - 1
        if left:
            self._running[client_key] = left
        else:
            del self._running[client_key]

    def admits_at_once(self, client_key: str, request: Callable[[], PickRequest]) -> bool:
        """Return whether a new unit would be admitted without a wait."""
        if self.is_short_of_memory:
            return False
        if (
            not self._lines_by_key
            and self._engine_room.has_room(request)
            and self._held_session(request, client_key) is None
        ):
            return True
        return self._skips_queue(request())

    def _held_session(self, request: Callable[[], PickRequest], client_key: str) -> Any:
        """Return the session of a request that has to wait for room in a working set, or None if it may go."""
        sets = self._queue_order.working_sets
        if sets is None or not sets.are_limits_active or len(self._held_sessions) >= self._limits.max_waiting:
            return None
        pick = request()
        if pick.request_subject is None:
            return None
        return sets.session_to_hold(pick.prefix_keys.keys, pick.session, client_key, self._clock())

    def check_soon(self) -> None:
        """Check soon whether there is room. May be called before the room is free."""
        if self._lines_by_key and not self._is_check_scheduled:
            self._is_check_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake_next_unit)

    def _count_wait(self) -> None:
        """Count a unit that has to wait, by the reason."""
        reason = "queue"
        if not self._lines_by_key:
            role = self._engine_room.find_full_role()
            reason = "better" if role is None else role.value
        self._metrics.queue_waits_total.labels(reason).inc()

    async def _wait_for_room(self, entry: QueueEntry) -> None:
        """Wait until there is room for a queued unit."""
        waiter = self._add_to_queue(entry)
        try:
            await waiter.turn_future
            while not self._remove_if_room(waiter):
                await waiter.turn_future
        except asyncio.CancelledError:
            self._remove_waiting(waiter)
            raise

    def _remove_if_room(self, waiter: WaitingUnit) -> bool:
        """Remove a unit from the queue if there is still room. Raises the error of a rejected unit."""
        if waiter.rejection_error is not None:  # it has been removed already
            raise waiter.rejection_error
        room = self._engine_room
        if not room.has_room() and not (waiter.skips_learned_limits and room.would_take_now()):
            # Another worker took the room, or a unit that does not queue. The unit keeps its place.
            waiter.turn_future = asyncio.get_running_loop().create_future()
            return False
        now = self._clock()
        self._fair_queue.charge_key(waiter)
        self._drain_rate.record_service(waiter.drain_amount, now)
        self._remove_unit(waiter)
        self._metrics.queue_seconds.observe(now - waiter.arrived_at)
        return True

    def _remove_waiting(self, waiter: WaitingUnit) -> None:
        """Remove a unit that does not wait any longer, unless it has been rejected."""
        if waiter in self._held_sessions:
            if self._holding_sets is not None:
                self._holding_sets.record_client_gone(self._held_sessions[waiter], self._clock())
            self._remove_from_held(waiter)
        elif waiter.rejection_error is None:
            self._remove_unit(waiter)

    def _add_to_queue(self, entry: QueueEntry) -> WaitingUnit:
        """Add a unit to the queue, or raise the error that rejects it."""
        if (
            entry.pick_request is not None
            and not entry.is_patient
            and (session := self._held_session(entry.pick_request, entry.client_key)) is not None
        ):
            return self._hold_for_session(entry, session)
        self._count_wait()
        to_reject = None
        is_full = not entry.is_patient and len(self._rejectable_units) >= self._limits.max_waiting
        if is_full:
            to_reject = self._fair_queue.find_unit_to_reject(entry.client_key)
            if to_reject is None and not self._engine_room.would_take_now():
                raise make_queue_full_error()
        waiter = self._make_waiter(entry)
        if not waiter.is_patient and (rejection := self._find_rejection(waiter)) is not None:
            if waiter.pick_request is not None:
                self._queue_order.on_left_queue(waiter.pick_request)
            raise rejection
        if not self._lines_by_key:
            self._engine_room.announce_room_to(self.check_soon)
        self._fair_queue.add_unit(waiter)
        if not waiter.is_patient:
            self._rejectable_units[waiter] = None
            self._deadlines.add_unit(waiter)
            self._metrics.queued_requests.inc()
        self._set_timer()
        self.check_soon()  # the free instance may suit this unit best
        if is_full and self._engine_room.would_take_now():
            self._skip_learned_limits(
                next((each for each in self._rejectable_units if not each.skips_learned_limits), waiter)
            )
        elif to_reject is not None:
            self._reject_unit(to_reject, make_queue_full_error())  # last, so that its turn can pass to another unit
        return waiter

    def _hold_for_session(self, entry: QueueEntry, session: Any) -> WaitingUnit:
        """Hold a unit back until there is room for its session in a working set."""
        self._metrics.queue_waits_total.labels("working_set").inc()
        waiter = self._make_waiter(entry, is_held=True)
        self._add_to_held(waiter, session)
        if waiter.overdue_at <= waiter.arrived_at:
            self._remove_waiting(waiter)
            raise make_deadline_error(waiter.first_token_seconds or 0.0)
        self._set_timer()
        return waiter

    def _add_to_held(self, waiter: WaitingUnit, session: Any) -> None:
        """Add a unit to the units that are held back."""
        sets = self._queue_order.working_sets
        assert sets is not None
        sets.waiting_turn_count += 1
        self._holding_sets = sets
        self._held_sessions[waiter] = session
        self._deadlines.add_unit(waiter)
        self._metrics.queued_requests.inc()

    def _hold_displaced_units(self) -> None:
        """Hold back the queued units whose sessions have lost their place in a working set."""
        sets = self._queue_order.working_sets
        if sets is None or not sets.are_limits_active or sets.shed_turn_count == self._seen_shed_turns:
            return
        self._seen_shed_turns = sets.shed_turn_count
        for waiter in list(self._rejectable_units):
            pick = waiter.pick_request
            if pick is None or waiter.turn_future.done():
                continue
            session = sets.session_to_hold(pick.prefix_keys.keys, pick.session, waiter.client_key, self._clock())
            if session is not None:
                self._remove_unit(waiter)
                self._add_to_held(waiter, session)

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._on_timer)

    def _release_sessions(self, now: float) -> None:
        """Let the units go for whose sessions the working sets have room, or which have waited too long for it."""
        if now < self._next_session_check_at:
            return
        self._hold_displaced_units()
        if not self._held_sessions:
            return
        self._next_session_check_at = now + _SESSIONS_SECONDS
        sets, held = self._queue_order.working_sets, self._held_sessions
        if sets is None or sets is not self._holding_sets:
            ready = set(held.values())
        else:
            waiting = ((session, waiter.arrived_at) for waiter, session in held.items())
            ready = set(sets.next_sessions(waiting, self._limits.session_patience_seconds, now))
            for waiter, session in held.items():
                waited = now - waiter.arrived_at
                if waited > min(self._limits.session_wait_seconds, (waiter.overdue_at - waiter.arrived_at) / 2):
                    sets.admit_regardless(session, now)
                    self._metrics.session_waits_overdue_total.inc()
                    ready.add(session)
        for waiter in [waiter for waiter, session in held.items() if session in ready]:
            self._metrics.session_wait_seconds.observe(now - waiter.arrived_at)
            self._remove_from_held(waiter)
            self._move_to_queue(waiter, now)

    def _remove_from_held(self, waiter: WaitingUnit) -> None:
        del self._held_sessions[waiter]
        if self._holding_sets is not None:
            self._holding_sets.waiting_turn_count -= 1
        self._deadlines.remove_unit(waiter)
        self._metrics.queued_requests.dec()

    def _move_to_queue(self, waiter: WaitingUnit, now: float) -> None:
        """Give a unit that was held back its place in the queue. The time until now does not count there."""
        if waiter.pick_request is not None:
            waiter.set_work_seconds(self._queue_order.predict_work_seconds(waiter.pick_request))
        waiter.arrived_at = now
        if not self._lines_by_key:
            self._engine_room.announce_room_to(self.check_soon)
        self._fair_queue.add_unit(waiter)
        self._rejectable_units[waiter] = None
        self._deadlines.add_unit(waiter)
        self._metrics.queued_requests.inc()
        self.check_soon()

    def _make_waiter(self, entry: QueueEntry, is_held: bool = False) -> WaitingUnit:
        request = None if entry.pick_request is None else entry.pick_request()
        first_token_seconds = None if request is None else request.first_token_seconds
        requested = None if request is None else request.priority(is_lower_first=self._is_lower_priority_first)
        lowest = self.priorities.get(entry.client_key)
        priority = (requested or 0) if lowest is None else lowest if requested is None else max(lowest, requested)
        work = cost = 0.0
        if not self._queue_order.holds_queue:
            request = None
        if request is not None and not is_held:
            work = self._queue_order.predict_work_seconds(request)
            cost = work + self._engine_room.answer_seconds(request)
        now = self._clock()
        late_at = math.inf
        if first_token_seconds is not None:
            late_at = (now if entry.arrived_at is None else entry.arrived_at) + first_token_seconds - work
        return WaitingUnit(
            client_key=entry.client_key,
            arrived_at=now,
            turn_future=asyncio.get_running_loop().create_future(),
            pick_request=request,
            is_patient=entry.is_patient,
            priority_number=priority,
            work_seconds=work,
            cost_seconds=cost,
            first_token_seconds=first_token_seconds,
            overdue_at=late_at,
        )

    def _find_rejection(self, waiter: WaitingUnit) -> GatewayError | None:
        """Return why to reject a new unit at once, or None if it may wait."""
        if waiter.overdue_at <= waiter.arrived_at:
            return make_deadline_error(waiter.first_token_seconds or 0.0)
        refusing = self._engine_room.find_refusing_role()
        if refusing is not None and refusing[1] > waiter.arrived_at + self._limits.wait_seconds:
            return make_all_refuse_error(refusing[0], refusing[1] - waiter.arrived_at)
        max_seconds = self._limits.max_predicted_wait_seconds
        if max_seconds is None or not self._lines_by_key or self._engine_room.would_take_now():
            return None
        predicted = self._drain_rate.predict_seconds(self._fair_queue.amount_ahead(waiter), waiter.arrived_at)
        max_seconds = min(max_seconds, waiter.overdue_at - waiter.arrived_at)
        return None if predicted is None or predicted <= max_seconds else make_long_wait_error(predicted, max_seconds)

    def _remove_unit(self, waiter: WaitingUnit) -> None:
        """Remove a unit from the queue."""
        if waiter.pick_request is not None:
            self._queue_order.on_left_queue(waiter.pick_request)
        self._fair_queue.remove_unit(waiter)
        if not waiter.is_patient:
            del self._rejectable_units[waiter]
            self._deadlines.remove_unit(waiter)
            self._metrics.queued_requests.dec()
        if not self._lines_by_key:
            if self._queue_head is not None:
                self._queue_head.publish_empty()
            self._drain_rate.stop_measuring()
            self._engine_room.announce_room_to(None)
            if self._timer is not None and not self._held_sessions:
                self._timer.cancel()
                self._timer = None
        self.check_soon()  # the next unit goes after this one has taken its lease

    def _reject_unit(self, waiter: WaitingUnit, rejection: GatewayError) -> None:
        self._remove_waiting(waiter)
        waiter.rejection_error = rejection
        if not waiter.turn_future.done():
            waiter.turn_future.set_result(None)

    def _skip_learned_limits(self, waiter: WaitingUnit) -> None:
        """Let a unit go to an engine that would take it, whatever the learned limits."""
        waiter.skips_learned_limits = True
        if not waiter.turn_future.done():
            waiter.turn_future.set_result(None)

    def _release_overdue(self, now: float) -> None:
        """Let units go that have waited too long for a learned limit."""
        room = self._engine_room
        if now < self._next_limit_check_at or not room.would_take_now():
            return
        self._next_limit_check_at = now + _LEARNED_LIMITS_SECONDS
        waiting = len(self._fair_queue)
        overdue = [
            waiter
            for line in self._lines_by_key.values()
            for waiter in line.queued_units
            # A unit with a deadline waits at most half of the time until then.
            if now - waiter.arrived_at
            > min(room.max_hold_seconds(waiter.pick_request, waiting), (waiter.overdue_at - waiter.arrived_at) / 2)
        ]
        for waiter in overdue:
            self._skip_learned_limits(waiter)

    def _wake_next_unit(self) -> None:
        """Wake the next unit if there is room. Only its lease shows whether there is more room."""
        self._is_check_scheduled = False
        now = self._clock()
        while (late := self._deadlines.first_overdue(now)) is not None:
            self._reject_unit(late, make_deadline_error(late.first_token_seconds or 0.0))
        if not self._lines_by_key:
            return
        has_room = self._engine_room.has_room()
        if not has_room:
            self._release_overdue(now)
            if self._queue_head is None:
                return
        front = self._fair_queue.first_units(_LOOKAHEAD if has_room else 1)
        if self._queue_head is not None:
            self._queue_head.publish_head(*front[0].rank_among_workers)
        if not has_room:
            return
        waiter = self._next_unit(front)
        # A unit whose turn has come runs next. If it was cancelled, it passes its turn on.
        if waiter is None or waiter.turn_future.done():
            return
        # Smaller requests do not overtake it, or it might wait forever.
        if (
            waiter.pick_request is not None
            and not waiter.skips_learned_limits
            and not self._engine_room.fits_engines(waiter.pick_request)
        ):
            return
        if self._queue_head is None or not self._queue_head.should_yield_to_earlier(*waiter.rank_among_workers, now):
            waiter.turn_future.set_result(None)

    def _next_unit(self, front: Sequence[WaitingUnit]) -> WaitingUnit | None:
        """Return the unit that goes next, or None if all should wait for another instance.

        `front`: the first units of the queue, at least one.
        """
        awake = next((waiter for waiter in front if waiter.turn_future.done()), None)
        if awake is not None:
            return awake
        if front[0].pick_request is None:
            return front[0]
        predictable = [waiter for waiter in front if waiter.pick_request is not None]
        place = self._queue_order.index_to_admit(
            [waiter.pick_request for waiter in predictable if waiter.pick_request is not None]
        )
        return None if place is None else predictable[place]

    def _on_timer(self) -> None:
        """Reject the units that have waited too long, and check for room."""
        self._timer = None
        now = self._clock()
        wait_seconds = self._limits.wait_seconds
        latest = now - wait_seconds
        refusing = self._engine_room.find_refusing_role()
        # Units that arrived before this time cannot be served in time.
        useless = latest if refusing is None else max(latest, refusing[1] - wait_seconds)
        try:
            for waiter in list(takewhile(lambda waiter: waiter.arrived_at <= useless, self._rejectable_units)):
                if refusing is not None and waiter.arrived_at > latest:
                    self._reject_unit(waiter, make_all_refuse_error(refusing[0], refusing[1] - now))
                elif self._engine_room.would_take_now():
                    self._skip_learned_limits(waiter)
                # A unit that skips learned limits goes before all others, and may wait for twice the time.
                elif not waiter.skips_learned_limits or waiter.arrived_at <= latest - wait_seconds:
                    absent = self._engine_room.find_absent_role()
                    self._reject_unit(waiter, make_queue_timeout_error(wait_seconds, absent))
            self._release_sessions(now)
            self._wake_next_unit()
        finally:  # an error must not stop the timer
            if self._lines_by_key or self._held_sessions:
                self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._on_timer)


class QueuedUnit:
    """A queued unit that has no task. `AdmissionQueue.queue_unit` returns it."""

    def __init__(
        self, admission_queue: AdmissionQueue, waiter: WaitingUnit, on_turn: Callable[[GatewayError | None], None]
    ) -> None:
        self._admission_queue = admission_queue
        self._waiter = waiter
        self._on_turn: Callable[[GatewayError | None], None] | None = on_turn
        waiter.turn_future.add_done_callback(self._on_wake)

    def leave_queue(self) -> None:
        """Leave the admission queue without an answer."""
        if self._on_turn is not None:
            self._on_turn = None
            self._admission_queue._remove_waiting(self._waiter)

    def _on_wake(self, _: asyncio.Future[None]) -> None:
        on_turn = self._on_turn
        if on_turn is None:
            return
        refusal: GatewayError | None = None
        try:
            if not self._admission_queue._remove_if_room(self._waiter):
                self._waiter.turn_future.add_done_callback(self._on_wake)
                return
        except GatewayError as error:
            refusal = error
        self._on_turn = None
        on_turn(refusal)


class QueueEntry:
    """The admission of one unit. `AdmissionQueue.make_entry` returns it. Enter it once."""

    def __init__(
        self,
        admission_queue: AdmissionQueue,
        key: str,
        is_patient: bool,
        on_wait: Callable[[], None] | None,
        request: Callable[[], PickRequest] | None = None,
        since: float | None = None,
    ) -> None:
        self._admission_queue = admission_queue
        self._on_wait = on_wait
        self.has_been_queued = False
        """Whether the unit was admitted before, so that it does not wait."""
        self.pick_request = request
        self.arrived_at = since
        self.client_key = key
        self.is_patient = is_patient

    async def __aenter__(self) -> Self:
        admission, key, request = self._admission_queue, self.client_key, self.pick_request
        if (
            not self.has_been_queued
            and (
                admission._lines_by_key
                or not admission._engine_room.has_room(request)
                or (request is not None and not self.is_patient and admission._held_session(request, key) is not None)
            )
            and (request is None or self.is_patient or not admission._skips_queue(request()))
        ):
            if self._on_wait is not None:
                self._on_wait()
            await admission._wait_for_room(self)
        # No other task can run between this point and the first await of the block.
        admission.admit_at_once(key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission_queue.end_unit(self.client_key)
