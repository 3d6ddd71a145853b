"""Splits requests into units, and makes the answers to the units."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.errors import Failure, GatewayError, UpstreamError
from proxy.dialects.base import Unit
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.answers import AssembledBody, EngineBody, FlowParts, StreamedAnswer
from proxy.gateway.attempts import AttemptLoop
from proxy.gateway.common_abilities import CommonAbilities
from proxy.gateway.detokenizer import ChatPrompts
from proxy.gateway.retry import RetryBudget
from proxy.resume.engines import VLLM, WatchLevel
from proxy.wire.openai import error_event as openai_error_event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.backend import Backend, Role
    from proxy.connectors.base import Connector
    from proxy.dialects.base import Dialect, Rendering
    from proxy.dialects.call import Call
    from proxy.gateway.answers import UnitAnswer
    from proxy.gateway.attempts import FailedAttempt
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.gateway.suspects import Suspects
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engines import AnswerWatch
    from proxy.settings import Settings
    from proxy.settings.live import LiveSettings


logger = logging.getLogger("proxy.flow.gateway")

_NOT_WATCHED: Final = VLLM.watching[WatchLevel.REPEAT_UNSEEN]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServiceParts:
    """The parts of one worker that a RequestService works with."""

    connector: Connector
    """Carries the calls to engines."""
    pools: Pools
    """Instances that serve the calls."""
    detokenizer: Detokenizer
    """Returns the text of token ids, by asking engines."""
    suspects: Suspects
    """Requests that may have crashed engines."""
    is_engine_gone: Callable[[Backend, float], Awaitable[bool]]
    """Returns whether an engine is down now, or after a number of seconds."""
    metrics: Metrics
    """Metrics of this worker."""
    queue_head: WorkerQueueHead | None = None
    """See AdmissionParts."""


class RequestService:
    """Serves the calls of all dialects through one connector."""

    def __init__(self, parts: ServiceParts, live: LiveSettings) -> None:
        settings = live.settings
        connector, pools, metrics = parts.connector, parts.pools, parts.metrics
        self.metrics = metrics
        self.retry_budget = RetryBudget(lambda: live.settings.retry)
        admission_parts = AdmissionParts(
            has_room=self._have_pools_room,
            fits_engines=self._fits_engines,
            metrics=metrics,
            find_absent_role=self._find_absent_role,
            find_full_role=self._find_full_role,
            on_waiting_change=self._on_waiting_change,
            queue_order=pools.prefill,
            answer_seconds=pools.decode.predict_work_seconds,
            is_lower_priority_first=settings.connector_traits.lower_priority_first,
            queue_head=parts.queue_head,
            would_take_now=self._would_take_now,
            max_hold_seconds=self._max_hold_seconds,
            find_refusing_role=self._find_refusing_role,
        )
        self.admission_queue = AdmissionQueue(admission_parts, settings.admission)
        self._connector = connector
        self._pools = pools
        self._flow_parts = FlowParts(
            connector=connector,
            pools=pools,
            common_abilities=CommonAbilities(
                [pools.pool_of(role) for role in connector.roles], settings.connector_traits.engine
            ),
            detokenizer=parts.detokenizer,
            suspects=parts.suspects,
            is_engine_gone=parts.is_engine_gone,
            retry_budget=self.retry_budget,
            admission_queue=self.admission_queue,
            metrics=metrics,
            live_settings=live,
        )
        self._chat_prompts = ChatPrompts(self._flow_parts.common_abilities, parts.detokenizer)
        self._serving_pools = tuple(map(pools.pool_of, connector.roles))

    def on_settings_change(self, settings: Settings) -> None:
        """Apply changed settings to queued requests and retries. Later ones read them."""
        self.retry_budget.grant_free_permits()
        self.admission_queue.set_limits(settings.admission)

    def can_serve_dialect(self, dialect: Dialect) -> bool:
        """Return whether the engines can serve a dialect."""
        return dialect.api in self._connector.apis

    # The work on one request

    async def make_chat_prompt(self, call: Call) -> ChatPrompt | None:
        """Return the prompt of a chat that engines get as a completion, or None if they get the chat itself.

        It matters only for SGLang with `sglang.chat_sampling`.
        """
        return await self._chat_prompts.make_chat_prompt(
            call, self._flow_parts.live_settings.settings.sglang.chat_sampling
        )

    def make_work(
        self,
        dialect: Dialect,
        call: Call,
        writer: ClientWriter,
        record: RequestRecord,
        prompt: ChatPrompt | None = None,
    ) -> RequestWork:
        """Split a request into units, and prepare their answers.

        Args:
            dialect: The API of the client.
            call: The request.
            writer: The client's stream, for an answer that is streamed.
            record: The record of the request.
            prompt: The result of `make_chat_prompt`.

        Raises:
            GatewayError: The request cannot be served.
        """
        connector, parts = self._connector, self._flow_parts
        connector.check_call(call)
        if dialect.has_single_choice(call) or not connector.splits_into_units(call):
            units = [Unit(call, 0, True)]
        else:
            units = dialect.split_into_units(
                call, parts.live_settings.settings.cost, parts.live_settings.settings.fanout.max_units
            )
        answers: list[UnitAnswer] = []
        if not call.stream:
            for unit in units:
                watching = self.choose_answer_watch(dialect, unit.call, prompt)
                if watching.is_watched:
                    answers.append(AssembledBody(unit.call, dialect, parts, watching, prompt))
                else:
                    answers.append(EngineBody(unit.call, dialect))
            return RequestWork(dialect, call, units, answers)
        rendering = dialect.make_rendering(call, units)
        for unit in units:
            watching = self.choose_answer_watch(dialect, unit.call, prompt)
            unit_rendering = rendering.make_unit_rendering(unit)
            if unit_rendering is None and watching.is_watched:
                unit_rendering = dialect.make_watched_rendering(unit.call)
            answer = StreamedAnswer(
                unit.call,
                dialect,
                writer,
                record,
                parts,
                watching=watching,
                rendering=unit_rendering,
                shares_client=len(units) > 1,
                prompt=prompt,
            )
            answers.append(answer)
        return RequestWork(dialect, call, units, answers, rendering)

    def choose_answer_watch(self, dialect: Dialect, call: Call, prompt: ChatPrompt | None = None) -> AnswerWatch:
        """Return how closely to read the answer to a unit, so that another engine can continue it.

        `prompt`: that of a chat that engines get as a completion. None: the engines get the call itself.
        """
        if prompt is not None:
            return prompt.engine.watching[WatchLevel.CONTINUE_FROM_IDS]
        resume = self._flow_parts.live_settings.settings.resume
        abilities = self._flow_parts.common_abilities
        limit = None if call.stream else call.output_limit
        engine = abilities.common_engine
        if (
            engine is None
            or resume.mode != "exact"
            or (limit is not None and limit <= resume.repeat_up_to_tokens)
            or not (self._connector.splits_into_units(call) or dialect.has_single_choice(call))
        ):
            return _NOT_WATCHED
        return engine.watching[engine.watch_level(call, abilities.have_all)]

    async def make_answers(
        self, call: Call, answers: Sequence[UnitAnswer], record: RequestRecord, failed: FailedAttempt | None = None
    ) -> None:
        """Make the answers to the units of a client request.

        Args:
            call: The client request.
            answers: The answers to make.
            record: The record of the request.
            failed: The first attempt at the only unit. None: no attempt was made.

        Raises:
            GatewayError: One of the answers failed.
            ClientStalled: The client does not read.
        """
        suspects = self._flow_parts.suspects
        suspicion = suspects.begin_request(call, len(answers))
        try:
            if len(answers) == 1:
                await AttemptLoop(self._flow_parts, answers[0], record, suspicion, failed).make_attempts()
            else:
                await self._make_units(answers, record, suspicion)
        except BaseException as error:
            suspects.end_request(call, suspicion, error)
            raise
        suspects.end_request(call, suspicion, None)

    async def _make_units(self, answers: Sequence[UnitAnswer], record: RequestRecord, suspicion: Suspicion) -> None:
        """Make several answers at a time, up to `fanout.concurrency`. The first failure ends all of them."""
        room = asyncio.Semaphore(self._flow_parts.live_settings.settings.fanout.concurrency)

        async def make_one(answer: UnitAnswer) -> None:
            async with room:
                await AttemptLoop(self._flow_parts, answer, record, suspicion).make_attempts()

        try:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(make_one(answer))
        except BaseExceptionGroup as failed_units:
            raise failed_units.exceptions[0] from None

    async def repeat_damaged_answers(self, work: RequestWork, record: RequestRecord) -> None:
        """Request whole answers, once, in place of those whose tool calls were damaged by the engine's stream.

        Engines parse streams and whole answers by different code (vllm#54701), so the whole answer may be intact.

        Raises:
            GatewayError: The request failed, and one of the present answers lacks tool calls.
        """
        before = work.unit_answers
        after: list[UnitAnswer] = [
            EngineBody(answer.delivery.call, work.dialect) if answer.has_damaged_tool_calls else answer
            for answer in before
        ]
        repeated = [answer for answer, old in zip(after, before, strict=True) if answer is not old]
        self._flow_parts.metrics.whole_answers_repeated_total.inc(len(repeated))
        logger.info("answer: requesting the whole answer: tool calls are damaged in the engine's stream")
        try:
            await self.make_answers(work.call, repeated, record)
        except GatewayError as error:
            # An engine that answers with something else than JSON cannot give a whole answer.
            has_none = isinstance(error, UpstreamError) and error.failure is Failure.BAD_ANSWER
            if not has_none and any(answer.lacks_tool_calls for answer in before):
                raise
            return
        work.unit_answers = after

    # Called by AdmissionQueue, see AdmissionParts

    def _on_waiting_change(self, is_waiting: bool) -> None:
        """Let the pools announce free room only while a unit waits: the announcement costs three calls a request."""
        for pool in self._serving_pools:
            pool.on_release = self.admission_queue.check_soon if is_waiting else None

    def _have_pools_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        for pool in self._serving_pools:  # noqa: SIM110 - a generator would be one more call for each request
            if not pool.has_room(request):
                return False
        return True

    def _fits_engines(self, request: PickRequest) -> bool:
        return self._pools.decode.has_room(lambda: request)

    def _would_take_now(self) -> bool:
        return all(pool.would_take_now() for pool in self._serving_pools)

    def _max_hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        decode, prefill = self._pools.decode, self._pools.prefill
        return (prefill if decode.has_room() else decode).policy.max_hold_seconds(request, waiting)

    def _find_full_role(self) -> Role | None:
        return next((pool.role for pool in self._serving_pools if not pool.has_room()), None)

    def _find_absent_role(self) -> Role | None:
        return next((pool.role for pool in self._serving_pools if pool.are_all_gone()), None)

    def _find_refusing_role(self) -> tuple[Role, float] | None:
        until, role = max((pool.refused_until(), pool.role) for pool in self._serving_pools)
        return (role, until) if until else None


class RequestWork:
    """The units of one client request, and the answers to them."""

    __slots__ = ("_stream_rendering", "unit_answers", "call", "dialect", "unit_calls")

    def __init__(
        self,
        dialect: Dialect,
        call: Call,
        units: Sequence[Unit],
        answers: list[UnitAnswer],
        rendering: Rendering | None = None,
    ) -> None:
        """Keep the units and answers. `rendering`: the writer of a streamed answer; otherwise None."""
        self.dialect = dialect
        self.call = call
        self.unit_calls = units
        self.unit_answers = answers
        """The answers to the units, in the order of the units."""
        self._stream_rendering = rendering

    @property
    def has_damaged_tool_calls(self) -> bool:
        """Whether the engine's stream has damaged the tool calls of an answer that the client gets whole."""
        if self._stream_rendering is not None:
            return False
        for answer in self.unit_answers:  # noqa: SIM110 - a generator would be one more call for each request
            if answer.has_damaged_tool_calls:
                return True
        return False

    def render_final_bytes(self) -> bytes:
        """Return the end of a stream, or the whole body of an answer that is not streamed. Raises GatewayError."""
        if self._stream_rendering is None:
            return self.dialect.render_complete_body(self.call, self.unit_calls, self.unit_answers)
        answers = self.unit_answers
        usages = [answer.delivery.last_usage for answer in answers]
        return (
            self._stream_rendering.render_final_events(usages, answers[-1].delivery.writer.last_payload)
            + self.dialect.stream_end_event
        )

    def make_error_event(self, error: GatewayError) -> bytes:
        """Return the event that reports an error in the middle of a stream."""
        return (
            openai_error_event(error) if self._stream_rendering is None else self._stream_rendering.error_event(error)
        )
