"""An event loop in virtual time: its clock jumps to the next timer, so hours take seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(Exception):
    """All tasks wait, and no timer is pending."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0 and jumps to the next timer. It supports no sockets."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the clock."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("all tasks wait, and no timer is pending")
        self._loop.jump(timeout)
        return []


def run(course: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    """Run a coroutine on this loop, and close the loop."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(course)
