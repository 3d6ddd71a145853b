"""One unit's answer in the making: how it is taken from an engine, and what becomes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.engines.capabilities import ROUTED_EXPERTS
from proxy.connectors.base import parse_answer
from proxy.flow.assembly import Assembly
from proxy.flow.delivery import Delivery
from proxy.flow.relay import Relay
from proxy.flow.token_clock import TokenClock
from proxy.flow.whole_body import check_answer
from proxy.resume.engine import Watch
from proxy.resume.vllm import VLLM
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.document import REMOVED, Document, joined
from proxy.wire.openai import Api
from proxy.wire.python_json import dumps, loads, utf8

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.call import Call
    from proxy.connectors.attempt import Attempt
    from proxy.dialects.base import Dialect, UnitRendering
    from proxy.flow.client import ClientWriter
    from proxy.flow.parts import FlowParts
    from proxy.flow.relay import OutputListener
    from proxy.flow.unit_guard import UnitGuard
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline
    from proxy.resume.chat_as_completion import ChatPrompt
    from proxy.resume.engine import Watching
    from proxy.resume.transcript import Transcript


class Answer(ABC):
    """What the attempts of one unit work on."""

    def __init__(
        self,
        delivery: Delivery,
        watching: Watching,
        client: ClientWriter | None = None,
        prompt: ChatPrompt | None = None,
    ) -> None:
        """`client` None: the answer is not streamed. `prompt`: of a chat that is asked for as a completion."""
        self.delivery = delivery
        self.prompt = prompt
        self.engine = watching.engine
        """What works on it."""
        self._client = client
        self._watching = watching

    @cached_property
    def call(self) -> Call:
        """The call as it is sent to the engines. Only an attempt loop asks, which most answers do without."""
        return self._watching.observed(self.delivery.call)

    def sent(self, call: Call) -> Call:
        """A call at this answer as engines get it."""
        return call if self.prompt is None or call.api is not Api.CHAT else self.prompt.completion(call)

    @abstractmethod
    async def take(self, attempt: Attempt, guard: UnitGuard) -> None:
        """Take an attempt's whole answer; the guard is told of its first output.

        Raises UpstreamError, ClientStalled.
        """

    def close(self, timeline: Timeline) -> None:
        """End an answer that no engine ends. Raises UnreadableMember if it cannot be put together."""
        self._end(timeline)
        timeline.usage.saw_completion(self.delivery.usage)

    def _end(self, timeline: Timeline) -> None:
        ending = self.delivery.closing(timeline.usage.prompt_details)
        if self._client is not None:
            self._client.write(ending)


class EngineBody(Answer):
    """Read whole, and passed on as the engine wrote it, but for the dialect's corrections."""

    has_spoilt_calls: Final = False
    lacks_calls: Final = False

    def __init__(self, call: Call, dialect: Dialect) -> None:
        super().__init__(Delivery(call, is_observed=False), VLLM.watching[Watch.NOT])
        self._dialect = dialect
        self._raw = b""
        self._answer: Document | None = None
        self._corrections: dict[str, Any] = {}

    async def take(self, attempt: Attempt, guard: UnitGuard) -> None:
        """See Answer. An answer that comes in one piece has no first output before its end."""
        self._raw = await attempt.response.read()
        attempt.kv_arrived()
        self._answer = parse_answer(Document, attempt.response, self._raw)
        values = dict(self._answer.values)
        check_answer(attempt, values, self._dialect)
        self._corrections = await self._dialect.corrections(self.call, values, attempt)

    def body(self) -> bytes:
        """See Whole."""
        assert self._answer is not None
        return joined(self._answer.with_changes(self._corrections)) if self._corrections else self._raw

    def values(self) -> dict[str, Any]:
        """See Whole."""
        assert self._answer is not None
        values = {**self._answer.values, **self._corrections}
        return {name: value for name, value in values.items() if value is not REMOVED}


class _Relayed(Answer):
    """Taken from a stream, event by event."""

    def __init__(
        self,
        delivery: Delivery,
        parts: FlowParts,
        watching: Watching,
        client: ClientWriter | None = None,
        prompt: ChatPrompt | None = None,
    ) -> None:
        super().__init__(delivery, watching, client, prompt)
        self._metrics = parts.metrics
        self._timeouts = parts.settings.timeouts

    async def _relay(self, relay: Relay, attempt: Attempt) -> None:
        try:
            await relay.run(self._timeouts)
        finally:
            self.count_malformed(relay)
        self.ended(relay, attempt)

    def count_malformed(self, relay: Relay) -> None:
        """A stream has ended, well or not."""
        if relay.malformed_events:
            self._metrics.sse_bad_events_total.inc(relay.malformed_events)

    def ended(self, relay: Relay, attempt: Attempt) -> None:
        """A stream has ended with the whole answer."""
        delivery, segment = self.delivery, relay.segment
        if not segment.has_usage_chunk:
            attempt.saw_usage(delivery.of_all(segment.usage))
            return
        if delivery.is_stopped or delivery.usage is None:
            self._end(attempt.timeline)
        attempt.saw_usage(delivery.usage)


