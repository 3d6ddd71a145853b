"""Makes the attempts of one unit: the only loop that retries or resumes a request."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Role
from proxy.common.errors import Failure, NoBackendAvailable, Overloaded, UpstreamError
from proxy.common.terms import Stage
from proxy.gateway.admission import QueueEntry
from proxy.gateway.resuming import Resuming
from proxy.gateway.retry import RetryPermit, backoff_seconds, may_retry
from proxy.gateway.suspects import UnitGuard
from proxy.upstream import make_upstream_error
from proxy.wire.chat_members import UnreadableMember

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.common.backend import Backend
    from proxy.gateway.answers import UnitAnswer
    from proxy.gateway.lane_parts import LaneParts
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline

# The interval of checks for a backend that can continue an answer.
_CHECK_SECONDS: Final = 0.25
# Failures after which the same instance may serve the request.
_MAY_SUCCEED_AGAIN: Final = (Failure.RECOMPUTED, Failure.RESTARTED)


@dataclass(frozen=True, slots=True, eq=False)
class FailedAttempt:
    """A first attempt that failed before the attempt loop began."""

    unit_timeline: Timeline
    """The timeline of the unit."""
    attempt_error: NoBackendAvailable | UpstreamError
    """Why the attempt failed."""
    prefiller: Backend | None
    """The prefiller that has the prompt in its cache. None: there is none, or it is unknown."""
    began_at: float | None
    """Time of the first output, in seconds of the suspects' clock. None: there was no output."""


