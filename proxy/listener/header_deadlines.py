"""Tracks the connections that wait for the headers of a request, and how long they wait.

The time begins when a connection opens, or with the first byte of a further request. It ends with complete headers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ConnectionT = TypeVar("ConnectionT")


@dataclass(slots=True, eq=False)
class _Head:
    since: float
    size_bytes: int = 0


class HeaderDeadlines(Generic[ConnectionT]):
    """Start times and sizes of incomplete request headers, by connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Store the clock, which is monotonic and returns seconds."""
        self._clock = clock
        # Ordered by time, so that finding the late ones takes one step more than there are late ones.
        self._heads: dict[ConnectionT, _Head] = {}
        self._nobody = asyncio.Event()

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._heads

    def begin(self, connection: ConnectionT) -> None:
        """Start to measure the time until the headers arrive on a connection."""
        self._heads[connection] = _Head(self._clock())

    def grow(self, connection: ConnectionT, size_bytes: int) -> int:
        """Add bytes to the headers of a connection, and return their size so far."""
        head = self._heads[connection]
        head.size_bytes += size_bytes
        return head.size_bytes

    def end(self, connection: ConnectionT) -> None:
        """Stop to measure the time for headers on a connection, if it is measured."""
        if self._heads.pop(connection, None) is not None and not self._heads:
            self._nobody.set()

    def overdue_connections(self, seconds: float) -> list[tuple[ConnectionT, bool]]:
        """Return connections that have waited `seconds` for headers, and for each whether any bytes have arrived."""
        due = self._clock() - seconds
        return [
            (connection, head.size_bytes > 0)
            for connection, head in takewhile(lambda each: each[1].since <= due, self._heads.items())
        ]

    async def wait_until_empty(self) -> None:
        """Wait until no connection waits for headers."""
        while self._heads:
            self._nobody.clear()
            await self._nobody.wait()
