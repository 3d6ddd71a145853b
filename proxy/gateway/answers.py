"""The answer to one unit: reads it from engines, and completes it for the client."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.balancer.engines import ROUTED_EXPERTS
from proxy.connectors.base import parse_answer
from proxy.gateway.assembly import StreamAssembly
from proxy.gateway.delivery import Delivery
from proxy.gateway.relay import Relay, TokenClock
from proxy.resume.engines import VLLM, WatchLevel
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.document import REMOVED, SHORT_DOCUMENT_BYTES, Document, LongAnswer, join_body
from proxy.wire.openai import Api
from proxy.wire.python_json import dumps, encode_utf8, loads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.errors import UpstreamError
    from proxy.connectors.legs import Attempt
    from proxy.dialects.base import Dialect, UnitRendering
    from proxy.dialects.call import Call
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.lane_parts import LaneParts
    from proxy.gateway.relay import AnswerOwner
    from proxy.gateway.suspects import UnitGuard
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engines import AnswerWatch, Engine


class UnitAnswer(ABC):
    """The answer to one unit, whichever attempts work on it."""

    engine_call: Call
    """The call as engines get it."""
    delivery: Delivery
    """Decides what the client gets."""
    engine: Engine
    """The kind of the engines that work on the answer."""
    chat_prompt: ChatPrompt | None = None
    """The prompt of a chat that engines get as a completion. None: they get the call itself."""
    client_writer: ClientWriter | None = None
    """The client's stream. None: the answer is not streamed."""

    def adapt_call(self, call: Call) -> Call:
        """Return a call for this answer in the form that engines get."""
        return (
            call
            if self.chat_prompt is None or call.api is not Api.CHAT
            else self.chat_prompt.make_completion_call(call)
        )

    @property
    def has_damaged_tool_calls(self) -> bool:
        """Whether tool calls are missing from the answer, or have arguments that are not JSON."""
        return False

    @property
    def lacks_tool_calls(self) -> bool:
        """Whether the answer ends with the finish reason `tool_calls` and has no tool call."""
        return False

    def make_body(self) -> bytes:
        """Return the JSON body of the answer. As far as possible, it consists of the engine's own bytes.

        Only answers that are not streamed have a body.
        """
        raise NotImplementedError

    def parsed_body(self) -> dict[str, Any]:
        """Return the answer's body as Python objects. Long members may be an `orjson.Fragment`, for orjson only.

        Only answers that are not streamed have values.
        """
        raise NotImplementedError

    # Reading the answer of one attempt

    @abstractmethod
    def begin_reading(self, attempt: Attempt, owner: AnswerOwner) -> None:
        """Begin to read the decoder's answer of an attempt."""

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether nothing more of the attempt's answer will arrive."""

    @abstractmethod
    def continue_reading(self) -> None:
        """Continue to read, after the client has read enough."""

    @abstractmethod
    def stop_reading(self) -> None:
        """Stop reading the decoder's answer after its attempt is over."""

    @abstractmethod
    def check_complete(self, attempt: Attempt) -> None:
        """Check the answer after its end. Raises UpstreamError if it is incomplete."""

    @abstractmethod
    async def wait_for_other_parts(self, attempt: Attempt) -> None:
        """Wait for the parts of the answer that come from other engines. Raises UpstreamError."""

    async def read_whole_answer(self, attempt: Attempt, unit_guard: UnitGuard) -> None:
        """Read the whole answer of an attempt in a task. Raises UpstreamError, ClientStalled."""
        owner = _TaskAnswerOwner(unit_guard)
        self.begin_reading(attempt, owner)
        try:
            while True:
                await owner.wake_event.wait()
                owner.wake_event.clear()
                if self.is_ended:
                    break
                assert self.client_writer is not None
                await self.client_writer.wait_until_read()
                self.continue_reading()
        finally:
            self.stop_reading()
        self.check_complete(attempt)
        await self.wait_for_other_parts(attempt)

    def end_answer(self, timeline: Timeline) -> None:
        """End an answer whose last engine has not ended it. Raises UnreadableMember if it cannot be assembled."""
        self._write_end(timeline)
        timeline.usage.add_completion_usage(self.delivery.last_usage)

    def record_partial_usage(self, timeline: Timeline) -> None:
        """Record the tokens of an answer that has ended early, unless an engine has reported them."""
        if timeline.usage.completion_tokens is None:
            timeline.usage.add_completion_usage(self.delivery.estimate_partial_usage())

    def _write_end(self, timeline: Timeline) -> None:
        ending = self.delivery.make_missing_end(timeline.usage.prompt_details)
        if self.client_writer is not None:
            self.client_writer.write(ending)


