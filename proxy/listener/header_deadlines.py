"""Which connections owe us the headers of a request, and since when.

From the opening of a connection, or from the first byte of a further request, until a request is there.
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
    """`clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # In the order of their times, so that looking for the late ones means looking at them and at one more.
        self._heads: dict[ConnectionT, _Head] = {}
        self._nobody = asyncio.Event()

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._heads

    def begin(self, connection: ConnectionT) -> None:
        """Headers are expected on a connection from now on."""
        self._heads[connection] = _Head(self._clock())

    def grow(self, connection: ConnectionT, size_bytes: int) -> int:
        """Some have arrived where they are expected; how many bytes of them there are."""
        head = self._heads[connection]
        head.size_bytes += size_bytes
        return head.size_bytes

    def end(self, connection: ConnectionT) -> None:
        """The headers on a connection are complete, or no longer expected. Does nothing where none were expected."""
        if self._heads.pop(connection, None) is not None and not self._heads:
            self._nobody.set()

    def late(self, seconds: float) -> list[tuple[ConnectionT, bool]]:
        """Where they were expected that long ago, and whether some have arrived."""
        due = self._clock() - seconds
        return [
            (connection, head.size_bytes > 0)
            for connection, head in takewhile(lambda each: each[1].since <= due, self._heads.items())
        ]

    async def none_left(self) -> None:
        """Wait until no connection owes any."""
        while self._heads:
            self._nobody.clear()
            await self._nobody.wait()
