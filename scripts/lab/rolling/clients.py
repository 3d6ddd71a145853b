"""Clients that ask the same again and again, and look whether an answer is whole, right, and comes steadily."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from proxy.sim.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PATH: Final = "/v1/chat/completions"
_DATA: Final = b"data: "


@dataclass(slots=True)
class Seen:
    """What all clients have seen. `failures`: by what was wrong."""

    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    longest_gap_seconds: float = 0.0


class Clients:
    """So many streams at a time. Half of the clients keep their connections."""

    def __init__(self, url: str, streams: int, tokens: int) -> None:
        self._url = url
        self._streams = streams
        self._body = {
            "model": "sim",
            "messages": [{"role": "user", "content": "What is replaced while this is written?"}],
            "max_tokens": tokens,
            "stream": True,
        }
        self._expected = ""
        self.seen = Seen()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Seen]:
        """All of them, until the end of the block; then their last answers end."""
        self._expected = await self._alone()
        is_over = asyncio.Event()
        clients = [asyncio.create_task(self._client(number, is_over)) for number in range(self._streams)]
        try:
            yield self.seen
        finally:
            is_over.set()
            await asyncio.gather(*clients)

    async def _alone(self) -> str:
        """What an engine without a gateway says."""
        async with SimulatedEngine(role="both") as engine, aiohttp.ClientSession() as session:
            text, problem = await self._ask(session, engine.url, Seen())
        assert not problem, problem
        return text

    async def _client(self, number: int, is_over: asyncio.Event) -> None:
        # Not all at the same moment, or nothing would be asked in between.
        await asyncio.sleep(number / self._streams)
        connector = aiohttp.TCPConnector(force_close=bool(number % 2))
        async with aiohttp.ClientSession(connector=connector) as session:
            while not is_over.is_set():
                text, problem = await self._ask(session, self._url, self.seen)
                if not problem and text != self._expected:
                    problem = "another answer"
                self.seen.answers += 1
                if problem:
                    self.seen.failures[problem] += 1

    async def _ask(self, session: aiohttp.ClientSession, url: str, seen: Seen) -> tuple[str, str]:
        """The text, and what is wrong; empty: nothing."""
        text, last, is_done = "", None, False
        try:
            async with session.post(url + _PATH, json=self._body) as response:
                if response.status != 200:
                    return "", f"status {response.status}"
                async for line in response.content:
                    if line.startswith(_DATA + b"[DONE]"):
                        is_done = True
                    elif line.startswith(_DATA):
                        now = time.monotonic()
                        if last is not None:
                            seen.longest_gap_seconds = max(seen.longest_gap_seconds, now - last)
                        last = now
                        text += _content(orjson.loads(line[len(_DATA) :]))
        except (aiohttp.ClientError, TimeoutError) as error:
            return text, type(error).__name__
        return text, "" if is_done else "ended too early"


def _content(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
