"""Resolves host names of instances, and checks their addresses, for all connections to instances.

Names are looked up in separate threads, so slow name servers block nothing else. After the first look-up, the last good
addresses are used at once, and refreshed in the background when they are older than a few seconds. Callers connect to
the checked addresses and not to the name, which could change between check and connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import queue
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from proxy.settings import is_ip_address
from proxy.settings.tls import describe_tls_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from types import TracebackType

    from proxy.observe.metrics import Metrics

logger = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 10.0
_UNKNOWN_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 5.0
_THREADS: Final = 2
# More than the number of instances. A forgotten name is looked up again.
_MAX_NAMES: Final = 4096

_FORBIDDEN: Final = "its address is not allowed by admin.networks"


class AddressProblem(OSError):
    """An instance has no address to which the gateway may connect. The text names neither host nor address."""


@dataclass(slots=True, eq=False)
class _HostName:
    """The state of one host name. A literal address counts as a name that needs no look-up."""

    known_addresses: tuple[str, ...] = ()
    """Addresses of the last successful look-up."""
    allowed_addresses: tuple[str, ...] | None = None
    """Addresses that the rules allow; None if they were not checked yet."""
    next_look_up_at: float = -math.inf
    """Clock time of the next look-up."""
    pending_look_up: asyncio.Future[None] | None = None
    """A future that ends with the look-up under way, even if the look-up fails; None if none is under way."""
    look_up_problem: str = ""
    """The error of the last look-up; empty if it succeeded."""


class HostNames:
    """The host names that one worker uses, and their addresses. Leaving the `async with` block ends its threads."""

    def __init__(
        self,
        rules: AddressRules,
        configured: Collection[str],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        look_up: Callable[[str], tuple[str, ...]] | None = None,
    ) -> None:
        """Create the names.

        Args:
            rules: Which addresses are allowed for hosts that are not configured.
            configured: Hosts of the configuration, which may have any address.
            metrics: Counts failed look-ups.
            clock: Returns the time in seconds.
            look_up: Returns the addresses of a name; called in a thread. None: the resolver of the system.
        """
        self._address_rules = rules
        self._configured_hosts = frozenset(configured)
        self._metrics = metrics
        self._clock = clock
        self._look_up = look_up or _look_up_in_system
        self._names_by_host: dict[str, _HostName] = {}
        self._look_up_queue: queue.SimpleQueue[tuple[str, _HostName] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(queue.Empty):
            while True:
                self._look_up_queue.get_nowait()
        for _ in self._threads:
            self._look_up_queue.put(None)
        for name in self._names_by_host.values():
            if name.pending_look_up is not None:
                name.pending_look_up.cancel()
                name.pending_look_up = None

    def set_rules(self, rules: AddressRules, configured: Collection[str]) -> None:
        """Change which addresses are allowed for new connections."""
        self._address_rules = rules
        self._configured_hosts = frozenset(configured)
        for name in self._names_by_host.values():
            name.allowed_addresses = None

    def known_addresses(self, host: str) -> tuple[str, ...]:
        """Return the known addresses in the order in which to try them; empty if `find_addresses` must look it up.

        Raises AddressProblem if the host has no allowed address.
        """
        name = self._get_and_refresh(host)
        return self._find_allowed_addresses(host, name) if name.known_addresses else ()

    def is_former_address(self, host: str, address: str) -> bool:
        """Return whether the name is known to have other addresses now."""
        name = self._get_and_refresh(host)
        return bool(name.known_addresses) and address not in name.known_addresses

    async def find_addresses(self, host: str) -> tuple[str, ...]:
        """Return at least one address, in the order in which to try them. Waits up to 5 s for the first look-up.

        Raises AddressProblem.
        """
        known = self.known_addresses(host)
        if known:
            return known
        name = self._names_by_host[host]
        if name.pending_look_up is not None:
            # Other callers may wait for it, so it is not cancelled.
            await asyncio.wait((name.pending_look_up,), timeout=_WAIT_SECONDS)
        if not name.known_addresses:
            raise AddressProblem(name.look_up_problem or "timed out")
        return self._find_allowed_addresses(host, name)

    def check_address(self, address: str) -> None:
        """Raise AddressProblem if no instance may have this address."""
        is_configured = address in self._configured_hosts or any(
            address in self._names_by_host[host].known_addresses
            for host in self._configured_hosts
            if host in self._names_by_host
        )
        if not is_configured and not self._address_rules.allows_address(address):
            raise AddressProblem(_FORBIDDEN)

    def _get_and_refresh(self, host: str) -> _HostName:
        """Return the state of a name, and begin a look-up if it is old. Raises AddressProblem."""
        name = self._names_by_host.get(host) or self._add_name(host)
        if name.pending_look_up is None and self._clock() >= name.next_look_up_at:
            self._begin_look_up(host, name)
        return name

    def _add_name(self, host: str) -> _HostName:
        if is_odd_literal(host):
            raise AddressProblem("not a host name")
        if len(self._names_by_host) >= _MAX_NAMES:
            del self._names_by_host[next(iter(self._names_by_host))]
        name = self._names_by_host[host] = (
            _HostName((host,), next_look_up_at=math.inf) if is_ip_address(host) else _HostName()
        )
        return name

    def _find_allowed_addresses(self, host: str, name: _HostName) -> tuple[str, ...]:
        if host in self._configured_hosts:
            return name.known_addresses
        if name.allowed_addresses is None:
            name.allowed_addresses = tuple(filter(self._address_rules.allows_address, name.known_addresses))
        if not name.allowed_addresses:
            raise AddressProblem(_FORBIDDEN)
        return name.allowed_addresses

    # Looking up

    def _begin_look_up(self, host: str, name: _HostName) -> None:
        name.pending_look_up = self._loop.create_future()
        self._look_up_queue.put((host, name))
        if len(self._threads) < _THREADS:
            # Daemon threads do not delay the end of the process.
            thread = threading.Thread(target=self._run_look_up_thread, name=f"names-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_look_up_thread(self) -> None:
        """Look up names in a thread, until the queue returns None."""
        while (job := self._look_up_queue.get()) is not None:
            host, name = job
            addresses: tuple[str, ...] = ()
            problem = ""
            try:
                addresses = self._look_up(host)
            except OSError as error:
                problem = describe_connect_error(error)
            except ValueError:  # from the codec for international names: an empty label, or one that is too long
                problem = "not a host name"
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end_look_up, host, name, addresses, problem)

    def _end_look_up(self, host: str, name: _HostName, addresses: tuple[str, ...], problem: str) -> None:
        """Record the result of a look-up. Runs on the event loop."""
        pending, name.pending_look_up = name.pending_look_up, None
        if pending is None:
            return  # this object was closed
        if problem:
            self._metrics.dns_errors_total.inc()
            if not name.look_up_problem:
                kept = "its last address stays in use" if name.known_addresses else "it has no address yet"
                logger.warning("names: look-up failed: %s: %s; %s", host, problem, kept)
        else:
            name.known_addresses, name.allowed_addresses = addresses, None
            if name.look_up_problem:
                logger.info("names: look-up works again: %s", host)
        name.look_up_problem = problem
        name.next_look_up_at = self._clock() + (_FRESH_SECONDS if name.known_addresses else _UNKNOWN_SECONDS)
        pending.set_result(None)


def describe_connect_error(error: OSError) -> str:
    """Return the reason for a failed connection in the words of the system, such as `connection refused`."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, AddressProblem):
        return str(error)
    if isinstance(error, ssl.SSLError):
        return f"TLS: {describe_tls_problem(error)}"
    if isinstance(error, socket.gaierror):  # its error numbers are not those of errno
        return (error.strerror or "name not found").lower()
    # The text of the error is not used, because it contains the address.
    return (os.strerror(error.errno) if error.errno else type(error).__name__).lower()


