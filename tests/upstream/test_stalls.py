"""Test engines that send nothing: for too long, while others send, or while the gateway was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import Timeouts
from proxy.upstream import Response, Upstream, UpstreamOptions
from tests.clock import Clock
from tests.upstream.raw import LONG, OK, STREAM_HEAD, Collector, Link, chunk, engine, exchange, fetch

STALL = 30.0
STALLED = "prefill instance: sends nothing while others do"


class Speaker:
    """An engine with one stream, which says something when told to, and the gateway's end of that stream."""

    def __init__(self, backend: Backend, link: Link, response: Response) -> None:
        self.backend = backend
        self.response = response
        self.sink = Collector()
        response.attach_sink(self.sink)
        self._link = link

    async def say(self) -> None:
        before = len(self.sink.body)
        self._link.send(chunk(b"."))
        while len(self.sink.body) == before:
            self.sink.begun.clear()
            await self.sink.begun.wait()

    async def beat(self) -> None:
        """Say something that is no part of an answer."""
        self.sink.is_progress = False
        await self.say()
        self.sink.is_progress = True

    @property
    def error(self) -> UpstreamError | None:
        """Return the failure of the stream, or None while it runs."""
        return self.sink.finished.result() if self.sink.finished.done() else None


@asynccontextmanager
async def speaker(
    upstream: Upstream, *, is_stream: bool = True, answer_seconds: float = LONG
) -> AsyncIterator[Speaker]:
    links: list[Link] = []

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        links.append(link)
        await link.left()

    async with engine(script) as backend, exchange(upstream, backend, answer_seconds=answer_seconds) as response:
        if is_stream:
            response.limit_silence(answer_seconds)
        yield Speaker(backend, links[0], response)


class Watch:
    """Lets time pass: once a second some engines speak, and then the connections are looked at."""

    def __init__(self, upstream: Upstream, clock: Clock) -> None:
        self._upstream = upstream
        self._clock = clock

    async def passes(self, seconds: int, *speaking: Speaker) -> None:
        for _ in range(seconds):
            self._clock.now += 1
            for one in speaking:
                await one.say()
            self._upstream.check_connections()


@asynccontextmanager
async def watching(clock: Clock, verdict: bool = True) -> AsyncIterator[tuple[Upstream, Watch, list[Backend]]]:
    found: list[Backend] = []

    def on_stall(backend: Backend) -> bool:
        found.append(backend)
        return verdict

    keys = EngineKeys(None)
    async with Upstream(
        Timeouts(),
        keys,
        options=UpstreamOptions(stall_seconds=STALL, on_stall=on_stall, sweep_seconds=1.0, clock=clock),
    ) as upstream:
        yield upstream, Watch(upstream, clock), found


@pytest.mark.fault(11)
async def test_streams_of_a_stalled_backend_fail_while_others_go_on(clock: Clock) -> None:
    async with watching(clock) as (upstream, watch, found), speaker(upstream) as a, speaker(upstream) as b:
        await watch.passes(2, a, b)
        await watch.passes(30, b)
        assert found == []
        assert a.error is None
        await watch.passes(60, b)
        assert found == [a.backend]
        assert a.error is not None
        assert (a.error.failure, a.error.message, a.error.backend) == (Failure.STALLED, STALLED, a.backend)
        assert b.error is None


@pytest.mark.fault(69)
async def test_heartbeat_is_no_sign_that_a_backend_works(clock: Clock) -> None:
    async with watching(clock) as (upstream, watch, found), speaker(upstream) as a, speaker(upstream) as b:
        await watch.passes(2, a, b)
        for _ in range(30):
            await a.beat()
            await watch.passes(1, b)
        assert found == []
        await a.beat()
        await watch.passes(1, b)
        assert found == [a.backend]


async def test_all_streams_of_a_stalled_backend_fail(clock: Clock) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await link.left()

    async with watching(clock) as (upstream, watch, found), speaker(upstream) as b, AsyncExitStack() as stack:
        backend = await stack.enter_async_context(engine(script, script, script))
        responses = [await stack.enter_async_context(exchange(upstream, backend)) for _ in range(3)]
        sinks = [Collector() for _ in responses]
        for response, sink in zip(responses, sinks, strict=True):
            response.limit_silence(LONG)
            response.attach_sink(sink)
        responses[0].pause_reading()  # its client is slow: it fails, too, as soon as the engine is known to be stuck
        await watch.passes(35, b)
        assert found == [backend]
        errors = [await sink.finished for sink in sinks]
        assert [error.failure for error in errors if error] == [Failure.STALLED] * 3


