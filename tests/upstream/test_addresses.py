"""Where instances that are added at run time may be."""

from __future__ import annotations

import socket

import pytest

from proxy.settings import Settings
from proxy.upstream import AddressRules, is_odd_literal
from proxy.upstream.addresses import is_literal

EVERYWHERE = AddressRules(["0.0.0.0/0", "::/0"])

INSIDE = ["10.1.2.3", "192.168.0.9", "127.0.0.1", "100.64.0.1", "::1", "fd00::7", "::ffff:10.0.0.1"]
OUTSIDE = ["8.8.8.8", "172.32.0.1", "2001:db8::1", "::ffff:8.8.8.8", "64:ff9b::a00:1"]
NEVER = {
    "the metadata service": "169.254.169.254",
    "link-local": "fe80::1",
    "link-local with its zone": "fe80::1%eth0",
    "multicast": "224.0.0.1",
    "IPv6 multicast": "ff02::1",
    "unspecified": "0.0.0.0",
    "IPv6 unspecified": "::",
    "broadcast": "255.255.255.255",
    "link-local, mapped": "::ffff:169.254.169.254",
    "unspecified, mapped": "::ffff:0.0.0.0",
    "multicast, mapped": "::ffff:e000:1",
    "broadcast, mapped": "::ffff:255.255.255.255",
    "a name": "localhost",
    "nothing": "",
    "a number": "2130706433",
}


@pytest.mark.parametrize("address", INSIDE)
def test_by_default_instances_may_be_in_private_networks(address: str) -> None:
    assert AddressRules(Settings().admin.networks).allows(address)


@pytest.mark.parametrize("address", OUTSIDE)
def test_by_default_instances_may_not_be_elsewhere(address: str) -> None:
    assert not AddressRules(Settings().admin.networks).allows(address)
    assert EVERYWHERE.allows(address)


@pytest.mark.parametrize("address", NEVER.values(), ids=NEVER)
def test_some_addresses_are_never_allowed(address: str) -> None:
    assert not EVERYWHERE.allows(address)


def test_without_networks_nothing_is_allowed() -> None:
    assert not AddressRules([]).allows("127.0.0.1")


ODD = ["2130706433", "0x7f000001", "0X7F000001", "127.1", "127.0.1", "0177.0.0.1", "127.0.0.01", "0x7f.1", "0"]


@pytest.mark.parametrize("host", ODD)
def test_an_address_in_disguise_is_told(host: str) -> None:
    assert is_odd_literal(host)
    assert not is_literal(host)
    # The reason: without a look-up, it is an address to the system.
    assert socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "fd00::7", "engine", "engine-1", "engine.1", "10.xx.xx.1", "7100.engines", "1.2.3.4.5"]
)
def test_an_address_as_it_is_usually_written_or_a_name_is_not_odd(host: str) -> None:
    assert not is_odd_literal(host)
