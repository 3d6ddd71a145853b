"""The answer to one unit: reads it from engines, and completes it for the client."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.balancer.engines import ROUTED_EXPERTS
from proxy.connectors.base import parse_answer
from proxy.gateway.assembly import Assembly
from proxy.gateway.delivery import Delivery
from proxy.gateway.relay import Relay, TokenClock
from proxy.resume.engines import VLLM, WatchLevel
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.document import REMOVED, SHORT_DOCUMENT_BYTES, Document, LongAnswer, join_body
from proxy.wire.openai import Api
from proxy.wire.python_json import dumps, encode_utf8, loads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.balancer.pool import Pools
    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError
    from proxy.connectors.base import Connector
    from proxy.connectors.legs import Attempt
    from proxy.dialects.base import Dialect, UnitRendering
    from proxy.dialects.call import Call
    from proxy.gateway.admission import AdmissionQueue
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.common_abilities import CommonAbilities
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.gateway.relay import AnswerOwner
    from proxy.gateway.retry import RetryBudget
    from proxy.gateway.suspects import Suspects, UnitGuard
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engines import AnswerWatch, Engine
    from proxy.settings.live import LiveSettings


@dataclass(slots=True, eq=False, kw_only=True)
class FlowParts:
    """The parts of one lane that make answers. An attempt loop keeps the settings with which it began."""

    connector: Connector
    pools: Pools
    abilities: CommonAbilities
    detokenizer: Detokenizer
    suspects: Suspects
    is_gone: Callable[[Backend, float], Awaitable[bool]]
    """Returns whether an engine is down now, or after a number of seconds."""
    budget: RetryBudget
    admission: AdmissionQueue
    metrics: Metrics
    live: LiveSettings


class Answer(ABC):
    """The answer to one unit, whichever attempts work on it."""

    call: Call
    """The call as engines get it."""
    delivery: Delivery
    """Decides what the client gets."""
    engine: Engine
    """The kind of the engines that work on the answer."""
    prompt: ChatPrompt | None = None
    """The prompt of a chat that engines get as a completion. None: they get the call itself."""
    writer: ClientWriter | None = None
    """The client's stream. None: the answer is not streamed."""

    def call_for_engine(self, call: Call) -> Call:
        """Return a call for this answer in the form that engines get."""
        return call if self.prompt is None or call.api is not Api.CHAT else self.prompt.make_completion_call(call)

    @property
    def has_damaged_calls(self) -> bool:
        """Whether tool calls are missing from the answer, or have arguments that are not JSON."""
        return False

    @property
    def lacks_calls(self) -> bool:
        """Whether the answer ends with the finish reason `tool_calls` and has no tool call."""
        return False

    def body(self) -> bytes:
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
    def begin(self, attempt: Attempt, owner: AnswerOwner) -> None:
        """Begin to read the decoder's answer of an attempt."""

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether nothing more of the attempt's answer will arrive."""

    @abstractmethod
    def go_on(self) -> None:
        """Continue to read, after the client has read enough."""

    @abstractmethod
    def stop_reading(self) -> None:
        """Stop reading the decoder's answer after its attempt is over."""

    @abstractmethod
    def complete(self, attempt: Attempt) -> None:
        """Check the answer after its end. Raises UpstreamError if it is incomplete."""

    @abstractmethod
    async def settle(self, attempt: Attempt) -> None:
        """Wait for the parts of the answer that come from other engines. Raises UpstreamError."""

    async def take(self, attempt: Attempt, guard: UnitGuard) -> None:
        """Read the whole answer of an attempt in a task. Raises UpstreamError, ClientStalled."""
        owner = _TaskOwner(guard)
        self.begin(attempt, owner)
        try:
            while True:
                await owner.event.wait()
                owner.event.clear()
                if self.is_ended:
                    break
                assert self.writer is not None
                await self.writer.wait_until_read()
                self.go_on()
        finally:
            self.stop_reading()
        self.complete(attempt)
        await self.settle(attempt)

    def close(self, timeline: Timeline) -> None:
        """End an answer whose last engine has not ended it. Raises UnreadableMember if it cannot be assembled."""
        self._write_end(timeline)
        timeline.usage.add_completion_usage(self.delivery.usage)

    def note_partial_usage(self, timeline: Timeline) -> None:
        """Record the tokens of an answer that has ended early, unless an engine has reported them."""
        if timeline.usage.completion_tokens is None:
            timeline.usage.add_completion_usage(self.delivery.partial_usage())

    def _write_end(self, timeline: Timeline) -> None:
        ending = self.delivery.missing_end(timeline.usage.prompt_details)
        if self.writer is not None:
            self.writer.write(ending)


class _TaskOwner:
    """The AnswerOwner that wakes a task."""

    def __init__(self, guard: UnitGuard) -> None:
        self.event = asyncio.Event()
        self._guard = guard

    def on_first_output(self) -> None:
        self._guard.first_output()

    def on_end(self) -> None:
        self.event.set()

    def wake(self) -> None:
        self.event.set()


