"""SGLang's engines are told to stop working on requests that were given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import orjson

from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.backend import Backend
    from proxy.background import Background
    from proxy.upstream import Upstream

_ABORT_SECONDS: Final = 2.0
_MAX_ABORTS_AT_ONCE: Final = 8
_MAX_ABORTS_PENDING: Final = 1024


class Aborts:
    """Tells engines, in the background, to stop working on requests that were given up.

    An engine notices a closed connection only after some seconds, and its partner's end after minutes. Nothing depends
    on it, so an abort that fails is not repeated, and those beyond the bound are left out.
    """

    def __init__(self, upstream: Upstream, background: Background) -> None:
        self._upstream = upstream
        self._background = background
        self._places: WeakValueDictionary[Backend, asyncio.Semaphore] = WeakValueDictionary()

    def send(self, backend: Backend, attempt_id: str, headers: Mapping[str, str]) -> None:
        """Have an engine abort this attempt. `headers`: the client's credential may be the engine's."""
        if len(self._background) < _MAX_ABORTS_PENDING:
            places = self._places.setdefault(backend, asyncio.Semaphore(_MAX_ABORTS_AT_ONCE))
            self._background.start(self._send(backend, attempt_id, headers, places))

    async def _send(
        self, backend: Backend, attempt_id: str, headers: Mapping[str, str], places: asyncio.Semaphore
    ) -> None:
        body = orjson.dumps({"rid": attempt_id})
        async with places:
            with suppress(UpstreamError):
                await self._upstream.fetch(
                    backend, "/abort_request", body, headers, answer_seconds=_ABORT_SECONDS, resend_if_stale=True
                )
