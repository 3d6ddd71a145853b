"""Drain: what is being answered right now, and whether this worker is on its way out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler


class Drain:
    """One worker's requests in flight. The worker begins the drain; the readiness route and a middleware read it."""

    def __init__(self) -> None:
        self.is_draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Client requests being answered by this worker."""
        return self._in_flight

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request as long as it is being answered; while draining, tell its client to connect anew."""
        self._in_flight += 1
        self._idle.clear()
        try:
            response = await handler(request)
            if self.is_draining and not response.prepared:
                response.force_close()
            return response
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()
