"""KV caches that a prefiller keeps though no decoder is going to fetch them, until they are released or expire.

They are no load, since no request holds them and nothing waits for them, but they fill the prefiller's memory: their
tokens weigh on the choice of a prefiller, and every scrape tells how many there are. A worker keeps its own and
publishes their sums in its row of the scoreboard.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.balancer.shared.scoreboard import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.balancer.shared.scoreboard import LoadRow
    from proxy.common.backend import Backend


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """One KV cache on `backend`, left behind at `since` and freed by the engine itself at `until`, in clock seconds.

    `suspected`: the prefiller's answer was lost, so it is not known whether there is any.
    """

    backend: Backend
    tokens: int
    since: float
    until: float
    suspected: bool


@dataclass(slots=True)
class _Slot:
    pins: dict[Pin, None] = field(default_factory=dict)  # oldest first
    tokens: int = 0


class PinnedKv:
    """One worker's pins. `row` is its own; `clock` is the system's monotonic one except in tests."""

    def __init__(self, row: LoadRow, clock: Callable[[], float] = time.monotonic) -> None:
        self._row = row
        self._clock = clock
        # By slot and not by backend: one that was removed and added again is equal, but it is elsewhere.
        self._slots: dict[int, _Slot] = {}
        # A heap; the number keeps pins from being compared.
        self.expiries: list[tuple[float, int, Pin]] = []
        """When what ends, the soonest first; empty while nothing is pinned."""
        self._numbers = itertools.count()

    def pin(self, backend: Backend, tokens: int, seconds: float, *, suspected: bool = False) -> Pin:
        """Account for KV that the engine keeps for `seconds` more."""
        now = self._clock()
        pin = Pin(backend, tokens, now, now + seconds, suspected)
        slot = self._slots.setdefault(backend.slot, _Slot())
        slot.pins[pin] = None
        self._row.count_pinned(backend.slot)
        slot.tokens += tokens
        heapq.heappush(self.expiries, (pin.until, next(self._numbers), pin))
        self._publish(backend.slot, slot)
        return pin

    def unpin(self, pin: Pin) -> None:
        """The engine has let go of it. May be called again, and for what has expired."""
        slot = self._slots.get(pin.backend.slot)
        if slot is not None and pin in slot.pins:
            del slot.pins[pin]
            slot.tokens -= pin.tokens
            self._publish(pin.backend.slot, slot)

    def expire(self) -> None:
        """Drop what the engines have freed by now. To be called before the scoreboard's sums are read."""
        if not self.expiries:
            return
        now = self._clock()
        while self.expiries and self.expiries[0][0] <= now:
            self.unpin(heapq.heappop(self.expiries)[2])

    def forget(self, backend: Backend) -> None:
        """Drop everything on a backend that has left."""
        slot = self._slots.pop(backend.slot, None)
        if slot is not None:
            self._publish(backend.slot, _Slot())

    def pins(self) -> list[Pin]:
        """What this worker knows of."""
        self.expire()
        return [pin for slot in self._slots.values() for pin in slot.pins]

    def _publish(self, number: int, slot: _Slot) -> None:
        oldest = next(iter(slot.pins), None)
        since = None if oldest is None else oldest.since
        self._row.set_pinned(number, Pinned(len(slot.pins), slot.tokens, since))
