"""Clients of one connection and one streamed answer each. Raw asyncio: thousands of them cost little."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, cast

import httptools
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.common.scripted.engines import Script

_HOST = "127.0.0.1"
_CONTENT = b'"content":" token"'
_find_completion_tokens = re.compile(rb'"completion_tokens":\s*(\d+)').search


def request(port: int, prompt_bytes: int, max_tokens: int, script: Script) -> bytes:
    """As the OpenAI SDK writes it, for a stream on a connection of its own."""
    text = ("Tell me of the river and the bridge. " * (prompt_bytes // 37 + 1))[:prompt_bytes]
    body = orjson.dumps(
        {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "script": asdict(script),
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {_HOST}:{port}\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 1.60.0\r\nAuthorization: Bearer measuring\r\nX-Stainless-Lang: python\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Outcomes:
    """What became of several streams."""

    begun: int = 0
    """Streams whose first token has come, whatever became of them."""
    completed: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def fail(self, problem: str) -> None:
        self.errors[problem] = self.errors.get(problem, 0) + 1

    @property
    def ended(self) -> int:
        return self.completed + sum(self.errors.values())


class Stream(asyncio.Protocol):
    """One answer. Whatever is not exactly as it should be is an error. The connection is closed behind it."""

    def __init__(self, request: bytes, outcomes: Outcomes, on_change: Callable[[], None]) -> None:
        self._request = request
        self._outcomes = outcomes
        self._on_change = on_change
        self._parser = httptools.HttpResponseParser(self)
        self._tokens = 0
        self._tail = b""
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._has_ended:
            self._end("the connection was closed before the end of the answer")

    def on_body(self, data: bytes) -> None:
        # A gateway passes whole events on, in whatever pieces they come.
        if not self._tokens and _CONTENT in data:
            self._outcomes.begun += 1
            self._on_change()
        self._tokens += data.count(_CONTENT)
        self._tail = (self._tail + data)[-600:]

    def on_message_complete(self) -> None:
        self._end(self._problem())
        self.transport.close()

    def _problem(self) -> str | None:
        if self._parser.get_status_code() != 200:
            return f"status {self._parser.get_status_code()}"
        if not self._tail.endswith(b"data: [DONE]\n\n"):
            return "no [DONE]"
        told = _find_completion_tokens(self._tail)
        return None if told is not None and int(told[1]) == self._tokens else "wrong number of tokens"

    def _end(self, problem: str | None) -> None:
        self._has_ended = True
        if problem is None:
            self._outcomes.completed += 1
        else:
            self._outcomes.fail(problem)
        self._on_change()


class Crowd:
    """Streams that are open at the same time."""

    def __init__(self, port: int) -> None:
        self.outcomes = Outcomes()
        self._port = port
        self._opened = 0
        self._changed = asyncio.Event()

    async def open(self, request: bytes) -> None:
        """One more. Errors are counted, not raised."""
        self._opened += 1
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: Stream(request, self.outcomes, self._changed.set), _HOST, self._port)
        except OSError as error:
            self.outcomes.fail(str(error))

    async def begun(self, patience_seconds: float) -> None:
        """Until the first token of every stream is there, or an error."""
        await self._until(lambda: self.outcomes.begun + sum(self.outcomes.errors.values()), patience_seconds)

    async def ended(self, patience_seconds: float) -> None:
        """Until every stream has ended. Those that have not by then are errors."""
        await self._until(lambda: self.outcomes.ended, patience_seconds)
        if late := self._opened - self.outcomes.ended:
            self.outcomes.errors["not answered in time"] = late

    async def _until(self, count: Callable[[], int], patience_seconds: float) -> None:
        try:
            async with asyncio.timeout(patience_seconds):
                while count() < self._opened:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
