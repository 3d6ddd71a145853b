"""Asks one program for one scenario: `python -m benchmark.load PORT SCENARIO SECONDS`; prints a Result as JSON.

Raw asyncio on uvloop, because it shares the machine with what it measures. Every answer is checked: status, number of
tokens, finish reason, usage and the end of the stream. Whatever is not exactly as it should be is an error.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import cast

import httptools
import orjson
import uvloop

from benchmark.engines import WORD
from benchmark.scenarios import Scenario, scenarios

PATIENCE_SECONDS = 30.0
"""What is not answered so long after the scenario's own time is an error."""
_CONTENT = f'"content":"{WORD}'.encode()


@dataclass(slots=True)
class Result:
    """What came of one measurement."""

    completed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


class _Client(asyncio.Protocol):
    """One connection, used for one request after the other."""

    def __init__(self) -> None:
        self.closed = False
        self.first_token_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answer: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Status and body of the answer."""
        self.first_token_at = None
        self._body = []
        self._answer = self._loop.create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self.first_token_at is None and _CONTENT in data:
            self.first_token_at = self._loop.time()

    def on_message_complete(self) -> None:
        if not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was closed before the end of the answer"))
            self._answer.exception()  # nobody may be waiting any more


def _problem(scenario: Scenario, status: int, body: bytes) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    if status != 200:
        return f"status {status}"
    return _stream_problem(scenario, body) if scenario.stream else _answer_problem(scenario, body)


def _answer_problem(scenario: Scenario, body: bytes) -> str | None:
    answer = orjson.loads(body)
    if answer["choices"][0]["message"]["content"] != WORD * scenario.max_tokens:
        return "wrong text"
    return None if answer["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"


def _stream_problem(scenario: Scenario, body: bytes) -> str | None:
    if not body.endswith(b"data: [DONE]\n\n"):
        return "no [DONE]"
    if body.count(_CONTENT) != scenario.max_tokens:
        return "wrong number of tokens"
    if b'"finish_reason":"length"' not in body.replace(b": ", b":"):
        return "no finish reason"
    *_, usage, _, _ = body.split(b"\n\n")
    return None if orjson.loads(usage[6:])["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"


def _request(scenario: Scenario, port: int) -> bytes:
    body = scenario.body()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 1.60.0\r\nAuthorization: Bearer bench\r\nX-Stainless-Lang: python\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Load:
    """One scenario against one port. Owns the Result."""

    def __init__(self, scenario: Scenario, port: int, seconds: float) -> None:
        self.result = Result()
        self._scenario = scenario
        self._port = port
        self._seconds = seconds
        self._request = _request(scenario, port)
        self._errors: Counter[str] = Counter()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Spread over a second, as streams do not begin all at once; always the same way.
        draw = random.Random(0)
        delays = [draw.random() if self._scenario.once else 0.0 for _ in range(self._scenario.connections)]
        tasks = [asyncio.create_task(self._client(delay, began + self._seconds)) for delay in delays]
        _, late = await asyncio.wait(tasks, timeout=self._seconds + PATIENCE_SECONDS)
        self._errors["not answered in time"] += len(late)
        self.result.seconds = loop.time() - began
        self.result.errors = dict(+self._errors)

    async def _client(self, delay: float, until: float) -> None:
        await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        client: _Client | None = None
        while True:
            try:
                if client is None or client.closed:
                    _, client = await loop.create_connection(_Client, "127.0.0.1", self._port)
                sent_at = loop.time()
                self._take(client, sent_at, *await client.ask(self._request))
            except OSError as error:
                self._errors[str(error)] += 1
                await asyncio.sleep(0.01)
            if self._scenario.once or loop.time() > until:
                break
        if client is not None:
            client.transport.close()

    def _take(self, client: _Client, sent_at: float, status: int, body: bytes) -> None:
        problem = _problem(self._scenario, status, body)
        if problem is not None:
            self._errors[problem] += 1
            return
        self.result.completed += 1
        self.result.tokens += self._scenario.max_tokens
        if client.first_token_at is not None:
            self.result.first_token_ms.append(round(1000 * (client.first_token_at - sent_at), 3))


def main(port: int, name: str, seconds: float) -> None:
    """Run one scenario and print what came of it."""
    (scenario,) = (scenario for scenario in scenarios(seconds) if scenario.name == name)
    load = Load(scenario, port, seconds)
    uvloop.run(load.run())
    json.dump(asdict(load.result), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