class _TaskAnswerOwner:
    """The AnswerOwner that wakes a task."""

    def __init__(self, guard: UnitGuard) -> None:
        self.wake_event = asyncio.Event()
        self._unit_guard = guard

    def on_first_output(self) -> None:
        self._unit_guard.on_first_output()

    def on_end(self) -> None:
        self.wake_event.set()

    def on_progress(self) -> None:
        self.wake_event.set()


class EngineBody(UnitAnswer):
    """An answer that is not streamed. The client gets the engine's body with the dialect's corrections."""

    def __init__(self, call: Call, dialect: Dialect) -> None:
        self.engine_call = call
        self.delivery = Delivery(call, is_observed=False)
        self.engine = VLLM
        self._dialect = dialect
        self._body_bytes = b""
        self._read_error: UpstreamError | None = None
        self._is_ended = False
        self._answer_owner: AnswerOwner | None = None
        self._parsed_answer: Document | LongAnswer | None = None
        self._corrected_members: dict[str, Any] = {}

    def begin_reading(self, attempt: Attempt, owner: AnswerOwner) -> None:
        """Begin to read the decoder's answer of an attempt.

        A whole body has no first output before its end.
        """
        self._is_ended = False
        self._answer_owner = owner
        attempt.response.collect_body(self._on_body)

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def continue_reading(self) -> None:
        """Do nothing: before the end nothing is sent that the client could read too slowly."""

    def stop_reading(self) -> None:
        self._answer_owner = None

    def check_complete(self, attempt: Attempt) -> None:
        self._answer_owner = None
        if self._read_error is not None:
            raise self._read_error
        dialect, response, raw = self._dialect, attempt.response, self._body_bytes
        attempt.record_kv_arrival()
        if len(raw) > SHORT_DOCUMENT_BYTES and dialect.uses_engine_format:
            self._parsed_answer = parse_answer(LongAnswer, response, raw)
        else:
            self._parsed_answer = parse_answer(Document, response, raw)
        values = dict(self._parsed_answer.values)
        dialect.check_answer(response, values)
        attempt.record_usage(dialect.read_usage(values))
        if (kept := values.get("kv_transfer_params")) is not None:
            attempt.handoff.keep_answer_kv(kept, _prompt_and_answer_ids(values))
        if not dialect.waits_for_prefiller(self.engine_call):
            self._corrected_members = dialect.correct_members(values, attempt)

    async def wait_for_other_parts(self, attempt: Attempt) -> None:
        if self._dialect.waits_for_prefiller(self.engine_call):
            assert self._parsed_answer is not None
            self._corrected_members = await self._dialect.complete_members(
                self.engine_call, dict(self._parsed_answer.values), attempt
            )

    def make_body(self) -> bytes:
        if not self._corrected_members:
            return self._body_bytes
        assert self._parsed_answer is not None
        changed = self._parsed_answer.make_changed_body(self._corrected_members)
        return join_body(
            Document(self._body_bytes).make_changed_body(self._corrected_members) if changed is None else changed
        )

    def parsed_body(self) -> dict[str, Any]:
        assert self._parsed_answer is not None
        values = {**self._parsed_answer.values, **self._corrected_members}
        return {name: value for name, value in values.items() if value is not REMOVED}

    def _on_body(self, body: bytes, error: UpstreamError | None) -> None:
        owner = self._answer_owner
        if owner is not None:
            self._body_bytes, self._read_error, self._is_ended = body, error, True
            owner.on_end()


