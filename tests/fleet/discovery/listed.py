"""A source of discovery as a further one would be: this file, and a line in SOURCES. Its list is the test's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from proxy.common.backend import Backend


class Listed:
    """What a test wants there to be."""

    name = "test"

    def __init__(self, *backends: Backend) -> None:
        self._backends = backends
        self._problem: Exception | None = None
        self._has_changed = asyncio.Event()
        self.watches = 0
        """How many are under way."""

    def say(self, *backends: Backend) -> None:
        self._backends, self._problem = backends, None
        self._has_changed.set()

    def fail(self, problem: Exception) -> None:
        self._problem = problem
        self._has_changed.set()

    async def watch(self) -> AsyncGenerator[tuple[Backend, ...], None]:
        self.watches += 1
        try:
            while True:
                self._has_changed.clear()
                if self._problem is not None:
                    raise self._problem
                yield self._backends
                await self._has_changed.wait()
        finally:
            self.watches -= 1
