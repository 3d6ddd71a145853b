"""Which addresses an instance may have. Pure.

An instance that is added at run time must not lead the gateway to where only the gateway can go: a cloud's metadata
service, say. So its addresses have to be inside networks that the operator names, and some never are allowed.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")
# What inet_aton(3) reads, and so getaddrinfo: up to four numbers, each decimal, octal or hexadecimal.
_NUMBERS: Final = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}", re.IGNORECASE)


class AddressRules:
    """Decides for instances that are added at run time; those of the configuration are free."""

    def __init__(self, networks: Sequence[str]) -> None:
        """`networks` like `10.0.0.0/8`. Raises ValueError for what is none."""
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def allows(self, address: str) -> bool:
        """Whether it is inside one of the networks, and neither link-local, multicast, unspecified nor broadcast.

        An IPv4 address inside an IPv6 one (`::ffff:10.0.0.1`) is judged as itself. What is no address is not allowed.
        """
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
            return False
        return any(ip in network for network in self._networks)


def is_literal(host: str) -> bool:
    """Whether a host is an address and not a name: a dotted quad, or an IPv6 address without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_odd_literal(host: str) -> bool:
    """Whether a host is an IPv4 address in disguise: `2130706433`, `0x7f000001`, `127.1` and `0177.0.0.1` are no dotted
    quads, and yet getaddrinfo takes all of them for 127.0.0.1.
    """
    return _NUMBERS.fullmatch(host) is not None and not is_literal(host)
