"""The life of one request: split it into units, let each work, and put the answers together for the client."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from proxy.flow import answer as answers
from proxy.flow import fanout
from proxy.flow.admission import Admission
from proxy.flow.answer import WholeAnswer
from proxy.flow.budget import RetryBudget
from proxy.flow.delivery import Delivery
from proxy.flow.relay import Relay
from proxy.flow.resume import can_be_observed
from proxy.flow.work import Work
from proxy.wire.openai import DONE_EVENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proxy.balancer.backend import Backend, Role
    from proxy.balancer.engine_facts import EngineVersion
    from proxy.balancer.pool import Pool
    from proxy.call import Call
    from proxy.connectors.base import Attempt, Connector, Pools
    from proxy.flow.client import ClientStream
    from proxy.flow.fanout import Unit
    from proxy.flow.suspects import Suspects
    from proxy.flow.suspicion import Suspicion
    from proxy.flow.vocabulary import Vocabulary
    from proxy.metrics import Metrics
    from proxy.record import Record
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Gateway:
    """Serves calls through one connector."""

    def __init__(
        self,
        connector: Connector,
        pools: Pools,
        vocabulary: Vocabulary,
        suspects: Suspects,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.connector = connector
        self.pools = pools
        self.vocabulary = vocabulary
        self.suspects = suspects
        self.settings = settings
        self.metrics = metrics
        self.budget = RetryBudget(settings.retry.budget_share, settings.retry.budget_least)
        self.admission = Admission(settings.admission, self._has_room, metrics, absent=self._absent)
        for role in connector.roles:
            pools.of(role).on_release = self.admission.notify

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is decided from now on."""
        self.settings = settings
        self.budget.configure(settings.retry.budget_share, settings.retry.budget_least)
        self.admission.configure(settings.admission)
        self.connector.configure(settings)

    async def complete(self, call: Call, record: Record) -> bytes:
        """Serve a call that is not streamed; the JSON body for the client. Raises GatewayError."""
        units = self._units(call)
        with self.suspects.watch(call, len(units)) as suspicion:
            if len(units) == 1 and not self._observes(units[0].call):
                return await self._read_whole(units[0].call, record, suspicion)
            parts = await self._together([partial(self._assemble, unit.call, record, suspicion) for unit in units])
        return orjson.dumps(parts[0]) if len(units) == 1 else fanout.merge_answers(units, parts)

    async def stream(self, call: Call, client: ClientStream, record: Record) -> None:
        """Serve a streamed call and end the client's stream. Raises GatewayError, ClientStalled."""
        units = self._units(call)
        with self.suspects.watch(call, len(units)) as suspicion:
            if len(units) == 1:
                await self._relay(units[0], client, record, suspicion, None)
            else:
                await self._stream_merged(units, call, client, record, suspicion)
        await client.finish(DONE_EVENT)

    def engine_version(self) -> EngineVersion:
        """The lowest of all engines that an attempt may come to; (0, 0) when one is not known."""
        return min((pool.engine_version(backend) or (0, 0) for pool, backend in self._engines()), default=(0, 0))

    def max_model_len(self) -> int | None:
        """Tokens that fit into a sequence on every engine; None when none has told."""
        known = [pool.max_model_len(backend) for pool, backend in self._engines()]
        return min((length for length in known if length is not None), default=None)

    def _has_room(self) -> bool:
        """Whether one more unit would find room in every role, or would fail at once."""
        return all(self.pools.of(role).has_room() for role in self.connector.roles)

    def _absent(self) -> Role | None:
        """A role of which all are gone that were there, None if there is none."""
        return next((role for role in self.connector.roles if self.pools.of(role).is_gone()), None)

    def _engines(self) -> list[tuple[Pool, Backend]]:
        pools = [self.pools.of(role) for role in self.connector.roles]
        return [(pool, backend) for pool in pools for backend in pool.eligible()]

    async def _read_whole(self, call: Call, record: Record, suspicion: Suspicion) -> bytes:
        """An answer that is passed on as the engine wrote it, in one piece."""
        body = b""

        async def read(attempt: Attempt, on_begin: Callable[[], None]) -> None:
            nonlocal body
            answer = await answers.read_answer(attempt)
            attempt.saw_usage(answer.values.get("usage"))
            body = answers.client_body(attempt, answer)

        await Work(self, call, record, Delivery(call, is_observed=False), None, suspicion).run(read)
        return body

    async def _assemble(self, call: Call, record: Record, suspicion: Suspicion) -> dict[str, Any]:
        """An answer as parsed JSON: streamed by the engine if it is observed, so that it can be continued."""
        values: dict[str, Any] = {}
        whole = WholeAnswer()
        delivery = Delivery(call, is_observed=self._observes(call), whole=whole)

        async def read(attempt: Attempt, on_begin: Callable[[], None]) -> None:
            nonlocal values
            if delivery.is_observed:
                await self._copy(attempt, delivery, None, on_begin, _nothing)
            else:
                answer = await answers.read_answer(attempt)
                attempt.saw_usage(answer.values.get("usage"))
                values = answers.client_values(attempt, answer)

        await Work(self, call, record, delivery, None, suspicion).run(read)
        return whole.values(delivery) if delivery.is_observed else values

    async def _stream_merged(
        self, units: Sequence[Unit], call: Call, client: ClientStream, record: Record, suspicion: Suspicion
    ) -> None:
        merger = fanout.StreamMerger(units)
        deliveries = await self._together(
            [partial(self._relay, unit, client, record, suspicion, merger) for unit in units]
        )
        if call.include_usage:
            client.write(merger.usage_event(deliveries[-1].last_payload, [delivery.usage for delivery in deliveries]))

    async def _relay(
        self,
        unit: Unit,
        client: ClientStream,
        record: Record,
        suspicion: Suspicion,
        merger: fanout.StreamMerger | None,
    ) -> Delivery:
        call = unit.call
        delivery = Delivery(
            call, is_observed=self._observes(call), rewrite=merger.rewriter(unit) if merger is not None else None
        )
        clock = _TokenClock(record, self.metrics)

        async def copy(attempt: Attempt, on_begin: Callable[[], None]) -> None:
            await self._copy(attempt, delivery, client, on_begin, clock.tick)
            if merger is not None:
                await client.attend()  # the other units may take long

        await Work(self, call, record, delivery, client, suspicion).run(copy)
        return delivery

    async def _copy(
        self,
        attempt: Attempt,
        delivery: Delivery,
        client: ClientStream | None,
        on_begin: Callable[[], None],
        on_output: Callable[[], None],
    ) -> None:
        relay = Relay(attempt, delivery, client, on_begin, on_output)
        try:
            await relay.run(self.settings.timeouts)
        finally:
            if relay.malformed_events:
                self.metrics.sse_bad_events_total.inc(relay.malformed_events)
        if delivery.is_stopped or delivery.usage is None:
            delivery.close(attempt.journey.prompt_details, client)
        attempt.saw_usage(delivery.usage)

    def _units(self, call: Call) -> list[Unit]:
        self.connector.check(call)
        if not self.connector.splits(call):
            return [fanout.Unit(call, 0, True)]
        return fanout.split(call, self.settings.cost, self.settings.fanout.max_units)

    def _observes(self, call: Call) -> bool:
        """Whether an answer is watched so closely that it can be continued. It must be one sequence."""
        resume = self.settings.resume
        limit = None if call.stream else call.output_limit
        return (
            resume.mode == "exact"
            and (limit is None or limit > resume.repeat_up_to_tokens)
            and self.connector.continues_answers
            and (self.connector.splits(call) or fanout.is_single(call))
            and can_be_observed(call)
        )

    async def _together(self, works: Sequence[Callable[[], Awaitable[_Result]]]) -> list[_Result]:
        """Run the units side by side, a bounded number at a time; the first failure ends them all."""
        if len(works) == 1:
            return [await works[0]()]
        room = asyncio.Semaphore(self.settings.fanout.concurrency)

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


def _nothing() -> None:
    """Nobody watches the tokens of an answer that is not streamed."""
