"""Connections that are opened before there is anything to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure
from proxy.settings import Timeouts
from proxy.upstream import EngineConnection, Upstream, UpstreamOptions
from tests.asking import until
from tests.clock import Clock
from tests.upstream.raw import Link, deaf, engine, failure_of, fetch, free_port


def upstream_at(clock: Callable[[], float]) -> Upstream:
    return Upstream(Timeouts(), EngineKeys(None), options=UpstreamOptions(sweep_seconds=3600.0, clock=clock))


async def preconnected(upstream: Upstream, backend: Backend) -> EngineConnection:
    """Open a connection in advance, and return it."""
    upstream.open_in_advance(backend)
    await until(lambda: upstream._idle.get(backend.key), "a connection")
    (connection,) = upstream._idle[backend.key]
    return connection


async def answers(link: Link) -> None:
    await link.answer()


async def is_left(link: Link) -> None:
    await link.left()


async def test_preconnected_connection_is_used_by_the_next_request() -> None:
    async with upstream_at(Clock()) as upstream, engine(answers) as backend:
        await preconnected(upstream, backend)
        assert await fetch(upstream, backend) == b"ok"


async def test_preconnect_opens_no_second_idle_connection() -> None:
    async with upstream_at(Clock()) as upstream, engine(answers) as backend:
        await preconnected(upstream, backend)
        upstream.open_in_advance(backend)
        await asyncio.sleep(0)
        assert await fetch(upstream, backend) == b"ok"


@pytest.mark.parametrize(("seconds", "is_used"), [(9.9, True), (10.1, False)])
async def test_preconnected_connection_lasts_for_the_time_of_a_prompt(seconds: float, is_used: bool) -> None:
    """Engines close what is idle behind an answer."""
    clock = Clock()
    scripts = [answers] if is_used else [is_left, answers]
    async with upstream_at(clock) as upstream, engine(*scripts) as backend:
        connection = await preconnected(upstream, backend)
        clock.now += seconds
        upstream.check_connections()
        assert connection.is_closed is not is_used
        assert await fetch(upstream, backend) == b"ok"


async def test_preconnected_connection_is_used_after_another_was_stale() -> None:
    async with upstream_at(Clock()) as upstream, engine(answers) as backend:
        await preconnected(upstream, backend)
        upstream.stop_reuse_briefly(backend)
        assert await fetch(upstream, backend) == b"ok"


async def test_preconnected_connection_closed_without_answer_is_a_failure() -> None:
    async def asks_no_further(link: Link) -> None:
        await link.request()

    async with upstream_at(Clock()) as upstream, engine(asks_no_further) as backend:
        await preconnected(upstream, backend)
        assert await failure_of(fetch(upstream, backend, resend_if_stale=True)) is Failure.RESET


async def test_failed_preconnect_is_found_by_the_next_request() -> None:
    backend = Backend(Role.DECODE, "127.0.0.1", free_port())
    async with upstream_at(Clock()) as upstream:
        upstream.open_in_advance(backend)
        assert await failure_of(fetch(upstream, backend)) is Failure.CONNECT


async def test_running_preconnect_ends_with_the_gateway() -> None:
    with deaf() as listener:
        async with upstream_at(Clock()) as upstream:
            upstream.open_in_advance(Backend(Role.DECODE, *listener.getsockname()))
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
