"""Clients that ask at a fixed rate, whatever becomes of their requests, as people do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

REQUESTS_PER_SECOND = 50
TOKENS = 20
_PATIENCE_SECONDS = 10.0
_BODY = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Write down what the river said to the bridge."}],
    "max_tokens": TOKENS,
    "stream": True,
}


@dataclass(slots=True)
class Requests:
    """What became of all that was asked for. `errors` come with the seconds of the monotonic clock."""

    asked: int = 0
    errors: list[tuple[float, str]] = field(default_factory=list)

    async def ask(self, url: str, until: asyncio.Event) -> None:
        """Until told to stop; then the last ones are waited for."""
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            due = loop.time()
            while not until.is_set():
                group.create_task(self._one(session, url))
                due += 1 / REQUESTS_PER_SECOND
                await asyncio.sleep(due - loop.time())

    def reasons(self, since: float) -> Counter[str]:
        """Errors of which clients heard after a moment, by what they were."""
        return Counter(reason for at, reason in self.errors if at >= since)

    async def _one(self, session: aiohttp.ClientSession, url: str) -> None:
        self.asked += 1
        try:
            async with session.post(f"{url}/v1/chat/completions", json=_BODY) as response:
                problem = _problem(response.status, await response.read())
        except TimeoutError:
            problem = f"no answer in {_PATIENCE_SECONDS:g} s"
        except aiohttp.ClientError as error:
            problem = type(error).__name__
        if problem:
            self.errors.append((time.monotonic(), problem))


def _problem(status: int, body: bytes) -> str:
    """What is wrong with an answer; empty when nothing is."""
    if status != 200:
        return f"status {status}"
    if b'"error"' in body:
        return "error event"
    if not body.endswith(b"data: [DONE]\n\n"):
        return "ends without [DONE]"
    return "" if body.count(b'"content":"') > TOKENS // 4 else "too short"
