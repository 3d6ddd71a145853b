"""One unit's attempts: the only loop that repeats or resumes a request."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final

from proxy.balancer.blame import Blame
from proxy.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.flow.delivery import observed
from proxy.flow.resume import Action, CannotResume, ChatTokens, Resumption, Situation, plan
from proxy.flow.retry import backoff_seconds, may_retry
from proxy.flow.suspects import SuspectRequest
from proxy.record import Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from proxy.balancer.backend import Backend, Role
    from proxy.balancer.engine_facts import EngineVersion
    from proxy.call import Call
    from proxy.connectors.base import Attempt
    from proxy.flow.budget import Repeat
    from proxy.flow.client import ClientStream
    from proxy.flow.delivery import Delivery
    from proxy.flow.gateway import Gateway
    from proxy.flow.suspicion import Suspicion
    from proxy.record import Record

logger = logging.getLogger(__name__)

# From here on vLLM takes `kv_transfer_params.prompt_token_ids` in chats (renderers/online_renderer.py, PR #48145).
_NATIVE_CHAT_TOKENS: Final = (0, 27)
# From here on the length that ends an answer is not hidden by its tool calls (vLLM chat_completion/serving.py).
_LENGTH_IS_KEPT: Final = (0, 32)
# From here on the usage of a chat counts reasoning tokens, if engines have a parser for it.
_COUNTS_REASONING: Final = (0, 30)
# From here on white space at the end of reasoning is kept back (vLLM `parser/engine/parser_engine.py`).
_BLANKS_ARE_KEPT_BACK: Final = (0, 27)
# Between two looks for a backend that could go on with an answer.
_LOOK_AGAIN_SECONDS: Final = 0.25


class Work:
    """One unit's attempts: opened on fresh backends until its answer is complete, or must not be tried again.

    An attempt that failed before its decoder said anything is *repeated*; an answer that had begun is *resumed*.
    """

    def __init__(
        self,
        gateway: Gateway,
        call: Call,
        record: Record,
        delivery: Delivery,
        client: ClientStream | None,
        suspicion: Suspicion,
    ) -> None:
        """`suspicion`: that of the client request which this is a unit of."""
        self._gateway = gateway
        self._settings = gateway.settings
        self._metrics = gateway.metrics
        self._whole_call = observed(call) if delivery.is_observed else call
        self._caller = record.caller
        self._is_first = not record.journeys
        self._journey = record.journey()
        self._delivery = delivery
        self._client = client
        self._record = record
        self._suspicion = suspicion
        self._history = suspicion.add_unit()
        self._blame = Blame(suspicion.ways)
        self._settling: asyncio.TimerHandle | None = None
        # Of the next attempt.
        self._call = self._whole_call
        self._avoid: set[Backend] = set()
        self._prefer: Backend | None = None
        self._action: Action | None = None
        """How the answer is being resumed; None before the first incident."""
        # Of the attempts so far.
        self._failures: dict[Role, int] = {}
        self._has_reached_engines = False
        self._has_asked_all = False
        """Since the last failure those that had failed were asked once more, as there was nobody else."""
        self._soonest = math.inf
        self._last: UpstreamError | None = None
        self._unreached: NoBackendAvailable | UpstreamError | None = None
        """Why it is in the queue once more."""
        self._resumes = 0
        self._moves = 0
        """Of the resumes those that an evacuation made."""
        self._resume_until = 0.0
        self._chats: ChatTokens | None = None

    async def run(self, use: Callable[[Attempt, Callable[[], None]], Awaitable[None]]) -> None:
        """Open attempts until `use` succeeds with one; it calls its second argument when the decoder begins to answer.

        Raises Overloaded, NoBackendAvailable, UpstreamError.
        """
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._settings.admission.wait_seconds
        while True:
            try:
                return await self._run_admitted(use)
            except (NoBackendAvailable, UpstreamError) as error:
                if not self._may_queue_again(error) or loop.time() >= waits_until:
                    raise
                self._unreached = error
            self._avoid.clear()
            self._failures.clear()
            self._last = self._prefer = None

    async def _run_admitted(self, use: Callable[[Attempt, Callable[[], None]], Awaitable[None]]) -> None:
        # A request that was let in is let in whole: its further units wait as long as it takes.
        admission = self._gateway.admission
        async with admission.admit(self._caller, patient=not self._is_first, on_wait=self._enter_queue):
            self._journey.leave()
            if self._unreached is not None and self._is_still_gone(self._unreached):
                raise self._unreached  # it was let in because nobody waits for that role any longer
            # No await before the first lease: the room that was seen is still there.
            with self._blame, self._gateway.budget.request() as turn:
                while not await self._try(use, turn):
                    pass
        self._suspicion.was_served(self._history)

    def _may_queue_again(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Whether nothing has come of the request but refused connections, of instances that are only restarting."""
        if isinstance(error, UpstreamError) and error.failure is not Failure.CONNECT:
            return False
        return self._gateway.pools.of(_role_of(error)).is_restarting() and not self._has_reached_engines

    def _is_still_gone(self, error: NoBackendAvailable | UpstreamError) -> bool:
        """Whether another attempt would end as the last one did, after a prefill for nothing."""
        pool = self._gateway.pools.of(_role_of(error))
        return pool.is_gone() and not pool.is_restarting()

    def _enter_queue(self) -> None:
        self._journey.enter(Stage.QUEUE)

    async def _try(self, use: Callable[[Attempt, Callable[[], None]], Awaitable[None]], turn: Repeat) -> bool:
        """One attempt: whether the answer is complete, or else what to do next is decided."""
        try:
            # An attempt that nothing bears upon begins without an await.
            avoid = await self._place(turn) if self._suspicion.bears_on_choice else self._avoid
            return await self._attempt(use, turn, avoid)
        finally:
            self._journey.leave()
            self._end_attempt()

    async def _place(self, turn: Repeat) -> Collection[Backend]:
        """The backends to avoid. Who waits for a place of its own does not keep others from being repeated."""
        is_repeating = turn.is_repeating
        avoid = await self._gateway.suspects.confine(self._suspicion, self._history, self._avoid, turn.end)
        if is_repeating and not await turn.begin(self._settings.resume.deadline_seconds):
            assert self._last is not None
            self._metrics.retry_budget_exhausted_total.inc()
            raise self._given_up(self._last, "too many others are being taken up")
        return avoid

    async def _attempt(
        self,
        use: Callable[[Attempt, Callable[[], None]], Awaitable[None]],
        turn: Repeat,
        avoid: Collection[Backend],
    ) -> bool:
        suspects = self._gateway.suspects

        def begin() -> None:
            turn.end()
            self._begin()

        try:
            async with self._gateway.connector.open(self._call, avoid, self._journey, self._prefer) as attempt:
                self._prefer = attempt.prefiller
                await use(attempt, begin)
                return True
        except NoBackendAvailable as nobody:
            if left := suspects.leave(self._suspicion, self._history, nobody.role):
                self._avoid |= left
            else:
                await self._look_again(nobody)
        except UpstreamError as error:
            self._last = error
            self._has_asked_all = False
            self._has_reached_engines |= error.failure is not Failure.CONNECT
            self._avoid.add(error.backend)
            self._blame.failed(error)
            if error.is_breakdown and await suspects.broke_down(
                self._suspicion, self._history, error, self._journey, self._record
            ):
                raise self._stopped(error) from None
            if not self._delivery.is_touched:
                self._prefer = None  # the KV may never have arrived, and who knows on whose account
            if self._is_incident(error):
                return await self._resume(error, turn)
            await self._repeat(error, turn)
        return False

    def _begin(self) -> None:
        """The decoder has begun to answer. If it goes on for a while, it can do what others could not."""
        suspects, history = self._gateway.suspects, self._history
        if history.began_at is None:
            history.began_at = suspects.now()
            if history.reserved or self._blame.is_open:
                self._settling = asyncio.get_running_loop().call_later(history.apart_seconds, self._settle)

    def _settle(self) -> None:
        self._gateway.suspects.let_go(self._history)
        self._blame.settle()

    def _end_attempt(self) -> None:
        self._gateway.suspects.let_go(self._history)
        self._history.began_at = None
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    async def _look_again(self, nobody: NoBackendAvailable) -> None:
        """There was no backend: decide whether there may be one soon, or raise."""
        last = self._last
        is_innocent = last is not None and (last.is_stale or last.failure is Failure.RECOMPUTED)
        if self._avoid and last is not None and (self._is_resuming or is_innocent) and not self._has_asked_all:
            # A decoder that is short of memory is not sick, one that closed an idle connection may never have been
            # asked, and others may be well again: where there is no other, the same one is asked again.
            self._avoid.clear()
            self._has_asked_all = True
        elif self._is_resuming:
            self._avoid.clear()  # a suspect avoids those that refused it, too
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        # What the last engine said is more to the point, except that it could not be reached.
        elif last is None or (last.failure is Failure.CONNECT and self._action is None):
            if self._suspicion.is_confined and self._suspicion.has_broken_down:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # another unit of the request is about to tell why
            raise nobody
        else:
            raise self._given_up(last, "no instance could go on") if self._action else last from None

    async def _repeat(self, error: UpstreamError, turn: Repeat) -> None:
        """Wait for the next try of an attempt whose decoder said nothing, or raise."""
        role, retry = error.backend.role, self._settings.retry
        self._failures[role] = self._failures.get(role, 0) + 1
        attempts = self._failures[role]
        if error.retry_after_seconds is not None:  # where all are busy, the client may come when the first one is not
            self._soonest = error.retry_after_seconds = min(error.retry_after_seconds, self._soonest)
        if not may_retry(
            error, sent_to_client=self._is_unrepeatable, attempts=attempts, max_attempts=retry.max_attempts
        ):
            if error.failure is Failure.CONNECT and self._is_resuming:
                # The last instance of a role is not taken out, however often it refuses: it may be on its way back.
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                return
            raise self._given_up(error, "no instance could go on") if self._delivery.goes_on else error
        # What was never sent costs the engines nothing to repeat.
        if error.failure is not Failure.CONNECT and not await turn.begin(retry.budget_wait_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error
        self._metrics.retries_total.labels(role.value, error.failure.value).inc()
        if not self._delivery.goes_on:
            self._delivery.begin_anew()
        self._journey.leave()
        await asyncio.sleep(backoff_seconds(retry, attempts))

    @property
    def _is_unrepeatable(self) -> bool:
        """The client has a part of an answer of which nobody knows what it is."""
        delivery = self._delivery
        return delivery.has_output and (delivery.has_lost_track or not delivery.is_observed)

    # Resuming

    @property
    def _is_resuming(self) -> bool:
        """An answer that had begun is looking for an instance that can go on with it, and still may."""
        return self._action is not None and asyncio.get_running_loop().time() < self._resume_until

    def _is_incident(self, error: UpstreamError) -> bool:
        """Did an answer break off, and not only an attempt at one?"""
        return self._delivery.is_touched or error.failure in (Failure.RECOMPUTED, Failure.NOT_RESUMED)

    async def _resume(self, error: UpstreamError, turn: Repeat) -> bool:
        """Decide how the answer goes on: True when it is over, False when it is up to the next attempt.

        Raises the error when the answer cannot be saved.
        """
        settings = self._settings.resume
        if settings.mode == "off" or self._is_unrepeatable or (error.is_clients_fault and not self._delivery.goes_on):
            raise error
        # Being moved at an operator's will is no failure, and happens once for each instance that is removed.
        self._moves += error.failure is Failure.REMOVED
        if self._resumes - self._moves >= settings.max_attempts and error.failure is not Failure.REMOVED:
            raise self._given_up(error, f"it broke off {self._resumes + 1} times")
        self._resumes += 1
        self._resume_until = asyncio.get_running_loop().time() + settings.deadline_seconds
        try:
            resumption = await self._plan(error)
        except CannotResume as reason:
            raise self._given_up(error, str(reason)) from None
        self._account(error, resumption)
        self._failures.clear()
        self._avoid = {error.backend}
        self._action = resumption.action
        if resumption.call is None:
            self._delivery.close(self._journey.prompt_details, self._client)
            self._journey.saw_completion_usage(self._delivery.usage)
            return True
        self._call = resumption.call
        if not await turn.begin(settings.deadline_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise self._given_up(error, "too many others are being taken up")
        if self._resumes > 1:
            self._journey.leave()
            await asyncio.sleep(backoff_seconds(self._settings.retry, self._resumes - 1))
        return False

    async def _plan(self, error: UpstreamError) -> Resumption:
        """What to do next, and the delivery made ready for it. Raises CannotResume."""
        delivery = self._delivery
        if error.failure is Failure.NOT_RESUMED:
            if self._action not in (Action.CHAT_TOKENS, Action.ROLL_BACK):
                raise CannotResume("the engine did not continue it exactly")
            self._chats = ChatTokens.COMPLETIONS
        elif not delivery.is_touched:
            if not delivery.goes_on:
                delivery.begin_anew()
            return Resumption(self._action or Action.RESTART, self._call)
        if delivery.is_finished:
            return Resumption(Action.FINISH, None)
        if delivery.has_lost_track or not delivery.is_observed:
            delivery.begin_anew()
            return Resumption(Action.RESTART, self._whole_call)
        version = self._gateway.engine_version()
        # The prefiller's answer tells it, but with connector plain there is none.
        delivery.counts_reasoning |= (
            self._journey.counts_reasoning
            or (delivery.segment.usage or {}).get("completion_tokens_details") is not None
            or (version >= _COUNTS_REASONING and bool(delivery.transcript.reasoning))
        )
        situation = Situation(
            call=self._whole_call,
            head=delivery.head,
            transcript=delivery.transcript,
            shown=delivery.has_output,
            shows_ids=delivery.shows_ids,
            ahead=delivery.ahead,
            segment=self._resumes,
            chats=self._chats or _chat_tokens(self._settings.resume.chats, version),
            keeps_length=version >= _LENGTH_IS_KEPT,
            shows_blanks=version < _BLANKS_ARE_KEPT_BACK,
            max_model_len=self._gateway.max_model_len(),
        )
        steps = plan(situation)
        text: str | None = None
        try:
            while True:
                ids = steps.send(text)
                text = await self._gateway.vocabulary.text(self._call.values.get("model"), ids, self._call.headers)
        except StopIteration as decided:
            resumption: Resumption = decided.value
        if resumption.seam is None:
            delivery.begin_anew()
        else:
            delivery.go_on(resumption)
        self._journey.is_resumed = resumption.kept > 0
        return resumption

    def _account(self, error: UpstreamError, resumption: Resumption) -> None:
        """Metrics and the one line of a resume."""
        cause, action = error.failure.value, resumption.action
        call = resumption.call
        prefilled = 0 if call is None else call.prompt_tokens
        self._metrics.resumes_total.labels(cause, action.value).inc()
        self._metrics.resumed_tokens_total.inc(prefilled)
        self._journey.resumes += 1
        logger.info(
            "an answer goes on after its decoder was lost",
            extra={
                "fields": {
                    "cause": cause,
                    "action": action.value,
                    "from": error.backend.name,
                    "kept": len(self._delivery.transcript.ids),
                    "prefilled": prefilled,
                    "resume": self._resumes,
                }
            },
        )

    def _stopped(self, error: UpstreamError) -> UpstreamError:
        """The error of a request that must not come to another engine."""
        if self._delivery.is_touched or self._delivery.goes_on:
            self._metrics.resume_failures_total.labels(error.failure.value).inc()
        error.body = error.retry_after_seconds = None
        error.status, error.code = SuspectRequest.status, SuspectRequest.code
        error.message = f"{error.message}; another one had gone down over this request, which is stopped"
        return error

    def _given_up(self, error: UpstreamError, reason: str) -> UpstreamError:
        """The error of an answer that had begun and cannot be completed."""
        self._metrics.resume_failures_total.labels(error.failure.value).inc()
        if self._delivery.goes_on:
            error.body = None  # what an engine says to a request that the client did not send is not for the client
        if error.body is None:
            error.message = f"{error.message}; the answer could not be resumed: {reason}"
            error.status = 503
            error.retry_after_seconds = 1.0
        return error


def _role_of(error: NoBackendAvailable | UpstreamError) -> Role:
    return error.role if isinstance(error, NoBackendAvailable) else error.backend.role


def _chat_tokens(configured: str, version: EngineVersion) -> ChatTokens:
    if configured != "auto":
        return ChatTokens(configured)
    return ChatTokens.NATIVE if version >= _NATIVE_CHAT_TOKENS else ChatTokens.COMPLETIONS
