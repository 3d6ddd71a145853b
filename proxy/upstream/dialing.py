"""Connects to one of several addresses of a name, as in "Happy Eyeballs" (RFC 8305).

The attempts start a moment apart, beginning with the address that worked last. The first connection is used. The other
attempts continue until they connect or fail, because only that distinguishes a dead address from a slow one.
aiohappyeyeballs, which aiohttp uses, cancels them and so cannot report dead addresses.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proxy.upstream.names import describe_connect_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proxy.upstream.connection import EngineConnection

    Connect = Callable[[str], Awaitable[EngineConnection]]
    """Connects to one address. Raises OSError."""

logger = logging.getLogger(__name__)

_STAGGER_SECONDS: Final = 0.25  # the delay that RFC 8305 recommends
_LOOK_AGAIN_SECONDS: Final = 30.0
# More than the number of names. A forgotten address is tried again.
_MAX_REMEMBERED: Final = 4096


class Dialer:
    """Connects to names with several addresses, and remembers for one worker which addresses accept connections.

    An address counts as dead only while another address of the same name works. Otherwise the engine is down.
    """

    def __init__(self, clock: Callable[[], float], is_news: Callable[[str, str], bool]) -> None:
        """Create the dialer.

        Args:
            clock: Returns the time in seconds.
            is_news: Returns whether a log message about a subject differs from the last one, so that it must be logged.
        """
        self._clock = clock
        self._is_news = is_news
        self._last_good_address: dict[tuple[str, int], str] = {}
        """The address that worked last, by name and port, for names with several addresses."""
        self._dead_addresses: dict[tuple[str, str], dict[int, float]] = {}
        """Ports that accept no connections, and the clock time of the next attempt, by name and address."""
        self._unneeded_attempts: set[asyncio.Task[EngineConnection]] = set()

    async def cancel_attempts(self) -> None:
        """Cancel all running attempts to connect."""
        losers = list(self._unneeded_attempts)
        for task in losers:
            task.cancel()
        await asyncio.gather(*losers, return_exceptions=True)

    async def connect_to_first(
        self, host: str, port: int, addresses: Sequence[str], connect: Connect, timeout_seconds: float
    ) -> EngineConnection:
        """Connect to one of several addresses. Raises the OSError of the last attempt.

        `timeout_seconds` limits each attempt. The caller limits all attempts together.
        """
        waiting = self._order_addresses(host, port, addresses)
        stagger_seconds = min(_STAGGER_SECONDS, timeout_seconds / (len(addresses) + 1))
        racing: dict[asyncio.Task[EngineConnection], str] = {}
        failed: dict[str, OSError] = {}
        self._retry_dead_addresses(host, port, addresses, connect, timeout_seconds)
        try:
            while True:
                if waiting:
                    address = waiting.pop(0)
                    racing[asyncio.create_task(_connect_with_timeout(timeout_seconds, connect, address))] = address
                done, _ = await asyncio.wait(
                    racing, timeout=stagger_seconds if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    error = task.exception()
                    if error is None:
                        address = racing.pop(task)
                        self._record_success(host, port, address, failed)
                        return task.result()
                    if not isinstance(error, OSError):
                        raise error
                    failed[racing.pop(task)] = error
                    if not racing and not waiting:
                        raise error
        except BaseException:
            for task in racing:
                task.cancel()
            raise
        finally:
            for task, address in racing.items():
                self._add_unneeded_attempt(task, host, port, address)

    def _order_addresses(self, host: str, port: int, addresses: Sequence[str]) -> list[str]:
        """Return the address that worked last, then the others, with dead ones at the end."""
        worked = self._last_good_address.get((host, port))
        return sorted(
            addresses, key=lambda address: (address != worked, port in self._dead_addresses.get((host, address), ()))
        )

    def _retry_dead_addresses(
        self, host: str, port: int, addresses: Sequence[str], connect: Connect, seconds: float
    ) -> None:
        """Connect to dead addresses in the background from time to time."""
        now = self._clock()
        for address in addresses:
            ports = self._dead_addresses.get((host, address), {})
            if ports.get(port, now + 1.0) <= now:
                ports[port] = now + _LOOK_AGAIN_SECONDS
                self._add_unneeded_attempt(
                    asyncio.create_task(_connect_with_timeout(seconds, connect, address)), host, port, address
                )

    def _add_unneeded_attempt(self, task: asyncio.Task[EngineConnection], host: str, port: int, address: str) -> None:
        self._unneeded_attempts.add(task)
        task.add_done_callback(partial(self._record_unneeded_result, host, port, address))

    def _record_unneeded_result(self, host: str, port: int, address: str, task: asyncio.Task[EngineConnection]) -> None:
        """Record the result of an attempt that is no longer needed."""
        self._unneeded_attempts.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            task.result().abort_connection()
            self._record_alive_address(host, port, address)
        elif isinstance(error, OSError) and (host, port) in self._last_good_address:
            self._record_dead_address(host, port, address, error)

    # Recording results

    def _record_success(self, host: str, port: int, address: str, failed: dict[str, OSError]) -> None:
        self._last_good_address.pop((host, port), None)
        _evict_oldest_if_full(self._last_good_address)
        self._last_good_address[host, port] = address
        self._record_alive_address(host, port, address)
        for other, error in failed.items():
            self._record_dead_address(host, port, other, error)

    def _record_dead_address(self, host: str, port: int, address: str, error: OSError) -> None:
        ports = self._dead_addresses.get((host, address))
        if ports is None:
            _evict_oldest_if_full(self._dead_addresses)
            ports = self._dead_addresses[host, address] = {}
            if self._is_news(_log_subject(host, address), "dead"):
                # An engine may listen on one address family only. Such an address takes no time.
                is_other_family = (":" in address) != (":" in self._last_good_address[host, port])
                is_usual = isinstance(error, ConnectionRefusedError) and is_other_family
                logger.log(
                    logging.INFO if is_usual else logging.WARNING,
                    "dialing: address accepts no connections, another one is used: %s of %s (%s)",
                    address,
                    host,
                    describe_connect_error(error),
                )
        ports[port] = self._clock() + _LOOK_AGAIN_SECONDS

    def _record_alive_address(self, host: str, port: int, address: str) -> None:
        ports = self._dead_addresses.get((host, address), {})
        if ports.pop(port, None) is not None and not ports:
            del self._dead_addresses[host, address]
            if self._is_news(_log_subject(host, address), "alive"):
                logger.info("dialing: address accepts connections again: %s of %s", address, host)


def _log_subject(host: str, address: str) -> str:
    return f"{address} of {host}"


async def _connect_with_timeout(seconds: float, connect: Connect, address: str) -> EngineConnection:
    async with asyncio.timeout(seconds):
        return await connect(address)


def _evict_oldest_if_full(address_table: dict[Any, Any]) -> None:
    if len(address_table) >= _MAX_REMEMBERED:
        del address_table[next(iter(address_table))]
