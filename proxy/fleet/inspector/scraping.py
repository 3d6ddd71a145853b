"""Engines' `/metrics`, read by this gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from proxy.upstream import EngineRequestError
from proxy.wire.exposition import parse_work

if TYPE_CHECKING:
    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend
    from proxy.upstream import EngineClient

_PATH: Final = "/metrics"
_TIMEOUT_SECONDS: Final = 5.0
_MAX_BYTES: Final = 4 * 1024 * 1024


async def scrape(client: EngineClient, keys: EngineKeys, backend: Backend) -> bytes | None:
    """What an engine's counters say, unparsed; None when it tells nothing."""
    try:
        answer = await client.get(backend.url, _PATH, _TIMEOUT_SECONDS, keys.headers(backend), _MAX_BYTES)
    except EngineRequestError:
        return None
    return answer.body if answer.status == 200 else None


async def makes_progress(client: EngineClient, keys: EngineKeys, backend: Backend, pause_seconds: float) -> bool:
    """Return whether an engine's counters of tokens grow within so many seconds. False also if it shows none."""
    before = await scrape(client, keys, backend)
    worked = None if before is None else parse_work(before)
    if worked is None:
        return False
    await asyncio.sleep(pause_seconds)
    after = await scrape(client, keys, backend)
    works = None if after is None else parse_work(after)
    return works is not None and works > worked
