"""A custom source of discovery: this file, and an entry in SOURCES. A test sets its list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from proxy.common.backend import Backend


class Listed:
    """A source of the instances that a test sets."""

    source_name = "test"

    def __init__(self, *backends: Backend) -> None:
        self._backends = backends
        self._problem: Exception | None = None
        self._has_changed = asyncio.Event()
        self.watches = 0
        """Number of running watches."""

    def publish(self, *backends: Backend) -> None:
        self._backends, self._problem = backends, None
        self._has_changed.set()

    def fail(self, problem: Exception) -> None:
        self._problem = problem
        self._has_changed.set()

    async def watch_instances(self) -> AsyncGenerator[tuple[Backend, ...], None]:
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
