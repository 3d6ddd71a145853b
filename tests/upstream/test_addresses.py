"""Test which addresses are allowed for instances that are added at run time."""

from __future__ import annotations

import socket

import pytest

from proxy.settings import Settings, is_ip_address
from proxy.upstream import AddressRules, is_odd_literal

EVERYWHERE = AddressRules(["0.0.0.0/0", "::/0"])

INSIDE = [
    *("10.1.2.3", "192.168.0.9", "127.0.0.1", "100.64.0.1", "::1", "fd00::7", "::ffff:10.0.0.1"),
    *("100.100.100.201", "fd20:ce::255", "fd00:ec3::254", "fd00:1:2:3:a9fe::1"),
]
OUTSIDE = [
    *("8.8.8.8", "172.32.0.1", "2001:db8::1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "2002:a00:1::1"),
    *("168.63.129.17", "192.0.0.193"),
]
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
    "Alibaba Cloud's metadata": "100.100.100.200",
    "Azure's wire server": "168.63.129.16",
    "Oracle Cloud Classic's metadata": "192.0.0.192",
    "AWS' metadata": "fd00:ec2::254",
    "AWS' credentials of pods": "fd00:ec2:0:0::23",
    "Google Cloud's metadata": "fd20:ce::254",
    "Google Cloud's metadata, written out": "FD20:00CE:0000:0000:0000:0000:0000:0254",
    "Oracle Cloud's metadata": "fd00:c1::a9fe:a9fe",
    "Scaleway's metadata": "fd00:42::42",
    "Akamai's metadata": "fd00:a9fe:a9fe::1",
    "Alibaba Cloud's metadata, IPv6": "fd00:100::100:200",
    "metadata, mapped": "::ffff:100.100.100.200",
    "metadata, mapped, in hexadecimal": "::ffff:6464:64c8",
    "metadata, compatible": "::169.254.169.254",
    "metadata, translated": "::ffff:0:100.100.100.200",
    "metadata, 6to4": "2002:a9fe:a9fe::1",
    "Alibaba Cloud's metadata, 6to4": "2002:6464:64c8::",
    "metadata, NAT64": "64:ff9b::a9fe:a9fe",
    "Alibaba Cloud's metadata, NAT64": "64:ff9b::100.100.100.200",
    "metadata, local NAT64, 48 bits": "64:ff9b:1:a9fe:a9:fe00::",
    "metadata, local NAT64, 56 bits": "64:ff9b:1:a9:fe:a9fe::",
    "metadata, local NAT64, 64 bits": "64:ff9b:1::a9:fea9:fe00:0",
    "metadata, local NAT64, 96 bits": "64:ff9b:1::a9fe:a9fe",
    "metadata, NAT64 with an operator's prefix": "fd64:1234::169.254.169.254",
    "credentials of containers, NAT64 with an operator's prefix": "2001:db8:64::169.254.170.2",
    "metadata, Teredo's server": "2001:0:a9fe:a9fe::1",
    "metadata, Teredo's client": "2001:0:808:808::5601:5601",
    "metadata, ISATAP": "fd00::5efe:169.254.1.1",
    "metadata, ISATAP, universal": "2001:db8::200:5efe:100.100.100.200",
    "link-local, NAT64": "64:ff9b::169.254.0.1",
    "a name": "localhost",
    "nothing": "",
    "a number": "2130706433",
}


@pytest.mark.parametrize("address", INSIDE)
def test_by_default_instances_may_be_in_private_networks(address: str) -> None:
    assert AddressRules(Settings().admin.networks).allows_address(address)


@pytest.mark.parametrize("address", OUTSIDE)
def test_by_default_instances_may_not_be_in_public_networks(address: str) -> None:
    assert not AddressRules(Settings().admin.networks).allows_address(address)
    assert EVERYWHERE.allows_address(address)


@pytest.mark.fault(59)
@pytest.mark.parametrize("address", NEVER.values(), ids=NEVER)
def test_forbidden_addresses_are_never_allowed(address: str) -> None:
    assert not EVERYWHERE.allows_address(address)


def test_without_networks_nothing_is_allowed() -> None:
    assert not AddressRules([]).allows_address("127.0.0.1")


ODD = ["2130706433", "0x7f000001", "0X7F000001", "127.1", "127.0.1", "0177.0.0.1", "127.0.0.01", "0x7f.1", "0"]


@pytest.mark.parametrize("host", ODD)
def test_unusual_spelling_of_an_ipv4_address_is_detected(host: str) -> None:
    assert is_odd_literal(host)
    assert not is_ip_address(host)
    # The reason: without a look-up, it is an address to the system.
    assert socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "fd00::7", "engine", "engine-1", "engine.1", "10.xx.xx.1", "7100.engines", "1.2.3.4.5"]
)
def test_usual_addresses_and_names_are_not_odd_literals(host: str) -> None:
    assert not is_odd_literal(host)
