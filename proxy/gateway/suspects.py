"""Which requests may have broken engines: one worker's requests under suspicion, and what is done about them.

Requests that were on an engine when it went down go on elsewhere, each on an engine without another suspect if there is
one or soon will be. So the next engine that goes down tells which request broke it. That request is stopped, and
refused when it is sent again; the others go on.
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
    MOST_ENGINES,
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

# An engine that dies closes its connections a little before its port, or the other way round.
_CLOSING_SECONDS: Final = 0.05
# How long a suspect waits for an engine where it is alone, and how many of them wait for each engine.
_WAIT_SECONDS: Final = 5.0
_IN_TURN: Final = 4
# By then all requests that were on an engine have reported its end.
_TOLD_SECONDS: Final = 10.0
_HEARING_SECONDS: Final = 2.0


class Suspects:
    """One worker's suspects; `memory` is shared by all workers."""

    def __init__(
        self,
        memory: SuspectMemory,
        pools: Pools,
        roles: Sequence[Role],
        is_gone: Callable[[Backend, float], Awaitable[bool]],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_gone` says whether an engine that broke off is down, now or within the given number of seconds."""
        self.memory = memory
        self._pools = pools
        self._roles = roles
        self._is_gone = is_gone
        self._metrics = metrics
        self.clock = clock
        """Tells seconds."""
        self.hearing_seconds = _HEARING_SECONDS
        """How long a request that seems to be poison waits before it is stopped. It may be acquitted in this time: an
        engine goes down without it, or the same request is served."""
        self._casualties: dict[Backend, list[Casualty]] = {}
        self._hearings: dict[Suspicion, asyncio.Future[None]] = {}
        """Those that seem to be poison, and may still be acquitted."""
        self._deaths: dict[Backend, Death] = {}
        """Engines that went down in the last seconds."""
        self._reservations: Counter[Backend] = Counter()  # how many suspects each is reserved for
        self._waiting: dict[asyncio.Future[None], None] = {}

    def begin(self, call: Call, units: int) -> Suspicion:
        """Return the suspicion of a client request with a number of units. `end` must follow.

        Raises:
            SuspectRequest: The same request has crashed engines before.
        """
        earlier = 0 if self.memory.is_empty else self.memory.engines(call.body({}))
        if earlier >= MOST_ENGINES:
            raise SuspectRequest
        return Suspicion(earlier, is_split=units > 1, call=call)

    def end(self, call: Call, suspicion: Suspicion, error: BaseException | None) -> None:
        """A client request has ended, well if there is no error: let others go where it was, and remember it or not."""
        self.release(suspicion.reserved)
        if error is not None:
            if engines := suspicion.engines(self.clock()):
                least_poison = MOST_ENGINES if suspicion.is_convicted else 0
                self.memory.remember(call.body({}), max(least_poison, min(engines, MOST_ENGINES - 1)))
        else:
            self.served(call)

    def served(self, call: Call) -> None:
        """A client request has got its whole answer."""
        if not self.memory.is_empty:
            self.memory.forget(call.body({}))

    # Where a unit may go

    async def confine(
        self, suspicion: Suspicion, history: UnitHistory, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """The backends that the next attempt has to avoid, `avoid` among them.

        Returns without waiting unless the request is suspicious; `on_wait` is called before it waits.
        """
        if suspicion.is_confined:
            avoid = {*avoid, *(backend for role in self._roles for backend in self._outside(suspicion, role, avoid))}
        lost = suspicion.lost(self.clock())
        if lost or suspicion.earlier:
            roles = {backend.role for backend in lost} if lost else self._roles
            for role in roles:
                avoid = await self._set_apart(history, self._pools.of(role), avoid, on_wait)
        return avoid

    def leave(self, suspicion: Suspicion, history: UnitHistory, role: Role) -> set[Backend]:
        """No backend of a role took an attempt that was confined: those that need not be asked again, as others may be.
        Empty when it was not confined, or must not come to others.
        """
        if reserved := {backend for backend in history.reserved if backend.role is role}:
            return reserved
        if suspicion.is_confined and not suspicion.has_broken_down:
            return suspicion.drop_subset(role)
        return set()

    def _outside(self, suspicion: Suspicion, role: Role, avoid: Collection[Backend]) -> list[Backend]:
        """The backends of a role on which no unit of the request may be."""
        pool = self._pools.of(role)
        subset = suspicion.subset(role, pool.eligible())
        with suppress(NoBackendAvailable):
            while len(subset) < MOST_ENGINES - suspicion.earlier:
                subset.append(pool.pick({*subset, *avoid}))
        return [backend for backend in pool.backends() if backend not in subset]

    async def _set_apart(
        self, history: UnitHistory, pool: Pool, avoid: Collection[Backend], on_wait: Callable[[], None]
    ) -> Collection[Backend]:
        """Choose an engine without other suspects, wait for one, or else share one."""
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
                return avoid  # the attempt finds out when it leases
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
        """Keep a backend for the owner of `reserved`, which lists all that are."""
        self._reservations[backend] += 1
        reserved.append(backend)

    def release(self, reserved: list[Backend]) -> None:
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

    # What becomes of it

    async def broke_down(
        self,
        suspicion: Suspicion,
        history: UnitHistory,
        error: UpstreamError,
        timeline: Timeline,
        record: RequestRecord,
    ) -> bool:
        """An attempt of a unit broke down: whether the request is poison, and must not be sent to another engine.

        Takes as long as the engine needs to say that it is well.
        """
        now = self.clock()
        if history.is_cleared(now):
            history.lost.clear()
        seconds = history.seconds_of_output(now)
        involved = [error.backend]
        if history.began_at is None:
            involved += self._others(timeline, error.backend)
        casualties = {
            backend: Casualty(suspicion, rank_of(suspicion, history, backend, now), seconds) for backend in involved
        }
        told = {backend: self._told(backend, casualty) for backend, casualty in casualties.items()}
        self.release(history.reserved)
        if suspicion.is_confined and not suspicion.reserved:  # at once: others are about to look for a place
            for other in suspicion.rest_of_subset(error.backend):
                self._reserve(suspicion.reserved, other)
        history.began_at = None
        history.doubtful[error.backend] = seconds
        asked = [*history.doubtful, *(backend for backend in involved if backend not in history.doubtful)]
        gone = dict(
            zip(asked, await asyncio.gather(*(self._is_down(backend, error) for backend in asked)), strict=True)
        )
        for backend, seconds_there in list(history.doubtful.items()):
            if gone[backend]:
                del history.doubtful[backend]
                if backend not in involved:
                    history.lost[backend] = seconds_there
        accusers = []
        for backend, casualty in casualties.items():
            if not gone[backend]:
                told[backend].remove(casualty)
                continue
            self._note_death(backend, told[backend])
            if self._charge(history, backend, casualty, told[backend], record):
                accusers.append(backend)
        if accusers and not suspicion.is_convicted:
            if suspicion not in self._hearings:
                await self._hear(suspicion, accusers[0])
            else:
                await self.is_acquitted(suspicion)
        if not suspicion.lost(now):
            self.release(suspicion.reserved)
        return suspicion.is_convicted

    def _note_death(self, backend: Backend, casualties: Sequence[Casualty]) -> None:
        if backend not in self._deaths:
            self._deaths[backend] = Death(backend, casualties)
            seconds = _TOLD_SECONDS + self.hearing_seconds
            asyncio.get_running_loop().call_later(seconds, self._deaths.pop, backend, None)

    async def _is_down(self, backend: Backend, error: UpstreamError) -> bool:
        """Whether an engine is down after an attempt failed so. One that still says what is wrong knows how it is."""
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
        """An engine is down on which a unit was. Returns whether its request seems to be poison."""
        suspicion = casualty.suspicion
        most = _IN_TURN * max(1, len(self._pools.of(backend.role).eligible()))
        if not is_charged(casualty, casualties, most):
            return False
        history.lost[backend] = casualty.seconds_of_output
        now = self.clock()
        record.lost_engines = suspicion.engines(now)
        return is_poison(casualty, casualties, now)

    async def _hear(self, suspicion: Suspicion, backend: Backend) -> None:
        """Convict a request that seems to be poison, unless something acquits it soon. `backend`: the last engine."""
        call, memory = suspicion.call, self.memory
        if call is not None:
            memory.remember(call.body({}), 1)  # the same request, if it is served meanwhile, makes it forgotten
        verdict = self._hearings[suspicion] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.sleep(self.hearing_seconds)
            self._judge(suspicion, backend)
        finally:
            del self._hearings[suspicion]
            verdict.set_result(None)

    async def is_acquitted(self, suspicion: Suspicion) -> bool:
        """Wait for the verdict on a request, if it is about to be found poison. Return whether it was, and is not."""
        verdict = self._hearings.get(suspicion)
        if verdict is None:
            return False
        await asyncio.wait((verdict,))
        return not suspicion.is_convicted

    def _judge(self, suspicion: Suspicion, backend: Backend) -> None:
        call, memory, now = suspicion.call, self.memory, self.clock()
        deaths = [death for death in self._deaths.values() if death.backend.role is backend.role]
        is_served = call is not None and not memory.engines(call.body({}))
        if is_served or is_acquitted(suspicion, deaths, now):
            suspicion.acquit()
            if call is not None:
                memory.forget(call.body({}))
        else:
            suspicion.is_convicted = True
            self._metrics.suspect_requests_total.inc()
            names = sorted(lost.name for lost in suspicion.lost(now))
            logger.warning(
                "instances went down while serving this request: it is stopped, and refused if it comes again",
                extra={"fields": {"instances": ", ".join(names), "role": backend.role.value}},
            )

    def _told(self, backend: Backend, casualty: Casualty) -> list[Casualty]:
        """Note one that was on an engine that broke down; all of them, as far as they have been heard."""
        casualties = self._casualties.get(backend)
        if casualties is None:
            casualties = self._casualties[backend] = []
            asyncio.get_running_loop().call_later(_TOLD_SECONDS, self._casualties.pop, backend, None)
        casualties.append(casualty)
        return casualties

    def _others(self, timeline: Timeline, failed: Backend) -> list[Backend]:
        """The other engine of an attempt without output: it may have gone down, and taken this one with it."""
        names = {timeline.prefiller, timeline.decoder}
        return [
            backend
            for role in self._roles
            for backend in self._pools.of(role).backends()
            if backend.name in names and backend != failed
        ]


class UnitGuard:
    """One unit's, for all of its attempts; `suspicion` is that of the client request. Holds the unit's place in the
    retry budget, because the first output of an attempt ends both at once: the attempt's trial and its being repeated.
    """

    def __init__(self, suspects: Suspects, suspicion: Suspicion, permit: RetryPermit) -> None:
        self.blame = Blame(suspicion.ways)
        self._suspects = suspects
        self.suspicion = suspicion
        self._permit = permit
        self.history = suspicion.add_unit()
        self._settling: asyncio.TimerHandle | None = None

    async def confine(self, avoid: Collection[Backend]) -> Collection[Backend]:
        """The backends that the next attempt has to avoid, `avoid` among them. A unit that waits for a place of its own
        gives up its permit to be repeated, so as not to keep others from it.
        """
        return await self._suspects.confine(self.suspicion, self.history, avoid, self._permit.release)

    def first_output(self) -> None:
        """The decoder has begun to answer. If it goes on for a while, it can do what others could not."""
        self._permit.release()
        history = self.history
        if history.began_at is None:
            history.began_at = self._suspects.clock()
            if history.reserved or self.blame.is_open:
                self._settling = asyncio.get_running_loop().call_later(history.apart_seconds, self._settle)

    async def broke_down(self, error: UpstreamError, timeline: Timeline, record: RequestRecord) -> bool:
        """An attempt failed: whether the request is poison, and must not be sent to another engine."""
        self.blame.failed(error)
        return error.is_breakdown and await self._suspects.broke_down(
            self.suspicion, self.history, error, timeline, record
        )

    def leave(self, role: Role) -> set[Backend]:
        """No backend of a role took an attempt: those that need not be asked again, as others may be. Empty when the
        unit was not confined to them.
        """
        return self._suspects.leave(self.suspicion, self.history, role)

    @property
    def awaits_verdict(self) -> bool:
        """Whether another unit of the request is about to tell why engines broke down."""
        return self.suspicion.is_confined and self.suspicion.has_broken_down

    async def is_acquitted(self) -> bool:
        """Wait for the verdict on the request, if it is about to be found poison. Return whether it is not."""
        return await self._suspects.is_acquitted(self.suspicion)

    def end_attempt(self) -> None:
        """The attempt is over, well or not."""
        if self.history.reserved:
            self._suspects.release(self.history.reserved)
        self.history.began_at = None
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    def _settle(self) -> None:
        self._suspects.release(self.history.reserved)
        self.blame.settle()
