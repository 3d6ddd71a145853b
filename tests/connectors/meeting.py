"""Engines that act as a test says, request by request, for protocols in which two of them work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.asking import until
from tests.canned import CannedEngine, Received, data, event_stream, http, json_answer, read_request

Act = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request to an engine, and what the engine does about it."""

    engine: ActingEngine
    received: Received
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @property
    def body(self) -> Any:
        return orjson.loads(self.received.body)

    def write(self, *pieces: bytes) -> None:
        self._writer.write(b"".join(pieces))

    async def hang(self) -> None:
        """Answer nothing until the gateway hangs up."""
        assert await self._reader.read(1) == b""
        self.engine.hung_up += 1
        raise ConnectionError

    def reset(self) -> None:
        self._writer.transport.abort()
        raise ConnectionError


@dataclass
class ActingEngine(CannedEngine):
    """Does `act` for every generation request, and answers requests to abort one."""

    act: Act = field(default=None)  # type: ignore[assignment]
    hung_up: int = 0
    connections: int = 0
    aborted: list[str] = field(default_factory=list)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    answers_aborts: asyncio.Event | None = None
    """When it does; None: at once."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await super()._serve(reader, writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, received = await read_request(reader)
        if method == "GET":
            writer.write(http(b""))
        elif received.path == "/abort_request":
            self.aborted.append(orjson.loads(received.body)["rid"])
            if self.answers_aborts is not None:
                await self.answers_aborts.wait()
            writer.write(http(b""))
        else:
            self.received.append(received)
            await self.act(Exchange(self, received, reader, writer))
        return True

    @property
    def bodies(self) -> list[Any]:
        return [orjson.loads(received.body) for received in self.received]

    async def works(self, requests: int = 1) -> None:
        """Wait until the engine has `count` requests."""
        await until(lambda: len(self.received) == requests, f"{requests} requests")


ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 5},
    },
}
_CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None, "matched_stop": None}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None, "matched_stop": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 7}]},
    {"choices": [], "usage": ANSWER["usage"]},
]
CHUNKS = [data({"id": "x", "object": "chat.completion.chunk", **chunk}) for chunk in _CHUNKS]
DONE = b"data: [DONE]\n\n"


async def answers(exchange: Exchange) -> None:
    """Send the whole answer at once."""
    if exchange.body.get("stream"):
        exchange.write(*event_stream([*CHUNKS, DONE]))
    else:
        exchange.write(json_answer(ANSWER))


async def hangs(exchange: Exchange) -> None:
    await exchange.hang()


async def resets(exchange: Exchange) -> None:
    exchange.reset()


async def begins_and_hangs(exchange: Exchange) -> None:
    """Streams its first token and then nothing."""
    exchange.write(*event_stream(CHUNKS[:2], is_whole=False))
    await exchange.hang()


async def begins_and_resets(exchange: Exchange) -> None:
    exchange.write(*event_stream(CHUNKS[:2], is_whole=False))
    await exchange._writer.drain()
    await exchange.engine.let_go.wait()
    exchange.reset()


def answers_when(engine: Callable[[], ActingEngine], requests: int = 1) -> Act:
    """Answers once another engine has the request, too."""

    async def act(exchange: Exchange) -> None:
        await engine().works(requests)
        await answers(exchange)

    return act


def says(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> Act:
    async def act(exchange: Exchange) -> None:
        exchange.write(http(body, status, content_type))

    return act


def streams(*events: bytes, is_whole: bool = True) -> Act:
    async def act(exchange: Exchange) -> None:
        exchange.write(*event_stream(events, is_whole=is_whole))

    return act


async def when_let_go(exchange: Exchange) -> None:
    """Answers when the test lets the engine go."""
    await exchange.engine.let_go.wait()
    await answers(exchange)
