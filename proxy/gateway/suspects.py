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

from proxy.balancer.blame import Blame
from proxy.common.errors import Failure, NoBackendAvailable, SuspectRequest
from proxy.gateway.suspicion import (
    MAX_ENGINES,
    Casualty,
    Death,
    Suspicion,
    is_acquitted,
    is_charged,
    is_poison,
    rank_of,
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
        self.memory = memory
        self._pools = pools
        self._roles = roles
        self._is_gone = is_gone
        self._metrics = metrics
        self.clock = clock
        """Returns the time in seconds."""
        self.hearing_seconds = _HEARING_SECONDS
        """How long a request that seems to crash engines waits before it is stopped. It is acquitted if an engine
        crashes without it in this time, or if the same request is served."""
        self._casualties: dict[Backend, list[Casualty]] = {}
        """The units that were on an engine when it failed, for some seconds."""
        self._hearings: dict[Suspicion, asyncio.Future[None]] = {}
        """The requests that seem to crash engines and may still be acquitted."""
        self._deaths: dict[Backend, Death] = {}
        """The engines that crashed in the last seconds."""
        self._reservations: Counter[Backend] = Counter()
        """The number of suspects for which an engine is reserved."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """The suspects that wait for an engine, in their order."""

    def begin(self, call: Call, units: int) -> Suspicion:
        """Return the suspicion of a client request with a number of units. `end` must follow.

        Raises:
            SuspectRequest: The same request has crashed engines before.
        """
        earlier = 0 if self.memory.is_empty else self.memory.engines(call.make_body({}))
        if earlier >= MAX_ENGINES:
            raise SuspectRequest
        return Suspicion(earlier, is_split=units > 1, call=call)

    def end(self, call: Call, suspicion: Suspicion, error: BaseException | None) -> None:
        """End a client request: release its engines, and remember it if it may have crashed engines.

        `error`: why it failed. None: it was served.
        """
        self.release(suspicion.reserved)
        if error is not None:
            if engines := suspicion.engines(self.clock()):
                least_poison = MAX_ENGINES if suspicion.is_convicted else 0
                self.memory.remember(call.make_body({}), max(least_poison, min(engines, MAX_ENGINES - 1)))
        else:
            self.note_served(call)

    def note_served(self, call: Call) -> None:
        """Forget a client request that has received its whole answer."""
        if not self.memory.is_empty:
            self.memory.forget(call.make_body({}))

    # Where a unit may go

    async def confine(
        self, suspicion: Suspicion, history: UnitHistory, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """Return the backends that the next attempt must avoid.

        Args:
            suspicion: The suspicion of the client request. Only a suspicious request may wait here.
            history: The attempts of the unit.
            avoid: Further backends to avoid.
            on_wait: Called before a wait.
        """
        if suspicion.is_confined:
            avoid = {
                *avoid,
                *(backend for role in self._roles for backend in self._backends_outside_subset(suspicion, role, avoid)),
            }
        lost = suspicion.lost(self.clock())
        if lost or suspicion.earlier:
            roles = {backend.role for backend in lost} if lost else self._roles
            for role in roles:
                avoid = await self._set_apart(history, self._pools.of(role), avoid, on_wait)
        return avoid

    def leave(self, suspicion: Suspicion, history: UnitHistory, role: Role) -> set[Backend]:
        """Give up the backends that a unit is confined to, after none of them took the attempt.

        Return these backends, so that the unit can avoid them. Return an empty set if the unit was not confined, or
        must not run on other backends.
        """
        if reserved := {backend for backend in history.reserved if backend.role is role}:
            return reserved
        if suspicion.is_confined and not suspicion.has_broken_down:
            return suspicion.drop_subset(role)
        return set()

    def _backends_outside_subset(self, suspicion: Suspicion, role: Role, avoid: Collection[Backend]) -> list[Backend]:
        """Return the backends of a role on which no unit of the request may run."""
        pool = self._pools.of(role)
        subset = suspicion.subset(role, pool.eligible())
        with suppress(NoBackendAvailable):
            while len(subset) < MAX_ENGINES - suspicion.earlier:
                subset.append(pool.pick({*subset, *avoid}))
        return [backend for backend in pool.backends() if backend not in subset]

    async def _set_apart(
        self, history: UnitHistory, pool: Pool, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """Choose an engine without other suspects, and wait for one if necessary. After the wait, share an engine."""
        until = self.clock() + _WAIT_SECONDS
        while True:
            try:
                chosen = pool.pick({*avoid, *self._reservations})
                break
            except NoBackendAvailable:
                left_seconds = until - self.clock()
                if left_seconds > 0 and any(backend not in avoid for backend in pool.eligible()):
                    on_wait()
                    await self._wait(left_seconds)
                    continue
            try:
                chosen = pool.pick(avoid)
                break
            except NoBackendAvailable:
                return avoid  # the lease of the attempt will fail
        self._reserve(history.reserved, chosen)
        return {*avoid, *(backend for backend in pool.backends() if backend != chosen)}

    async def _wait(self, seconds: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await asyncio.wait((turn,), timeout=seconds)
        finally:
            self._waiting.pop(turn, None)

    def _reserve(self, reserved: list[Backend], backend: Backend) -> None:
        """Reserve a backend for a suspect. `reserved`: the list of its reservations."""
        self._reservations[backend] += 1
        reserved.append(backend)

    def release(self, reserved: list[Backend]) -> None:
        """Release all reservations of a suspect, and wake those that wait. `reserved`: the list of its reservations."""
        if not reserved:
            return
        for backend in reserved:
            self._reservations[backend] -= 1
            if not self._reservations[backend]:
                del self._reservations[backend]
        reserved.clear()
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    # Crashes

    async def must_stop(
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
        if history.is_cleared(now):
            history.lost.clear()
        seconds = history.seconds_of_output(now)
        involved = [error.backend]
        if history.began_at is None:
            involved += self._other_engines(timeline, error.backend)
        casualties = {
            backend: Casualty(suspicion, rank_of(suspicion, history, backend, now), seconds) for backend in involved
        }
        reported = {backend: self._report(backend, casualty) for backend, casualty in casualties.items()}
        self.release(history.reserved)
        if suspicion.is_confined and not suspicion.reserved:  # now, because other suspects choose their engines next
            for other in suspicion.rest_of_subset(error.backend):
                self._reserve(suspicion.reserved, other)
        history.began_at = None
        history.doubtful[error.backend] = seconds
        doubtful = [*history.doubtful, *(backend for backend in involved if backend not in history.doubtful)]
        gone = dict(
            zip(doubtful, await asyncio.gather(*(self._is_down(backend, error) for backend in doubtful)), strict=True)
        )
        for backend, seconds_there in list(history.doubtful.items()):
            if gone[backend]:
                del history.doubtful[backend]
                if backend not in involved:
                    history.lost[backend] = seconds_there
        accusers = []
        for backend, casualty in casualties.items():
            if not gone[backend]:
                reported[backend].remove(casualty)
                continue
            self._record_death(backend, reported[backend])
            if self._charge(history, backend, casualty, reported[backend], record):
                accusers.append(backend)
        if accusers and not suspicion.is_convicted:
            if suspicion not in self._hearings:
                await self._hold_hearing(suspicion, accusers[0])
            else:
                await self.is_acquitted(suspicion)
        if not suspicion.lost(now):
            self.release(suspicion.reserved)
        return suspicion.is_convicted

    def _record_death(self, backend: Backend, casualties: Sequence[Casualty]) -> None:
        if backend not in self._deaths:
            self._deaths[backend] = Death(backend, casualties)
            seconds = _REPORT_SECONDS + self.hearing_seconds
            asyncio.get_running_loop().call_later(seconds, self._deaths.pop, backend, None)

    async def _is_down(self, backend: Backend, error: UpstreamError) -> bool:
        """Return whether an engine is down after an attempt failed. Allow a moment if its connection was closed."""
        broke_off = backend == error.backend and error.failure is not Failure.STATUS
        return await self._is_gone(backend, _CLOSING_SECONDS if broke_off else 0.0)

    def _charge(
        self,
        history: UnitHistory,
        backend: Backend,
        casualty: Casualty,
        casualties: Sequence[Casualty],
        record: RequestRecord,
    ) -> bool:
        """Charge a request with the crash of an engine. Return whether the request seems to crash engines."""
        suspicion = casualty.suspicion
        max_charged = _SUSPECTS_PER_ENGINE * max(1, len(self._pools.of(backend.role).eligible()))
        if not is_charged(casualty, casualties, max_charged):
            return False
        history.lost[backend] = casualty.seconds_of_output
        now = self.clock()
        record.lost_engines = suspicion.engines(now)
        return is_poison(casualty, casualties, now)

    async def _hold_hearing(self, suspicion: Suspicion, backend: Backend) -> None:
        """Wait for the time of a hearing, and convict or acquit a request. `backend`: the engine that crashed last."""
        call, memory = suspicion.call, self.memory
        if call is not None:
            memory.remember(call.make_body({}), 1)  # forgotten if the same request is served during the hearing
        verdict = self._hearings[suspicion] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.sleep(self.hearing_seconds)
            self._judge(suspicion, backend)
        finally:
            del self._hearings[suspicion]
            verdict.set_result(None)

    async def is_acquitted(self, suspicion: Suspicion) -> bool:
        """Wait for the end of a hearing. Return True if the request was acquitted, False if there was no hearing."""
        verdict = self._hearings.get(suspicion)
        if verdict is None:
            return False
        await asyncio.wait((verdict,))
        return not suspicion.is_convicted

    def _judge(self, suspicion: Suspicion, backend: Backend) -> None:
        """Convict or acquit a request at the end of its hearing."""
        call, memory, now = suspicion.call, self.memory, self.clock()
        deaths = [death for death in self._deaths.values() if death.backend.role is backend.role]
        is_served = call is not None and not memory.engines(call.make_body({}))
        if is_served or is_acquitted(suspicion, deaths, now):
            suspicion.acquit()
            if call is not None:
                memory.forget(call.make_body({}))
        else:
            suspicion.is_convicted = True
            self._metrics.suspect_requests_total.inc()
            names = sorted(lost.name for lost in suspicion.lost(now))
            logger.warning(
                "request stopped: instances went down while they served it; it is rejected if it is sent again",
                extra={"fields": {"instances": ", ".join(names), "role": backend.role.value}},
            )

    def _report(self, backend: Backend, casualty: Casualty) -> list[Casualty]:
        """Record a unit that was on a failed engine. Return all units that were reported for this engine."""
        casualties = self._casualties.get(backend)
        if casualties is None:
            casualties = self._casualties[backend] = []
            asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._casualties.pop, backend, None)
        casualties.append(casualty)
        return casualties

    def _other_engines(self, timeline: Timeline, failed: Backend) -> list[Backend]:
        """Return the other engine of an attempt without output. Its crash may be the cause of the failure."""
        names = {timeline.prefiller, timeline.decoder}
        return [
            backend
            for role in self._roles
            for backend in self._pools.of(role).backends()
            if backend.name in names and backend != failed
        ]


class UnitGuard:
    """Connects the attempts of one unit with the suspicion of its client request.

    It also holds the permit of the unit in the retry budget, because the first output of an attempt releases it.
    """

    def __init__(self, suspects: Suspects, suspicion: Suspicion, permit: RetryPermit) -> None:
        self.blame = Blame(suspicion.ways)
        self._suspects = suspects
        self.suspicion = suspicion
        self._permit = permit
        self.history = suspicion.add_unit()
        self._settling: asyncio.TimerHandle | None = None

    async def confine(self, avoid: Collection[Backend]) -> Collection[Backend]:
        """Return the backends that the next attempt must avoid. A unit that waits here releases its permit."""
        return await self._suspects.confine(self.suspicion, self.history, avoid, self._permit.release)

    def first_output(self) -> None:
        """Record that the decoder has begun to answer. If it continues for a while, the unit is not suspicious."""
        self._permit.release()
        history = self.history
        if history.began_at is None:
            history.began_at = self._suspects.clock()
            if history.reserved or self.blame.is_open:
                self._settling = asyncio.get_running_loop().call_later(history.isolation_seconds, self._settle)

    async def must_stop(self, error: UpstreamError, timeline: Timeline, record: RequestRecord) -> bool:
        """Return whether to stop the request after an attempt failed. See Suspects.must_stop."""
        self.blame.note_failure(error)
        return error.is_engine_breakdown and await self._suspects.must_stop(
            self.suspicion, self.history, error, timeline, record
        )

    def leave(self, role: Role) -> set[Backend]:
        """Give up the backends to which the suspect unit was restricted. See Suspects.leave."""
        return self._suspects.leave(self.suspicion, self.history, role)

    async def is_acquitted(self) -> bool:
        """Wait for the end of a hearing. See Suspects.is_acquitted."""
        return await self._suspects.is_acquitted(self.suspicion)

    def end_attempt(self) -> None:
        """Release the engines of an attempt after its end."""
        if self.history.reserved:
            self._suspects.release(self.history.reserved)
        self.history.began_at = None
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    def _settle(self) -> None:
        self._suspects.release(self.history.reserved)
        self.blame.settle()