class EngineBody(Answer):
    """An answer that is not streamed. The client gets the engine's body with the dialect's corrections."""

    def __init__(self, call: Call, dialect: Dialect) -> None:
        self.call = call
        self.delivery = Delivery(call, is_observed=False)
        self.engine = VLLM
        self._dialect = dialect
        self._raw = b""
        self._error: UpstreamError | None = None
        self._is_ended = False
        self._owner: AnswerOwner | None = None
        self._answer: Document | LongAnswer | None = None
        self._corrections: dict[str, Any] = {}

    def begin(self, attempt: Attempt, owner: AnswerOwner) -> None:
        """Begin to read the decoder's answer of an attempt.

        A whole body has no first output before its end.
        """
        self._is_ended = False
        self._owner = owner
        attempt.response.collect(self._on_body)

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def go_on(self) -> None:
        """Return True: nothing is sent before the end, so the client cannot read too slowly."""

    def stop_reading(self) -> None:
        self._owner = None

    def complete(self, attempt: Attempt) -> None:
        self._owner = None
        if self._error is not None:
            raise self._error
        dialect, response, raw = self._dialect, attempt.response, self._raw
        attempt.record_kv_arrival()
        if len(raw) > SHORT_DOCUMENT_BYTES and dialect.uses_engine_format:
            self._answer = parse_answer(LongAnswer, response, raw)
        else:
            self._answer = parse_answer(Document, response, raw)
        values = dict(self._answer.values)
        dialect.check_answer(response, values)
        attempt.record_usage(dialect.read_usage(values))
        if (kept := values.get("kv_transfer_params")) is not None:
            attempt.handoff.keep_answer_kv(kept, _all_ids(values))
        if not dialect.waits_for_prefiller(self.call):
            self._corrections = dialect.correct_members(values, attempt)

    async def settle(self, attempt: Attempt) -> None:
        if self._dialect.waits_for_prefiller(self.call):
            assert self._answer is not None
            self._corrections = await self._dialect.complete_members(self.call, dict(self._answer.values), attempt)

    def body(self) -> bytes:
        if not self._corrections:
            return self._raw
        assert self._answer is not None
        changed = self._answer.make_changed_body(self._corrections)
        return join_body(Document(self._raw).make_changed_body(self._corrections) if changed is None else changed)

    def parsed_body(self) -> dict[str, Any]:
        assert self._answer is not None
        values = {**self._answer.values, **self._corrections}
        return {name: value for name, value in values.items() if value is not REMOVED}

    def _on_body(self, body: bytes, error: UpstreamError | None) -> None:
        owner = self._owner
        if owner is not None:
            self._raw, self._error, self._is_ended = body, error, True
            owner.on_end()


class _Relayed(Answer):
    """An answer that is read from a stream, event by event."""

    def __init__(
        self,
        delivery: Delivery,
        parts: FlowParts,
        watching: AnswerWatch,
        writer: ClientWriter | None = None,
        prompt: ChatPrompt | None = None,
    ) -> None:
        self.call = watching.make_observable_call(delivery.call)
        self.delivery = delivery
        self.engine = watching.engine
        self.prompt = prompt
        self.writer = writer
        self._metrics = parts.metrics
        self._timeouts = parts.live.settings.timeouts
        self._relay: Relay | None = None
        """The reader of the present attempt's stream. None between attempts."""
        self._clock: TokenClock | None = None
        """Times the tokens of an answer that is streamed to the client. None: it is not."""
        self._rendering: UnitRendering | None = None
        """Writes the events for the client. None: the client gets those of the engine."""

    def begin(self, attempt: Attempt, owner: AnswerOwner) -> None:
        if self._rendering is not None:
            self._rendering.begin_decoder_answer(attempt, goes_on=self.delivery.seam is not None)
        timeouts, response = self._timeouts, attempt.response
        relay = self._relay = Relay(attempt, self.delivery, owner, self.writer, self._clock, timeouts.idle_seconds)
        response.limit_silence(attempt.first_token_seconds or timeouts.first_token_seconds)
        response.attach(relay)

    @property
    def is_ended(self) -> bool:
        return self._relay is not None and self._relay.is_ended

    def go_on(self) -> None:
        assert self._relay is not None
        self._relay.go_on()

    def stop_reading(self) -> None:
        if self._relay is not None:
            self._relay.stop_reading()

    def complete(self, attempt: Attempt) -> None:
        relay, self._relay = self._relay, None
        assert relay is not None
        if relay.malformed_events:
            self._metrics.sse_bad_events_total.inc(relay.malformed_events)
        if relay.error is not None:
            raise relay.error
        delivery, segment = self.delivery, relay.segment
        if segment.kept_kv_params is not None:
            attempt.handoff.keep_answer_kv(segment.kept_kv_params, delivery.all_ids())
        if not segment.has_usage_chunk:
            attempt.record_usage(delivery.total_usage(segment.usage))
            return
        if delivery.is_stopped or delivery.usage is None:
            self._write_end(attempt.timeline)
        attempt.record_usage(delivery.usage)

    async def settle(self, attempt: Attempt) -> None:
        """Wait for the parts of the answer that come from other engines. Raises UpstreamError.

        A stream has no parts from other engines.
        """


