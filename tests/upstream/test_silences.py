"""Test silent answers of engines that accept no connections, or make no progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.balancer.stalls import StreamPace
from proxy.common.backend import Backend
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import Timeouts
from proxy.upstream import Response, SilenceChecks, Upstream, UpstreamOptions
from tests.asking import until
from tests.clock import Clock
from tests.upstream.raw import LONG, STREAM_HEAD, Collector, Link, chunk, engine, exchange

SILENCE = 10.0


class Checks:
    """Scripted results of checks, and a record of the callbacks."""

    def __init__(self) -> None:
        self.down: set[Backend] = set()
        self.working = False
        self.others = True
        self.refused: list[Backend] = []
        self.asked: list[tuple[Backend, float]] = []
        self.hung: list[Backend] = []
        self.answered = asyncio.Event()
        self.answered.set()

    async def makes_progress(self, backend: Backend, pause_seconds: float) -> bool:
        self.asked.append((backend, pause_seconds))
        await self.answered.wait()
        return self.working

    def on_hang(self, backend: Backend) -> bool:
        self.hung.append(backend)
        return self.others

    @property
    def given(self) -> SilenceChecks:
        return SilenceChecks(
            is_backend_down=lambda backend: backend in self.down,
            on_refused_connection=self.refused.append,
            makes_progress=self.makes_progress,
            on_engine_hang=self.on_hang,
        )


class Engine:
    """One engine with several streams, which can stop listening."""

    def __init__(self, backend: Backend, server: asyncio.Server, links: list[Link]) -> None:
        self.backend = backend
        self.server = server
        self.links = links
        self.streams: list[Stream] = []

    def stop_listening(self) -> None:
        self.server.close()


class Stream:
    """The gateway's end of one stream, and the engine's."""

    def __init__(self, link: Link, response: Response) -> None:
        self.link = link
        self.response = response
        self.sink = Collector()
        response.attach_sink(self.sink)

    async def say(self) -> None:
        before = len(self.sink.body)
        self.link.send(chunk(b"."))
        while len(self.sink.body) == before:
            self.sink.begun.clear()
            await self.sink.begun.wait()

    @property
    def error(self) -> UpstreamError | None:
        return self.sink.finished.result() if self.sink.finished.done() else None


class World:
    """An Upstream whose clock a test moves."""

    def __init__(self, upstream: Upstream, clock: Clock, checks: Checks, stack: AsyncExitStack) -> None:
        self.upstream = upstream
        self.checks = checks
        self._clock = clock
        self._stack = stack

    async def engine(self, streams: int = 1, *, has_begun: bool = True) -> Engine:
        links: list[Link] = []

        async def script(link: Link) -> None:
            links.append(link)
            await link.answer(STREAM_HEAD)
            await link.left()

        servers: list[asyncio.Server] = []
        backend = await self._stack.enter_async_context(engine(*[script] * streams, servers=servers))
        made = Engine(backend, servers[0], links)
        for _ in range(streams):
            response = await self._stack.enter_async_context(exchange(self.upstream, backend))
            response.limit_silence(LONG, has_begun)
            made.streams.append(Stream(links[-1], response))
        return made

    async def passes(self, seconds: float, *speaking: Stream, parts: int = 5) -> None:
        """Let time pass with a number of parts per second on these streams, then check the connections."""
        for _ in range(round(seconds)):
            self._clock.now += 1
            for stream in speaking * parts:
                await stream.say()
            self.upstream.check_connections()
            await self.settles()

    async def settles(self) -> None:
        """Wait until the running checks end, except those that wait for `checks.answered`."""
        silences = self.upstream._silences
        assert silences is not None
        checks, looks = self.checks, silences._background
        await until(lambda: len(looks) == (0 if checks.answered.is_set() else len(checks.asked)), "the looks")


@asynccontextmanager
async def world(clock: Clock) -> AsyncIterator[World]:
    checks = Checks()
    async with (
        Upstream(
            Timeouts(),
            EngineKeys(None),
            options=UpstreamOptions(
                silence_seconds=SILENCE, silence_checks=checks.given, sweep_seconds=1.0, clock=clock
            ),
        ) as upstream,
        AsyncExitStack() as stack,
    ):
        yield World(upstream, clock, checks, stack)


# No process listens


@pytest.mark.fault(114)
async def test_silent_answers_of_an_engine_that_refuses_connections_are_lost(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(3)
        await at.passes(3, *one.streams)
        one.stop_listening()
        await at.passes(2)
        assert [stream.error.failure for stream in one.streams if stream.error] == [Failure.BROKEN] * 3
        assert one.backend in at.checks.refused


async def test_answers_of_an_engine_that_accepts_connections_go_on(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        at.checks.working = True
        await at.passes(3, *one.streams)
        await at.passes(50)
        assert one.streams[0].error is None
        assert not at.checks.refused


async def test_draining_engine_keeps_answers_that_progress(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(2)
        one.stop_listening()
        moving, silent = one.streams
        await at.passes(3, moving, silent)
        await at.passes(30, moving)
        assert moving.error is None
        assert silent.error is not None


async def test_slow_engine_that_refuses_connections_has_five_usual_gaps(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        for _ in range(10):
            await at.passes(2)
            await at.passes(1, *one.streams, parts=1)
        one.stop_listening()
        await at.passes(13)
        assert one.streams[0].error is None
        await at.passes(2)
        assert one.streams[0].error is not None


@pytest.mark.fault(114)
async def test_silent_answers_of_an_engine_that_is_down_are_lost(clock: Clock) -> None:
    async with world(clock) as at:
        one, other = await at.engine(2), await at.engine()
        at.checks.down = {one.backend}
        await at.passes(3, *one.streams, *other.streams)
        await at.passes(2, one.streams[0])
        assert (one.streams[0].error, other.streams[0].error) == (None, None)
        assert one.streams[1].error is not None


async def test_answer_not_begun_waits_longer_when_connections_are_refused(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(has_begun=False)
        one.stop_listening()
        at.checks.down = {one.backend}
        await at.passes(SILENCE)
        assert one.streams[0].error is None
        await at.passes(2)
        assert one.streams[0].error is not None


async def test_answer_that_has_not_begun_outlives_failed_health_checks(clock: Clock) -> None:
    """The engine may be busy with its prompt."""
    async with world(clock) as at:
        one = await at.engine(has_begun=False)
        at.checks.down = {one.backend}
        await at.passes(5 * SILENCE)
        assert one.streams[0].error is None


@pytest.mark.fault(114)
async def test_answers_that_have_not_begun_are_lost_with_those_that_had(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(2, has_begun=False)
        begun = one.streams[0]
        begun.response.limit_silence(LONG, True)
        await at.passes(3, begun)
        one.stop_listening()
        await at.passes(2)
        assert all(stream.error for stream in one.streams)


# Facts for the status


async def test_answer_that_begins_after_a_long_wait_is_not_silent(clock: Clock) -> None:
    """Answers of a layerwise decoder begin together when a long prompt ahead of theirs is computed."""
    async with world(clock) as at:
        one = await at.engine(3, has_begun=False)
        await at.passes(8)
        assert at.upstream.quiet_seconds_by_backend() == {one.backend: (False, [7.0] * 3)}
        for stream in one.streams:
            stream.response.limit_silence(LONG, True)
        assert at.upstream.quiet_seconds_by_backend() == {one.backend: (True, [0.0] * 3)}
        await at.passes(1)
        await at.passes(6, one.streams[0])
        assert sorted(at.upstream.quiet_seconds_by_backend()[one.backend][1]) == [0.0, 6.0, 6.0]


async def test_answers_are_not_silent_because_the_gateway_was_stopped(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        await at.passes(2, *one.streams)
        clock.now += 30
        assert at.upstream.quiet_seconds_by_backend() == {one.backend: (True, [0.0])}
        at.upstream.check_connections()
        assert at.upstream.quiet_seconds_by_backend()[one.backend][1][0] < 2.0


async def test_complete_answer_is_no_running_answer(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        await at.passes(2, *one.streams)
        one.links[0].send(b"0\r\n\r\n")
        await one.streams[0].sink.finished
        assert at.upstream.quiet_seconds_by_backend() == {}
        one.links[0].writer.close()


# It makes no progress


@pytest.mark.fault(115)
async def test_silent_answers_of_an_engine_without_progress_are_moved(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(5)
        await at.passes(3, *one.streams)
        await at.passes(SILENCE - 1)
        assert at.checks.asked == []
        await at.passes(1)
        assert [stream.error.failure for stream in one.streams if stream.error] == [Failure.STALLED] * 5
        assert at.checks.hung == [one.backend]


async def test_engine_that_makes_progress_is_checked_again_later(clock: Clock) -> None:
    async with world(clock) as at:
        at.checks.working = True
        one = await at.engine()
        await at.passes(3, *one.streams)
        await at.passes(4 * SILENCE)
        assert len(at.checks.asked) == 4
        assert (one.streams[0].error, at.checks.hung) == (None, [])


async def test_engine_with_other_progressing_answers_is_not_checked(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(2)
        await at.passes(3, *one.streams)
        await at.passes(3 * SILENCE, one.streams[0])
        assert at.checks.asked == []


async def test_answers_stay_when_no_other_engine_could_continue_them(clock: Clock) -> None:
    async with world(clock) as at:
        at.checks.others = False
        one = await at.engine()
        await at.passes(3, *one.streams)
        await at.passes(2 * SILENCE)
        assert one.streams[0].error is None
        assert at.checks.hung == [one.backend] * 2


async def test_slow_engine_is_checked_after_twenty_usual_gaps(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        for _ in range(10):
            await at.passes(1)
            await at.passes(1, *one.streams, parts=1)
        await at.passes(36)
        assert at.checks.asked == []
        await at.passes(4)
        ((_, pause_seconds),) = at.checks.asked
        assert pause_seconds == pytest.approx(6.0, rel=0.1)


async def test_answer_that_moves_during_the_check_stays(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine(2)
        await at.passes(3, *one.streams)
        at.checks.answered.clear()
        await at.passes(SILENCE)
        assert at.checks.asked
        await one.streams[0].say()
        at.checks.answered.set()
        await at.settles()
        assert one.streams[0].error is None
        assert one.streams[1].error is not None


async def test_silence_checks_can_be_disabled(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        at.upstream.set_limits(Timeouts(), 3600.0, 0.0)
        await at.passes(3, *one.streams)
        one.stop_listening()
        await at.passes(3 * SILENCE)
        assert one.streams[0].error is None


async def test_silence_while_this_process_was_stopped_is_not_checked(clock: Clock) -> None:
    async with world(clock) as at:
        one = await at.engine()
        await at.passes(3, *one.streams)
        one.stop_listening()
        clock.now += 100
        at.upstream.check_connections()
        await at.settles()
        assert (one.streams[0].error, at.checks.refused) == (None, [])


# Pace


def test_pace_is_the_mean_time_between_parts() -> None:
    pace = StreamPace()
    assert pace.mean_gap_seconds == 0
    pace.add_parts(10, 1.0)
    pace.add_parts(30, 3.0)
    assert pace.mean_gap_seconds == pytest.approx(0.1)


def test_pace_follows_an_engine_that_becomes_slower() -> None:
    pace = StreamPace()
    for _ in range(10_000):
        pace.add_parts(10, 1.0)
    for _ in range(10_000):
        pace.add_parts(1, 1.0)
    assert pace.mean_gap_seconds == pytest.approx(1.0, rel=0.5)
