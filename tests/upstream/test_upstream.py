"""Connections to engines over many exchanges: opened, reused, given up, left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import Timeouts
from proxy.upstream import EngineRequestError, Upstream, UpstreamOptions
from tests.clock import Clock
from tests.upstream.raw import (
    LONG,
    OK,
    SHORT,
    STREAM_HEAD,
    Collector,
    Link,
    chunk,
    deaf,
    engine,
    exchange,
    failure_of,
    fetch,
    free_port,
    new_upstream,
)

# Connections that serve again


async def test_connection_is_reused(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer()
        await link.answer(STREAM_HEAD + chunk(b"ok") + b"0\r\n\r\n")
        await link.answer()

    async with engine(script) as backend:
        assert [await fetch(upstream, backend) for _ in range(3)] == [b"ok"] * 3


async def test_concurrent_requests_use_separate_connections(upstream: Upstream) -> None:
    both = asyncio.Barrier(2)

    async def script(link: Link) -> None:
        await link.request()
        await both.wait()
        link.send(OK)

    async with engine(script, script) as backend, asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(fetch(upstream, backend))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_connection_with_close_header_is_not_reused(upstream: Upstream, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.answer(answer)
        await link.left()

    async with engine(script, script) as backend:
        assert [await fetch(upstream, backend) for _ in range(2)] == [b"ok"] * 2


@pytest.mark.parametrize("more", [OK, b"garbage", b"\x00"])
async def test_bytes_after_the_answer_close_only_the_connection(upstream: Upstream, more: bytes) -> None:
    async def together(link: Link) -> None:
        await link.answer(OK + more)
        await link.left()

    async def later(link: Link) -> None:
        await link.answer(OK)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        link.send(more)
        await link.left()

    async with engine(together, later) as backend:
        assert await fetch(upstream, backend) == b"ok"
        assert await fetch(upstream, backend) == b"ok"


async def serves_twice(link: Link) -> None:
    await link.answer()
    await link.answer()


async def test_connection_paused_at_the_end_of_its_answer_is_reused(upstream: Upstream) -> None:
    async with engine(serves_twice) as backend:
        async with exchange(upstream, backend) as response:
            assert await response.read_body() == b"ok"
            response.pause_reading()
        assert await fetch(upstream, backend) == b"ok"


async def serves_until_it_is_left(link: Link) -> None:
    await link.answer()
    await link.left()


async def test_idle_connections_are_closed_before_the_engine_does_it(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.upstream.upstream._KEEP_ALIVE_SECONDS", 0.0)

    async with engine(serves_until_it_is_left) as backend:
        assert await fetch(upstream, backend) == b"ok"


async def closes_for_the_second_request(link: Link) -> None:
    await link.answer()
    await link.request()


async def resets_for_the_second_request(link: Link) -> None:
    await closes_for_the_second_request(link)
    link.reset()


stale = pytest.mark.parametrize("script", [closes_for_the_second_request, resets_for_the_second_request])


@stale
async def test_request_on_a_stale_connection_may_be_sent_again(upstream: Upstream, script: Any) -> None:
    seen: list[bytes] = []

    async def fresh(link: Link) -> None:
        seen.append((await link.request())[1])
        link.send(OK)

    async with engine(script, fresh) as backend:
        await fetch(upstream, backend)
        assert await fetch(upstream, backend, b'{"again":1}', resend_if_stale=True) == b"ok"
    assert seen == [b'{"again":1}']


@stale
@pytest.mark.parametrize(
    "ask", [fetch, lambda *exchanged: exchange(*exchanged).__aenter__()], ids=["fetched", "opened"]
)
async def test_request_is_not_resent_by_default(upstream: Upstream, script: Any, ask: Any) -> None:
    async with engine(script) as backend:
        await fetch(upstream, backend)
        assert await failure_of(ask(upstream, backend)) is Failure.RESET


async def test_request_is_sent_again_on_a_fresh_connection() -> None:
    both, stale_requests = asyncio.Barrier(2), 0

    async def goes_stale(link: Link) -> None:
        nonlocal stale_requests
        await link.request()
        await both.wait()
        link.send(OK)
        with suppress(asyncio.IncompleteReadError):
            await link.request()
            stale_requests += 1

    async with engine(goes_stale, goes_stale, Link.answer) as backend, new_upstream() as upstream:
        await asyncio.gather(fetch(upstream, backend), fetch(upstream, backend))
        assert await fetch(upstream, backend, resend_if_stale=True) == b"ok"
        assert stale_requests == 1


async def closes_after_the_request(link: Link) -> None:
    await link.request()


async def test_request_is_sent_again_only_once(upstream: Upstream) -> None:
    async with engine(closes_for_the_second_request, closes_after_the_request) as backend:
        await fetch(upstream, backend)
        assert await failure_of(fetch(upstream, backend, resend_if_stale=True)) is Failure.RESET


async def test_resend_to_a_lost_engine_reports_the_first_failure(upstream: Upstream) -> None:
    """The first failure is reported, because an engine may have received the request."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        await link.answer()
        await link.request()
        server.close()
        writer.close()
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    backend = Backend(Role.PREFILL, *server.sockets[0].getsockname())
    await fetch(upstream, backend)
    with pytest.raises(UpstreamError) as failed:
        await fetch(upstream, backend, resend_if_stale=True)
    assert (failed.value.failure, failed.value.is_stale_connection) == (Failure.RESET, True)
    await gone.wait()


