"""Splits requests into units, and makes the answers to the units."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from proxy.common.errors import Failure, GatewayError, UpstreamError
from proxy.dialects.base import Unit
from proxy.gateway.answers import AssembledBody, EngineBody, StreamedAnswer
from proxy.gateway.attempts import AttemptLoop
from proxy.gateway.detokenizer import ChatPrompts
from proxy.gateway.lane_parts import LaneParts
from proxy.resume.engines import VLLM, WatchLevel
from proxy.wire.openai import error_event as openai_error_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.dialects.base import Dialect, Rendering
    from proxy.dialects.call import Call
    from proxy.gateway.answers import UnitAnswer
    from proxy.gateway.attempts import FailedAttempt
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.record import RequestRecord
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engines import AnswerWatch
    from proxy.settings import Settings


logger = logging.getLogger("proxy.flow.gateway")

_NOT_WATCHED: Final = VLLM.watching[WatchLevel.REPEAT_UNSEEN]


class RequestService(LaneParts):
    """The parts of one lane, which serve its calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chat_prompts = ChatPrompts(self.common_abilities, self.detokenizer)

    def on_settings_change(self, settings: Settings) -> None:
        """Apply changed settings to queued requests and retries. Later ones read them."""
        self.retry_budget.grant_free_permits()
        self.admission_queue.set_limits(settings.admission)

    # The work on one request

    async def make_chat_prompt(self, call: Call) -> ChatPrompt | None:
        """Return the prompt of a chat that engines get as a completion, or None if they get the chat itself.

        It matters only for SGLang with `sglang.chat_sampling`.
        """
        return await self._chat_prompts.make_chat_prompt(call, self.live_settings.settings.sglang.chat_sampling)

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
        self.connector.check_call(call)
        if dialect.has_single_choice(call) or not self.connector.splits_into_units(call):
            units = [Unit(call, 0, True)]
        else:
            settings = self.live_settings.settings
            units = dialect.split_into_units(call, settings.cost, settings.fanout.max_units)
        answers: list[UnitAnswer] = []
        if not call.stream:
            for unit in units:
                watching = self.choose_answer_watch(dialect, unit.call, prompt)
                if watching.is_watched:
                    answers.append(AssembledBody(unit.call, dialect, self, watching, prompt))
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
                self,
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
        resume = self.live_settings.settings.resume
        abilities = self.common_abilities
        limit = None if call.stream else call.output_limit
        engine = abilities.common_engine
        if (
            engine is None
            or resume.mode != "exact"
            or (limit is not None and limit <= resume.repeat_up_to_tokens)
            or not (self.connector.splits_into_units(call) or dialect.has_single_choice(call))
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
        suspects = self.suspects
        suspicion = suspects.begin_request(call, len(answers))
        try:
            if len(answers) == 1:
                await AttemptLoop(self, answers[0], record, suspicion, failed).make_attempts()
            else:
                await self._make_units(answers, record, suspicion)
        except BaseException as error:
            suspects.end_request(call, suspicion, error)
            raise
        suspects.end_request(call, suspicion, None)

    async def _make_units(self, answers: Sequence[UnitAnswer], record: RequestRecord, suspicion: Suspicion) -> None:
        """Make several answers at a time, up to `fanout.concurrency`. The first failure ends all of them."""
        room = asyncio.Semaphore(self.live_settings.settings.fanout.concurrency)

        async def make_one(answer: UnitAnswer) -> None:
            async with room:
                await AttemptLoop(self, answer, record, suspicion).make_attempts()

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
        self.metrics.whole_answers_repeated_total.inc(len(repeated))
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


class RequestWork:
    """The units of one client request, and the answers to them."""

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
