"""What simulated engines ask each other: JSON over real sockets, for what real ones do by RDMA and ZMQ."""

from __future__ import annotations

from typing import Any

import aiohttp


class Peers:
    """Connections to other engines, opened when first needed. After `close` nobody is reached any more."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def post(self, url: str, body: Any) -> Any:
        """The answer, None if it is not a success or the engine is not reached. It may take as long as it takes."""
        return await self._ask("POST", url, body)

    async def get(self, url: str) -> Any:
        """Likewise."""
        return await self._ask("GET", url, None)

    async def delivers(self, url: str, body: Any) -> bool:
        """Whether the other side answered at all, be it with an error."""
        if self._is_closed:
            return False
        try:
            async with self._open().post(url, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, ValueError):
            return False
        return True

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: str, body: Any) -> Any:
        if self._is_closed:
            return None
        try:
            async with self._open().request(method, url, json=body) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        return self._session


def address(host: object, port: object) -> str:
    """The beginning of a URL; an IPv6 host may be given with or without brackets."""
    name = str(host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"
