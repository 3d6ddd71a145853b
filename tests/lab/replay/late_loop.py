"""An event loop in virtual time that stalls at times, and its measured lag."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Final

from lab.replay import virtual_time
from proxy.process.loop_lag import LoopLag

# Durations of stalls, and of the time between them.
_STALLS: Final = (0.2, 1.0)
_RUNS: Final = (0.5, 3.0)
_TICK_SECONDS: Final = 0.25


class _LateLoop(virtual_time.VirtualLoop):
    """A loop that stalls at times, so that timers are late."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next_stall = self._rng.uniform(*_RUNS)
        super().__init__()

    def jump(self, seconds: float) -> None:
        super().jump(seconds)
        if self.time() >= self._next_stall:
            stall = self._rng.uniform(*_STALLS)
            super().jump(stall)
            # Stalls depend on the intended time, so that all runs of a world stall at similar times.
            self._next_stall += stall + self._rng.uniform(*_RUNS)


def run(course: Callable[[LoopLag | None], Coroutine[None, None, None]], *, is_late: bool, seed: int) -> None:
    """Run a course to its end. It gets the lag measurements of its loop, or None for a loop without stalls."""
    if not is_late:
        virtual_time.run(course(None), virtual_time.VirtualLoop())
        return

    async def measured() -> None:
        loop_lag = LoopLag()
        measuring = asyncio.create_task(_measure(loop_lag))
        await course(loop_lag)
        measuring.cancel()

    virtual_time.run(measured(), _LateLoop(seed))


async def _measure(loop_lag: LoopLag) -> None:
    """Measure the lag as proxy.process.monitor does."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        loop_lag.add_lag(loop.time(), loop.time() - due)