class _RelayedAnswer(UnitAnswer):
    """An answer that is read from a stream, event by event."""

    def __init__(
        self,
        delivery: Delivery,
        parts: LaneParts,
        watching: AnswerWatch,
        writer: ClientWriter | None = None,
        prompt: ChatPrompt | None = None,
    ) -> None:
        self.engine_call = watching.make_observable_call(delivery.call)
        self.delivery = delivery
        self.engine = watching.engine
        self.chat_prompt = prompt
        self.client_writer = writer
        self._metrics = parts.metrics
        self._timeouts = parts.live_settings.settings.timeouts
        self._relay: Relay | None = None
        """The reader of the present attempt's stream. None between attempts."""
        self._token_clock: TokenClock | None = None
        """Times the tokens of an answer that is streamed to the client. None: it is not."""
        self._unit_rendering: UnitRendering | None = None
        """Writes the events for the client. None: the client gets those of the engine."""

    def begin_reading(self, attempt: Attempt, owner: AnswerOwner) -> None:
        if self._unit_rendering is not None:
            self._unit_rendering.begin_decoder_answer(attempt, goes_on=self.delivery.seam is not None)
        timeouts, response = self._timeouts, attempt.response
        relay = self._relay = Relay(
            attempt, self.delivery, owner, self.client_writer, self._token_clock, timeouts.idle_seconds
        )
        response.limit_silence(attempt.first_token_seconds or timeouts.first_token_seconds)
        response.attach_sink(relay)

    @property
    def is_ended(self) -> bool:
        return self._relay is not None and self._relay.is_ended

    def continue_reading(self) -> None:
        assert self._relay is not None
        self._relay.continue_reading()

    def stop_reading(self) -> None:
        if self._relay is not None:
            self._relay.stop_reading()

    def check_complete(self, attempt: Attempt) -> None:
        relay, self._relay = self._relay, None
        assert relay is not None
        if relay.malformed_events:
            self._metrics.sse_bad_events_total.inc(relay.malformed_events)
        if relay.stream_error is not None:
            raise relay.stream_error
        delivery, segment = self.delivery, relay.segment
        if segment.kept_kv_params is not None:
            attempt.handoff.keep_answer_kv(segment.kept_kv_params, delivery.all_token_ids())
        if not segment.has_usage_chunk:
            attempt.record_usage(delivery.total_usage(segment.usage))
            return
        if delivery.is_stopped or delivery.last_usage is None:
            self._write_end(attempt.timeline)
        attempt.record_usage(delivery.last_usage)

    async def wait_for_other_parts(self, attempt: Attempt) -> None:
        """Wait for the parts of the answer that come from other engines. Raises UpstreamError.

        A stream has no parts from other engines.
        """