async def test_role_uses_new_connections_for_a_while_after_a_stale_one(clock: Clock) -> None:
    async with (
        engine(closes_for_the_second_request) as stale,
        engine(serves_until_it_is_left, serves_until_it_is_left, serves_twice) as other,
        Upstream(Timeouts(), EngineKeys(None), options=UpstreamOptions(sweep_seconds=0.01, clock=clock)) as upstream,
    ):
        await fetch(upstream, stale)
        await fetch(upstream, other)
        assert await failure_of(fetch(upstream, stale)) is Failure.RESET
        assert await fetch(upstream, other) == b"ok"
        clock.now += 2.1
        for _ in range(2):
            assert await fetch(upstream, other) == b"ok"


async def test_fresh_connection_that_closes_is_not_a_stale_one(upstream: Upstream) -> None:
    async with engine(closes_after_the_request) as backend:
        assert await failure_of(fetch(upstream, backend, resend_if_stale=True)) is Failure.RESET


async def test_request_is_not_resent_after_the_answer_began(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer()
        await link.answer(b"HTTP/1.1 2")

    async with engine(script) as backend:
        await fetch(upstream, backend)
        assert await failure_of(fetch(upstream, backend, resend_if_stale=True)) is Failure.BROKEN


# How it fails


@pytest.mark.fault(1)
async def test_refused_connection_is_a_failed_connect(upstream: Upstream) -> None:
    with pytest.raises(UpstreamError) as failed:
        await fetch(upstream, Backend(Role.DECODE, "127.0.0.1", free_port()))
    assert failed.value.failure is Failure.CONNECT
    assert failed.value.message == "decode instance: cannot connect (connection refused)"


async def test_connection_that_takes_too_long_is_a_failed_connect() -> None:
    async with new_upstream(connect_seconds=SHORT) as upstream:
        with deaf() as listener, pytest.raises(UpstreamError) as failed:
            await fetch(upstream, Backend(Role.DECODE, *listener.getsockname()))
    assert failed.value.failure is Failure.CONNECT
    assert failed.value.message == "decode instance: cannot connect (timed out)"


async def closes_at_once(link: Link) -> None:
    pass


async def resets_after_the_request(link: Link) -> None:
    await link.request()
    link.reset()


@pytest.mark.parametrize("script", [closes_at_once, closes_after_the_request, resets_after_the_request])
async def test_connection_closed_without_a_byte_fails_as_reset(upstream: Upstream, script: Any) -> None:
    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend)) is Failure.RESET


# How long it waits


async def says_nothing(link: Link) -> None:
    await link.request()
    await link.left()


@pytest.mark.fault(2)
async def test_engine_that_sends_nothing_times_out(upstream: Upstream) -> None:
    async with engine(says_nothing) as backend:
        with pytest.raises(UpstreamError) as failed:
            await fetch(upstream, backend, answer_seconds=SHORT)
    assert failed.value.failure is Failure.TIMEOUT
    assert failed.value.status == 504
    assert failed.value.message == "prefill instance: waited 0.05 s for an answer"


async def test_engine_that_stops_in_the_middle_times_out(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"ok"))
        await link.left()

    async with engine(script) as backend:
        with pytest.raises(UpstreamError) as failed:
            await fetch(upstream, backend, answer_seconds=SHORT)
    assert failed.value.message == "prefill instance: waited 0.05 s for more of the answer"


async def test_engine_that_never_comes_to_the_end_of_its_headers_times_out(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(b"HTTP/1.1 200 OK\r\n")
        while not link.writer.is_closing():
            link.send(b"X")
            await asyncio.sleep(0.001)

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend, answer_seconds=SHORT)) is Failure.TIMEOUT


