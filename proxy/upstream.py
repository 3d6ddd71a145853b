"""HTTP out: raw HTTP/1.1 connections to the engines, and the only file that knows transport errors.

Bytes are parsed by httptools inside `data_received` and handed to a Sink in the same call stack, so a streamed token
costs a function call and not a task switch. Connections are kept alive and reused per backend. Every failure leaves
this file as an UpstreamError that says whether the engine can have seen the request.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from proxy.errors import Failure, UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType
    from typing import Self

    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.settings import Timeouts

# Engines close an idle connection after 5 s (vLLM VLLM_HTTP_TIMEOUT_KEEP_ALIVE, SGLang SGLANG_TIMEOUT_KEEP_ALIVE).
_KEEP_ALIVE_SECONDS: Final = 3.5
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024


class Sink(Protocol):
    """Takes the body of an answer as it arrives. Both methods are called from the event loop's read callback."""

    def received(self, data: bytes) -> None:
        """The body bytes of one read from the socket, in order, never empty."""

    def ended(self, error: UpstreamError | None) -> None:
        """No more bytes. None: the body is complete. Called once."""


class Response:
    """An engine's answer whose status line and headers have arrived; the body goes to whoever attaches."""

    __slots__ = ("_arrived", "_connection", "_ended", "_error", "_sink", "backend", "headers", "status")

    def __init__(self, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self.backend = connection.backend
        self.status = status
        self.headers = headers
        """Lower-case names; the last one of equal names."""
        self._connection = connection
        self._sink: Sink | None = None
        self._arrived: list[bytes] = []
        self._ended = False
        self._error: UpstreamError | None = None

    def attach(self, sink: Sink) -> None:
        """Give the body to `sink`, beginning with what has arrived already."""
        self._sink = sink
        if self._arrived:
            sink.received(b"".join(self._arrived))
            self._arrived.clear()
        if self._ended:
            sink.ended(self._error)

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when it ends early or is larger than the bound."""
        reader = _Reader(self)
        self.attach(reader)
        return await reader.whole

    def pause(self) -> None:
        """Stop reading from the engine: TCP flow control then holds its output back."""
        self._connection.pause(True)

    def resume(self) -> None:
        """Read again after `pause`."""
        self._connection.pause(False)

    def limit_silence(self, seconds: float) -> None:
        """From now on, fail with TIMEOUT when the engine sends nothing for so long."""
        self._connection.limit_silence(seconds)

    def fail(self, failure: Failure, message: str) -> UpstreamError:
        """The error for an answer that arrived but cannot be used."""
        return _error(failure, self.backend, message)

    def _deliver(self, data: bytes) -> None:
        if self._sink is None:
            self._arrived.append(data)
        else:
            self._sink.received(data)

    def _end(self, error: UpstreamError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            if self._sink is not None:
                self._sink.ended(error)


def _error(failure: Failure, backend: Backend, message: str) -> UpstreamError:
    # Clients see this text: it names the role, while the address stays in the log.
    return UpstreamError(failure, backend, f"{backend.role.value} instance: {message}")


def _reason(error: OSError) -> str:
    # Not the error's own text, which holds the address. Name lookup has negative numbers of its own.
    if isinstance(error, TimeoutError):
        return "timed out"
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else type(error).__name__.lower()


def _sweep_seconds(timeouts: Timeouts) -> float:
    shortest: float = min(
        timeouts.prefill_seconds, timeouts.first_token_seconds, timeouts.answer_seconds, timeouts.idle_seconds
    )
    return max(0.01, min(1.0, shortest / 4))


class _Reader:
    """The Sink behind `Response.read`."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._parts: list[bytes] = []
        self._size = 0
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= _MAX_ANSWER_BYTES:
            self._parts.append(data)
        elif not self.whole.done():
            self._parts.clear()
            self.whole.set_exception(self._response.fail(Failure.BAD_ANSWER, "the engine's answer is too large"))

    def ended(self, error: UpstreamError | None) -> None:
        if self.whole.done():
            return
        if error is None:
            self.whole.set_result(b"".join(self._parts))
        else:
            self.whole.set_exception(error)


class _Connection(asyncio.Protocol):
    """One connection to one backend: idle, or busy with exactly one exchange."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.exchanges = 0
        self.idle_since = 0.0
        self.closed = False
        self.complete = False
        """The exchange's answer has arrived whole, and the connection can carry another."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Response] | None = None
        self._response: Response | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._message_complete = False
        self._keep_alive = False
        self._answered = False
        self._quiet_since = 0.0
        self._silence_seconds = 0.0
        self._active = False
        self._paused = False

    # What Upstream does with it

    @property
    def is_reusable(self) -> bool:
        """Has its exchange ended well, and is it still open? A transport that has seen EOF reports the loss later."""
        return self.complete and not self.closed and self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, *, silence_seconds: float, now: float) -> asyncio.Future[Response]:
        """Begin an exchange; the future is done when the answer's headers have arrived."""
        assert self._transport is not None
        self.exchanges += 1
        self.complete = self._message_complete = self._answered = self._active = False
        self._response = None
        self._head_bytes = 0
        self._head = asyncio.get_running_loop().create_future()
        self._quiet_since, self._silence_seconds = now, silence_seconds
        self._transport.writelines((head, body))
        return self._head

    def limit_silence(self, seconds: float) -> None:
        self._silence_seconds = seconds
        self._active = True

    def check_silence(self, now: float) -> None:
        """Fail the exchange if the engine has been silent for too long. Time spent paused by us does not count."""
        if self._active or self._paused:
            self._active, self._quiet_since = False, now
        elif now - self._quiet_since > self._silence_seconds:
            stage = "an answer" if self._response is None else "more of the answer"
            self.abort(_error(Failure.TIMEOUT, self.backend, f"waited {self._silence_seconds:g} s for {stage}"))

    def pause(self, paused: bool) -> None:
        if self._transport is None or self.closed or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def abort(self, error: UpstreamError | None = None) -> None:
        """Drop the connection at once: the engine sees it and stops working for us."""
        if self._transport is not None and not self.closed:
            self.closed = True
            self._transport.abort()
        if error is not None:
            self._fail(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._head is None or self.complete:
            self.abort()  # bytes that nobody asked for: whatever they are, this connection cannot be trusted
            return
        self._active = self._answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep_alive = False
            if not self._message_complete:  # what follows a complete answer cannot spoil it
                self.abort(_error(Failure.BAD_ANSWER, self.backend, "the engine's answer is not valid HTTP"))
                return
        response = self._response
        if response is None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.abort(_error(Failure.BAD_ANSWER, self.backend, "the engine's response headers are too large"))
            return
        if self._body:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            response._deliver(body)
        if self._message_complete:
            assert self._transport is not None
            # An answer that came before the request was written out leaves the rest of the request in the pipe.
            if self._keep_alive and not self._transport.get_write_buffer_size():
                self.complete = True
            else:
                self.abort()
            response._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._head is None or self.complete:
            return
        if self._answered:
            self._fail(
                _error(Failure.BROKEN, self.backend, "the engine closed the connection in the middle of its answer")
            )
        else:
            self._fail(_error(Failure.RESET, self.backend, "the engine closed the connection without an answer"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._message_complete:
            raise ValueError("a second answer to one request")  # feed_data raises HttpParserError for it
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._response = Response(self, status, self._headers)
            if self._head is not None and not self._head.done():
                self._head.set_result(self._response)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._message_complete = self._response is not None  # a 1xx answer is followed by the real one
        self._keep_alive = self._parser.should_keep_alive()  # known only here: the parser resets itself next

    def _fail(self, error: UpstreamError) -> None:
        if self._response is not None:
            self._response._end(error)
        elif self._head is not None and not self._head.done():
            self._head.set_exception(error)


class Upstream:
    """One worker's connections to all backends. `async with` it; leaving closes every connection."""

    def __init__(self, timeouts: Timeouts, keys: EngineKeys, *, sweep_seconds: float | None = None) -> None:
        """`sweep_seconds`: how often silences are looked at; by default often enough for the shortest of them."""
        self._timeouts = timeouts
        self._keys = keys
        self._sweep_seconds = sweep_seconds or _sweep_seconds(timeouts)
        self._idle: dict[Backend, list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._sweep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.abort()
        self._idle.clear()

    @property
    def busy_connections(self) -> int:
        """Exchanges under way."""
        return len(self._busy)

    @asynccontextmanager
    async def open(
        self,
        backend: Backend,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        silence_seconds: float,
        resend_if_stale: bool = False,
    ) -> AsyncIterator[Response]:
        """POST a JSON body and yield the answer once its headers are there. Leaving early drops the connection.

        `headers` have lower-case names; an `authorization` among them is the client's own.
        `silence_seconds` bounds the wait for the headers and then, until `limit_silence`, every gap in the body.
        `resend_if_stale`: when a *reused* connection closes without a byte of answer, the engine most likely closed it
        while idle, and the request is sent once more on a fresh one. Not for a leg that must not be sent twice.
        Raises UpstreamError.
        """
        head = self._head(backend, path, len(body), headers)
        connection, response = await self._exchange(backend, head, body, silence_seconds, resend_if_stale)
        try:
            yield response
        finally:
            self._put_back(connection)

    async def fetch(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], *, silence_seconds: float
    ) -> tuple[Response, bytes]:
        """POST a JSON body and return the answer with its whole body. Raises UpstreamError."""
        head = self._head(backend, path, len(body), headers)
        connection, response = await self._exchange(backend, head, body, silence_seconds, resend_if_stale=True)
        try:
            return response, await response.read()
        finally:
            self._put_back(connection)

    async def _exchange(
        self, backend: Backend, head: bytes, body: bytes, silence_seconds: float, resend_if_stale: bool
    ) -> tuple[_Connection, Response]:
        connection = self._take_idle(backend) or await self._connect(backend)
        while True:
            self._busy.add(connection)
            now = asyncio.get_running_loop().time()
            try:
                return connection, await connection.send(head, body, silence_seconds=silence_seconds, now=now)
            except BaseException as error:
                self._put_back(connection)
                stale = isinstance(error, UpstreamError) and error.failure is Failure.RESET and connection.exchanges > 1
                if not (stale and resend_if_stale):
                    raise
            connection = await self._connect(backend)

    async def _connect(self, backend: Backend) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                _, connection = await loop.create_connection(lambda: _Connection(backend), backend.host, backend.port)
        except OSError as error:  # TimeoutError is one
            raise _error(Failure.CONNECT, backend, f"cannot connect ({_reason(error)})") from None
        return connection

    def _head(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1\r\n",
            f"Host: {backend.name}\r\n",
            "Content-Type: application/json\r\n",
            f"Content-Length: {body_bytes}\r\n",
            "Accept-Encoding: identity\r\n",
        ]
        credentials = self._keys.headers(backend, headers.get("authorization"))
        lines += [f"{name}: {value}\r\n" for name, value in headers.items() if name != "authorization"]
        lines += [f"{name}: {value}\r\n" for name, value in credentials.items()]
        lines.append("\r\n")
        return "".join(lines).encode("utf-8", "surrogateescape")  # how aiohttp decoded a client's header

    def _take_idle(self, backend: Backend) -> _Connection | None:
        idle = self._idle.get(backend, [])
        oldest = asyncio.get_running_loop().time() - _KEEP_ALIVE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _put_back(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection.is_reusable:
            connection.pause(False)
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault(connection.backend, []).append(connection)
        else:
            connection.abort()

    def _sweep(self) -> None:
        """One timer for all exchanges: a timer per token would cost as much as the token."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._sweeper = loop.call_later(self._sweep_seconds, self._sweep)
        for connection in list(self._busy):
            connection.check_silence(now)
        for backend, idle in list(self._idle.items()):
            kept = [c for c in idle if c.is_reusable and now - c.idle_since < _KEEP_ALIVE_SECONDS]
            for connection in set(idle).difference(kept):
                connection.abort()
            if kept:
                self._idle[backend] = kept
            else:
                del self._idle[backend]
