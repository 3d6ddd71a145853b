"""Engines' `/metrics`, read by this gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp

from proxy.upstream import read_bounded

if TYPE_CHECKING:
    from proxy.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys

_PATH: Final = "/metrics"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_MAX_BYTES: Final = 4 * 1024 * 1024


async def scrape(session: aiohttp.ClientSession, keys: EngineKeys, backend: Backend) -> bytes | None:
    """What an engine's counters say, unparsed; None when it tells nothing."""
    url, headers = backend.url + _PATH, keys.headers(backend)
    try:
        async with session.get(url, headers=headers, timeout=_TIMEOUT, allow_redirects=False) as answer:
            return await read_bounded(answer, _MAX_BYTES) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
