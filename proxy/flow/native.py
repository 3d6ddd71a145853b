"""SGLang's own API through the same attempts as OpenAI's: its requests split, its streams relayed, its answers merged.

A request for several answers is split like any other, because each sequence needs a room of its own; so each has its
own backends, retries and place in the queue, and one engine's failure does not end them all. What only the prefiller
knows of the prompt is put into the decoder's answer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from proxy.connectors.base import parse_answer
from proxy.connectors.sglang_bootstrap import SglangAttempt
from proxy.errors import Failure
from proxy.flow.delivery import Delivery
from proxy.flow.fanout import Unit
from proxy.flow.gateway import Gateway
from proxy.flow.relay import Relay
from proxy.flow.transcript import Meaning, Segment
from proxy.flow.work import Work
from proxy.wire import sglang
from proxy.wire.openai import DONE, DONE_EVENT, data_event
from proxy.wire.sglang_errors import ERROR_HEADERS, error_of
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.call import Call
    from proxy.connectors.base import Attempt
    from proxy.flow.client import ClientStream
    from proxy.flow.suspicion import Suspicion
    from proxy.record import Record
    from proxy.settings import Settings
    from proxy.wire.sse import Event


class NativeGateway(Gateway):
    """What a Gateway does, for calls of SGLang's own API. Shares its parts with the one for OpenAI's."""

    def __init__(self, gateway: Gateway) -> None:
        self.connector = gateway.connector
        self.pools = gateway.pools
        self.vocabulary = gateway.vocabulary
        self.suspects = gateway.suspects
        self.settings = gateway.settings
        self.metrics = gateway.metrics
        self.budget = gateway.budget
        self.admission = gateway.admission

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is decided from now on. The shared parts have them already."""
        self.settings = settings

    async def complete(self, call: Call, record: Record) -> bytes:
        """Serve a call that is not streamed; the JSON body for the client. Raises GatewayError."""
        units = self._units(call)
        with self.suspects.watch(call, len(units)) as suspicion:
            bodies = await self._together([partial(self._read_whole, unit.call, record, suspicion) for unit in units])
        return b"[%b]" % b",".join(bodies) if sglang.is_batch(call.values) else bodies[0]

    async def stream(self, call: Call, client: ClientStream, record: Record) -> None:
        """Serve a streamed call and end the client's stream. Raises GatewayError, ClientStalled."""
        is_batch = sglang.is_batch(call.values)
        units = self._units(call)
        with self.suspects.watch(call, len(units)) as suspicion:
            await self._together(
                [partial(self._copy_unit, unit, is_batch, client, record, suspicion) for unit in units]
            )
        await client.finish(DONE_EVENT)

    def _units(self, call: Call) -> list[Unit]:
        self.connector.check(call)
        items = sglang.items_of(call.values, self.settings.fanout.max_units)
        tokens = max(1, call.prompt_tokens // sum(item.is_first for item in items))
        return [
            Unit(call.changed(item.changes, prompt_tokens=tokens) if item.changes else call, index, item.is_first)
            for index, item in enumerate(items)
        ]

    async def _read_whole(self, call: Call, record: Record, suspicion: Suspicion) -> bytes:
        body = b""

        async def read(attempt: Attempt, on_begin: Callable[[], None]) -> None:
            nonlocal body
            response = attempt.response
            body = await response.read()
            attempt.kv_arrived()
            answer = parse_answer(response, body).values
            if told := error_of(answer):
                raise response.refuse("reported an error", told.status, told.body, ERROR_HEADERS)
            if _finish_of(answer) is None:
                raise response.fail(Failure.BROKEN, "the answer ended without a finish reason")
            attempt.saw_usage(sglang.usage_of(answer))
            if (parts := _Parts.of(attempt, call)) is not None:
                body = orjson.dumps((await parts.whole()).complete(answer))

        await Work(self, call, record, Delivery(call, is_observed=False), None, suspicion).run(read)
        return body

    async def _copy_unit(
        self, unit: Unit, is_batch: bool, client: ClientStream, record: Record, suspicion: Suspicion
    ) -> None:
        call = unit.call
        rewriter = _Rewriter(unit.index if is_batch else None)
        must_rewrite = is_batch or _needs_prefiller(call)
        delivery = Delivery(call, is_observed=False, rewrite=rewriter.rewrite if must_rewrite else None)

        async def copy(attempt: Attempt, on_begin: Callable[[], None]) -> None:
            rewriter.begin(_Parts.of(attempt, call))
            relay = _NativeRelay(attempt, delivery, client, on_begin, record.first_token)
            try:
                await relay.run(self.settings.timeouts)
            finally:
                if relay.malformed_events:
                    self.metrics.sse_bad_events_total.inc(relay.malformed_events)
            if rest := await rewriter.rest():
                client.write(rest)
            if is_batch:
                await client.attend()  # the other units may take long
            attempt.saw_usage(relay.segment.usage)

        await Work(self, call, record, delivery, client, suspicion).run(copy)


class _Parts:
    """The prefiller's parts of one answer, once they have come."""

    def __init__(self, attempt: SglangAttempt) -> None:
        self._answer = attempt.prefill_answer
        self._parts: sglang.PrefilledParts | None = None

    @staticmethod
    def of(attempt: Attempt, call: Call) -> _Parts | _LonePrefiller | None:
        """None when the decoder's answer has all that is asked for."""
        if not _needs_prefiller(call):
            return None
        return _Parts(attempt) if isinstance(attempt, SglangAttempt) else _LonePrefiller(call)

    @property
    def so_far(self) -> sglang.PrefilledParts | None:
        """None until the prefiller has answered."""
        answer = self._answer.so_far
        if self._parts is None and answer is not None:
            self._parts = sglang.PrefilledParts(answer)
        return self._parts

    async def whole(self) -> sglang.PrefilledParts:
        """Wait for them. Raises UpstreamError."""
        await self._answer.whole()
        parts = self.so_far
        assert parts is not None
        return parts


class _LonePrefiller:
    """In place of them where no decoder is: the prefiller's answer is all there is."""

    def __init__(self, call: Call) -> None:
        params = call.changes.get("sampling_params", call.values.get("sampling_params"))
        self.so_far = sglang.LoneAnswer(sglang.output_limit(params))

    async def whole(self) -> sglang.LoneAnswer:
        return self.so_far


class _Rewriter:
    """Makes the client's events of one unit out of an engine's: with the index of its answer, and all of its parts.

    What the decoder says before the prefiller's answer is there, which is read beside it, waits.
    """

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._parts: _Parts | _LonePrefiller | None = None
        self._waiting: list[dict[str, Any]] = []

    def begin(self, parts: _Parts | _LonePrefiller | None) -> None:
        """Another attempt begins."""
        self._parts = parts
        self._waiting.clear()

    def rewrite(self, payload: dict[str, Any]) -> bytes:
        """Take an event; what can be sent now."""
        self._waiting.append(payload)
        if self._parts is None:
            return self._events(None)
        parts = self._parts.so_far
        return b"" if parts is None else self._events(parts)

    async def rest(self) -> bytes:
        """What still waits. Raises UpstreamError."""
        return self._events(await self._parts.whole()) if self._waiting and self._parts is not None else b""

    def _events(self, parts: sglang.PrefilledParts | sglang.LoneAnswer | None) -> bytes:
        events = []
        for payload in self._waiting:
            index = {} if self._index is None else {"index": self._index}
            events.append(data_event({**(payload if parts is None else parts.complete(payload)), **index}))
        self._waiting.clear()
        return b"".join(events)


class _NativeRelay(Relay):
    """Copies a stream of SGLang's own API."""

    def __init__(
        self,
        attempt: Attempt,
        delivery: Delivery,
        client: ClientStream,
        on_begin: Callable[[], None],
        on_output: Callable[[], None],
    ) -> None:
        super().__init__(attempt, delivery, client, on_begin, on_output)
        self.segment = _NativeSegment()
        delivery.begin_stream(self.segment)


class _NativeSegment(Segment):
    """A stream whose every event has the answer so far, and the last one the reason for its end."""

    __slots__ = ()

    def read(self, event: Event) -> Meaning:
        """Take the next event."""
        self.payload, self.data = None, event.data
        if event.data is None:
            return Meaning.OTHER
        if event.data == DONE:
            self.done = True
            return Meaning.DONE
        if len(event.data) > LONG_BYTES and is_heavier(event.data, MAX_ANSWER_ELEMENTS):
            return Meaning.MALFORMED
        try:
            self.payload = payload = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            return Meaning.MALFORMED
        if told := error_of(payload):
            self.payload = orjson.loads(told.body)
            return Meaning.ERROR
        usage = sglang.usage_of(payload)
        if usage is None:
            return Meaning.OTHER
        self.usage = usage
        if (finish := _finish_of(payload)) is not None:
            self.finish_reasons[0] = str(finish)
        return Meaning.CONTENT


def _needs_prefiller(call: Call) -> bool:
    return sglang.wants_prefillers_answer({**call.values, **call.changes})


def _finish_of(payload: dict[str, Any]) -> Any:
    """Why an answer has ended; None while it goes on."""
    meta = payload.get("meta_info")
    return meta.get("finish_reason") if isinstance(meta, dict) else None