async def test_one_stream_that_goes_on_is_enough(clock: Clock) -> None:
    links: list[Link] = []

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        links.append(link)
        await link.left()

    async with watching(clock) as (upstream, watch, found), speaker(upstream) as b, AsyncExitStack() as stack:
        backend = await stack.enter_async_context(engine(*[script] * 8))
        streams = [
            Speaker(backend, links[-1], response)
            for _ in range(8)
            if (response := await stack.enter_async_context(exchange(upstream, backend)))
        ]
        for stream in streams:
            stream.response.limit_silence(LONG)
        for stream in streams[:2]:
            await watch.passes(35, stream, b)
        assert found == []


async def test_unstreamed_answers_of_a_stalled_backend_continue(clock: Clock) -> None:
    released = asyncio.Event()

    async def streams(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await link.left()

    async def answers(link: Link) -> None:
        await link.request()
        await released.wait()
        link.send(OK)

    async with (
        watching(clock) as (upstream, watch, found),
        speaker(upstream) as b,
        engine(streams, answers) as backend,
        exchange(upstream, backend) as response,
    ):
        response.limit_silence(LONG)
        whole = asyncio.create_task(fetch(upstream, backend))
        await watch.passes(35, b)
        assert found == [backend]
        released.set()
        assert await whole == b"ok"


async def test_streams_continue_when_a_stalled_backend_is_kept(clock: Clock) -> None:
    async with watching(clock, False) as (upstream, watch, found), speaker(upstream) as a, speaker(upstream) as b:
        await watch.passes(100, b)
        assert found == [a.backend]
        await a.say()
        assert a.error is None


async def test_no_backend_is_stalled_without_a_callback(clock: Clock) -> None:
    undecided = Upstream(Timeouts(), EngineKeys(None), options=UpstreamOptions(sweep_seconds=1.0, clock=clock))
    async with undecided as upstream, speaker(upstream) as a, speaker(upstream) as b:
        await Watch(upstream, clock).passes(100, b)
        assert a.error is None


async def test_unstreamed_answer_does_not_count_as_silent(clock: Clock) -> None:
    async with (
        watching(clock) as (upstream, watch, found),
        speaker(upstream, is_stream=False) as a,
        speaker(upstream) as b,
    ):
        await watch.passes(100, b)
        assert found == []
        assert a.error is None


async def test_paused_stream_does_not_count_as_silent(clock: Clock) -> None:
    async with watching(clock) as (upstream, watch, found), speaker(upstream) as a, speaker(upstream) as b:
        a.response.pause_reading()
        await watch.passes(100, b)
        a.response.resume_reading()
        await watch.passes(30, b)
        assert found == []
        await watch.passes(2, b)
        assert found == [a.backend]


async def test_time_to_a_stall_can_be_changed(clock: Clock) -> None:
    async with watching(clock) as (upstream, watch, found), speaker(upstream) as a, speaker(upstream) as b:
        upstream.set_limits(Timeouts(), 5.0)
        await watch.passes(8, b)
        assert found == [a.backend]


# While this process did not run


@pytest.mark.fault(41)
async def test_silence_while_this_process_was_stopped_does_not_count(clock: Clock) -> None:
    async with (
        watching(clock) as (upstream, watch, found),
        speaker(upstream, answer_seconds=60.0) as a,
        speaker(upstream) as b,
    ):
        await watch.passes(20, a, b)
        clock.now += 1000
        upstream.check_connections()
        assert a.error is None
        await watch.passes(25, b)
        assert (a.error, found) == (None, [])
        await watch.passes(10, b)
        assert found == [a.backend]


async def test_silence_counts_again_after_this_process_was_stopped(clock: Clock) -> None:
    async with watching(clock) as (upstream, watch, _), speaker(upstream, answer_seconds=60.0) as a:
        await watch.passes(20)
        clock.now += 1000
        upstream.check_connections()
        await watch.passes(39)
        assert a.error is None
        await watch.passes(3)
        assert a.error is not None
        assert a.error.failure is Failure.TIMEOUT


@pytest.mark.parametrize("late_seconds", [0.5, 2.0])
async def test_slightly_late_check_changes_nothing(clock: Clock, late_seconds: float) -> None:
    async with watching(clock) as (upstream, _, _), speaker(upstream, answer_seconds=60.0) as a:
        upstream.check_connections()
        looks = 0
        while a.error is None:
            clock.now += 1.0 + late_seconds
            upstream.check_connections()
            looks += 1
        assert looks == 60 // (1.0 + late_seconds) + 1
        await asyncio.sleep(0)
