"""Names with several addresses, of which some take no connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.balancer.shared.memory import LogOnce
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure
from proxy.settings import Timeouts
from proxy.upstream import Upstream, UpstreamOptions
from proxy.upstream.dialing import Dialer
from tests.clock import Clock
from tests.upstream.desk import Desk, desk
from tests.upstream.raw import SHORT, Link, deaf, engine, failure_of, fetch

DEAF, GOOD, REFUSED = "127.0.0.2", "127.0.0.1", "127.0.0.3"
LOGGER = "proxy.upstream.dialing"


class Dialing:
    """Upstream with an engine named `engine`, and the port of all addresses of the name."""

    def __init__(self, upstream: Upstream, at: Desk, port: int) -> None:
        self.upstream = upstream
        self.at = at
        self.port = port

    async def ask(self) -> None:
        assert await fetch(self.upstream, Backend(Role.DECODE, "engine", self.port)) == b"ok"

    async def verdicts(self) -> None:
        """Until the attempts that were not waited for have ended."""
        while losers := list(self.upstream._dialer._unneeded_attempts):
            await asyncio.wait(losers)
            await asyncio.sleep(0)


async def closes(link: Link) -> None:
    await link.answer(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")


@asynccontextmanager
async def dialing(
    clock: Clock, *addresses: str, requests: int = 1, connect_seconds: float = 1.0
) -> AsyncIterator[Dialing]:
    """Answer this number of requests, each on a new connection."""
    timeouts = Timeouts(connect_seconds=connect_seconds)
    async with (
        desk(clock) as at,
        engine(*[closes] * requests) as server,
        Upstream(timeouts, EngineKeys(None), at.names, UpstreamOptions(clock=clock)) as upstream,
    ):
        at.server.say(addresses)
        yield Dialing(upstream, at, server.port)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == LOGGER]


DEAD = (
    "WARNING",
    f"dialing: address accepts no connections, another one is used: {DEAF} of engine (timed out)",
)
ALIVE = ("INFO", f"dialing: address accepts connections again: {DEAF} of engine")


@pytest.mark.fault(68)
@pytest.mark.parametrize("addresses", [(DEAF, GOOD), (GOOD, DEAF), (DEAF, REFUSED, GOOD)])
async def test_name_with_one_dead_address_is_reachable(clock: Clock, addresses: tuple[str, ...]) -> None:
    async with dialing(clock, *addresses, requests=3) as at:
        with deaf(DEAF, at.port):
            for _ in range(3):
                await at.ask()


@pytest.mark.fault(68)
async def test_dead_address_and_its_return_are_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with dialing(clock, DEAF, GOOD, requests=5) as at:
        with deaf(DEAF, at.port) as listener:
            for _ in range(2):
                await at.ask()
                await at.verdicts()
            assert told(caplog) == [DEAD]
            clock.now += 30.1  # it is tried again in the background
            await at.ask()
            await at.verdicts()
            assert told(caplog) == [DEAD]
            listener.listen(16)
            await at.ask()
            await at.verdicts()
            assert told(caplog) == [DEAD]
            clock.now += 30.1
            await at.ask()
            await at.verdicts()
            assert told(caplog) == [DEAD, ALIVE]


async def test_one_of_several_workers_logs_a_dead_address(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    is_news = LogOnce().is_news
    timeouts = Timeouts(connect_seconds=2.0)
    async with (
        desk(clock) as at,
        engine(*[closes] * 4) as server,
        Upstream(timeouts, EngineKeys(None), at.names, UpstreamOptions(is_news=is_news, clock=clock)) as one,
        Upstream(timeouts, EngineKeys(None), at.names, UpstreamOptions(is_news=is_news, clock=clock)) as other,
    ):
        at.server.say([DEAF, GOOD])
        workers = [Dialing(upstream, at, server.port) for upstream in (one, other)]

        async def ask_all() -> None:
            for worker in workers:
                await worker.ask()
                await worker.verdicts()

        with deaf(DEAF, server.port) as listener:
            await ask_all()
            assert told(caplog) == [DEAD]
            listener.listen(16)
            clock.now += 30.1
            at.server.say([DEAF, GOOD])
            await ask_all()
            assert told(caplog) == [DEAD, ALIVE]


async def test_address_that_worked_last_is_tried_first(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with dialing(clock, DEAF, GOOD, requests=2) as at:
        with deaf(DEAF, at.port):
            await at.ask()
            # An attempt that begins with the wrong address would now wait forever.
            monkeypatch.setattr("proxy.upstream.dialing._STAGGER_SECONDS", 3600.0)
            at.upstream.set_limits(Timeouts(connect_seconds=3600.0), 30.0)
            await at.ask()


async def test_dead_addresses_are_tried_last(clock: Clock) -> None:
    tried: list[str] = []
    refusing = {DEAF}

    async def connect(address: str) -> Any:
        tried.append(address)
        if address in refusing:
            raise ConnectionRefusedError
        return address

    dialer, addresses = Dialer(clock, lambda *_: True), (DEAF, GOOD, REFUSED)
    assert await dialer.connect_to_first("engine", 1, addresses, connect, 1.0) == GOOD
    refusing.add(GOOD)
    assert await dialer.connect_to_first("engine", 1, addresses, connect, 1.0) == REFUSED
    await dialer.cancel_attempts()
    assert tried == [DEAF, GOOD, GOOD, REFUSED]


async def test_address_that_stops_working_is_no_longer_used(clock: Clock) -> None:
    async with (
        desk(clock) as at,
        Upstream(Timeouts(), EngineKeys(None), at.names, UpstreamOptions(clock=clock)) as upstream,
    ):
        at.server.say([GOOD, REFUSED])
        async with engine(closes) as first:
            backend = Backend(Role.DECODE, "engine", first.port)
            await fetch(upstream, backend)
        async with engine(closes, closes, host=REFUSED, port=first.port):
            for _ in range(2):
                assert await fetch(upstream, backend) == b"ok"


async def test_slow_address_is_not_a_dead_one(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr("proxy.upstream.dialing._STAGGER_SECONDS", 0.0)  # all of them at once: one must lose

    async def may_be_left(link: Link) -> None:
        with suppress(asyncio.IncompleteReadError):
            await closes(link)

    async with (
        desk(clock) as at,
        engine(may_be_left) as one,
        engine(may_be_left, host=REFUSED, port=one.port),
        Upstream(Timeouts(), EngineKeys(None), at.names, UpstreamOptions(clock=clock)) as upstream,
    ):
        at.server.say([GOOD, REFUSED])
        dialing = Dialing(upstream, at, one.port)
        await dialing.ask()
        await dialing.verdicts()
    assert told(caplog) == []


async def test_no_address_is_dead_when_all_of_them_fail(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    timeouts = Timeouts(connect_seconds=SHORT)
    async with (
        desk(clock) as at,
        Upstream(timeouts, EngineKeys(None), at.names, UpstreamOptions(clock=clock)) as upstream,
    ):
        at.server.say([DEAF, REFUSED])
        with deaf(DEAF) as listener:
            backend = Backend(Role.DECODE, "engine", listener.getsockname()[1])
            for _ in range(2):
                assert await failure_of(fetch(upstream, backend)) is Failure.CONNECT
            await Dialing(upstream, at, backend.port).verdicts()
    assert told(caplog) == []


async def test_request_that_is_given_up_leaves_no_attempt_behind(clock: Clock) -> None:
    timeouts = Timeouts(connect_seconds=3600.0)
    async with (
        desk(clock) as at,
        Upstream(timeouts, EngineKeys(None), at.names, UpstreamOptions(clock=clock)) as upstream,
    ):
        at.server.say([DEAF, GOOD])
        await at.names.find_addresses("engine")
        with deaf(GOOD) as listener, deaf(DEAF, listener.getsockname()[1]):
            asking = asyncio.create_task(fetch(upstream, Backend(Role.DECODE, "engine", listener.getsockname()[1])))
            await asyncio.sleep(0)  # it has begun
            asking.cancel()
            await asyncio.wait([asking])
            await Dialing(upstream, at, 0).verdicts()
