"""The instances that were added while the gateway runs and did not answer yet, as all workers see them.

The worker that was told to add one waits for it, and any worker may be told to stop. Should the first one die,
nothing waits any more, so each entry has a time by which it is over. Make the list before forking.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.shared.memory import SharedValue
from proxy.common.backend import Backend, Role

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES_PER_ENTRY: Final = 512  # a host name has at most 253, and what it serves is told of few


class WaitingList:
    """Instances that wait, each with a ticket, since one that was taken off the list may be put on it again."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """For `capacity` instances. `clock` is the system's monotonic one, which all workers share, except in tests."""
        self._clock = clock
        self._shared = SharedValue("list of instances that join", capacity_bytes=capacity * _BYTES_PER_ENTRY)
        self._shared.write([])

    def enter(self, backend: Backend, seconds: float) -> int | None:
        """Put it on the list for `seconds`; its ticket, None if it is there already. Raises ValueError if it is
        full.
        """
        with self._shared.exclusive():
            rows = self._rows()
            if backend in map(_backend, rows):
                return None
            ticket = self._shared.version
            place = (backend.role, backend.host, backend.port)
            instance = [*place, backend.trusted, backend.bootstrap_port, backend.models]
            self._shared.write([*rows, [instance, self._clock() + seconds, ticket]])
            return ticket

    def leave(self, backend: Backend, ticket: int | None = None) -> bool:
        """Take it off; False when it is not there, or not with this ticket."""
        with self._shared.exclusive():
            rows = self._rows()
            left = [row for row in rows if not _is(row, backend, ticket)]
            if len(left) < len(rows):
                self._shared.write(left)
            return len(left) < len(rows)

    def holds(self, backend: Backend, ticket: int) -> bool:
        """Whether it is still there with this ticket."""
        return any(_is(row, backend, ticket) for row in self._rows())

    def backends(self) -> list[Backend]:
        """The instances on the list, the longest first."""
        return [_backend(row) for row in self._rows()]

    def _rows(self) -> list[Any]:
        now = self._clock()
        return [row for row in self._shared.read()[1] if row[1] > now]


def _backend(row: Any) -> Backend:
    role, host, port, trusted, bootstrap_port, models = row[0]
    return Backend(Role(role), host, port, 0, trusted, bootstrap_port, tuple(models))


def _is(row: Any, backend: Backend, ticket: int | None) -> bool:
    return _backend(row) == backend and ticket in (None, row[2])
