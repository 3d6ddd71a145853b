"""The life of one request: split it, open an attempt, relay it; and the only loop that repeats an attempt."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from proxy.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.flow import answer as answers
from proxy.flow import fanout
from proxy.flow.relay import Relay
from proxy.flow.retry import backoff_seconds, may_retry
from proxy.wire.openai import DONE_EVENT, with_prompt_details

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proxy.balancer.backend import Backend, Role
    from proxy.call import Call
    from proxy.connectors.base import Attempt, Connector
    from proxy.flow.client import ClientStream
    from proxy.flow.fanout import Unit
    from proxy.metrics import Metrics
    from proxy.record import Journey, Record
    from proxy.settings import Settings

_Result = TypeVar("_Result")


class Gateway:
    """Serves calls through one connector."""

    def __init__(self, connector: Connector, settings: Settings, metrics: Metrics) -> None:
        self._connector = connector
        self._settings = settings
        self._metrics = metrics

    async def complete(self, call: Call, record: Record) -> bytes:
        """Serve a call that is not streamed; the JSON body for the client. Raises GatewayError."""
        units = self._units(call)

        async def whole(attempt: Attempt) -> bytes:
            answer = await answers.read_answer(attempt)
            attempt.saw_usage(answer.values.get("usage"))
            return answers.client_body(attempt, answer)

        async def part(attempt: Attempt) -> dict[str, Any]:
            answer = await answers.read_answer(attempt)
            attempt.saw_usage(answer.values.get("usage"))
            return answers.client_values(attempt, answer)

        if len(units) == 1:
            return await self._attempt(units[0].call, record.journey(), whole, _never)
        parts = await self._together(
            [partial(self._attempt, unit.call, record.journey(), part, _never) for unit in units],
        )
        return fanout.merge_answers(units, parts)

    async def stream(self, call: Call, client: ClientStream, record: Record) -> None:
        """Serve a streamed call and end the client's stream. Raises GatewayError, ClientStalled."""
        units = self._units(call)
        if len(units) == 1:
            await self._relay(units[0], call, client, record, None)
        else:
            await self._stream_merged(units, call, client, record)
        await client.finish(DONE_EVENT)

    async def _stream_merged(self, units: Sequence[Unit], call: Call, client: ClientStream, record: Record) -> None:
        merger = fanout.StreamMerger(units)
        relays = await self._together([partial(self._relay, unit, call, client, record, merger) for unit in units])
        if call.include_usage:
            usages = [_corrected_usage(relay, journey) for relay, journey in zip(relays, record.journeys, strict=True)]
            client.write(merger.usage_event(relays[-1].last_payload, usages))

    async def _relay(
        self, unit: Unit, call: Call, client: ClientStream, record: Record, merger: fanout.StreamMerger | None
    ) -> Relay:
        relay: Relay | None = None
        journey = record.journey()

        async def copy(attempt: Attempt) -> Relay:
            nonlocal relay
            relay = Relay(
                attempt,
                client,
                _TokenClock(record, self._metrics).tick,
                include_usage=call.include_usage,
                rewrite=merger.rewriter(unit) if merger else None,
            )
            await relay.run(self._settings.timeouts.idle_seconds)
            if merger is not None:
                await client.attend()  # the other units may take long
            attempt.saw_usage(relay.transcript.usage)
            return relay

        return await self._attempt(unit.call, journey, copy, lambda: relay is not None and relay.has_sent)

    async def _attempt(
        self,
        call: Call,
        journey: Journey,
        use: Callable[[Attempt], Awaitable[_Result]],
        has_sent: Callable[[], bool],
    ) -> _Result:
        """Open attempts on fresh backends until `use` succeeds with one, or the failure may not be repeated."""
        avoid: set[Backend] = set()
        failures: dict[Role, int] = {}
        last: UpstreamError | None = None
        retry = self._settings.retry
        while True:
            try:
                async with self._connector.open(call, avoid, journey) as attempt:
                    return await use(attempt)
            except NoBackendAvailable:
                if avoid and last is not None and last.failure is Failure.RECOMPUTED:
                    # A decoder that is short of memory is not sick: where there is no other, it is asked again.
                    avoid.clear()
                    continue
                # What the last engine said is more to the point, except that it could not be reached.
                if last is None or last.failure is Failure.CONNECT:
                    raise
                raise last from None
            except UpstreamError as error:
                role = error.backend.role
                failures[role] = failures.get(role, 0) + 1
                if not may_retry(
                    error, sent_to_client=has_sent(), attempts=failures[role], max_attempts=retry.max_attempts
                ):
                    raise
                last = error
                avoid.add(error.backend)
                self._metrics.retries_total.labels(role.value, error.failure.value).inc()
            finally:
                journey.leave()
            await asyncio.sleep(backoff_seconds(retry, failures[role]))

    def _units(self, call: Call) -> list[Unit]:
        self._connector.check(call)
        if not self._connector.one_sequence_per_call:
            return [fanout.Unit(call, 0, True)]
        return fanout.split(call, self._settings.cost, self._settings.fanout.max_units)

    async def _together(self, works: Sequence[Callable[[], Awaitable[_Result]]]) -> list[_Result]:
        """Run the units side by side, a bounded number at a time; the first failure ends them all."""
        room = asyncio.Semaphore(self._settings.fanout.concurrency)

        async def run(work: Callable[[], Awaitable[_Result]]) -> _Result:
            async with room:
                return await work()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(work)) for work in works]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]


class _TokenClock:
    """Times the tokens of one unit: the first for the record, the gaps by sample since most are alike."""

    def __init__(self, record: Record, metrics: Metrics) -> None:
        self._record = record
        self._metrics = metrics
        self._writes = 0
        self._gap_from = 0.0

    def tick(self) -> None:
        """Part of the answer went to the client."""
        self._writes += 1
        phase = self._writes & 7
        if phase == 1:
            if self._writes == 1:
                self._record.first_token()
            self._gap_from = self._record.clock()
        elif phase == 2:
            self._metrics.inter_token_seconds.observe(self._record.clock() - self._gap_from)


def _never() -> bool:
    return False


def _corrected_usage(relay: Relay, journey: Journey) -> dict[str, Any] | None:
    usage = relay.transcript.usage
    return usage if usage is None else with_prompt_details(usage, journey.prompt_details)
