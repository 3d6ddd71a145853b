"""Test the resolution of host names with working and failing name servers."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.observe.metrics import Metrics
from proxy.settings import Timeouts
from proxy.upstream import AddressProblem, AddressRules, HostNames, Upstream, UpstreamOptions
from tests.clock import Clock
from tests.upstream.desk import LOOPBACK, NameServer, desk
from tests.upstream.raw import OK, Link, engine, fetch, free_port, new_upstream

UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_literal_is_known_without_a_look_up(clock: Clock, host: str) -> None:
    async with desk(clock) as at:
        assert at.names.known_addresses(host) == (host,)
        clock.now += 1e6
        assert await at.names.find_addresses(host) == (host,)
        assert at.server.asked == []


async def test_name_is_looked_up_once(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["127.0.0.2", "127.0.0.1"])
        assert at.names.known_addresses("engine") == ()
        assert await at.names.find_addresses("engine") == ("127.0.0.2", "127.0.0.1")
        assert at.names.known_addresses("engine") == ("127.0.0.2", "127.0.0.1")
        assert at.server.asked == ["engine"]


async def test_concurrent_callers_share_one_look_up(clock: Clock) -> None:
    async with desk(clock) as at:
        asking = [asyncio.create_task(at.names.find_addresses("engine")) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()  # which must not take the answer from the others
        at.server.say(["127.0.0.1"])
        assert await asyncio.gather(*asking[1:]) == [("127.0.0.1",)] * 2
        assert at.server.asked == ["engine"]


@pytest.mark.fault(37)
async def test_old_address_is_used_while_a_new_one_is_looked_up(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("engine")
        clock.now += 9.5
        assert at.names.known_addresses("engine") == ("127.0.0.1",)
        assert at.server.asked == ["engine"]
        clock.now += 0.5
        for _ in range(2):
            assert await at.names.find_addresses("engine") == ("127.0.0.1",)  # the server has not answered yet
        at.server.say(["127.0.0.2"])
        await at.refreshed("engine")
        assert at.names.known_addresses("engine") == ("127.0.0.2",)
        assert at.server.asked == ["engine", "engine"]


@pytest.mark.fault(37)
async def test_slow_name_server_holds_up_no_other_name(clock: Clock) -> None:
    async with desk(clock, "known", "slow") as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("known")
        slow = asyncio.create_task(at.names.find_addresses("slow"))
        await asyncio.sleep(0)
        clock.now += 100
        assert at.names.known_addresses("known") == ("127.0.0.1",)
        at.server.say(["127.0.0.2"], ["127.0.0.2"])
        assert await slow == ("127.0.0.2",)


@pytest.mark.fault(37)
async def test_failed_look_up_is_logged_once_and_keeps_the_last_address(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy.upstream.names")
    async with desk(clock) as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("engine")
        for _ in range(3):
            clock.now += 10.1
            at.server.say(UNKNOWN)
            assert at.names.known_addresses("engine") == ("127.0.0.1",)
            await at.refreshed("engine")
        assert at.names.known_addresses("engine") == ("127.0.0.1",)
        assert at.errors == 3
        clock.now += 10.1
        at.server.say(["127.0.0.2"])
        at.names.known_addresses("engine")
        await at.refreshed("engine")
        assert at.names.known_addresses("engine") == ("127.0.0.2",)
    assert [record.getMessage() for record in caplog.records] == [
        "names: look-up failed: engine: name or service not known; its last address stays in use",
        "names: look-up works again: engine",
    ]


async def test_name_without_address_is_looked_up_again_soon(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(UNKNOWN)
        for _ in range(3):
            with pytest.raises(AddressProblem, match=r"^name or service not known$"):
                await at.names.find_addresses("engine")
        assert at.server.asked == ["engine"]
        clock.now += 1.1
        at.server.say(["127.0.0.1"])
        assert await at.names.find_addresses("engine") == ("127.0.0.1",)


async def test_first_look_up_is_not_waited_for_for_ever(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.names._WAIT_SECONDS", 0.01)
    async with desk(clock) as at:
        with pytest.raises(AddressProblem, match=r"^timed out$"):
            await at.names.find_addresses("engine")
        monkeypatch.setattr("proxy.upstream.names._WAIT_SECONDS", 60.0)
        at.server.say(["127.0.0.1"])  # what comes later is of use for the next one
        assert await at.names.find_addresses("engine") == ("127.0.0.1",)
        assert at.server.asked == ["engine"]


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".y"])
async def test_impossible_name_is_an_address_problem(clock: Clock, host: str) -> None:
    async with HostNames(
        LOOPBACK, [host], Metrics(), clock=clock
    ) as names:  # asks the system, which raises UnicodeError
        with pytest.raises(AddressProblem, match=r"^not a host name$"):
            await names.find_addresses(host)


async def test_unusual_spelling_of_an_address_is_not_looked_up(clock: Clock) -> None:
    async with desk(clock, "127.1") as at:
        with pytest.raises(AddressProblem, match=r"^not a host name$"):
            at.names.known_addresses("127.1")


async def test_system_resolver_finds_localhost(clock: Clock) -> None:
    async with HostNames(LOOPBACK, [], Metrics(), clock=clock) as names:
        assert set(await names.find_addresses("localhost")) <= {"127.0.0.1", "::1"}


# Where instances may be

FORBIDDEN = r"^its address is not allowed by admin.networks$"


async def test_added_instance_must_be_where_the_rules_allow(clock: Clock) -> None:
    async with desk(clock, "configured") as at:
        at.server.say(["169.254.169.254"])
        with pytest.raises(AddressProblem, match=FORBIDDEN):
            await at.names.find_addresses("added")
        with pytest.raises(AddressProblem, match=FORBIDDEN):
            at.names.known_addresses("8.8.8.8")
        at.server.say(["8.8.8.8"])
        assert await at.names.find_addresses("configured") == ("8.8.8.8",)


async def test_of_several_addresses_only_the_allowed_are_used(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["169.254.169.254", "127.0.0.1", "8.8.8.8"])
        assert await at.names.find_addresses("added") == ("127.0.0.1",)


async def test_name_that_moves_to_a_forbidden_address_is_not_followed(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("added")
        clock.now += 10.1
        at.server.say(["169.254.169.254"])
        at.names.known_addresses("added")
        await at.refreshed("added")
        with pytest.raises(AddressProblem, match=FORBIDDEN):
            at.names.known_addresses("added")


async def test_new_rules_apply_to_known_names(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("added")
        at.names.set_rules(AddressRules([]), ["other"])
        with pytest.raises(AddressProblem, match=FORBIDDEN):
            at.names.known_addresses("added")
        at.names.set_rules(AddressRules([]), ["added"])
        assert at.names.known_addresses("added") == ("127.0.0.1",)


async def test_rules_check_an_address_once(clock: Clock) -> None:
    asked: list[str] = []

    class Rules(AddressRules):
        def allows_address(self, address: str) -> bool:
            asked.append(address)
            return super().allows_address(address)

    async with desk(clock) as at:
        at.names.set_rules(Rules(["127.0.0.0/8"]), [])
        for _ in range(3):
            assert at.names.known_addresses("127.0.0.3") == ("127.0.0.3",)
    assert asked == ["127.0.0.3"]


async def test_number_of_remembered_names_is_limited(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.names._MAX_NAMES", 2)
    async with desk(clock) as at:
        for host in ("a", "b", "c", "a"):
            at.server.say(["127.0.0.1"])
            assert await at.names.find_addresses(host) == ("127.0.0.1",)
        assert at.server.asked == ["a", "b", "c", "a"]


# Its end


async def test_names_end_their_threads_at_the_end(clock: Clock) -> None:
    async with desk(clock) as at:
        for host in ("a", "b", "c"):
            at.server.say(["127.0.0.1"])
            await at.names.find_addresses(host)
        threads = at.names._threads
        assert [thread.name for thread in threads] == ["names-0", "names-1"]
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
    assert not any(thread.is_alive() for thread in threads)


async def test_leaving_does_not_wait_for_a_name_server(clock: Clock) -> None:
    server = NameServer()
    async with HostNames(LOOPBACK, [], Metrics(), clock=clock, look_up=server) as names:
        waiting = asyncio.create_task(names.find_addresses("stuck"))
        names.known_addresses("another")
        for _ in range(2):
            await asyncio.to_thread(server.is_asked.acquire, timeout=60)
        names.known_addresses("queued")
        threads = names._threads
    assert all(thread.daemon for thread in threads)
    with pytest.raises(AddressProblem):
        await waiting
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    server.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
    assert "queued" not in server.asked
    await asyncio.sleep(0)  # results of the threads are ignored now
    assert problems == []


# Connecting


async def test_upstream_connects_to_the_address_and_names_the_host(clock: Clock) -> None:
    heads: list[bytes] = []

    async def script(link: Link) -> None:
        heads.append((await link.request())[0])
        link.send(OK)

    async with desk(clock) as at, engine(script) as server, new_upstream(names=at.names) as upstream:
        at.server.say(["127.0.0.1"])
        assert await fetch(upstream, Backend(Role.DECODE, "engine.invalid", server.port)) == b"ok"
        assert b"\r\nHost: engine.invalid:%d\r\n" % server.port in heads[0]


async def test_upstream_tries_one_address_after_the_other(clock: Clock) -> None:
    async with desk(clock) as at, engine(Link.answer) as server, new_upstream(names=at.names) as upstream:
        at.server.say(["127.0.0.3", "127.0.0.2", "127.0.0.1"])  # the engine listens on the last one only
        assert await fetch(upstream, Backend(Role.DECODE, "engine", server.port)) == b"ok"


@pytest.mark.fault(71)
async def test_upstream_leaves_an_address_that_has_left_the_name(clock: Clock) -> None:
    """However steady the traffic is: an idle connection is asked whether it still leads where the name does."""

    async def keeps_serving(link: Link) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await link.answer()

    async with (
        desk(clock) as at,
        engine(keeps_serving) as old,
        engine(keeps_serving, host="127.0.0.2", port=old.port) as new,
        Upstream(
            Timeouts(), EngineKeys(None), at.names, UpstreamOptions(sweep_seconds=3600.0, clock=clock)
        ) as upstream,
    ):
        backend = Backend(Role.DECODE, "engine", old.port)
        at.server.say([old.host])
        for _ in range(22):
            assert await fetch(upstream, backend) == b"ok"
            (idle,) = upstream._idle[backend.key]
            assert idle.address == old.host
            clock.now += 0.5
        at.server.say([new.host])
        await at.refreshed("engine")
        assert await fetch(upstream, backend) == b"ok"
        (idle,) = upstream._idle[backend.key]
        assert idle.address == new.host


@pytest.mark.fault(71)
async def test_upstream_stays_with_an_address_while_its_name_cannot_be_looked_up(clock: Clock) -> None:
    async def serves_thrice(link: Link) -> None:
        for _ in range(3):
            await link.answer()

    async with (
        desk(clock) as at,
        engine(serves_thrice) as server,
        Upstream(
            Timeouts(), EngineKeys(None), at.names, UpstreamOptions(sweep_seconds=3600.0, clock=clock)
        ) as upstream,
    ):
        backend = Backend(Role.DECODE, "engine", server.port)
        at.server.say([server.host], UNKNOWN)
        await fetch(upstream, backend)
        clock.now += 10.1
        at.names.known_addresses("engine")
        await at.refreshed("engine")
        upstream._idle[backend.key][0].usable_until = clock.now + 1
        for _ in range(2):
            assert await fetch(upstream, backend) == b"ok"


async def connect_message(upstream: Any, backend: Backend) -> str:
    with pytest.raises(UpstreamError) as failed:
        await fetch(upstream, backend)
    assert failed.value.failure is Failure.CONNECT
    return failed.value.message


async def test_upstream_tells_why_there_is_no_address(clock: Clock) -> None:
    async with desk(clock) as at, new_upstream(names=at.names) as upstream:
        at.server.say(UNKNOWN)
        assert await connect_message(upstream, Backend(Role.DECODE, "a", 1)) == (
            "decode instance: cannot connect (name or service not known)"
        )
        assert await connect_message(upstream, Backend(Role.DECODE, "169.254.169.254", 1)) == (
            "decode instance: cannot connect (its address is not allowed by admin.networks)"
        )
        at.server.say(["127.0.0.2", "127.0.0.1"])
        assert await connect_message(upstream, Backend(Role.DECODE, "refused", free_port())) == (
            "decode instance: cannot connect (connection refused)"
        )


async def test_upstream_waits_for_a_name_no_longer_than_for_a_connection(clock: Clock) -> None:
    async with desk(clock) as at, new_upstream(names=at.names, connect_seconds=0.05) as upstream:
        assert await connect_message(upstream, Backend(Role.DECODE, "slow", 1)) == (
            "decode instance: cannot connect (timed out)"
        )


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".y"])
async def test_upstream_without_names_survives_impossible_hosts(host: str) -> None:
    async with new_upstream() as upstream:
        assert await connect_message(upstream, Backend(Role.DECODE, host, 1)) == (
            "decode instance: cannot connect (not a host name)"
        )
