"""One unit's attempts: the only loop that repeats or resumes a request."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.errors import Failure, NoBackendAvailable, Overloaded, UpstreamError
from proxy.common.terms import Stage
from proxy.gateway.admission import Entry
from proxy.gateway.resuming import Resuming
from proxy.gateway.retry import RetryPermit, backoff_seconds, may_retry
from proxy.gateway.suspects import UnitGuard
from proxy.upstream import upstream_error
from proxy.wire.chat_members import UnreadableMember

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.common.backend import Backend, Role
    from proxy.gateway.answers import Answer, FlowParts
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline

# Between two looks for a backend that could go on with an answer.
_LOOK_AGAIN_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class FailedAttempt:
    """The first attempt at a unit, which failed before the attempt loop began."""

    timeline: Timeline
    """The timeline of the unit."""
    error: NoBackendAvailable | UpstreamError
    prefiller: Backend | None
    """The prefiller that has the prompt in its cache; None: none, or not known."""
    began_at: float | None
    """When the attempt had its first output, in seconds of the suspects' clock; None: it had none."""


class AttemptLoop:
    """One unit's attempts: opened on fresh backends until its answer is complete, or must not be tried again.

    An attempt that failed before its decoder said anything is *repeated*; an answer that had begun is *resumed*.
    """

    def __init__(
        self,
        parts: FlowParts,
        answer: Answer,
        record: RequestRecord,
        suspicion: Suspicion,
        failed: FailedAttempt | None = None,
    ) -> None:
        """Begin no attempt yet.

        Args:
            parts: Those of the lane.
            answer: The answer to the unit.
            record: What is noted of the client request.
            suspicion: Whether the client request may break engines.
            failed: The first attempt at a unit that has been let in already; None: there was none.
        """
        self._parts = parts
        self._settings = parts.settings
        self._metrics = parts.metrics
        self._answer = answer
        self._delivery = answer.delivery
        self._record = record
        self._is_first = failed is not None or not record.timelines
        self._begun = failed
        self._timeline = record.timeline() if failed is None else failed.timeline
        self._permit = RetryPermit(parts.budget)
        self._guard = UnitGuard(parts.suspects, suspicion, self._permit)
        self._resuming = Resuming(parts, answer, self._timeline)
        # Of the next attempt.
        self._call = answer.call
        self._avoid: set[Backend] = set()
        self._prefer: Backend | None = None
        # Of the attempts so far.
        self._failures: dict[Role, int] = {}
        self._has_reached_engines = False
        self._has_asked_all = False
        """Since the last failure, backends that had failed were tried once more for lack of others."""
        self._soonest = math.inf
        self._last: UpstreamError | None = None
        self._gone: Role | None = None
        """Whose instances it is in the queue for once more."""
        self._refusal: UpstreamError | None = None
        """All instances of a role refused, last with this, and it is in the queue once more until one takes it."""

    async def run(self) -> None:
        """Open attempts until one has brought the whole answer.

        Raises Overloaded, NoBackendAvailable, UpstreamError, ClientStalled.
        """
        record, guard = self._record, self._guard
        waits_until = record.clock() + self._settings.admission.wait_seconds
        while True:
            try:
                async with self._admit():
                    if self._begun is None:
                        self._timeline.leave()
                    if self._gone is not None and self._is_still_gone(self._gone):
                        raise NoBackendAvailable(self._gone)  # it was let in because the queue waits no longer for them
                    # No await before the first lease: the room that was seen is still there.
                    with guard.blame, self._permit:
                        while not await self._attempt():
                            pass
                guard.suspicion.was_served(guard.history)
                return
            except Overloaded as error:
                # What an engine said is more to the point than that the queue was in vain.
                raise error if self._refusal is None else self._refusal from None
            except (NoBackendAvailable, UpstreamError) as error:
                if self._is_refused(error):
                    # It also waits in vain for instances that say themselves that they refuse for longer.
                    refused_until = self._parts.pools.of(_role_of(error)).refused_until()
                    if max(record.clock(), refused_until) >= waits_until:
                        raise
                    self._refusal = error if isinstance(error, UpstreamError) else self._refusal
                elif not self._is_absence(error):
                    raise
                else:
                    gone = _role_of(error)
                    if not self._parts.pools.of(gone).is_restarting() or record.clock() >= waits_until:
                        raise error if isinstance(error, NoBackendAvailable) else NoBackendAvailable(gone) from error
                    self._gone = gone
                    self._failures.clear()
            self._avoid.clear()
            self._last = self._prefer = None

    def _admit(self) -> Entry:
        admission, key = self._parts.admission, self._record.key
        if self._begun is not None:
            entry = Entry(admission, key, is_patient=True, on_wait=None)
            entry.has_been_in = True
            return entry
        # A request that was let in is let in whole: its further units wait as long as it takes.
        wanted = self._call.pick_request
        return admission.admit(
            key,
            patient=not self._is_first and self._refusal is None,
            on_wait=self._enter_queue,
            request=wanted,
            since=self._record.started,
        )

    def _is_refused(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Whether it may wait in the queue, because all instances of a role refuse requests for the moment."""
        if self._delivery.is_touched or self._delivery.seam is not None or self._settings.retry.max_attempts < 2:
            return False
        if isinstance(error, UpstreamError):
            return error.is_refusal and not self._resuming.is_unrepeatable
        return self._parts.pools.of(error.role).refuse_all()

    def _is_absence(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Whether nothing has come of the request but refused connections, of instances that are all gone."""
        if isinstance(error, UpstreamError) and error.failure is not Failure.CONNECT:
            return False
        return self._parts.pools.of(_role_of(error)).is_gone() and not self._has_reached_engines

    def _is_still_gone(self, role: Role) -> bool:
        """Whether another attempt would end as the last one did, after a prefill for nothing."""
        pool = self._parts.pools.of(role)
        return pool.is_gone() and not pool.is_restarting()

    def _enter_queue(self) -> None:
        self._timeline.enter(Stage.QUEUE)

    async def _attempt(self) -> bool:
        """One attempt: whether the answer is complete, or else what to do next is decided."""
        guard = self._guard
        try:
            # An attempt whose place does not matter begins without an await.
            begun, self._begun = self._begun, None
            if begun is None:
                avoid = await self._confine() if guard.suspicion.bears_on_choice else self._avoid
            else:
                self._prefer = begun.prefiller
                if begun.began_at is not None:
                    guard.history.began_at = begun.began_at
            try:
                if begun is not None:
                    raise begun.error
                wanted, sent = self._call.pick_request(avoid, self._prefer), self._answer.sent(self._call)
                async with self._parts.connector.open(sent, wanted, self._timeline) as attempt:
                    self._prefer = attempt.prefiller
                    await self._answer.take(attempt, guard)
                    return True
            except NoBackendAvailable as nobody:
                if left := guard.leave(nobody.role):
                    self._avoid |= left
                else:
                    await self._look_again(nobody)
                return False
            except UpstreamError as error:
                return await self._failed(error)
        finally:
            self._timeline.leave()
            guard.end_attempt()

    async def _confine(self) -> Collection[Backend]:
        """The backends to avoid; raises the last error when its turn to be repeated does not come again."""
        was_held = self._permit.is_held
        avoid = await self._guard.confine(self._avoid)
        if was_held and not await self._permit.acquire(self._settings.resume.deadline_seconds):
            assert self._last is not None
            self._metrics.retry_budget_exhausted_total.inc()
            raise self._resuming.given_up(self._last, "the retry budget had no place for it in time")
        return avoid

    async def _failed(self, error: UpstreamError) -> bool:
        """Decide what to do after an attempt failed: True when the answer is over all the same, or raise."""
        self._last = error
        self._timeline.failed(error)
        self._has_asked_all = False
        self._has_reached_engines |= error.failure is not Failure.CONNECT
        self._avoid.add(error.backend)
        if await self._guard.broke_down(error, self._timeline, self._record):
            if self._delivery.is_touched or self._delivery.seam is not None:
                self._metrics.resume_failures_total.labels(error.failure.value).inc()
            raise error.as_stopped()
        if not self._delivery.is_touched:
            self._prefer = None  # the KV may never have arrived, and either engine may be the reason
        if self._resuming.is_incident(error):
            return await self._resume(error)
        await self._repeat(error)
        return False

    async def _resume(self, error: UpstreamError) -> bool:
        """True when the answer is over, False when it is up to the next attempt. Raises when it cannot be saved."""
        resuming = self._resuming
        resumption = await resuming.decide(error, self._call)
        self._failures.clear()
        self._avoid = {error.backend}
        if resumption.call is None:
            try:
                self._answer.close(self._timeline)
            except UnreadableMember as odd:
                message = f"sent an answer that cannot be read: {odd}"
                raise upstream_error(Failure.BAD_ANSWER, error.backend, message) from None
            return True
        self._call = resumption.call
        if not await self._permit.acquire(self._settings.resume.deadline_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise resuming.given_up(error, "the retry budget had no place for it in time")
        if resuming.count > 1:
            self._timeline.leave()
            await asyncio.sleep(backoff_seconds(self._settings.retry, resuming.count - 1))
        return False

    async def _repeat(self, error: UpstreamError) -> None:
        """Wait for the next try of an attempt whose decoder said nothing, or raise."""
        role, retry, resuming = error.backend.role, self._settings.retry, self._resuming
        if error.retry_after_seconds is not None:  # where all are busy, the client may come when the first one is not
            self._soonest = error.retry_after_seconds = min(error.retry_after_seconds, self._soonest)
        if error.is_refusal and retry.max_attempts > 1 and not resuming.is_unrepeatable:
            await self._repeat_refused(error)
            return
        attempts = self._failures[role] = self._failures.get(role, 0) + 1
        if not may_retry(
            error, sent_to_client=resuming.is_unrepeatable, attempts=attempts, max_attempts=retry.max_attempts
        ):
            if error.failure is Failure.CONNECT and resuming.is_searching:
                # The last instance of a role is not taken out, however often it refuses: it may be on its way back.
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                return
            raise (
                resuming.given_up(error, "no instance could continue it") if self._delivery.seam is not None else error
            )
        # What was never sent costs the engines nothing to repeat.
        if error.failure is not Failure.CONNECT and not await self._permit.acquire(retry.budget_wait_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error
        self._metrics.retries_total.labels(role.value, error.failure.value).inc()
        if self._delivery.seam is None:
            self._delivery.begin_anew()
        self._timeline.leave()
        await asyncio.sleep(backoff_seconds(retry, attempts))

    async def _repeat_refused(self, error: UpstreamError) -> None:
        """Wait for the next try of an attempt that an engine refused, or raise. It counts for nothing: the engine has
        done no work, is passed over from now on, and so is not asked again before others.
        """
        role, resuming = error.backend.role, self._resuming
        pool = self._parts.pools.of(role)
        if not pool.would_accept(self._avoid):
            if not resuming.is_searching:
                raise (
                    resuming.given_up(error, "no instance could continue it")
                    if self._delivery.seam is not None
                    else error
                )
            while pool.refuse_all() and resuming.is_searching:  # noqa: ASYNC110 time alone may end it
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            self._avoid.clear()
        self._metrics.retries_total.labels(role.value, error.failure.value).inc()
        if self._delivery.seam is None:
            self._delivery.begin_anew()
        self._timeline.leave()
        await asyncio.sleep(backoff_seconds(self._settings.retry, 1))

    async def _look_again(self, nobody: NoBackendAvailable) -> None:
        """There was no backend: decide whether there may be one soon, or raise."""
        last, resuming = self._last, self._resuming
        is_innocent = last is not None and (last.is_stale or last.failure is Failure.RECOMPUTED)
        if self._avoid and last is not None and (resuming.is_searching or is_innocent) and not self._has_asked_all:
            # A decoder that is short of memory is not sick, one that closed an idle connection may never have been
            # asked, and others may be well again: where there is no other, the same one is asked again.
            self._avoid.clear()
            self._has_asked_all = True
        elif resuming.is_searching:
            self._avoid.clear()  # a suspect avoids those that refused it, too
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        # What the last engine said is more to the point, except that it could not be reached.
        elif last is None or (last.failure is Failure.CONNECT and resuming.action is None):
            if self._guard.awaits_verdict:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                if await self._guard.is_acquitted():
                    return
            raise nobody
        else:
            raise resuming.given_up(last, "no instance could continue it") if resuming.action else last from None


def _role_of(error: NoBackendAvailable | UpstreamError) -> Role:
    return error.role if isinstance(error, NoBackendAvailable) else error.backend.role