async def test_bound_on_silence_can_change_with_the_stage(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await link.left()

    async with engine(script) as backend, exchange(upstream, backend, answer_seconds=LONG) as response:
        response.limit_silence(SHORT)
        assert await failure_of(response.read_body()) is Failure.TIMEOUT


async def test_request_that_the_engine_does_not_read_times_out(upstream: Upstream) -> None:
    served = asyncio.Event()

    async def script(link: Link) -> None:
        await served.wait()

    async with engine(script) as backend:
        assert await failure_of(fetch(upstream, backend, b"x" * 32_000_000, answer_seconds=SHORT)) is Failure.TIMEOUT
        served.set()


async def drips(link: Link) -> None:
    await link.answer(STREAM_HEAD)
    while not link.writer.is_closing():
        link.send(chunk(b"."))
        await asyncio.sleep(0.001)


async def test_stream_that_goes_on_does_not_time_out(upstream: Upstream) -> None:
    async with (
        engine(drips, says_nothing, says_nothing) as backend,
        exchange(upstream, backend, answer_seconds=LONG) as response,
    ):
        response.limit_silence(2 * SHORT)
        sink = Collector()
        response.attach_sink(sink)
        for _ in range(2):
            assert await failure_of(fetch(upstream, backend, answer_seconds=2 * SHORT)) is Failure.TIMEOUT
        assert not sink.finished.done()


@pytest.mark.fault(69)
async def test_slowly_dripping_answer_has_the_usual_time_limit(upstream: Upstream) -> None:
    async with engine(drips) as backend:
        assert await failure_of(fetch(upstream, backend, answer_seconds=SHORT)) is Failure.TIMEOUT


@pytest.mark.fault(69)
async def test_stream_of_heartbeats_times_out(upstream: Upstream) -> None:
    async with engine(drips) as backend, exchange(upstream, backend, answer_seconds=LONG) as response:
        response.limit_silence(SHORT)
        sink = Collector()
        sink.is_progress = False
        response.attach_sink(sink)
        error = await sink.finished
        assert error is not None
        assert error.failure is Failure.TIMEOUT


async def test_silence_while_reading_is_paused_does_not_count(upstream: Upstream) -> None:
    resumed = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD)
        await resumed.wait()
        link.send(chunk(b"ok") + b"0\r\n\r\n")

    async with (
        engine(script, says_nothing, says_nothing) as backend,
        exchange(upstream, backend, answer_seconds=SHORT) as response,
    ):
        response.pause_reading()
        # Exchanges that begin later and time out show that the time has passed.
        for _ in range(2):
            assert await failure_of(fetch(upstream, backend, answer_seconds=SHORT)) is Failure.TIMEOUT
        response.limit_silence(LONG)
        response.resume_reading()
        resumed.set()
        assert await response.read_body() == b"ok"


# Leaving


async def streams_until_it_is_left(link: Link) -> None:
    await link.answer(STREAM_HEAD + chunk(b"ok"))
    await link.left()


def waits(asked: asyncio.Event) -> Callable[[Link], Awaitable[None]]:
    """Return a script that sets `asked` when it has the request, and answers nothing."""

    async def script(link: Link) -> None:
        await link.request()
        asked.set()
        await link.left()

    return script


async def test_leaving_early_closes_the_engines_connection(upstream: Upstream) -> None:
    async with engine(streams_until_it_is_left) as backend:
        async with exchange(upstream, backend):
            assert upstream.busy_connections == 1
        assert upstream.busy_connections == 0


async def test_leaving_with_an_error_closes_the_engines_connection(upstream: Upstream) -> None:
    async with engine(streams_until_it_is_left) as backend:
        with pytest.raises(ZeroDivisionError):
            async with exchange(upstream, backend):
                raise ZeroDivisionError
        assert upstream.busy_connections == 0


async def test_leaving_the_upstream_closes_every_connection() -> None:
    asked = asyncio.Event()

    async with engine(streams_until_it_is_left, waits(asked), serves_until_it_is_left) as backend:
        async with AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(new_upstream())
            async with exchange(upstream, backend) as streaming:
                waiting = asyncio.create_task(failure_of(fetch(upstream, backend)))
                await asked.wait()
                assert await fetch(upstream, backend) == b"ok"
                await stack.aclose()
                assert await failure_of(streaming.read_body()) is Failure.BROKEN
                assert await waiting is Failure.RESET
        assert upstream.busy_connections == 0


# Cancellation, in each phase