class AssembledBody(_Relayed):
    """An answer that is not streamed to the client. The engine streams it, so that another engine can continue it."""

    def __init__(
        self, call: Call, dialect: Dialect, parts: FlowParts, watching: AnswerWatch, prompt: ChatPrompt | None = None
    ) -> None:
        self._dialect = dialect
        self._values: dict[str, Any] | None = None
        """The parsed body. None until it is requested after the end of an attempt."""
        self._own = dialect.make_watched_assembler(call)
        """Assembles the answer for the dialect. None: `_assembly` does."""
        self._assembly = Assembly(has_routed_experts=parts.abilities.has_if_known(ROUTED_EXPERTS))
        delivery = Delivery(
            call,
            dialect.make_watched_segment if prompt is None else partial(prompt.segment, call),
            is_observed=True,
            keeps_bytes=prompt is None,
            engine=watching.engine,
            whole=self._own or self._assembly,
        )
        super().__init__(delivery, parts, watching, prompt=prompt)

    def begin(self, attempt: Attempt, owner: AnswerOwner) -> None:
        self._values = None
        super().begin(attempt, owner)

    def complete(self, attempt: Attempt) -> None:
        super().complete(attempt)
        try:
            self._dialect.check_answer(attempt.response, self.parsed_body())
        except UnreadableMember as odd:
            raise attempt.response.make_unreadable_error(f"sent an answer that cannot be read: {odd}") from None

    def close(self, timeline: Timeline) -> None:
        """End an answer whose last engine has not ended it. Raises UnreadableMember if it cannot be assembled.

        Raises UnreadableMember.
        """
        super().close(timeline)
        self.parsed_body()

    @property
    def has_damaged_calls(self) -> bool:
        return self.lacks_calls or any(map(_is_broken, self._calls()))

    @property
    def lacks_calls(self) -> bool:
        return self._assembly.finish_reason == "tool_calls" and not self.delivery.transcript.tools

    def _calls(self) -> list[dict[str, Any]]:
        """Return the tool calls that the model has completed."""
        if not self.delivery.transcript.tools or not self._assembly.is_complete(self.engine.stop_member):
            return []
        calls: list[dict[str, Any]] = self.parsed_body()["choices"][0]["message"]["tool_calls"]
        return calls

    def body(self) -> bytes:
        return dumps(self.parsed_body())

    def parsed_body(self) -> dict[str, Any]:
        if self._values is None:
            self._values = self._assembly.values(self.delivery) if self._own is None else self._own.values()
        return self._values


def _all_ids(values: Mapping[str, Any]) -> array[int] | None:
    """Return the token ids of prompt and answer in a whole answer; None if it does not have them."""
    choices = values.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict) else {}
    try:
        return array("I", [*(values.get("prompt_token_ids") or choice["prompt_token_ids"]), *choice["token_ids"]])
    except (LookupError, TypeError, OverflowError):
        return None


def _is_broken(call: dict[str, Any]) -> bool:
    """Return whether even a tolerant parser cannot read the arguments of a tool call as JSON."""
    try:
        loads(encode_utf8(call["function"]["arguments"]))
    except ValueError:
        return True
    return False


class StreamedAnswer(_Relayed):
    """An answer that is streamed to the client."""

    def __init__(
        self,
        call: Call,
        dialect: Dialect,
        writer: ClientWriter,
        record: RequestRecord,
        parts: FlowParts,
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
            prompt: See Answer.
        """
        new_segment = dialect.make_watched_segment if watching.is_watched else dialect.make_segment
        delivery = Delivery(
            call,
            new_segment if prompt is None else partial(prompt.segment, call),
            is_observed=watching.is_watched,
            keeps_bytes=prompt is None,
            tells_ids=watching.level is WatchLevel.CONTINUE_FROM_IDS,
            engine=watching.engine,
            rewrite=None if rendering is None else rendering.render,
        )
        super().__init__(delivery, parts, watching, writer, prompt)
        self._clock = TokenClock(record, parts.metrics)
        self._rendering = rendering
        self._shares_client = shares_client

    async def settle(self, attempt: Attempt) -> None:
        """Write the rest of the answer, which may come from other engines."""
        assert self.writer is not None
        if self._rendering is not None:
            self.writer.write(await self._rendering.wait_for_remaining_events())
        if self._shares_client:
            await self.writer.wait_until_read()  # the other units may run for long
