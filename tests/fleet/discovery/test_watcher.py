"""The roster follows the instances of discovery sources, also when sources fail."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

import pytest

from proxy.balancer.roster import Roster, SourceStates
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.sources import MakeSources
from proxy.fleet.discovery.watcher import OwnAddresses, SourceWatcher, WatcherParts, load_sources_once
from proxy.settings import Settings
from tests.asking import until
from tests.fleet.discovery.listed import Listed

SETTINGS = Settings.model_validate({"prefill": ["p:1"], "decode": ["d:1"]})


def decoder(port: int) -> Backend:
    return Backend(Role.DECODE, "d", port)


class Gateway:
    """A roster with one configured decoder, and a watcher of sources for it."""

    def __init__(self) -> None:
        self.roster = Roster([], [("d", 1)], Scoreboard(slots=4))
        self.states = SourceStates()

    def members(self) -> list[str]:
        return [
            f"{member.backend.port} {'+'.join(member.origins) or 'draining'}"
            for member in self.roster.members_of_role(Role.DECODE)
        ]

    def parts(self, kinds: Mapping[str, MakeSources], own: OwnAddresses | None = None) -> WatcherParts:
        roles = (Role.PREFILL, Role.DECODE)
        return WatcherParts(
            source_kinds=kinds, roster=self.roster, source_states=self.states, roles=roles, own_addresses=own
        )

    @asynccontextmanager
    async def watching(self, **sources: Listed) -> AsyncIterator[SourceWatcher]:
        kinds = {kind: lambda _, source=source: [source] for kind, source in sources.items()}
        async with SourceWatcher(self.parts(kinds), SETTINGS, retry_seconds=0.001) as watcher:
            yield watcher
        assert all(source.watches == 0 for source in sources.values())

    def state(self, origin: str) -> tuple[bool, int, str | None]:
        """Return whether a source has ever succeeded, its number of failures, and its current problem."""
        state = self.states.states_by_origin()[origin]
        return state.succeeded_at is not None, state.failures, state.problem

    async def has(self, *members: str) -> None:
        await until(lambda: self.members() == list(members), f"the members to be {members}")


@pytest.fixture
def gateway(caplog: pytest.LogCaptureFixture) -> Gateway:
    caplog.set_level(logging.INFO, "proxy.discovery")
    return Gateway()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_roster_follows_the_instances_of_a_source(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    listed = Listed(decoder(2))
    async with gateway.watching(listed=listed):
        await gateway.has("1 config", "2 listed:test")
        listed.publish(decoder(1), decoder(3))
        await gateway.has("1 config+listed:test", "2 draining", "3 listed:test")
        listed.publish()
        await gateway.has("1 config", "2 draining", "3 draining")
    assert lines(caplog) == [
        ("INFO", "discovery: added instances: listed:test: decode d:2"),
        ("INFO", "discovery: added instances: listed:test: decode d:3"),
        ("INFO", "discovery: removed instances: listed:test: decode d:2"),
        ("INFO", "discovery: removed instances: listed:test: decode d:3"),
    ]


async def test_last_instances_stay_while_a_source_fails(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    listed = Listed(decoder(2))
    async with gateway.watching(listed=listed):
        await gateway.has("1 config", "2 listed:test")
        caplog.clear()
        listed.fail(OSError("no such name"))
        await until(lambda: caplog.records, "the line about the failure")
        assert gateway.members() == ["1 config", "2 listed:test"]
        has_succeeded, failures, problem = gateway.state("listed:test")
        assert (has_succeeded, failures > 0, problem) == (True, True, "no such name")
        listed.publish(decoder(2))
        await until(lambda: len(caplog.records) > 1, "the line about the recovery")
        assert gateway.state("listed:test")[::2] == (True, None)
    assert lines(caplog) == [
        ("WARNING", "discovery: source failed, and its instances stay: listed:test: no such name"),
        ("INFO", "discovery: source works again: listed:test"),
    ]


async def test_repeated_failures_of_a_source_are_logged_once(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    class Broken(Listed):
        def watch_instances(self):  # type: ignore[no-untyped-def]
            nonlocal tries
            tries += 1
            raise RuntimeError

    async with gateway.watching(listed=Broken()):
        await until(lambda: tries > 3, "some tries")
    assert lines(caplog) == [("WARNING", "discovery: source failed, and its instances stay: listed:test: RuntimeError")]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Backend(Role.PREFILL, "d", 1), "d:1 is already a decode instance"),
        (Backend(Role.ENCODE, "e", 1), "e:1: this gateway has no encode instances"),
    ],
)
async def test_invalid_list_changes_nothing(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, wrong: Backend, why: str
) -> None:
    listed = Listed(decoder(2), wrong)
    async with gateway.watching(listed=listed):
        await until(lambda: caplog.records, "the line about the mistake")
        assert gateway.members() == ["1 config"]
        listed.publish(decoder(2))
        await gateway.has("1 config", "2 listed:test")
    assert lines(caplog)[0] == ("WARNING", f"discovery: source failed, and its instances stay: listed:test: {why}")


async def test_failing_source_does_not_delay_another(gateway: Gateway) -> None:
    failing, other = Listed(), Listed(decoder(2))
    failing.fail(OSError("no such name"))
    async with gateway.watching(failing=failing, other=other):
        await gateway.has("1 config", "2 other:test")


async def test_next_worker_continues_with_the_last_instances(gateway: Gateway) -> None:
    async with gateway.watching(listed=Listed(decoder(2), decoder(3))):
        await gateway.has("1 config", "2 listed:test", "3 listed:test")
    async with gateway.watching(listed=Listed(decoder(3))):
        await gateway.has("1 config", "2 draining", "3 listed:test")


async def test_source_is_stopped_when_a_reload_removes_it(gateway: Gateway) -> None:
    listed, wanted = Listed(decoder(2)), True
    kinds = {"listed": lambda _: [listed] if wanted else []}
    async with SourceWatcher(gateway.parts(kinds), SETTINGS) as watcher:
        await gateway.has("1 config", "2 listed:test")
        watcher.apply_settings(SETTINGS)
        assert gateway.members() == ["1 config", "2 listed:test"]
        wanted = False
        watcher.apply_settings(SETTINGS)
        assert gateway.members() == ["1 config", "2 draining"]
        await until(lambda: listed.watches == 0, "the end of its watch")
        assert gateway.states.states_by_origin() == {}


async def test_instance_stays_when_it_moves_between_sources(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    sources = [Listed(decoder(2), decoder(3))]
    kinds = {"listed": lambda _: sources}
    async with SourceWatcher(gateway.parts(kinds), SETTINGS, retry_seconds=0.001) as watcher:
        await gateway.has("1 config", "2 listed:test", "3 listed:test")
        new = Listed(decoder(2))
        new.source_name = "new"
        new.fail(OSError("not yet"))
        sources[:] = [new]
        watcher.apply_settings(SETTINGS)
        await until(lambda: gateway.state("listed:new")[1], "the new one to fail")
        assert gateway.members() == ["1 config", "2 listed:test", "3 listed:test"]
        caplog.clear()
        new.publish(decoder(2))
        await gateway.has("1 config", "2 listed:new", "3 draining")
    assert [line for _, line in lines(caplog) if "removed" in line] == [
        "discovery: removed instances: listed:test: decode d:3"
    ]


async def test_look_once_reads_all_sources_concurrently() -> None:
    meeting = asyncio.Barrier(2)

    class Met(Listed):
        """Yields its instances only while another source is read, too."""

        async def watch_instances(self) -> AsyncGenerator[tuple[Backend, ...], None]:
            await meeting.wait()
            async with aclosing(super().watch_instances()) as lists:
                async for instances in lists:
                    yield instances

    gateway = Gateway()
    failing = Listed()
    failing.fail(OSError("gone"))
    sources = {"one": Met(decoder(2)), "gone": failing, "other": Met(decoder(3))}
    kinds = {kind: lambda _, source=source: [source] for kind, source in sources.items()}
    assert await load_sources_once(kinds, gateway.roster, SETTINGS, within_seconds=5.0) == {"gone:test": "gone"}
    assert gateway.members() == ["1 config", "2 one:test", "3 other:test"]
    assert all(source.watches == 0 for source in sources.values())


@pytest.mark.fault(110)
@pytest.mark.parametrize("host", ["203.0.113.7", "169.254.169.254", "2130706433", "fe80::1"])
async def test_list_with_an_address_that_is_not_allowed_is_rejected(gateway: Gateway, host: str) -> None:
    listed = Listed(decoder(2))
    async with gateway.watching(listed=listed):
        await gateway.has("1 config", "2 listed:test")
        listed.publish(decoder(3), Backend(Role.DECODE, host, 4))
        await until(lambda: gateway.state("listed:test")[2], "the failure")
        assert str(gateway.state("listed:test")[2]).endswith("the address is not in admin.networks")
        assert gateway.members() == ["1 config", "2 listed:test"]


@pytest.mark.fault(110)
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
async def test_list_with_the_gateways_own_address_is_rejected(bound: str) -> None:
    with socket.create_server((bound, 0)) as listener:
        port = listener.getsockname()[1]
        own = OwnAddresses([listener])
        gateway = Gateway()
        listed = Listed(Backend(Role.DECODE, "localhost", port))
        kinds = {"listed": lambda _: [listed]}
        watcher = SourceWatcher(gateway.parts(kinds, own), SETTINGS, retry_seconds=0.001)
        async with watcher:
            await until(lambda: gateway.state("listed:test")[2], "the failure")
            assert gateway.state("listed:test")[2] == f"localhost:{port}: the gateway itself listens there"
        assert gateway.members() == ["1 config"]
        assert not own.is_own_address("127.0.0.1", port + 1)
        assert not own.is_own_address("203.0.113.7", port)
