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
class _IncompleteHead:
    started_at: float
    size_bytes: int = 0


class HeaderDeadlines(Generic[ConnectionT]):
    """Start times and sizes of incomplete request headers, by connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Store the clock, which is monotonic and returns seconds."""
        self._clock = clock
        # Ordered by time, so that finding the late ones takes one step more than there are late ones.
        self._incomplete_heads: dict[ConnectionT, _IncompleteHead] = {}
        self._is_empty_event = asyncio.Event()

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._incomplete_heads

    def start_timing(self, connection: ConnectionT) -> None:
        """Start to measure the time until the headers arrive on a connection."""
        self._incomplete_heads[connection] = _IncompleteHead(self._clock())

    def add_header_bytes(self, connection: ConnectionT, size_bytes: int) -> int:
        """Add bytes to the headers of a connection, and return their size so far."""
        head = self._incomplete_heads[connection]
        head.size_bytes += size_bytes
        return head.size_bytes

    def stop_timing(self, connection: ConnectionT) -> None:
        """Stop to measure the time for headers on a connection, if it is measured."""
        if self._incomplete_heads.pop(connection, None) is not None and not self._incomplete_heads:
            self._is_empty_event.set()

    def overdue_connections(self, seconds: float) -> list[tuple[ConnectionT, bool]]:
        """Return connections that have waited `seconds` for headers, and for each whether any bytes have arrived."""
        due = self._clock() - seconds
        return [
            (connection, head.size_bytes > 0)
            for connection, head in takewhile(lambda each: each[1].started_at <= due, self._incomplete_heads.items())
        ]

    async def wait_until_empty(self) -> None:
        """Wait until no connection waits for headers."""
        while self._incomplete_heads:
            self._is_empty_event.clear()
            await self._is_empty_event.wait()
