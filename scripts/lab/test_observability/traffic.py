"""Clients: some that ask all the time, and those of a fault, whom engines know by `user`."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lab.test_observability.fleet import Gateway

_PER_SECOND: Final = 12.0
_TOPICS: Final = [f"Topic {number}: " + "tell me more about it, please. " * 12 * number for number in range(1, 9)]
_GONE: Final = (aiohttp.ClientError, TimeoutError, ConnectionError)


class Clients:
    """Of one gateway. Nobody minds what they get; what they do not read they leave."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._url = gateway.url
        self._session = session
        self._draw = random.Random(7)

    async def ask(self, user: str = "", *, leaves_after: float = 60.0, **fields: Any) -> int:
        """The status of one answer; 0 if none came, or it broke off."""
        body = self._body() | ({"user": user} if user else {}) | fields
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        with suppress(*_GONE):
            async with asyncio.timeout(leaves_after), self._session.post(self._url + path, json=body) as response:
                await response.read()
                return response.status
        return 0

    async def message(self) -> None:
        """One of Anthropic's."""
        body = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": self._draw.choice(_TOPICS)}]}
        with suppress(*_GONE):
            async with self._session.post(self._url + "/v1/messages", json=body) as response:
                await response.read()

    async def send(self, data: bytes) -> None:
        """Bytes that are no request."""
        host, _, port = self._url.removeprefix("http://").partition(":")
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            await writer.drain()
            writer.close()

    @asynccontextmanager
    async def asking(self, user: str = "", per_second: float = _PER_SECOND, **fields: Any) -> AsyncIterator[None]:
        """So many requests a second, for as long as this lasts; then those under way are left."""
        async with asyncio.TaskGroup() as group:
            begun: set[asyncio.Task[Any]] = set()

            async def begin() -> None:
                while True:
                    task = group.create_task(self.ask(user, **fields))
                    begun.add(task)
                    task.add_done_callback(begun.discard)
                    if not user and self._draw.random() < 0.1:
                        group.create_task(self.message())
                    await asyncio.sleep(1 / per_second)

            beginner = group.create_task(begin())
            try:
                yield
            finally:
                beginner.cancel()
                for task in list(begun):
                    task.cancel()

    def _body(self) -> dict[str, Any]:
        topic = self._draw.choice([*_TOPICS, "Hi"])
        asked = {"model": "sim", "max_tokens": self._draw.randrange(4, 60), "stream": self._draw.random() < 0.8}
        if self._draw.random() < 0.5:
            return asked | {"prompt": topic}
        return asked | {"messages": [{"role": "user", "content": topic}]}
