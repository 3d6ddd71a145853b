"""The life of one request: split into units, each served by its attempts, their answers put together for the client."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from proxy.dialects.base import Unit
from proxy.errors import Failure, GatewayError, UpstreamError
from proxy.flow.admission import Admission
from proxy.flow.answers import AssembledBody, EngineBody, StreamedAnswer
from proxy.flow.attempts import AttemptLoop
from proxy.flow.budget import RetryBudget
from proxy.flow.chat_prompts import ChatPrompts
from proxy.flow.fleet import Fleet
from proxy.flow.guard import unwritable
from proxy.flow.parts import FlowParts
from proxy.resume.engine import Watch
from proxy.resume.sglang import SGLANG
from proxy.resume.vllm import VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.backend import Role
    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pools import Pools
    from proxy.balancer.shared.fronts import WorkerFront
    from proxy.call import Call
    from proxy.connectors.base import Connector
    from proxy.dialects.base import Dialect, UnitRendering
    from proxy.flow.answers import Answer
    from proxy.flow.begun import BegunAttempt
    from proxy.flow.client import ClientStream, ClientWriter
    from proxy.flow.detokenizer import Detokenizer
    from proxy.flow.suspects import Suspects
    from proxy.flow.suspicion import Suspicion
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engine import Watching
    from proxy.settings import Settings


logger = logging.getLogger(__name__)

_NOT: Final = VLLM.watching[Watch.NOT]


class Gateway:
    """Serves the calls of all dialects through one connector."""

    def __init__(
        self,
        connector: Connector,
        pools: Pools,
        detokenizer: Detokenizer,
        suspects: Suspects,
        settings: Settings,
        metrics: Metrics,
        front: WorkerFront | None = None,
    ) -> None:
        """`front`: see Admission."""
        self.metrics = metrics
        self.budget = RetryBudget(settings.retry.budget_share, settings.retry.budget_least)
        self.admission = Admission(
            settings.admission,
            self._has_room,
            metrics,
            absent=self._absent,
            full=self._full,
            on_wait=self._on_wait,
            line_up=pools.prefill,
            answer_seconds=pools.decode.work_seconds,
            lower_priority_first=settings.connector_traits.lower_priority_first,
            front=front,
            would_take=self._would_take,
            hold_seconds=lambda *waits: min(pools.decode.hold_seconds(*waits), pools.prefill.hold_seconds(*waits)),
            refusing=self._refusing,
        )
        self._connector = connector
        self._pools = pools
        self._parts = FlowParts(
            connector=connector,
            pools=pools,
            fleet=Fleet([pools.of(role) for role in connector.roles], settings.connector_traits.engine),
            detokenizer=detokenizer,
            suspects=suspects,
            budget=self.budget,
            admission=self.admission,
            metrics=metrics,
            settings=settings,
        )
        self._chat_prompts = ChatPrompts(self._parts.fleet, detokenizer)
        self._serving = tuple(map(pools.of, connector.roles))
        self._read(settings)

    def _read(self, settings: Settings) -> None:
        """Keep at hand what every request asks for."""
        self._is_exact = settings.resume.mode == "exact"
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

    async def complete(self, dialect: Dialect, call: Call, record: RequestRecord) -> bytes:
        """Serve a call that is not streamed; the JSON body for the client. Raises GatewayError."""
        units = self._units(dialect, call)
        prompt = await self._prompt(dialect, call)
        answers = [self._whole(dialect, unit.call, prompt) for unit in units]
        with self._parts.suspects.watch(call, len(units)) as suspicion:
            await self._run(answers, record, suspicion)
        if any(answer.has_spoilt_calls for answer in answers):
            answers = await self._asked_again(dialect, call, answers, record)
        try:
            return dialect.whole(call, units, answers)
        except GatewayError:
            raise
        except Exception as error:
            raise unwritable(error) from None

    async def _asked_again(
        self, dialect: Dialect, call: Call, answers: Sequence[EngineBody | AssembledBody], record: RequestRecord
    ) -> list[EngineBody | AssembledBody]:
        """Ask once for whole answers in place of those whose tool calls are spoilt.

        Engines have one parser for streams and another one for whole answers (vllm#54701), so the calls may be there.
        Raises GatewayError if that fails, unless the answers that there are have all their calls.
        """
        again = [EngineBody(answer.delivery.call, dialect) if answer.has_spoilt_calls else answer for answer in answers]
        asked = [answer for answer, before in zip(again, answers, strict=True) if answer is not before]
        self._parts.metrics.whole_answers_repeated_total.inc(len(asked))
        logger.info("an answer is asked for again as a whole: the engine's stream has spoilt its tool calls")
        try:
            with self._parts.suspects.watch(call, len(asked)) as suspicion:
                await self._run(asked, record, suspicion)
        except GatewayError as error:
            # An engine that answers something else than JSON has no whole answer to give.
            has_none = isinstance(error, UpstreamError) and error.failure is Failure.BAD_ANSWER
            if not has_none and any(answer.lacks_calls for answer in answers):
                raise
            return list(answers)
        return again

    async def stream(self, dialect: Dialect, call: Call, client: ClientStream, record: RequestRecord) -> None:
        """Serve a streamed call and end the client's stream. Raises GatewayError, ClientStalled."""
        units = self._units(dialect, call)
        rendering = dialect.rendering(call, units)
        client.error_event = rendering.error_event
        prompt, is_shared = await self._prompt(dialect, call), len(units) > 1
        answers = [
            self.streamed(
                dialect, unit.call, client, record, rendering.unit(unit), shares_client=is_shared, prompt=prompt
            )
            for unit in units
        ]
        with self._parts.suspects.watch(call, len(units)) as suspicion:
            await self._run(answers, record, suspicion)
        deliveries = [answer.delivery for answer in answers]
        usages, last_payload = [delivery.usage for delivery in deliveries], deliveries[-1].writer.last_payload
        try:
            ending = rendering.ending(usages, last_payload)
        except GatewayError:
            raise
        except Exception as error:
            raise unwritable(error) from None
        client.write(ending)
        await client.finish(dialect.done_event)

    def streamed(
        self,
        dialect: Dialect,
        call: Call,
        client: ClientWriter,
        record: RequestRecord,
        rendering: UnitRendering | None = None,
        *,
        shares_client: bool = False,
        watching: Watching | None = None,
        prompt: ChatPrompt | None = None,
    ) -> StreamedAnswer:
        """One unit's answer that is streamed to the client; see StreamedAnswer. `watching`: how it is, if an engine has
        been asked already; None: it is for this to say.
        """
        watching = watching or self.watching(dialect, call, prompt)
        if rendering is None and watching.is_close:
            rendering = dialect.watched_rendering(call)
        return StreamedAnswer(
            call,
            dialect,
            client,
            record,
            self._parts,
            watching=watching,
            rendering=rendering,
            shares_client=shares_client,
            prompt=prompt,
        )

    async def go_on(self, answer: Answer, record: RequestRecord, begun: BegunAttempt | None) -> None:
        """Make the only answer of a request of the fast path. `begun`: its first attempt; None: there was none. Raises
        GatewayError, ClientStalled.
        """
        with self._parts.suspects.watch(answer.delivery.call, 1) as suspicion:
            await AttemptLoop(self._parts, answer, record, suspicion, begun).run()

    def _has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Whether one more unit would find room in every role, or would fail at once. See Admission."""
        line_up = self._pools.prefill
        for pool in self._serving:  # noqa: SIM110 - without a call for each
            if not pool.has_room(request if pool is line_up else None):
                return False
        return True

    def _would_take(self) -> bool:
        """Return whether one more unit lacks room only because of what was learned of engines. See Admission."""
        return all(pool.would_take() for pool in self._serving)

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
        self._connector.check(call)
        if not self._connector.splits(call):
            return [Unit(call, 0, True)]
        settings = self._parts.settings
        return dialect.split(call, settings.cost, settings.fanout.max_units)

    async def _prompt(self, dialect: Dialect, call: Call) -> ChatPrompt | None:
        """That of a chat which is to be asked for as a completion; None: as it is."""
        sampling = self._parts.settings.sglang.chat_sampling
        if not sampling or self.watching(dialect, call).engine is not SGLANG:
            return None
        return await self._chat_prompts.of(call, sampling)

    def _whole(self, dialect: Dialect, call: Call, prompt: ChatPrompt | None) -> EngineBody | AssembledBody:
        """The answer of a unit that is not streamed to the client."""
        watching = self.watching(dialect, call, prompt)
        if watching.is_close:
            return AssembledBody(call, dialect, self._parts, watching, prompt)
        return EngineBody(call, dialect)

    def watching(self, dialect: Dialect, call: Call, prompt: ChatPrompt | None = None) -> Watching:
        """How closely an answer is watched, so that it can be continued. It must be one sequence. `prompt`: of a chat
        that is asked for as a completion.
        """
        if prompt is not None:
            return prompt.engine.watching[Watch.IDS]
        fleet = self._parts.fleet
        limit = None if call.stream else call.output_limit
        engine = fleet.engine
        if (
            engine is None
            or not self._is_exact
            or (limit is not None and limit <= self._repeat_up_to_tokens)
            or not (self._connector.splits(call) or dialect.is_single(call))
        ):
            return _NOT
        return engine.watching[engine.watch(call, fleet.has)]

    async def _run(self, answers: Sequence[Answer], record: RequestRecord, suspicion: Suspicion) -> None:
        """Make the answers side by side, a bounded number at a time; the first failure ends them all."""
        if len(answers) == 1:
            await AttemptLoop(self._parts, answers[0], record, suspicion).run()
            return
        room = asyncio.Semaphore(self._parts.settings.fanout.concurrency)

        async def run(answer: Answer) -> None:
            async with room:
                await AttemptLoop(self._parts, answer, record, suspicion).run()

        try:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(run(answer))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