async def cancelled(task: asyncio.Task[Any], upstream: Upstream) -> None:
    """Cancel an exchange. Its connection is not in use afterwards."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert upstream.busy_connections == 0


async def test_cancelled_while_connecting(upstream: Upstream) -> None:
    with deaf() as listener:
        task = asyncio.create_task(fetch(upstream, Backend(Role.DECODE, *listener.getsockname())))
        await asyncio.sleep(0)  # it has begun
        await cancelled(task, upstream)


async def test_cancelled_while_the_request_is_written(upstream: Upstream) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def reads_little(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        begun.set()
        await gone.wait()
        await link.left()

    async with engine(reads_little) as backend:
        task = asyncio.create_task(fetch(upstream, backend, b"x" * 32_000_000))
        await begun.wait()
        await cancelled(task, upstream)
        gone.set()


@pytest.mark.parametrize("is_stale", [False, True], ids=["first", "again"])
async def test_cancelled_while_waiting_for_the_answer(upstream: Upstream, is_stale: bool) -> None:
    asked = asyncio.Event()
    scripts = [closes_for_the_second_request] if is_stale else []
    async with engine(*scripts, waits(asked)) as backend:
        for _ in scripts:
            await fetch(upstream, backend)
        task = asyncio.create_task(fetch(upstream, backend, resend_if_stale=is_stale))
        await asked.wait()
        await cancelled(task, upstream)


@pytest.mark.parametrize("is_paused", [False, True], ids=["reading", "paused"])
async def test_cancelled_while_the_body_arrives(upstream: Upstream, is_paused: bool) -> None:
    begun = asyncio.Event()

    async def reads() -> None:
        async with exchange(upstream, backend) as response:
            if is_paused:
                response.pause_reading()
            begun.set()
            await response.read_body()

    async with engine(streams_until_it_is_left) as backend:
        task = asyncio.create_task(reads())
        await begun.wait()
        await cancelled(task, upstream)


async def test_connection_is_reused_when_cancelled_after_the_whole_answer(upstream: Upstream) -> None:
    read = asyncio.Event()

    async def lingers() -> None:
        async with exchange(upstream, backend) as response:
            await response.read_body()
            read.set()
            await asyncio.Event().wait()

    async with engine(serves_twice) as backend:
        task = asyncio.create_task(lingers())
        await read.wait()
        await cancelled(task, upstream)
        assert await fetch(upstream, backend) == b"ok"


async def test_status_comes_over_a_recent_connection_that_is_not_busy() -> None:
    heads: list[bytes] = []

    async def answers_twice(link: Link) -> None:
        await link.answer()
        heads.append(await link.reader.readuntil(b"\r\n\r\n"))
        assert upstream.busy_connections == 0
        link.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")
        await link.answer()

    async with new_upstream("s3cret") as upstream, engine(answers_twice) as backend:
        assert await fetch(upstream, backend) == b"ok"
        assert await upstream.get_status(backend, "/health", LONG) == 503
        assert await fetch(upstream, backend) == b"ok"
    (head,) = heads
    assert head.startswith(b"GET /health HTTP/1.1\r\n")
    assert b"Content-" not in head


async def test_status_is_asked_again_if_the_engine_closed_the_connection() -> None:
    async def closes(link: Link) -> None:
        await link.answer()
        await link.reader.readuntil(b"\r\n\r\n")

    async def answers(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(OK)

    async with new_upstream() as upstream, engine(closes, answers) as backend:
        assert await fetch(upstream, backend) == b"ok"
        assert await upstream.get_status(backend, "/health", LONG) == 200


async def test_connection_of_a_status_request_is_not_reused() -> None:
    """A reset by the engine would otherwise look like that of an old connection, and the request be sent again."""

    async def answers(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        link.send(OK)
        await link.left()

    async def resets(link: Link) -> None:
        await link.request()
        link.reset()

    async with new_upstream() as upstream, engine(answers, resets) as backend:
        assert await upstream.get_status(backend, "/health", LONG) == 200
        with pytest.raises(UpstreamError) as caught:
            await fetch(upstream, backend)
    assert (caught.value.failure, caught.value.is_stale_connection) == (Failure.RESET, False)


async def test_status_request_fails_with_the_reason() -> None:
    async def is_left(link: Link) -> None:
        await link.left()

    async def closes(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")

    found: list[tuple[Failure, str]] = []
    with deaf() as listener:
        full = Backend(Role.PREFILL, "127.0.0.1", listener.getsockname()[1])
        refusing = Backend(Role.PREFILL, "127.0.0.1", free_port())
        async with new_upstream() as upstream, engine(is_left) as silent, engine(closes) as closing:
            for backend, seconds in ((silent, SHORT), (full, SHORT), (refusing, LONG), (closing, LONG)):
                with pytest.raises(EngineRequestError) as caught:
                    await upstream.get_status(backend, "/health", seconds)
                found.append((caught.value.failure_kind, str(caught.value)))
    assert found == [
        (Failure.TIMEOUT, "/health did not answer within 0.05 s"),
        (Failure.TIMEOUT, "/health did not answer within 0.05 s"),
        (Failure.CONNECT, "cannot connect (connection refused)"),
        (Failure.RESET, "/health failed: the engine closed the connection without an answer"),
    ]
