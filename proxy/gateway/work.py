"""The life of one request: split into units, each served by its attempts, their answers put together for the client."""

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
from proxy.resume.engines import SGLANG, VLLM, WatchLevel
from proxy.wire.openai import error_event as openai_error_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.backend import Role
    from proxy.connectors.base import Connector
    from proxy.dialects.base import Dialect, Rendering, UnitRendering
    from proxy.dialects.call import Call
    from proxy.gateway.answers import Answer
    from proxy.gateway.attempts import FailedAttempt
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.gateway.suspects import Suspects
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engines import Watching
    from proxy.settings import Settings


logger = logging.getLogger("proxy.flow.gateway")

_NOT: Final = VLLM.watching[WatchLevel.NOT]


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
    metrics: Metrics
    """Metrics of this worker."""
    front: WorkerQueueHead | None = None
    """See AdmissionParts."""


class RequestService:
    """Serves the calls of all dialects through one connector."""

    def __init__(self, parts: ServiceParts, settings: Settings) -> None:
        connector, pools, metrics = parts.connector, parts.pools, parts.metrics
        self.metrics = metrics
        self.budget = RetryBudget(settings.retry.budget_share, settings.retry.budget_least)
        admission_parts = AdmissionParts(
            has_room=self._has_room,
            metrics=metrics,
            absent=self._absent,
            full=self._full,
            on_wait=self._on_wait,
            line_up=pools.prefill,
            answer_seconds=pools.decode.work_seconds,
            lower_priority_first=settings.connector_traits.lower_priority_first,
            front=parts.front,
            would_take=self._would_take,
            hold_seconds=self._hold_seconds,
            refusing=self._refusing,
        )
        self.admission = AdmissionQueue(admission_parts, settings.admission)
        self._connector = connector
        self._pools = pools
        self._parts = FlowParts(
            connector=connector,
            pools=pools,
            abilities=CommonAbilities([pools.of(role) for role in connector.roles], settings.connector_traits.engine),
            detokenizer=parts.detokenizer,
            suspects=parts.suspects,
            budget=self.budget,
            admission=self.admission,
            metrics=metrics,
            settings=settings,
        )
        self._chat_prompts = ChatPrompts(self._parts.abilities, parts.detokenizer)
        self._serving = tuple(map(pools.of, connector.roles))
        self._read(settings)

    def _read(self, settings: Settings) -> None:
        """Keep at hand what every request asks for."""
        self._is_exact = settings.resume.mode == "exact"
        self._chat_sampling = settings.sglang.chat_sampling
        self._repeat_up_to_tokens = settings.resume.repeat_up_to_tokens

    def _on_wait(self, is_waiting: bool) -> None:
        """Have the pools tell of room only while a unit waits for it: otherwise each request would cost three calls."""
        for pool in self._serving:
            pool.on_release = self.admission.notify if is_waiting else None

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is decided from now on."""
        self._parts.settings = settings
        self.budget.configure(settings.retry.budget_share, settings.retry.budget_least)
        self.admission.configure(settings.admission)
        self._connector.configure(settings)
        self._read(settings)

    def speaks(self, dialect: Dialect) -> bool:
        """Whether engines can serve it."""
        return dialect.api in self._connector.apis

    # The work on one request

    def work(
        self,
        dialect: Dialect,
        call: Call,
        writer: ClientWriter,
        record: RequestRecord,
        prompt: ChatPrompt | None = None,
    ) -> Work:
        """Split a request into units, and prepare their answers. Raises GatewayError for what cannot be served.

        Args:
            dialect: The API of the client.
            call: The request.
            writer: The client's stream, for an answer that is streamed.
            record: What is noted of the request.
            prompt: See `prompt`.
        """
        self._connector.check(call)
        units = self._units(dialect, call)
        answers: list[Answer]
        if not call.stream:
            answers = [self._whole(dialect, unit.call, prompt) for unit in units]
            return Work(dialect, call, units, answers)
        rendering = dialect.rendering(call, units)
        is_shared = len(units) > 1
        answers = [
            self._streamed(dialect, unit.call, writer, record, rendering.unit(unit), prompt, shares_client=is_shared)
            for unit in units
        ]
        return Work(dialect, call, units, answers, rendering)

    def needs_prompt(self, dialect: Dialect, call: Call) -> bool:
        """Return whether `prompt` has something to find out."""
        return bool(self._chat_sampling) and self.watching(dialect, call).engine is SGLANG

    async def prompt(self, dialect: Dialect, call: Call) -> ChatPrompt | None:
        """Return the prompt of a chat that engines get as a completion; None: they get it as it is."""
        if not self.needs_prompt(dialect, call):
            return None
        return await self._chat_prompts.of(call, self._chat_sampling)

    async def make(self, work: Work, record: RequestRecord, failed: FailedAttempt | None = None) -> None:
        """Make the answers of a request. Raises GatewayError, ClientStalled.

        Args:
            work: The request.
            record: What is noted of it.
            failed: The first attempt at its only unit; None: there was none.
        """
        with self._parts.suspects.watch(work.call, len(work.answers)) as suspicion:
            await self._run(work.answers, record, suspicion, failed)

    async def ask_again(self, work: Work, record: RequestRecord) -> None:
        """Ask once for whole answers in place of those whose tool calls are spoilt.

        Engines have one parser for streams and another one for whole answers (vllm#54701), so the calls may be there.
        Raises GatewayError if that fails, unless the present answers have all their calls.
        """
        before = work.answers
        after: list[Answer] = [
            EngineBody(answer.delivery.call, work.dialect) if answer.has_spoilt_calls else answer for answer in before
        ]
        asked = [answer for answer, old in zip(after, before, strict=True) if answer is not old]
        self._parts.metrics.whole_answers_repeated_total.inc(len(asked))
        logger.info("an answer is asked for again as a whole: the engine's stream has spoilt its tool calls")
        try:
            with self._parts.suspects.watch(work.call, len(asked)) as suspicion:
                await self._run(asked, record, suspicion)
        except GatewayError as error:
            # An engine that answers something else than JSON has no whole answer to give.
            has_none = isinstance(error, UpstreamError) and error.failure is Failure.BAD_ANSWER
            if not has_none and any(answer.lacks_calls for answer in before):
                raise
            return
        work.answers = after

    def _streamed(
        self,
        dialect: Dialect,
        call: Call,
        writer: ClientWriter,
        record: RequestRecord,
        rendering: UnitRendering | None,
        prompt: ChatPrompt | None,
        *,
        shares_client: bool,
    ) -> StreamedAnswer:
        """Return the answer to a unit that is streamed to the client."""
        watching = self.watching(dialect, call, prompt)
        if rendering is None and watching.is_close:
            rendering = dialect.watched_rendering(call)
        return StreamedAnswer(
            call,
            dialect,
            writer,
            record,
            self._parts,
            watching=watching,
            rendering=rendering,
            shares_client=shares_client,
            prompt=prompt,
        )

    def _has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Whether one more unit would find room in every role, or would fail at once. See AdmissionParts."""
        line_up = self._pools.prefill
        for pool in self._serving:  # noqa: SIM110 - without a call for each
            if not pool.has_room(request if pool is line_up else None):
                return False
        return True

    def _would_take(self) -> bool:
        """Return whether one more unit lacks room only because of what was learned of engines. See AdmissionParts."""
        return all(pool.would_take() for pool in self._serving)

    def _hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return how long one of `waiting` queued units may wait for a limit that was learned. See AdmissionParts."""
        pools = self._pools
        return min(
            pools.decode.policy.hold_seconds(request, waiting), pools.prefill.policy.hold_seconds(request, waiting)
        )

    def _full(self) -> Role | None:
        """A role in which there is no room, None if there is room in each."""
        return next((role for role in self._connector.roles if not self._pools.of(role).has_room()), None)

    def _absent(self) -> Role | None:
        """A role of which all are gone that were there, None if there is none."""
        return next((role for role in self._connector.roles if self._pools.of(role).is_gone()), None)

    def _refusing(self) -> tuple[Role, float] | None:
        """The role all of whose backends refuse requests for the longest by their own words, and until when."""
        until, role = max((pool.refused_until(), pool.role) for pool in self._serving)
        return (role, until) if until else None

    def _units(self, dialect: Dialect, call: Call) -> list[Unit]:
        if dialect.is_single(call) or not self._connector.splits(call):
            return [Unit(call, 0, True)]
        settings = self._parts.settings
        return dialect.split(call, settings.cost, settings.fanout.max_units)

    def _whole(self, dialect: Dialect, call: Call, prompt: ChatPrompt | None) -> Answer:
        """Return the answer to a unit that is not streamed to the client."""
        watching = self.watching(dialect, call, prompt)
        if watching.is_close:
            return AssembledBody(call, dialect, self._parts, watching, prompt)
        return EngineBody(call, dialect)

    def watching(self, dialect: Dialect, call: Call, prompt: ChatPrompt | None = None) -> Watching:
        """How closely an answer is watched, so that it can be continued. It must be one sequence. `prompt`: of a chat
        that is asked for as a completion.
        """
        if prompt is not None:
            return prompt.engine.watching[WatchLevel.IDS]
        abilities = self._parts.abilities
        limit = None if call.stream else call.output_limit
        engine = abilities.engine
        if (
            engine is None
            or not self._is_exact
            or (limit is not None and limit <= self._repeat_up_to_tokens)
            or not (self._connector.splits(call) or dialect.is_single(call))
        ):
            return _NOT
        return engine.watching[engine.watch(call, abilities.has)]

    async def _run(
        self,
        answers: Sequence[Answer],
        record: RequestRecord,
        suspicion: Suspicion,
        failed: FailedAttempt | None = None,
    ) -> None:
        """Make the answers side by side, a bounded number at a time; the first failure ends them all."""
        if len(answers) == 1:
            await AttemptLoop(self._parts, answers[0], record, suspicion, failed).run()
            return
        room = asyncio.Semaphore(self._parts.settings.fanout.concurrency)

        async def run(answer: Answer) -> None:
            async with room:
                await AttemptLoop(self._parts, answer, record, suspicion).run()

        try:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(run(answer))
        except BaseExceptionGroup as failed_units:
            raise failed_units.exceptions[0] from None


class Work:
    """One client request: its units, and the answers to them."""

    __slots__ = ("_rendering", "answers", "call", "dialect", "units")

    def __init__(
        self,
        dialect: Dialect,
        call: Call,
        units: Sequence[Unit],
        answers: list[Answer],
        rendering: Rendering | None = None,
    ) -> None:
        """`rendering` None: the answer is not streamed."""
        self.dialect = dialect
        self.call = call
        self.units = units
        self.answers = answers
        """The answers to the units, in their order."""
        self._rendering = rendering

    @property
    def has_spoilt_calls(self) -> bool:
        """Whether the engine's stream has spoilt tool calls of an answer that the client gets whole."""
        if self._rendering is not None:
            return False
        for answer in self.answers:  # noqa: SIM110 - each request asks, and a generator costs more
            if answer.has_spoilt_calls:
                return True
        return False

    def ending(self) -> bytes:
        """Return the end of a stream, or the whole body of an answer that is not streamed. Raises GatewayError."""
        if self._rendering is None:
            return self.dialect.whole(self.call, self.units, self.answers)
        answers = self.answers
        usages = [answer.delivery.usage for answer in answers]
        return self._rendering.ending(usages, answers[-1].delivery.writer.last_payload) + self.dialect.done_event

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event that says in the middle of a stream why it is not complete."""
        return openai_error_event(error) if self._rendering is None else self._rendering.error_event(error)
