"""An event loop whose clock jumps to whatever comes next: hours take seconds, and the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(Exception):
    """Everybody waits, and nothing is to come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is seconds since it was made. It waits for no socket but its own, which nothing is written to."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """The virtual time."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("everybody waits, and nothing is to come")
        self._loop.jump(timeout)
        return []


def run(course: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    """Run it to its end on this loop, which is closed then."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(course)
