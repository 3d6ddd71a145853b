"""A load generator for all scripts: clients that cost little and check every answer.

`Client` is a connection, and `Answer` the outcome of one request. `Load` sends requests at a rate, or by a number of
clients, each of which sends the next request when it has its answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from random import Random
from ssl import SSLContext
from time import perf_counter
from typing import Any, Final, NamedTuple, cast

import httptools

from lab.common.engines import Script
from lab.common.processes import HOST

CHAT: Final = "/v1/chat/completions"
DONE: Final = b"data: [DONE]"
_BUCKETS_PER_SECOND: Final = 50_000
_LAST: Final = 30 * _BUCKETS_PER_SECOND
"""Longer durations count as 30 s."""
_has_content: Final = re.compile(rb'"(?:content|text)": ?"[^"]').search
_find_completion_tokens: Final = re.compile(rb'"completion_tokens": ?(\d+)').findall


class Histogram:
    """Durations to the nearest 20 µs, counted in buckets: memory does not grow with their number."""

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self.counts = {} if counts is None else counts

    def add(self, seconds: float) -> None:
        bucket = min(_LAST, round(seconds * _BUCKETS_PER_SECOND))
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def milliseconds(self, share: float) -> float:
        """Return the time below which this share of the durations lies, in ms; NaN without durations."""
        left = share * sum(self.counts.values())
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return 1000 * bucket / _BUCKETS_PER_SECOND
        return float("nan")


def post(port: int, body: Mapping[str, Any] | bytes, path: str = CHAT, **headers: str) -> bytes:
    """Return a request as the OpenAI SDK writes it. Underscores in header names become hyphens."""
    if not isinstance(body, bytes):
        body = json.dumps(body, separators=(",", ":")).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 1.60.0\r\nAuthorization: Bearer bench\r\nX-Stainless-Lang: python\r\n"
        f"{lines}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def scripted(port: int, prompt_bytes: int, max_tokens: int, script: Script) -> bytes:
    """Return a request for a stream, which `lab.common.engines` answers by the script."""
    text = ("Tell me of the river and the bridge. " * (prompt_bytes // 37 + 1))[:prompt_bytes]
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return post(port, {**body, **stream, "script": asdict(script)})


class Answer(NamedTuple):
    """The outcome of one request. Times are those of `perf_counter`."""

    status: int | None
    """None if no status line arrived."""
    body: bytes
    sent_at: float
    first_token_at: float | None
    ended_at: float
    is_whole: bool
    """False if the connection was closed before the end of the answer."""

    @property
    def pieces(self) -> int:
        """Number of events of a stream that have content."""
        return sum(_has_content(event) is not None for event in self.body.split(b"\n\n"))

    def problem(self, *, has_usage: bool = False) -> str:
        """Return the fault of a streamed answer, or an empty string. `has_usage`: usage must equal its pieces."""
        if not self.is_whole:
            return "the connection was closed before the end of the answer"
        if self.status != 200:
            return f"status {self.status}"
        if b'"error"' in self.body:
            return "error event"
        if not self.body.endswith(DONE + b"\n\n"):
            return "no [DONE]"
        counts = _find_completion_tokens(self.body) if has_usage else [self.pieces]
        return "" if counts and int(counts[-1]) == self.pieces else "wrong number of tokens"


class Client(asyncio.Protocol):
    """A connection for one request after the other. Adds the times between arrivals of tokens to `gaps`."""

    def __init__(self, gaps: Histogram | None = None) -> None:
        self.closed = False
        self.first_token: asyncio.Future[None]
        """Done when the first token of the answer has arrived, or the answer has ended."""
        self._gaps = gaps or Histogram()
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._body: list[bytes] = []
        self._sent_at = self._token_at = self._now = 0.0
        self._first_token_at: float | None = None
        self._has_status = False
        self._has_token = False
        """Whether the latest data has a token."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request. The future's answer is partial if the connection is lost."""
        self._body = []
        self._first_token_at = None
        self._has_status = False
        self._answer = self._loop.create_future()
        self.first_token = self._loop.create_future()
        self._sent_at = perf_counter()  # the clock of uvloop has milliseconds only
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        self._has_token = False
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self._has_status = True

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self._has_token or not _has_content(data):
            return
        self._has_token = True
        if self._first_token_at is None:
            self._first_token_at = self._now
            self._resolve_first_token()
        else:
            self._gaps.add(self._now - self._token_at)
        self._token_at = self._now

    def on_message_complete(self) -> None:
        self.closed = not self._parser.should_keep_alive()
        self._end(is_whole=True)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._end(is_whole=False)

    def _end(self, *, is_whole: bool) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        status = self._parser.get_status_code() if self._has_status else None
        times = self._sent_at, self._first_token_at, perf_counter()
        answer.set_result(Answer(status, b"".join(self._body), *times, is_whole))
        self._resolve_first_token()

    def _resolve_first_token(self) -> None:
        if not self.first_token.done():
            self.first_token.set_result(None)


async def connect(port: int, gaps: Histogram | None = None, tls: SSLContext | None = None) -> Client:
    """Open a connection, without TLS if `tls` is None. Raises OSError."""
    _, client = await asyncio.get_running_loop().create_connection(partial(Client, gaps), HOST, port, ssl=tls)
    return client


