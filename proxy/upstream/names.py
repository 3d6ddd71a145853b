"""Where instances are: host names become addresses here, for everything that connects to an instance.

A name is looked up in a thread of our own, so that slow name servers hold up nothing else. From then on it is known:
its last good addresses are used at once, and looked up again in the background when they are older than a few seconds.
Whoever connects gets addresses that were checked just then, and connects to them and not to the name again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from proxy.settings import is_literal
from proxy.upstream.addresses import is_odd_literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import TracebackType

    from proxy.observe.metrics import Metrics
    from proxy.upstream.addresses import AddressRules

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

    def known(self, host: str) -> tuple[str, ...]:
        """Addresses to try in this order, as far as they can be told at once; none: `find` has to be waited for.

        Raises AddressProblem when the host must not be there.
        """
        name = self._refreshed(host)
        return self._checked(host, name) if name.addresses else ()

    def has_left(self, host: str, address: str) -> bool:
        """Whether an address that was this name's is known not to be so any more."""
        name = self._refreshed(host)
        return bool(name.addresses) and address not in name.addresses

    async def find(self, host: str) -> tuple[str, ...]:
        """Addresses to try in this order, never none. A first look-up is waited for, but not for long.

        Raises AddressProblem.
        """
        known = self.known(host)
        if known:
            return known
        name = self._names[host]
        if name.pending is not None:
            await asyncio.wait((name.pending,), timeout=_WAIT_SECONDS)  # cancels nothing: others wait for it, too
        if not name.addresses:
            raise AddressProblem(name.problem or "timed out")
        return self._checked(host, name)

    def check(self, address: str) -> None:
        """Raise AddressProblem unless some instance may have this address."""
        is_configured = address in self._configured or any(
            address in self._names[host].addresses for host in self._configured if host in self._names
        )
        if not is_configured and not self._rules.allows(address):
            raise AddressProblem(_FORBIDDEN)

    def _refreshed(self, host: str) -> _Name:
        """What is known of a name; what is old is looked up again meanwhile. Raises AddressProblem."""
        name = self._names.get(host) or self._meet(host)
        if name.pending is None and self._clock() >= name.due:
            self._begin(host, name)
        return name

    def _meet(self, host: str) -> _Name:
        if is_odd_literal(host):
            raise AddressProblem("not a host name")
        if len(self._names) >= _MAX_NAMES:
            del self._names[next(iter(self._names))]
        name = self._names[host] = _Name((host,), due=math.inf) if is_literal(host) else _Name()
        return name

    def _checked(self, host: str, name: _Name) -> tuple[str, ...]:
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
                self._loop.call_soon_threadsafe(self._told, host, name, addresses, problem)

    def _told(self, host: str, name: _Name, addresses: tuple[str, ...], problem: str) -> None:
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
