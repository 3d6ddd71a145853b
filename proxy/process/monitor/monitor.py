"""One timer for each worker, which measures, decides on overload, and calls all periodic functions.

It measures the delay of the event loop, and the use of memory and descriptors. The thresholds and actions for memory
are those of Envoy's overload manager. It also logs the number of lost log lines.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Self

from proxy.observe import logs
from proxy.process.monitor.loop_lag import LoopLag
from proxy.process.monitor.usage import Memory, OpenFds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.monitor.monitor")

_TICK_SECONDS: Final = 0.25
_LAG_WINDOW_SECONDS: Final = 15.0
_MEMORY_SECONDS: Final = 1.0
_FDS_SECONDS: Final = 5.0
_SHRINK_SECONDS: Final = 10.0
_DEAD_AFTER_SECONDS: Final = 30.0

_CLOSE_FROM: Final = 0.92
_REFUSE_FROM: Final = 0.95
_HYSTERESIS: Final = 0.02


class Overload(IntEnum):
    """Overload by lack of memory. The values are those of the metric."""

    NONE = 0
    CLOSES_CONNECTIONS = 1
    REFUSES = 2


_MEANINGS: Final = {
    Overload.NONE: "no measures are needed",
    Overload.CLOSES_CONNECTIONS: "connections are closed after each answer",
    Overload.REFUSES: "new requests are refused",
}


def overload_of(memory_share: float, before: Overload) -> Overload:
    """Return the state for a share of memory in use. The threshold for leaving a state is a little lower."""
    for state, threshold in ((Overload.REFUSES, _REFUSE_FROM), (Overload.CLOSES_CONNECTIONS, _CLOSE_FROM)):
        if memory_share >= threshold - (_HYSTERESIS if before >= state else 0.0):
            return state
    return Overload.NONE


def _shrink_heap() -> None:
    """Return unused memory to the system. The C library would keep it, so overload would never end."""
    gc.collect()  # the body of a failed request may be in a cycle with its traceback
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc only


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MonitorParts:
    """Parts of one worker that a Monitor uses."""

    memory: Memory = field(default_factory=Memory)
    """Memory in use, and its limit."""
    fds: OpenFds = field(default_factory=OpenFds)
    """Open file descriptors, and their limit."""
    every_tick: Sequence[Callable[[], object]] = ()
    """Functions that are called on the event loop at each tick. An exception of one does not affect the others."""
    is_ready: Callable[[], bool] = lambda: True
    """Returns whether the worker is ready; `was_ready` returns the last result."""
    tick_seconds: float = _TICK_SECONDS
    """Time between two ticks."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    shrink_heap: Callable[[], object] = _shrink_heap
    """Returns unused memory to the system."""
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """Takes the delays of the event loop."""


class Monitor:
    """Monitors one worker inside `async with`."""

    def __init__(self, metrics: Metrics, parts: MonitorParts) -> None:
        self._metrics = metrics
        self._memory = parts.memory
        self._fds = parts.fds
        self._every_tick = parts.every_tick
        self._is_ready = parts.is_ready
        self._tick_seconds = parts.tick_seconds
        self._clock = parts.clock
        self._shrink_heap = parts.shrink_heap
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = self._due = self._memory_at = self._fds_at = self._shrink_at = parts.clock()
        self._loop_lag = parts.loop_lag
        self._cpu_seconds = 0.0
        self._told = logs.Lost()
        self._was_ready = False
        self.overload = Overload.NONE
        self.became_ready = asyncio.Event()
        """Set when the worker is ready for the first time."""

    async def __aenter__(self) -> Self:
        self._due = self._clock()
        self._on_timer()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def closes_connections(self) -> bool:
        """Return whether to close each connection after its answer, because idle connections use memory."""
        return self.overload >= Overload.CLOSES_CONNECTIONS

    @property
    def refuses(self) -> bool:
        """Return whether to answer new requests with 503 `memory`."""
        return self.overload >= Overload.REFUSES

    # For other threads: plain reads of values that the event loop has written.

    def is_alive(self) -> bool:
        """Return whether the event loop runs."""
        return self._clock() - self._ticked_at <= _DEAD_AFTER_SECONDS

    def was_ready(self) -> bool:
        """Return whether the worker was ready at the last tick, and may still be."""
        return self._was_ready and self.is_alive()

    # The timer

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        # First, so that no exception below ends the timer.
        self._timer = loop.call_later(self._tick_seconds, self._on_timer)
        for ticker in self._every_tick:
            loop.call_soon(ticker)
        self.tick()

    def tick(self) -> None:
        """Run the measurements that are due."""
        now = self._clock()
        self._note_lag(now)
        if now >= self._memory_at:
            self._memory_at = now + _MEMORY_SECONDS
            self._note_memory(now)
        if now >= self._fds_at and (fds_share := self._fds.share()) is not None:
            self._fds_at = now + _FDS_SECONDS
            self._metrics.open_fds_share.set(fds_share)
        self._tell_lost_lines()
        self._was_ready = self._is_ready()
        if self._was_ready:
            self.became_ready.set()

    def _note_lag(self, now: float) -> None:
        self._loop_lag.note(now, max(0.0, now - self._due))
        self._metrics.loop_lag_seconds.set(self._loop_lag.since(now - _LAG_WINDOW_SECONDS))
        self._ticked_at, self._due = now, now + self._tick_seconds

    def _note_memory(self, now: float) -> None:
        before_seconds, self._cpu_seconds = self._cpu_seconds, time.process_time()
        self._metrics.cpu_seconds_total.inc(self._cpu_seconds - before_seconds)
        self._metrics.resident_memory_bytes.set(self._memory.resident_bytes())
        share = self._memory.share()
        self._metrics.memory_share.set(share)
        before, self.overload = self.overload, overload_of(share, self.overload)
        self._metrics.overload_state.set(self.overload)
        if self.overload is not before:
            level = logging.WARNING if self.overload > before else logging.INFO
            logger.log(level, "memory: %s: %.1f %% of the limit in use", _MEANINGS[self.overload], 100 * share)
        if self.closes_connections and now >= self._shrink_at:
            self._shrink_at = now + _SHRINK_SECONDS
            self._shrink_heap()

    def _tell_lost_lines(self) -> None:
        logs.flush()
        told, self._told = self._told, logs.lost()
        self._metrics.log_lines_dropped_total.inc(self._told.dropped - told.dropped)
        self._metrics.log_lines_suppressed_total.inc(self._told.suppressed - told.suppressed)