async def ask(port: int, request: bytes) -> Answer:
    """Send a request on a new connection, which a cancelled request closes. Raises OSError."""
    client = await connect(port)
    try:
        return await client.ask(request)
    finally:
        client.transport.abort()


class Connections:
    """Connections to a port that are kept for further requests."""

    def __init__(self, port: int, gaps: Histogram | None = None) -> None:
        self.port = port
        self._gaps = gaps
        self._idle: list[Client] = []

    async def ask(self, request: bytes) -> Answer:
        """Send a request on an idle connection or a new one. A cancelled request closes it. Raises OSError."""
        self._idle = [client for client in self._idle if not client.closed]
        client = self._idle.pop() if self._idle else await connect(self.port, self._gaps)
        try:
            answer = await client.ask(request)
        except BaseException:
            client.transport.abort()
            raise
        if client.closed:
            client.transport.close()
        else:
            self._idle.append(client)
        return answer

    def close(self) -> None:
        for client in self._idle:
            client.transport.abort()


class Load:
    """Requests at a rate or by a number of clients, and their problems.

    `ask` gets the number of a request, and returns the problem of its answer, or an empty string. OSError and
    TimeoutError are problems, too.
    """

    def __init__(self, ask: Callable[[int], Awaitable[str]]) -> None:
        self._ask = ask
        self.request_count = 0
        self.ended = 0
        self.problems: list[tuple[float, str]] = []
        """Seconds of the monotonic clock and the problem, for each failed request."""
        self._changed = asyncio.Event()

    def failures(self, since: float = 0.0) -> Counter[str]:
        """Count the problems since a moment, by their text."""
        return Counter(problem for at, problem in self.problems if at >= since)

    async def have_ended(self, more: int) -> None:
        """Wait until this number of further requests have ended."""
        wanted = self.ended + more
        while self.ended < wanted:
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def at_rate(
        self, per_second: float, draw: Random | None = None, *, leaves: bool = False
    ) -> AsyncIterator[None]:
        """Send requests at this rate until the end of the block, without waiting for answers.

        Args:
          per_second: Mean rate.
          draw: Draws the pauses, which are equal without it.
          leaves: Cancel requests in flight at the end instead of waiting for them.
        """

        async def begin() -> None:
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                self._begin(tasks)
                # A late loop skips requests instead of sending all of them at once.
                due = max(due + (draw.expovariate(per_second) if draw else 1 / per_second), loop.time())
                await asyncio.sleep(due - loop.time())

        tasks: set[asyncio.Task[None]] = set()
        beginning = asyncio.create_task(begin())
        try:
            yield
        finally:
            beginning.cancel()
            await _ended([beginning, *tasks], leaves=leaves)

    @asynccontextmanager
    async def at_a_time(
        self, clients: int, spread_seconds: float = 0.0, *, leaves: bool = False
    ) -> AsyncIterator[None]:
        """Run this number of clients until the end of the block.

        Args:
          clients: Each sends its next request when it has an answer.
          spread_seconds: Time in which the clients begin.
          leaves: Cancel requests in flight at the end instead of waiting for them.
        """

        async def client(number: int) -> None:
            await asyncio.sleep(spread_seconds * number / clients)
            while not is_over:
                await self._one()

        is_over = False
        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield
        finally:
            is_over = True
            await _ended(tasks, leaves=leaves)

    def _begin(self, tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(self._one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _one(self) -> None:
        number = self.request_count
        self.request_count += 1
        try:
            problem = await self._ask(number)
        except (OSError, TimeoutError) as error:
            problem = type(error).__name__
        if problem:
            self.problems.append((time.monotonic(), problem))
        self.ended += 1
        self._changed.set()


async def _ended(tasks: list[asyncio.Task[None]], *, leaves: bool) -> None:
    for task in tasks if leaves else ():
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, BaseException) and not isinstance(found, asyncio.CancelledError):
            raise found


@contextmanager
def stalled_clients(port: int, request: bytes, count: int) -> Iterator[None]:
    """Keep connections open that have sent a request and read nothing of the answer."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((HOST, port))
            client.sendall(request)
        yield


class Crowd:
    """Streams that are open at the same time, on one connection each."""

    def __init__(self, port: int) -> None:
        self.errors: Counter[str] = Counter()
        self._port = port
        self._clients: list[Client] = []
        self._answers: list[asyncio.Future[Answer]] = []

    async def open(self, request: bytes) -> None:
        """Open one more stream. Errors are counted, not raised."""
        try:
            client = await connect(self._port)
        except OSError as error:
            self.errors[str(error)] += 1
            return
        self._answers.append(client.ask(request))
        self._clients.append(client)

    async def begun(self, patience_seconds: float) -> None:
        """Wait until every stream has its first token or has ended."""
        await _all([client.first_token for client in self._clients], patience_seconds)

    async def ended(self, patience_seconds: float) -> None:
        """Wait until every stream has ended. Later ends are errors."""
        await _all(self._answers, patience_seconds)
        for client, answer in zip(self._clients, self._answers, strict=True):
            problem = answer.result().problem(has_usage=True) if answer.done() else "not answered in time"
            if problem:
                self.errors[problem] += 1
            client.transport.abort()
        self._clients, self._answers = [], []


async def _all(futures: list[asyncio.Future[Any]], patience_seconds: float) -> None:
    if futures:
        await asyncio.wait(futures, timeout=patience_seconds)
