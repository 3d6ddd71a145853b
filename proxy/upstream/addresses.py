"""Which addresses an instance may have. Pure.

An instance that is added at run time must not lead the gateway to where only the gateway can go: a cloud's metadata
service, say. So its addresses have to be inside networks that the operator names, and some never are allowed.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

from proxy.settings import is_literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")

# Where clouds hand out a machine's credentials, or steer it, outside the link-local networks, which are refused whole.
# From the data sources of cloud-init and the providers' own documents.
_METADATA: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure's wire server
            "192.0.0.192",  # Oracle Cloud Classic
            "fd00:ec2::/32",  # AWS: metadata, credentials of pods, keys
            "fd20:ce::254",  # Google Cloud
            "fd00:c1::a9fe:a9fe",  # Oracle Cloud
            "fd00:42::42",  # Scaleway
            "fd00:a9fe:a9fe::1",  # Akamai
            "fd00:100::100:200",  # Alibaba Cloud
        ),
    )
)
# Of the link-local ones, those that are worth a look for behind whatever prefix translates to IPv4: of most clouds, of
# the credentials of AWS' containers and pods, of Scaleway and of Tencent Cloud.
_LINK_LOCAL_METADATA: Final = frozenset(
    map(
        ipaddress.IPv4Address,
        ("169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.42.42", "169.254.0.23"),
    )
)
# Prefixes of 96 bits behind which an IPv4 address stands: compatible (RFC 4291 2.5.5.1), translated (RFC 2765 2.1) and
# NAT64 (RFC 6052 2.1).
_PREFIXES: Final = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215; operators choose the length of theirs
_ISATAP: Final = (0x5EFE, 0x02005EFE)  # RFC 5214 6.1, the first half of the interface's part
# What inet_aton(3) reads, and so getaddrinfo: up to four numbers, each decimal, octal or hexadecimal.
_NUMBERS: Final = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}", re.IGNORECASE)


class AddressRules:
    """Decides for instances that are added at run time; those of the configuration are free."""

    def __init__(self, networks: Sequence[str]) -> None:
        """`networks` like `10.0.0.0/8`. Raises ValueError for what is none."""
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def allows(self, address: str) -> bool:
        """Whether it is inside one of the networks, and neither link-local, multicast, unspecified nor broadcast, nor
        a cloud's metadata service.

        A mapped IPv4 address (`::ffff:10.0.0.1`) is judged as itself. An IPv6 address that leads to an IPv4 one in any
        other way has to be inside the networks itself, and must not lead to what is never allowed. What is no address
        is not allowed.
        """
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if _is_never_allowed(ip):
            return False
        if isinstance(ip, ipaddress.IPv6Address) and any(map(_is_never_allowed, _embedded(ip))):
            return False
        return any(ip in network for network in self._networks)


def _is_never_allowed(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
        return True
    return any(ip in network for network in _METADATA)


def _embedded(ip: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """The IPv4 addresses to which an IPv6 address may lead, but for a mapped one."""
    last = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    is_isatap = (int(ip) >> 32) & 0xFFFF_FFFF in _ISATAP
    # A translator has a prefix of its own wherever an operator gives it one.
    is_metadata = last in _LINK_LOCAL_METADATA or any(last in network for network in _METADATA)
    if is_metadata or is_isatap or ip in _LOCAL_NAT64 or any(ip in prefix for prefix in _PREFIXES):
        yield last
    if ip in _LOCAL_NAT64:  # with a prefix of 48, 56 or 64 bits; bits 64 to 71 are left out (RFC 6052 2.2)
        bits = int(ip)
        for length in (48, 56, 64):
            before = 64 - length  # bits of the address in front of the gap
            high = (bits >> 64) & ((1 << before) - 1)
            low = (bits >> (56 - (32 - before))) & ((1 << (32 - before)) - 1)
            yield ipaddress.IPv4Address((high << (32 - before)) | low)
    if ip.sixtofour is not None:
        yield ip.sixtofour
    yield from ip.teredo or ()


def is_odd_literal(host: str) -> bool:
    """Whether a host is an IPv4 address in disguise: `2130706433`, `0x7f000001`, `127.1` and `0177.0.0.1` are no dotted
    quads, and yet getaddrinfo takes all of them for 127.0.0.1.
    """
    return _NUMBERS.fullmatch(host) is not None and not is_literal(host)