class AttemptLoop:
    """Makes attempts on further backends until the answer is complete, or must not be tried again.

    An attempt that failed before its decoder sent anything is *repeated*. An answer that had begun is *resumed*.
    """

    def __init__(
        self,
        parts: LaneParts,
        answer: UnitAnswer,
        record: RequestRecord,
        suspicion: Suspicion,
        failed_attempt: FailedAttempt | None = None,
    ) -> None:
        """Create the attempt loop.

        Args:
            parts: The parts of the lane.
            answer: The answer to the unit.
            record: The record of the client request.
            suspicion: The suspicion that the client request crashes engines.
            failed_attempt: The first attempt at a unit that was admitted already. None: no attempt was made.
        """
        self._lane_parts = parts
        self._settings = parts.live_settings.settings
        self._metrics = parts.metrics
        self._answer = answer
        self._delivery = answer.delivery
        self._record = record
        self._is_first_attempt = failed_attempt is not None or not record.timelines
        self._first_failure = failed_attempt
        self._timeline = record.add_timeline() if failed_attempt is None else failed_attempt.unit_timeline
        self._retry_permit = RetryPermit(parts.retry_budget)
        self._guard = UnitGuard(parts.suspects, suspicion, self._retry_permit)
        self._resuming = Resuming(parts, answer, self._timeline)
        # The next attempt
        self._call = answer.engine_call
        self._avoid: set[Backend] = set()
        self._prefer: Backend | None = None
        # The attempts so far
        self._failures: dict[Role, int] = {}
        """The number of failed attempts by role."""
        self._has_reached_engines = False
        """Whether an engine may have received the request."""
        self._has_retried_all = False
        """Whether failed backends were tried again since the last failure, because there were no others."""
        self._min_retry_after_seconds = math.inf
        """The shortest Retry-After of any engine."""
        self._last_error: UpstreamError | None = None
        self._awaited_role: Role | None = None
        """The role that lost all its instances, so that the unit is queued again. None: there is no such role."""
        self._rejection: UpstreamError | None = None
        """The last error, if all instances of a role reject requests and the unit is queued again."""

    async def make_attempts(self) -> None:
        """Make attempts until one has brought the whole answer.

        Raises:
            Overloaded: The queue rejects the unit.
            NoBackendAvailable: A role has no backend.
            UpstreamError: The last attempt failed.
            ClientStalled: The client does not read.
        """
        record, guard = self._record, self._guard
        waits_until = record.clock() + self._settings.admission.wait_seconds
        while True:
            try:
                async with self._make_queue_entry():
                    if self._first_failure is None:
                        self._timeline.end_attempt()
                    # The queue no longer waits for the instances of this role.
                    if self._awaited_role is not None and self._is_still_gone(self._awaited_role):
                        raise NoBackendAvailable(self._awaited_role)
                    # The first lease must be taken before any await, while there is room.
                    with guard.failure_blame, self._retry_permit:
                        while not await self._make_attempt():
                            pass
                guard.request_suspicion.clear_served_unit(guard.unit_history)
                return
            except Overloaded as error:
                # The error of the engine tells the client more than the error of the queue.
                raise error if self._rejection is None else self._rejection from None
            except (NoBackendAvailable, UpstreamError) as error:
                if self._may_queue_again(error):
                    # A wait is useless if all instances will reject requests for longer.
                    refused_until = self._lane_parts.pools.pool_of(_role_of_error(error)).refused_until()
                    if max(record.clock(), refused_until) >= waits_until:
                        raise
                    self._rejection = error if isinstance(error, UpstreamError) else self._rejection
                elif not self._is_role_absent(error):
                    raise
                else:
                    gone = _role_of_error(error)
                    if not self._lane_parts.pools.pool_of(gone).are_all_restarting() or record.clock() >= waits_until:
                        raise error if isinstance(error, NoBackendAvailable) else NoBackendAvailable(gone) from error
                    self._awaited_role = gone
                    self._failures.clear()
            self._avoid.clear()
            self._last_error = self._prefer = None

    def _make_queue_entry(self) -> QueueEntry:
        """Return the entry of the unit into the admission queue."""
        admission, key = self._lane_parts.admission_queue, self._record.key
        if self._first_failure is not None:
            entry = QueueEntry(admission, key, is_patient=True, on_wait=None)
            entry.has_been_queued = True
            return entry
        # All units of an admitted request are admitted, whatever the length of the wait.
        pick_request = self._call.make_pick_request
        return admission.make_entry(
            key,
            is_patient=not self._is_first_attempt and self._rejection is None,
            on_wait=partial(self._timeline.enter_stage, Stage.QUEUE),
            request=pick_request,
            arrived_at=self._record.started,
        )

    def _may_queue_again(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Return whether the unit may be queued again, because all instances of a role reject requests."""
        if self._delivery.is_answer_changed or self._delivery.seam is not None or self._settings.retry.max_attempts < 2:
            return False
        if isinstance(error, UpstreamError):
            return error.is_refusal and not self._resuming.is_unrepeatable
        return self._lane_parts.pools.pool_of(error.role).do_all_refuse()

    def _is_role_absent(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Return whether all instances of a role are gone, and no engine has received the request."""
        if isinstance(error, UpstreamError) and error.failure is not Failure.CONNECT:
            return False
        return self._lane_parts.pools.pool_of(_role_of_error(error)).are_all_gone() and not self._has_reached_engines

    def _has_returned(self, role: Role) -> bool:
        """Return whether a role that refused this unit is reachable again, and no engine has received the request.

        An attempt may have waited for the return of all its instances, and still avoids them.
        """
        last, pool = self._last_error, self._lane_parts.pools.pool_of(role)
        if last is None or last.backend.role is not role or self._has_reached_engines:
            return False
        return any(not pool.health.health_of(backend).is_unreachable for backend in pool.eligible_backends())

    def _is_still_gone(self, role: Role) -> bool:
        """Return whether another attempt would fail as the last one, after a useless prefill."""
        pool = self._lane_parts.pools.pool_of(role)
        return pool.are_all_gone() and not pool.are_all_restarting()

    async def _make_attempt(self) -> bool:
        """Make one attempt. Return True if the answer is complete, or False for another attempt."""
        guard = self._guard
        try:
            # If any backend will do, the attempt begins without an await.
            begun, self._first_failure = self._first_failure, None
            if begun is None:
                avoid = (
                    await self._choose_backends_to_avoid()
                    if guard.request_suspicion.affects_engine_choice
                    else self._avoid
                )
            else:
                self._prefer = begun.prefiller
                if begun.began_at is not None:
                    guard.unit_history.attempt_began_at = begun.began_at
            try:
                if begun is not None:
                    raise begun.attempt_error
                pick_request, call = (
                    self._call.make_pick_request(avoid, self._prefer),
                    self._answer.adapt_call(self._call),
                )
                async with self._lane_parts.connector.open_attempt(call, pick_request, self._timeline) as attempt:
                    self._prefer = attempt.prefiller
                    await self._answer.read_whole_answer(attempt, guard)
                    return True
            except NoBackendAvailable as absence:
                if left := guard.give_up_confined(absence.role):
                    self._avoid |= left
                else:
                    await self._wait_for_backend(absence)
                return False
            except UpstreamError as error:
                return await self._handle_failure(error)
        finally:
            self._timeline.end_attempt()
            guard.end_attempt()

    async def _choose_backends_to_avoid(self) -> Collection[Backend]:
        """Return the backends to avoid. Raise the last error if the retry budget has no permit in time."""
        was_held = self._retry_permit.is_held
        avoid = await self._guard.choose_backends_to_avoid(self._avoid)
        if was_held:
            assert self._last_error is not None
            await self._acquire_permit_to_resume(self._last_error)
        return avoid

    async def _acquire_permit_to_resume(self, error: UpstreamError) -> None:
        """Wait for a permit of the retry budget. Raise an error that names `error` if there is none in time."""
        if not await self._retry_permit.acquire_permit(self._settings.resume.deadline_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise self._resuming.make_given_up_error(error, "the retry budget did not admit it in time")

    async def _handle_failure(self, error: UpstreamError) -> bool:
        """Decide what to do after an attempt failed. Return True if the answer is complete anyway, or raise."""
        self._last_error = error
        error.quotable = self._delivery.quotable_texts
        self._timeline.record_failure(error)
        self._has_retried_all = False
        self._has_reached_engines |= error.failure is not Failure.CONNECT
        self._avoid.add(error.backend)
        if await self._guard.should_stop_request(error, self._timeline, self._record):
            if self._delivery.is_answer_changed or self._delivery.seam is not None:
                self._metrics.resume_failures_total.labels(error.failure.value).inc()
            raise error.mark_as_stopped()
        if not self._delivery.is_answer_changed:
            self._prefer = None  # the KV may not have arrived, and the prefiller may be the reason
        if self._resuming.is_broken_answer(error):
            return await self._prepare_resume(error)
        await self._wait_before_retry(error)
        return False

    async def _prepare_resume(self, error: UpstreamError) -> bool:
        """Prepare to resume the answer. Return True if it is complete already. Raise if it cannot be resumed."""
        resuming = self._resuming
        resumption = await resuming.decide_resumption(error, self._call)
        self._failures.clear()
        self._avoid = {error.backend}
        if resumption.call is None:
            try:
                self._answer.end_answer(self._timeline)
            except UnreadableMember as odd:
                message = f"sent an answer that cannot be read: {odd}"
                raise make_upstream_error(Failure.BAD_ANSWER, error.backend, message) from None
            return True
        self._call = resumption.call
        await self._acquire_permit_to_resume(error)
        if resuming.resume_count > 1:
            self._timeline.end_attempt()
            await asyncio.sleep(backoff_seconds(self._settings.retry, resuming.resume_count - 1))
        return False

    async def _wait_before_retry(self, error: UpstreamError) -> None:
        """Wait before an attempt is repeated, or raise. Its decoder has not sent anything."""
        role, retry, resuming = error.backend.role, self._settings.retry, self._resuming
        if error.retry_after_seconds is not None:  # if all are busy, the client may return when the first one is free
            self._min_retry_after_seconds = error.retry_after_seconds = min(
                error.retry_after_seconds, self._min_retry_after_seconds
            )
        if error.is_refusal and retry.max_attempts > 1 and not resuming.is_unrepeatable:
            await self._wait_after_rejection(error)
            return
        attempts = self._failures[role] = self._failures.get(role, 0) + 1
        if not may_retry(
            error, sent_to_client=resuming.is_unrepeatable, attempt_count=attempts, max_attempts=retry.max_attempts
        ):
            if error.failure is Failure.CONNECT and resuming.is_searching:
                # The last instance of a role is never ejected, because it may be restarting.
                await asyncio.sleep(_CHECK_SECONDS)
                await self._wait_for_decoder()
                if resuming.is_searching:
                    return
            raise self._make_final_error(error)
        # A request that was not sent costs the engines nothing, so it needs no permit.
        if error.failure is not Failure.CONNECT and not await self._retry_permit.acquire_permit(
            retry.budget_wait_seconds
        ):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error
        await self._back_off(error, attempts)

    async def _wait_after_rejection(self, error: UpstreamError) -> None:
        """Wait before an attempt is repeated that an engine rejected, or raise.

        Such an attempt does not count, because the engine has done no work and is avoided from now on.
        """
        pool, resuming = self._lane_parts.pools.pool_of(error.backend.role), self._resuming
        if not pool.would_accept(self._avoid):
            if not resuming.is_searching:
                raise self._make_final_error(error)
            while pool.do_all_refuse() and resuming.is_searching:  # noqa: ASYNC110 time alone may end it
                await asyncio.sleep(_CHECK_SECONDS)
            self._avoid.clear()
        await self._back_off(error, 1)

    def _make_final_error(self, error: UpstreamError) -> UpstreamError:
        """Return the error for the client if no instance can repeat or continue an attempt that failed."""
        if self._delivery.seam is None:
            return error
        return self._resuming.make_given_up_error(error, "no instance could continue it")

    async def _back_off(self, error: UpstreamError, attempts: int) -> None:
        """Count a retry, and wait before it. `attempts`: how many attempts have failed."""
        self._metrics.retries_total.labels(error.backend.role.value, error.failure.value).inc()
        if self._delivery.seam is None:
            self._delivery.restart_answer()
        self._timeline.end_attempt()
        await asyncio.sleep(backoff_seconds(self._settings.retry, attempts))

    async def _wait_for_backend(self, absence: NoBackendAvailable) -> None:
        """Decide whether to wait for a backend after there was none, or raise."""
        last, resuming = self._last_error, self._resuming
        is_innocent = last is not None and (last.is_stale_connection or last.failure in _MAY_SUCCEED_AGAIN)
        if absence.role is Role.DECODE and not is_innocent:
            await self._wait_for_decoder()
        is_innocent = is_innocent or self._has_returned(absence.role)
        if self._avoid and last is not None and (resuming.is_searching or is_innocent) and not self._has_retried_all:
            # Try the same backends again: a decoder may have recovered from a lack of KV memory, a request on a closed
            # idle connection may not have been received, and other backends may be healthy again.
            self._avoid.clear()
            self._has_retried_all = True
        elif resuming.is_searching:
            self._avoid.clear()  # a suspect also avoids the backends that rejected it
            await asyncio.sleep(_CHECK_SECONDS)
        # Report the last error of an engine, unless the engine was not reached.
        elif last is None or (last.failure is Failure.CONNECT and resuming.resume_action is None):
            suspicion = self._guard.request_suspicion
            if suspicion.are_units_confined and suspicion.has_broken_down:
                # Another unit may soon show why engines crashed.
                await asyncio.sleep(_CHECK_SECONDS)
                if await self._guard.wait_for_acquittal():
                    return
            raise absence
        else:
            raise (
                resuming.make_given_up_error(last, "no instance could continue it") if resuming.resume_action else last
            ) from None

    async def _wait_for_decoder(self) -> None:
        """Wait until a decoder runs, while an answer searches for an instance that can continue it.

        Each attempt without a decoder would cost a prefill, and its KV cache would stay pinned until its lease ends.
        """
        parts = self._lane_parts
        if not parts.pools.prefill.all_backends():
            return
        while self._resuming.is_searching:
            decoders = parts.pools.decode.eligible_backends()
            if not decoders or not all(
                await asyncio.gather(*(parts.is_engine_gone(decoder, 0.0) for decoder in decoders))
            ):
                return
            await asyncio.sleep(_CHECK_SECONDS)


def _role_of_error(error: NoBackendAvailable | UpstreamError) -> Role:
    return error.role if isinstance(error, NoBackendAvailable) else error.backend.role
