"""Finds the requests that crash engines, among the requests of one worker.

The requests of a crashed engine continue on other engines, each on an engine without another suspect if possible. The
next crash then shows which request is the cause. That request is stopped, and rejected when it is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from proxy.balancer.blame import FailureBlame
from proxy.common.errors import Failure, NoBackendAvailable, SuspectRequest
from proxy.gateway.suspicion import (
    MAX_ENGINES,
    Casualty,
    EngineCrash,
    Suspicion,
    is_acquitted,
    is_charged,
    is_poison,
    suspicion_rank_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from proxy.balancer.blame import SuspectMemory
    from proxy.balancer.pool import Pool, Pools
    from proxy.common.backend import Backend, Role
    from proxy.common.errors import UpstreamError
    from proxy.dialects.call import Call
    from proxy.gateway.retry import RetryPermit
    from proxy.gateway.suspicion import UnitHistory
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline


logger = logging.getLogger("proxy.flow.suspects")

# A crashed engine closes its connections a little before its port, or after it.
_CLOSING_SECONDS: Final = 0.05
# How long a suspect waits for an engine without other suspects.
_WAIT_SECONDS: Final = 5.0
# How many suspects can wait for each engine.
_SUSPECTS_PER_ENGINE: Final = 4
# After this time all requests of an engine have reported its crash.
_REPORT_SECONDS: Final = 10.0
_HEARING_SECONDS: Final = 2.0


class Suspects:
    """The suspects of one worker. The memory of suspects is shared by all workers."""

    def __init__(
        self,
        memory: SuspectMemory,
        pools: Pools,
        roles: Sequence[Role],
        is_gone: Callable[[Backend, float], Awaitable[bool]],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_gone`: returns whether an engine is down now, or within a number of seconds."""
        self.suspect_memory = memory
        self._pools = pools
        self._roles = roles
        self._is_engine_gone = is_gone
        self._metrics = metrics
        self.clock = clock
        """Returns the time in seconds."""
        self.hearing_seconds = _HEARING_SECONDS
        """How long a request that seems to crash engines waits before it is stopped. It is acquitted if an engine
        crashes without it in this time, or if the same request is served."""
        self._casualties_by_backend: dict[Backend, list[Casualty]] = {}
        """The units that were on an engine when it failed, for some seconds."""
        self._hearings_by_suspicion: dict[Suspicion, asyncio.Future[None]] = {}
        """The requests that seem to crash engines and may still be acquitted."""
        self._deaths_by_backend: dict[Backend, EngineCrash] = {}
        """The engines that crashed in the last seconds."""
        self._reservation_counts: Counter[Backend] = Counter()
        """The number of suspects for which an engine is reserved."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """The suspects that wait for an engine, in their order."""

    def begin_request(self, call: Call, units: int) -> Suspicion:
        """Return the suspicion of a client request with a number of units. `end_request` must follow.

        Raises:
            SuspectRequest: The same request has crashed engines before.
        """
        earlier = 0 if self.suspect_memory.is_empty else self.suspect_memory.count_crashed_engines(call.make_body({}))
        if earlier >= MAX_ENGINES:
            raise SuspectRequest
        return Suspicion(earlier, is_split=units > 1, call=call)

    def end_request(self, call: Call, suspicion: Suspicion, error: BaseException | None) -> None:
        """End a client request: release its engines, and remember it if it may have crashed engines.

        `error`: why it failed. None: it was served.
        """
        self.release_reservations(suspicion.reserved_backends)
        if error is not None:
            if engines := suspicion.count_crashed_engines(self.clock()):
                least_poison = MAX_ENGINES if suspicion.is_convicted else 0
                self.suspect_memory.remember_request(
                    call.make_body({}), max(least_poison, min(engines, MAX_ENGINES - 1))
                )
        else:
            self.forget_served(call)

    def forget_served(self, call: Call) -> None:
        """Forget a client request that has received its whole answer."""
        if not self.suspect_memory.is_empty:
            self.suspect_memory.forget_request(call.make_body({}))

    # Where a unit may go

    async def choose_backends_to_avoid(
        self, suspicion: Suspicion, history: UnitHistory, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """Return the backends that the next attempt must avoid.

        Args:
            suspicion: The suspicion of the client request. Only a suspicious request may wait here.
            history: The attempts of the unit.
            avoid: Further backends to avoid.
            on_wait: Called before a wait.
        """
        if suspicion.are_units_confined:
            avoid = {
                *avoid,
                *(backend for role in self._roles for backend in self._backends_outside_subset(suspicion, role, avoid)),
            }
        lost = suspicion.crashed_engines(self.clock())
        if lost or suspicion.earlier_crashes:
            roles = {backend.role for backend in lost} if lost else self._roles
            for role in roles:
                avoid = await self._reserve_separate_engine(history, self._pools.pool_of(role), avoid, on_wait)
        return avoid

    def give_up_confined(self, suspicion: Suspicion, history: UnitHistory, role: Role) -> set[Backend]:
        """Give up the backends that a unit is confined to, after none of them took the attempt.

        Return these backends, so that the unit can avoid them. Return an empty set if the unit was not confined, or
        must not run on other backends.
        """
        if reserved := {backend for backend in history.reserved_backends if backend.role is role}:
            return reserved
        if suspicion.are_units_confined and not suspicion.has_broken_down:
            return suspicion.drop_subset(role)
        return set()

    def _backends_outside_subset(self, suspicion: Suspicion, role: Role, avoid: Collection[Backend]) -> list[Backend]:
        """Return the backends of a role on which no unit of the request may run."""
        pool = self._pools.pool_of(role)
        subset = suspicion.engines_for_units(role, pool.eligible_backends())
        with suppress(NoBackendAvailable):
            while len(subset) < MAX_ENGINES - suspicion.earlier_crashes:
                subset.append(pool.pick_backend({*subset, *avoid}))
        return [backend for backend in pool.all_backends() if backend not in subset]

    async def _reserve_separate_engine(
        self, history: UnitHistory, pool: Pool, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """Choose an engine without other suspects, and wait for one if necessary. After the wait, share an engine."""
        until = self.clock() + _WAIT_SECONDS
        while True:
            try:
                chosen = pool.pick_backend({*avoid, *self._reservation_counts})
                break
            except NoBackendAvailable:
                left_seconds = until - self.clock()
                if left_seconds > 0 and any(backend not in avoid for backend in pool.eligible_backends()):
                    on_wait()
                    await self._wait_for_release(left_seconds)
                    continue
            try:
                chosen = pool.pick_backend(avoid)
                break
            except NoBackendAvailable:
                return avoid  # the lease of the attempt will fail
        self._reserve_backend(history.reserved_backends, chosen)
        return {*avoid, *(backend for backend in pool.all_backends() if backend != chosen)}

    async def _wait_for_release(self, seconds: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await asyncio.wait((turn,), timeout=seconds)
        finally:
            self._waiting.pop(turn, None)

    def _reserve_backend(self, reserved: list[Backend], backend: Backend) -> None:
        """Reserve a backend for a suspect. `reserved`: the list of its reservations."""
        self._reservation_counts[backend] += 1
        reserved.append(backend)

    def release_reservations(self, reserved: list[Backend]) -> None:
        """Release all reservations of a suspect, and wake those that wait. `reserved`: the list of its reservations."""
        if not reserved:
            return
        for backend in reserved:
            self._reservation_counts[backend] -= 1
            if not self._reservation_counts[backend]:
                del self._reservation_counts[backend]
        reserved.clear()
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    # Crashes

    async def should_stop_request(
        self,
        suspicion: Suspicion,
        history: UnitHistory,
        error: UpstreamError,
        timeline: Timeline,
        record: RequestRecord,
    ) -> bool:
        """Return whether to stop the request after an attempt broke down, because it crashes engines.

        Waits until it is known whether the engines of the attempt are down.
        """
        now = self.clock()
        if history.has_run_long_enough(now):
            history.lost_engines.clear()
        seconds = history.seconds_of_output(now)
        involved = [error.backend]
        if history.attempt_began_at is None:
            involved += self._other_engines(timeline, error.backend)
        casualties = {
            backend: Casualty(suspicion, suspicion_rank_of(suspicion, history, backend, now), seconds)
            for backend in involved
        }
        reported = {backend: self._report_casualty(backend, casualty) for backend, casualty in casualties.items()}
        self.release_reservations(history.reserved_backends)
        # Now, because other suspects choose their engines next.
        if suspicion.are_units_confined and not suspicion.reserved_backends:
            for other in suspicion.rest_of_subset(error.backend):
                self._reserve_backend(suspicion.reserved_backends, other)
        history.attempt_began_at = None
        history.doubtful_engines[error.backend] = seconds
        doubtful = [
            *history.doubtful_engines,
            *(backend for backend in involved if backend not in history.doubtful_engines),
        ]
        gone = dict(
            zip(
                doubtful,
                await asyncio.gather(*(self._is_engine_down(backend, error) for backend in doubtful)),
                strict=True,
            )
        )
        for backend, seconds_there in list(history.doubtful_engines.items()):
            if gone[backend]:
                del history.doubtful_engines[backend]
                if backend not in involved:
                    history.lost_engines[backend] = seconds_there
        accusers = []
        for backend, casualty in casualties.items():
            if not gone[backend]:
                reported[backend].remove(casualty)
                continue
            self._record_death(backend, reported[backend])
            if self._charge_with_crash(history, backend, casualty, reported[backend], record):
                accusers.append(backend)
        if accusers and not suspicion.is_convicted:
            if suspicion not in self._hearings_by_suspicion:
                await self._hold_hearing(suspicion, accusers[0])
            else:
                await self.wait_for_acquittal(suspicion)
        if not suspicion.crashed_engines(now):
            self.release_reservations(suspicion.reserved_backends)
        return suspicion.is_convicted

    def _record_death(self, backend: Backend, casualties: Sequence[Casualty]) -> None:
        if backend not in self._deaths_by_backend:
            self._deaths_by_backend[backend] = EngineCrash(backend, casualties)
            seconds = _REPORT_SECONDS + self.hearing_seconds
            asyncio.get_running_loop().call_later(seconds, self._deaths_by_backend.pop, backend, None)

    async def _is_engine_down(self, backend: Backend, error: UpstreamError) -> bool:
        """Return whether an engine is down after an attempt failed. Allow a moment if its connection was closed."""
        broke_off = backend == error.backend and error.failure is not Failure.STATUS
        return await self._is_engine_gone(backend, _CLOSING_SECONDS if broke_off else 0.0)

    def _charge_with_crash(
        self,
        history: UnitHistory,
        backend: Backend,
        casualty: Casualty,
        casualties: Sequence[Casualty],
        record: RequestRecord,
    ) -> bool:
        """Charge a request with the crash of an engine. Return whether the request seems to crash engines."""
        suspicion = casualty.suspicion
        max_charged = _SUSPECTS_PER_ENGINE * max(1, len(self._pools.pool_of(backend.role).eligible_backends()))
        if not is_charged(casualty, casualties, max_charged):
            return False
        history.lost_engines[backend] = casualty.seconds_of_output
        now = self.clock()
        record.lost_engines = suspicion.count_crashed_engines(now)
        return is_poison(casualty, casualties, now)

    async def _hold_hearing(self, suspicion: Suspicion, backend: Backend) -> None:
        """Wait for the time of a hearing, and convict or acquit a request. `backend`: the engine that crashed last."""
        call, memory = suspicion.client_call, self.suspect_memory
        if call is not None:
            memory.remember_request(call.make_body({}), 1)  # forgotten if the same request is served during the hearing
        verdict = self._hearings_by_suspicion[suspicion] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.sleep(self.hearing_seconds)
            self._judge_suspicion(suspicion, backend)
        finally:
            del self._hearings_by_suspicion[suspicion]
            verdict.set_result(None)

    async def wait_for_acquittal(self, suspicion: Suspicion) -> bool:
        """Wait for the end of a hearing. Return True if the request was acquitted, False if there was no hearing."""
        verdict = self._hearings_by_suspicion.get(suspicion)
        if verdict is None:
            return False
        await asyncio.wait((verdict,))
        return not suspicion.is_convicted

    def _judge_suspicion(self, suspicion: Suspicion, backend: Backend) -> None:
        """Convict or acquit a request at the end of its hearing."""
        call, memory, now = suspicion.client_call, self.suspect_memory, self.clock()
        deaths = [death for death in self._deaths_by_backend.values() if death.backend.role is backend.role]
        is_served = call is not None and not memory.count_crashed_engines(call.make_body({}))
        if is_served or is_acquitted(suspicion, deaths, now):
            suspicion.clear_of_crashes()
            if call is not None:
                memory.forget_request(call.make_body({}))
        else:
            suspicion.is_convicted = True
            self._metrics.suspect_requests_total.inc()
            names = sorted(lost.name for lost in suspicion.crashed_engines(now))
            logger.warning(
                "request stopped: instances went down while they served it; it is rejected if it is sent again",
                extra={"fields": {"instances": ", ".join(names), "role": backend.role.value}},
            )

    def _report_casualty(self, backend: Backend, casualty: Casualty) -> list[Casualty]:
        """Record a unit that was on a failed engine. Return all units that were reported for this engine."""
        casualties = self._casualties_by_backend.get(backend)
        if casualties is None:
            casualties = self._casualties_by_backend[backend] = []
            asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._casualties_by_backend.pop, backend, None)
        casualties.append(casualty)
        return casualties

    def _other_engines(self, timeline: Timeline, failed: Backend) -> list[Backend]:
        """Return the other engine of an attempt without output. Its crash may be the cause of the failure."""
        names = {timeline.prefiller, timeline.decoder}
        return [
            backend
            for role in self._roles
            for backend in self._pools.pool_of(role).all_backends()
            if backend.name in names and backend != failed
        ]


class UnitGuard:
    """Connects the attempts of one unit with the suspicion of its client request.

    It also holds the permit of the unit in the retry budget, because the first output of an attempt releases it.
    """

    def __init__(self, suspects: Suspects, suspicion: Suspicion, permit: RetryPermit) -> None:
        self.failure_blame = FailureBlame(suspicion.failed_engines)
        self._suspect_registry = suspects
        self.request_suspicion = suspicion
        self._retry_permit = permit
        self.unit_history = suspicion.add_unit()
        self._settling_timer: asyncio.TimerHandle | None = None

    async def choose_backends_to_avoid(self, avoid: Collection[Backend]) -> Collection[Backend]:
        """Return the backends that the next attempt must avoid. A unit that waits here releases its permit."""
        return await self._suspect_registry.choose_backends_to_avoid(
            self.request_suspicion, self.unit_history, avoid, self._retry_permit.release_permit
        )

    def on_first_output(self) -> None:
        """Record that the decoder has begun to answer. If it continues for a while, the unit is not suspicious."""
        self._retry_permit.release_permit()
        history = self.unit_history
        if history.attempt_began_at is None:
            history.attempt_began_at = self._suspect_registry.clock()
            if history.reserved_backends or self.failure_blame.has_unsettled_failures:
                self._settling_timer = asyncio.get_running_loop().call_later(
                    history.isolation_seconds, self._settle_after_output
                )

    async def should_stop_request(self, error: UpstreamError, timeline: Timeline, record: RequestRecord) -> bool:
        """Return whether to stop the request after an attempt failed. See Suspects.should_stop_request."""
        self.failure_blame.record_failure(error)
        return error.is_engine_breakdown and await self._suspect_registry.should_stop_request(
            self.request_suspicion, self.unit_history, error, timeline, record
        )

    def give_up_confined(self, role: Role) -> set[Backend]:
        """Give up the backends to which the suspect unit was restricted. See Suspects.give_up_confined."""
        return self._suspect_registry.give_up_confined(self.request_suspicion, self.unit_history, role)

    async def wait_for_acquittal(self) -> bool:
        """Wait for the end of a hearing. See Suspects.wait_for_acquittal."""
        return await self._suspect_registry.wait_for_acquittal(self.request_suspicion)

    def end_attempt(self) -> None:
        """Release the engines of an attempt after its end."""
        if self.unit_history.reserved_backends:
            self._suspect_registry.release_reservations(self.unit_history.reserved_backends)
        self.unit_history.attempt_began_at = None
        if self._settling_timer is not None:
            self._settling_timer.cancel()
            self._settling_timer = None

    def _settle_after_output(self) -> None:
        self._suspect_registry.release_reservations(self.unit_history.reserved_backends)
        self.failure_blame.settle_failures()
