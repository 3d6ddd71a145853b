"""Endpoints at which instances publish KV events, by the settings."""

from __future__ import annotations

import pytest

from proxy.common.backend import Backend, Role
from proxy.fleet.kv_events.messages import EventSource
from proxy.fleet.kv_events.subscriptions import choose_address, configured_publishers, event_sources_at
from proxy.settings.fleet import KvEvents
from proxy.upstream import AddressRules
from proxy.wire.kv_events import EventPublisher
from tests.clock import Clock
from tests.upstream.desk import desk


def test_ranks_publish_at_consecutive_ports() -> None:
    settings = KvEvents(endpoint="tcp://*:+1000", replay_endpoint="tcp://*:5657", topic="kv", ranks=2)
    told = configured_publishers(settings, Backend(Role.PREFILL, "a", 7100))
    assert told == [EventPublisher(8100, 5657, "kv"), EventPublisher(8101, 5658, "kv")]


def test_ports_out_of_range_are_rejected() -> None:
    settings = KvEvents(endpoint="tcp://*:+1000", ranks=2)
    configured_publishers(settings, Backend(Role.PREFILL, "a", 64534))
    with pytest.raises(ValueError, match="2 ranks have no ports from 65535 on"):
        configured_publishers(settings, Backend(Role.PREFILL, "a", 64535))


def test_endpoints_use_the_resolved_address() -> None:
    told = [EventPublisher(5557, 5657, "kv"), EventPublisher(5558, None, "")]
    backend = Backend(Role.PREFILL, "a", 7100)
    assert event_sources_at("10.0.0.1", backend, told) == [
        EventSource("prefill a 7100", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "kv"),
        EventSource("prefill a 7100", "tcp://10.0.0.1:5558", None, ""),
    ]
    assert event_sources_at("::1", backend, told[1:]) == [EventSource("prefill a 7100", "tcp://[::1]:5558", None, "")]


async def test_subscription_keeps_its_address_while_the_name_has_it(clock: Clock) -> None:
    async with desk(clock) as at:
        assert choose_address(at.names, "engine", None) is None
        at.server.say(["::1", "127.0.0.2", "127.0.0.1"])
        await at.names.find_addresses("engine")
        assert choose_address(at.names, "engine", None) == "127.0.0.2"
        for found, expected in (
            (["127.0.0.1", "127.0.0.2"], "127.0.0.2"),
            (["127.0.0.1"], "127.0.0.1"),
            (["::1"], "::1"),
        ):
            clock.now += 60
            at.server.say(found)
            at.names.known_addresses("engine")
            await at.refreshed("engine")
            assert choose_address(at.names, "engine", "127.0.0.2") == expected


async def test_addresses_outside_the_allowed_networks_are_not_used(clock: Clock) -> None:
    async with desk(clock) as at:
        at.server.say(["127.0.0.1"])
        await at.names.find_addresses("engine")
        assert choose_address(at.names, "engine", None) == "127.0.0.1"
        at.names.set_rules(AddressRules(["10.0.0.0/8"]), [])
        assert choose_address(at.names, "engine", "127.0.0.1") is None