class AssembledBody(_Relayed):
    """Streamed by the engine, so that it can be continued, and put together here."""

    def __init__(
        self, call: Call, dialect: Dialect, parts: FlowParts, watching: Watching, prompt: ChatPrompt | None = None
    ) -> None:
        self._dialect = dialect
        self._values: dict[str, Any] | None = None
        self._own = dialect.watched_whole(call)
        self._assembly = Assembly(has_routed_experts=parts.fleet.has_where_told(ROUTED_EXPERTS))
        delivery = Delivery(
            call,
            dialect.watched_segment if prompt is None else partial(prompt.segment, call),
            is_observed=True,
            keeps_bytes=prompt is None,
            engine=watching.engine,
            whole=self._own or self._assembly,
        )
        super().__init__(delivery, parts, watching, prompt=prompt)

    async def take(self, attempt: Attempt, guard: UnitGuard) -> None:
        """See Answer."""
        self._values = None
        await self._relay(Relay(attempt, self.delivery, guard), attempt)
        try:
            self._dialect.check_answer(attempt.response, self.values())
        except UnreadableMember as odd:
            raise attempt.response.unreadable(f"sent an answer that cannot be read: {odd}") from None

    def close(self, timeline: Timeline) -> None:
        """See Answer. Raises UnreadableMember."""
        super().close(timeline)
        self.values()

    @property
    def has_spoilt_calls(self) -> bool:
        """Whether the answer says that it calls tools and does not, or calls one with arguments that are no JSON."""
        return self.lacks_calls or any(map(_is_broken, self._calls()))

    @property
    def lacks_calls(self) -> bool:
        """Whether the answer says that it calls tools and does not."""
        return self._assembly.finish_reason == "tool_calls" and not self.delivery.transcript.tools

    def _calls(self) -> list[dict[str, Any]]:
        """The tool calls that the model has completed."""
        if not self.delivery.transcript.tools or not self._assembly.is_complete(self.engine.stop_member):
            return []
        calls: list[dict[str, Any]] = self.values()["choices"][0]["message"]["tool_calls"]
        return calls

    def body(self) -> bytes:
        """See Whole."""
        return dumps(self.values())

    def values(self) -> dict[str, Any]:
        """See Whole."""
        if self._values is None:
            self._values = self._assembly.values(self.delivery) if self._own is None else self._own.values()
        return self._values


def _is_broken(call: dict[str, Any]) -> bool:
    """Whether the arguments of a tool call are no JSON, not even for a tolerant parser."""
    try:
        loads(utf8(call["function"]["arguments"]))
    except ValueError:
        return True
    return False


class StreamedAnswer(_Relayed):
    """Streamed to the client."""

    def __init__(
        self,
        call: Call,
        dialect: Dialect,
        client: ClientWriter,
        record: RequestRecord,
        parts: FlowParts,
        *,
        watching: Watching,
        rendering: UnitRendering | None,
        shares_client: bool,
        prompt: ChatPrompt | None = None,
    ) -> None:
        """`rendering` None: the client gets the engine's own bytes. `shares_client`: other units' answers go there,
        too.
        """
        rewrite = None if rendering is None else rendering.render
        new_segment = dialect.watched_segment if watching.is_close else dialect.new_segment
        delivery = Delivery(
            call,
            new_segment if prompt is None else partial(prompt.segment, call),
            is_observed=watching.is_close,
            keeps_bytes=prompt is None,
            tells_ids=watching.watch is Watch.IDS,
            engine=watching.engine,
            rewrite=rewrite,
        )
        super().__init__(delivery, parts, watching, client, prompt)
        self._stream = client
        self._record = record
        self._clock: TokenClock | None = None
        """None before the first stream."""
        self._rendering = rendering
        self._shares_client = shares_client
        self._begun: Relay | None = None

    def go_on(
        self,
        attempt: Attempt,
        guard: OutputListener,
        wake: Callable[[], None],
        seen: bytes,
        clock: TokenClock,
        transcript: Transcript | None = None,
    ) -> Relay:
        """Go on, without a task, with the answer of an attempt of which this much was seen already, and timed by this
        clock. `transcript`: see Relay.begin. `take` goes on with it.
        """
        self._clock = clock
        self._begun = Relay(attempt, self.delivery, guard, self._stream, clock)
        self._begun.begin(self._timeouts, wake, seen, transcript)
        return self._begun

    async def take(self, attempt: Attempt, guard: UnitGuard) -> None:
        """See Answer."""
        rendering = self._rendering
        if rendering is not None:
            rendering.begin(attempt, goes_on=self.delivery.goes_on)
        relay, self._begun = self._begun, None
        if relay is None or not relay.is_of(attempt):
            if self._clock is None:
                self._clock = TokenClock(self._record, self._metrics)
            relay = Relay(attempt, self.delivery, guard, self._stream, self._clock)
        else:
            relay.hand_over(guard)
        await self._relay(relay, attempt)
        if rendering is not None:
            self._stream.write(await rendering.rest())
        if self._shares_client:
            await self._stream.attend()  # the other units may take long