def _look_up_in_system(host: str) -> tuple[str, ...]:
    """Look a name up with the resolver of the system. Raises OSError, and ValueError for invalid names."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


# Which addresses are allowed
#
# An instance that is added at run time must not lead the gateway to a place that only the gateway can reach, such as a
# cloud's metadata service. Its addresses must be inside networks that the operator names, and some are never allowed.

_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")

# Addresses outside the link-local networks where clouds serve or control the credentials of a machine. All link-local
# addresses are forbidden anyway. From the data sources of cloud-init and the documents of the providers.
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
# Link-local metadata addresses, which are also searched behind every prefix that may translate to IPv4: those of most
# clouds, of the credentials of containers and pods at AWS, of Scaleway and of Tencent Cloud.
_LINK_LOCAL_METADATA: Final = frozenset(
    map(
        ipaddress.IPv4Address,
        ("169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.42.42", "169.254.0.23"),
    )
)
# Prefixes of 96 bits that are followed by an IPv4 address: compatible (RFC 4291 2.5.5.1), translated (RFC 2765 2.1) and
# NAT64 (RFC 6052 2.1).
_PREFIXES: Final = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215; operators choose the length of theirs
_ISATAP: Final = (0x5EFE, 0x02005EFE)  # RFC 5214 6.1, the first half of the interface's part
# Addresses that inet_aton(3) and getaddrinfo read: up to four numbers, each decimal, octal or hexadecimal.
_NUMBERS: Final = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}", re.IGNORECASE)


class AddressRules:
    """Decides which addresses are allowed for instances that are added at run time."""

    def __init__(self, networks: Sequence[str]) -> None:
        """Store the allowed networks, such as `10.0.0.0/8`. Raises ValueError for an invalid network."""
        self._allowed_networks = tuple(ipaddress.ip_network(network) for network in networks)

    def allows_address(self, address: str) -> bool:
        """Return whether an address is inside one of the networks and not forbidden.

        Link-local, multicast, unspecified and broadcast addresses and the metadata services of clouds are forbidden. A
        mapped IPv4 address (`::ffff:10.0.0.1`) counts as that IPv4 address. An IPv6 address that leads to an IPv4
        address in another way must be inside the networks itself, and must not lead to a forbidden address.
        """
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if _is_never_allowed(ip):
            return False
        if isinstance(ip, ipaddress.IPv6Address) and any(map(_is_never_allowed, _find_embedded_ipv4(ip))):
            return False
        return any(ip in network for network in self._allowed_networks)


def _is_never_allowed(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
        return True
    return any(ip in network for network in _METADATA)


def _find_embedded_ipv4(ip: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """Yield the IPv4 addresses to which an IPv6 address may lead, except a mapped one."""
    last = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    is_isatap = (int(ip) >> 32) & 0xFFFF_FFFF in _ISATAP
    # Operators can give a translator any prefix.
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
    """Return whether a host is an IPv4 address in an unusual spelling.

    `2130706433`, `0x7f000001`, `127.1` and `0177.0.0.1` are not dotted quads, but getaddrinfo reads all of them as
    127.0.0.1.
    """
    return _NUMBERS.fullmatch(host) is not None and not is_ip_address(host)
