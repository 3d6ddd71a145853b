"""Whether this gateway listens at an address. As an instance it would send its requests to itself."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from proxy.settings import canonical_host, is_literal

if TYPE_CHECKING:
    from collections.abc import Iterable


class OwnAddresses:
    """Those of some listening sockets."""

    def __init__(self, listeners: Iterable[socket.socket]) -> None:
        self._places = {(canonical_host(host), port) for host, port, *_ in (each.getsockname() for each in listeners)}

    def has(self, host: str, port: int) -> bool:
        """Whether this gateway listens there. False for names, which are not looked up."""
        host = canonical_host(host)
        if (host, port) in self._places:
            return True
        return any(port == own and _is_any(address) for address, own in self._places) and _is_of_this_host(host)


def _is_any(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified


def _is_of_this_host(host: str) -> bool:
    """Whether an interface of this host has this address: a socket can be bound to such addresses only."""
    if not is_literal(host):
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True