class AssembledBody(_RelayedAnswer):
    """An answer that is not streamed to the client. The engine streams it, so that another engine can continue it."""

    def __init__(
        self,
        call: Call,
        dialect: Dialect,
        parts: LaneParts,
        watching: AnswerWatch,
        prompt: ChatPrompt | None = None,
    ) -> None:
        self._dialect = dialect
        self._body_values: dict[str, Any] | None = None
        """The parsed body. None until it is requested after the end of an attempt."""
        self._answer_maker = dialect.make_watched_assembler(call)
        """Assembles the answer for the dialect. None: `_assembly` does."""
        self._assembly = StreamAssembly(has_routed_experts=parts.common_abilities.have_all_known(ROUTED_EXPERTS))
        delivery = Delivery(
            call,
            dialect.make_watched_segment if prompt is None else partial(prompt.segment, call),
            is_observed=True,
            keeps_bytes=prompt is None,
            engine=watching.engine,
            collector=self._answer_maker or self._assembly,
        )
        super().__init__(delivery, parts, watching, prompt=prompt)

    def begin_reading(self, attempt: Attempt, owner: AnswerOwner) -> None:
        self._body_values = None
        super().begin_reading(attempt, owner)

    def check_complete(self, attempt: Attempt) -> None:
        super().check_complete(attempt)
        try:
            self._dialect.check_answer(attempt.response, self.parsed_body())
        except UnreadableMember as odd:
            raise attempt.response.make_unreadable_error(f"sent an answer that cannot be read: {odd}") from None

    def end_answer(self, timeline: Timeline) -> None:
        super().end_answer(timeline)
        self.parsed_body()

    @property
    def has_damaged_tool_calls(self) -> bool:
        return self.lacks_tool_calls or any(map(_has_broken_arguments, self._completed_tool_calls()))

    @property
    def lacks_tool_calls(self) -> bool:
        return self._assembly.finish_reason == "tool_calls" and not self.delivery.transcript.tools

    def _completed_tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls that the model has completed."""
        if not self.delivery.transcript.tools or not self._assembly.has_model_ended(self.engine.stop_member):
            return []
        calls: list[dict[str, Any]] = self.parsed_body()["choices"][0]["message"]["tool_calls"]
        return calls

    def make_body(self) -> bytes:
        return dumps(self.parsed_body())

    def parsed_body(self) -> dict[str, Any]:
        if self._body_values is None:
            self._body_values = (
                self._assembly.make_answer_values(self.delivery)
                if self._answer_maker is None
                else self._answer_maker.values()
            )
        return self._body_values


def _prompt_and_answer_ids(answer_body: Mapping[str, Any]) -> array[int] | None:
    """Return the token ids of prompt and answer in a whole answer; None if it does not have them."""
    choices = answer_body.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict) else {}
    try:
        return array("I", [*(answer_body.get("prompt_token_ids") or choice["prompt_token_ids"]), *choice["token_ids"]])
    except (LookupError, TypeError, OverflowError):
        return None


def _has_broken_arguments(tool_call: dict[str, Any]) -> bool:
    """Return whether even a tolerant parser cannot read the arguments of a tool call as JSON."""
    try:
        loads(encode_utf8(tool_call["function"]["arguments"]))
    except ValueError:
        return True
    return False


class StreamedAnswer(_RelayedAnswer):
    """An answer that is streamed to the client."""

    def __init__(
        self,
        call: Call,
        dialect: Dialect,
        writer: ClientWriter,
        record: RequestRecord,
        parts: LaneParts,
        *,
        watching: AnswerWatch,
        rendering: UnitRendering | None,
        shares_client: bool,
        prompt: ChatPrompt | None = None,
    ) -> None:
        """Create the streamed answer.

        Args:
            call: The call of the unit.
            dialect: The API of the client.
            writer: The client's stream.
            record: The record of the request.
            parts: The parts of the lane.
            watching: How closely to read the engine's stream.
            rendering: Writes the events for the client. None: the client gets those of the engine.
            shares_client: Whether other units write to the same stream.
            prompt: See UnitAnswer.
        """
        new_segment = dialect.make_watched_segment if watching.is_watched else dialect.make_segment
        delivery = Delivery(
            call,
            new_segment if prompt is None else partial(prompt.segment, call),
            is_observed=watching.is_watched,
            keeps_bytes=prompt is None,
            reports_token_ids=watching.level is WatchLevel.CONTINUE_FROM_IDS,
            engine=watching.engine,
            rewrite_chunk=None if rendering is None else rendering.render,
        )
        super().__init__(delivery, parts, watching, writer, prompt)
        self._token_clock = TokenClock(record, parts.metrics)
        self._unit_rendering = rendering
        self._shares_client = shares_client

    async def wait_for_other_parts(self, attempt: Attempt) -> None:
        """Write the rest of the answer, which may come from other engines."""
        assert self.client_writer is not None
        if self._unit_rendering is not None:
            self.client_writer.write(await self._unit_rendering.wait_for_remaining_events())
        if self._shares_client:
            await self.client_writer.wait_until_read()  # the other units may run for long
