"""The state of a simulated engine. Tests can wait for a condition on it.

Every change notifies waiting tests, so tests wait for a condition instead of sleeping.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Condition = Callable[["EngineState"], bool]

_MAX_KEPT_REQUESTS = 1000
_MAX_KEPT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it arrived. `body` is None if it was not JSON. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    body_bytes: int


@dataclass(slots=True)
class EngineState:
    """Counters of one engine. `live` requests are those whose answers have not ended."""

    live: int = 0
    received: int = 0
    finished: int = 0
    aborted: int = 0
    disconnects: int = 0
    refused: int = 0
    """The number of requests that were refused because the engine was full or paused."""
    tokens_generated: int = 0
    tokens_sent: int = 0
    prompt_tokens: int = 0
    pulls: int = 0
    pull_failures: int = 0
    read_backs: int = 0
    """The number of KV caches of answers that this prefiller has fetched from decoders."""
    releases: int = 0
    local_prefills: int = 0
    recomputed: int = 0
    prefix_cache_resets: int = 0
    faults_applied: int = 0
    kills: int = 0
    """How often the engine was killed or stopped."""
    encodings: int = 0
    """The number of images, recordings and clips that this engine has encoded."""
    encodings_fetched: int = 0
    """The number of images, recordings and clips that this engine has fetched from an encoder."""
    pinned: int = 0
    waiting_rooms: int = 0
    """The number of legs that now wait for their partner, in any protocol."""
    requests: deque[RecordedRequest] = field(default_factory=deque)
    """The latest requests. Old ones are dropped to bound the memory."""
    _kept_bytes: int = 0
    _waiters: list[tuple[Condition, asyncio.Future[None]]] = field(default_factory=list)

    def record_request(self, method: str, path: str, headers: dict[str, str], body: Any, body_bytes: int) -> None:
        self.requests.append(RecordedRequest(method, path, headers, body, body_bytes))
        self.received += 1
        self._kept_bytes += body_bytes
        while len(self.requests) > 1 and (
            self._kept_bytes > _MAX_KEPT_BYTES or len(self.requests) > _MAX_KEPT_REQUESTS
        ):
            self._kept_bytes -= self.requests.popleft().body_bytes
        self.notify_waiters()

    def record_faults(self, faults: int) -> None:
        if faults:
            self.faults_applied += faults
            self.notify_waiters()

    def notify_waiters(self) -> None:
        """Wake the tests whose condition now holds."""
        for condition, future in self._waiters:
            if not future.done() and condition(self):
                future.set_result(None)

    @contextmanager
    def waiting_room(self) -> Iterator[None]:
        """Count a leg as waiting for its partner within the block."""
        self.waiting_rooms += 1
        self.notify_waiters()
        try:
            yield
        finally:
            self.waiting_rooms -= 1
            self.notify_waiters()

    async def wait_until(self, condition: Condition, timeout_seconds: float = 60.0) -> None:
        if condition(self):
            return
        waiter = (condition, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def counters(self) -> dict[str, int]:
        names = [name for name in self.__slots__ if name != "requests" and not name.startswith("_")]
        return {name: getattr(self, name) for name in names}
