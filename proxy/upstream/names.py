"""Where instances are: host names become addresses here, for everything that connects to an instance.

A name is looked up in a thread of our own, so that slow name servers hold up nothing else. From then on it is known:
its last good addresses are used at once, and looked up again in the background when they are older than a few seconds.
Whoever connects gets addresses that were checked just then, and connects to them and not to the name again.
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
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from proxy.settings import is_literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from types import TracebackType

    from proxy.observe.metrics import Metrics

logger = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 10.0
_UNKNOWN_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 5.0
_THREADS: Final = 2
# More than there can be instances. A name that was forgotten is looked up once more.
_MAX_NAMES: Final = 4096

_FORBIDDEN: Final = "its address is not allowed by admin.networks"


class AddressProblem(OSError):
    """There is no address to connect to. The text may be shown to clients: it names neither host nor address."""


@dataclass(slots=True, eq=False)
class _Name:
    """What is known of one name. A literal is a name that needs no look-up, ever."""

    addresses: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    """Those of the addresses that the rules allow, which takes long to find out; None: nobody has asked."""
    due: float = -math.inf
    pending: asyncio.Future[None] | None = None
    """Of the look-up under way; it is done when that has ended, well or not."""
    problem: str = ""
    """Of the last look-up; empty: it went well."""


class Names:
    """One worker's knowledge of names. `async with` it; leaving ends its threads, a stuck one as soon as it can."""

    def __init__(
        self,
        rules: AddressRules,
        configured: Collection[str],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        look_up: Callable[[str], tuple[str, ...]] | None = None,
    ) -> None:
        """`configured` hosts may be anywhere, any other where `rules` allow it. `look_up` asks for a name's addresses,
        and is called in a thread; None: it asks the system.
        """
        self._rules = rules
        self._configured = frozenset(configured)
        self._metrics = metrics
        self._clock = clock
        self._look_up = look_up or _ask_system
        self._names: dict[str, _Name] = {}
        self._jobs: queue.SimpleQueue[tuple[str, _Name] | None] = queue.SimpleQueue()
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
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for name in self._names.values():
            if name.pending is not None:
                name.pending.cancel()
                name.pending = None

    def configure(self, rules: AddressRules, configured: Collection[str]) -> None:
        """Change who may be where, for connections from now on."""
        self._rules = rules
        self._configured = frozenset(configured)
        for name in self._names.values():
            name.allowed = None

    def known_addresses(self, host: str) -> tuple[str, ...]:
        """Addresses to try in this order, as far as they can be told at once; none: `find` has to be waited for.

        Raises AddressProblem when the host must not be there.
        """
        name = self._refreshed(host)
        return self._allowed(host, name) if name.addresses else ()

    def is_former_address(self, host: str, address: str) -> bool:
        """Whether an address that was this name's is known not to be so any more."""
        name = self._refreshed(host)
        return bool(name.addresses) and address not in name.addresses

    async def find(self, host: str) -> tuple[str, ...]:
        """Addresses to try in this order, never none. A first look-up is waited for, but not for long.

        Raises AddressProblem.
        """
        known = self.known_addresses(host)
        if known:
            return known
        name = self._names[host]
        if name.pending is not None:
            await asyncio.wait((name.pending,), timeout=_WAIT_SECONDS)  # cancels nothing: others wait for it, too
        if not name.addresses:
            raise AddressProblem(name.problem or "timed out")
        return self._allowed(host, name)

    def check(self, address: str) -> None:
        """Raise AddressProblem unless some instance may have this address."""
        is_configured = address in self._configured or any(
            address in self._names[host].addresses for host in self._configured if host in self._names
        )
        if not is_configured and not self._rules.allows(address):
            raise AddressProblem(_FORBIDDEN)

    def _refreshed(self, host: str) -> _Name:
        """What is known of a name; what is old is looked up again meanwhile. Raises AddressProblem."""
        name = self._names.get(host) or self._add(host)
        if name.pending is None and self._clock() >= name.due:
            self._begin(host, name)
        return name

    def _add(self, host: str) -> _Name:
        if is_odd_literal(host):
            raise AddressProblem("not a host name")
        if len(self._names) >= _MAX_NAMES:
            del self._names[next(iter(self._names))]
        name = self._names[host] = _Name((host,), due=math.inf) if is_literal(host) else _Name()
        return name

    def _allowed(self, host: str, name: _Name) -> tuple[str, ...]:
        if host in self._configured:
            return name.addresses
        if name.allowed is None:
            name.allowed = tuple(filter(self._rules.allows, name.addresses))
        if not name.allowed:
            raise AddressProblem(_FORBIDDEN)
        return name.allowed

    # Looking up

    def _begin(self, host: str, name: _Name) -> None:
        name.pending = self._loop.create_future()
        self._jobs.put((host, name))
        if len(self._threads) < _THREADS:
            # Daemons: the program's end does not wait for name servers.
            thread = threading.Thread(target=self._serve, name=f"names-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        """In a thread, until there is an end to the jobs."""
        while (job := self._jobs.get()) is not None:
            host, name = job
            addresses: tuple[str, ...] = ()
            problem = ""
            try:
                addresses = self._look_up(host)
            except OSError as error:
                problem = connect_problem(error)
            except ValueError:  # from the codec for international names: an empty label, or one that is too long
                problem = "not a host name"
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end_look_up, host, name, addresses, problem)

    def _end_look_up(self, host: str, name: _Name, addresses: tuple[str, ...], problem: str) -> None:
        """A look-up has ended, on the loop again."""
        pending, name.pending = name.pending, None
        if pending is None:
            return  # so have we
        if problem:
            self._metrics.dns_errors_total.inc()
            if not name.problem:
                kept = "its last address stays in use" if name.addresses else "it has no address yet"
                logger.warning("the name %s cannot be looked up (%s); %s", host, problem, kept)
        else:
            name.addresses, name.allowed = addresses, None
            if name.problem:
                logger.info("the name %s can be looked up again", host)
        name.problem = problem
        name.due = self._clock() + (_FRESH_SECONDS if name.addresses else _UNKNOWN_SECONDS)
        pending.set_result(None)


def connect_problem(error: OSError) -> str:
    """Why there is no connection, in the system's words: `connection refused`, `name or service not known` …"""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, AddressProblem):
        return str(error)
    if isinstance(error, socket.gaierror):  # has numbers of its own
        return (error.strerror or "name not found").lower()
    # Not the error's own text, which holds the address.
    return (os.strerror(error.errno) if error.errno else type(error).__name__).lower()


def _ask_system(host: str) -> tuple[str, ...]:
    """Raises OSError, and ValueError for what can be no name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


# Which addresses are allowed
#
# An instance that is added at run time must not lead the gateway to a place that only the gateway can reach, such as a
# cloud's metadata service. Its addresses must be inside networks that the operator names, and some are never allowed.

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
