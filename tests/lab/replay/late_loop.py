"""An event loop in virtual time that stands still now and then, and the measurements of that."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from lab.replay import virtual_time
from proxy.process.monitor import LoopLag

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

# A late loop stands still for so long, after it has run for so long.
_STALLS: Final = (0.2, 1.0)
_RUNS: Final = (0.5, 3.0)
_TICK_SECONDS: Final = 0.25


class _LateLoop(virtual_time.VirtualLoop):
    """Now and then it stands still, and everything that was due in the meantime comes late."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next_stall = self._rng.uniform(*_RUNS)
        super().__init__()

    def jump(self, seconds: float) -> None:
        """See VirtualLoop."""
        super().jump(seconds)
        if self.time() >= self._next_stall:
            stall = self._rng.uniform(*_STALLS)
            super().jump(stall)
            # By the time that was meant: all runs of a world stand still at about the same times.
            self._next_stall += stall + self._rng.uniform(*_RUNS)


def run(course: Callable[[LoopLag | None], Coroutine[None, None, None]], *, is_late: bool, seed: int) -> None:
    """Run a course to its end. It gets the measurements of how late its loop is; None: the loop is never late."""
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
    """Measure how late the loop is, as proxy.process.monitor does."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        loop_lag.note(loop.time(), loop.time() - due)
