"""One connection to one backend: an asyncio protocol around httptools' parser."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

import httptools

from proxy.errors import Failure, UpstreamError
from proxy.upstream.response import Response, upstream_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.backend import Backend

_MAX_HEAD_BYTES: Final = 64 * 1024

# A cable that was pulled, or a host that lost its power, says nothing: after this long it counts as lost.
_LOST_AFTER_SECONDS: Final = 30
SOCKET_OPTIONS: Final = [
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", _LOST_AFTER_SECONDS // 2),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _LOST_AFTER_SECONDS // 6),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _LOST_AFTER_SECONDS * 1000),
    )
    if hasattr(socket, name)
]


class Connection(asyncio.Protocol):
    """One connection to one backend: idle, or busy with exactly one exchange."""

    def __init__(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        on_exchanged: Callable[[Connection], None],
        address: str | None = None,
    ) -> None:
        """`on_exchanged`: takes the connection back when whoever began an exchange needs it no longer.

        `address`: the one of the backend's name that it goes to; None: the backend has no name but this address.
        """
        self.backend = backend
        self.address = address
        self.loop = loop  # to ask asyncio for it costs a system call in Python 3.11
        self.on_exchanged = on_exchanged
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
        self._limit_seconds = 0.0
        self._active = False
        self._paused = False
        self._is_stream = False

    # What Upstream does with it

    @property
    def is_reusable(self) -> bool:
        """Has its exchange ended well, and is it still open? A transport that has seen EOF reports the loss later."""
        return self.complete and not self.closed and self._transport is not None and not self._transport.is_closing()

    @property
    def is_stream(self) -> bool:
        """Is a streamed answer under way, that is, one with a bound on its gaps?"""
        return self._is_stream and not self.complete and not self.closed

    @property
    def is_paused(self) -> bool:
        """Do we hold the engine back?"""
        return self._paused

    @property
    def is_active(self) -> bool:
        """Has any of a streamed answer arrived since silence was last checked?"""
        return self._active

    def send(self, head: bytes, body: bytes, *, answer_seconds: float, now: float) -> asyncio.Future[Response]:
        """Begin an exchange; the future is done when the answer's headers have arrived."""
        assert self._transport is not None
        self.exchanges += 1
        self.complete = self._message_complete = self._answered = self._active = self._is_stream = False
        self._response = None
        self._head_bytes = 0
        self._head = self.loop.create_future()
        self._quiet_since, self._limit_seconds = now, answer_seconds
        self._transport.writelines((head, body))
        return self._head

    def limit_silence(self, seconds: float) -> None:
        self._limit_seconds = seconds
        self._active = self._is_stream = True

    def check_silence(self, now: float, lost_seconds: float) -> None:
        """Fail the exchange if its answer is not there in time, or a stream's next part.

        Time spent paused by us does not count, nor do `lost_seconds` in which this process did not run. Bytes are no
        progress by themselves: an engine, or what lies before it, can send some for ever and never come to an end.
        """
        self._quiet_since = min(self._quiet_since + lost_seconds, now)
        if self._active or self._paused:
            self._active, self._quiet_since = False, now
        elif now - self._quiet_since > self._limit_seconds:
            stage = "an answer" if self._response is None else "more of the answer"
            self.abort(self._error(Failure.TIMEOUT, f"waited {self._limit_seconds:g} s for {stage}"))

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
        sock = transport.get_extra_info("socket")
        for option in SOCKET_OPTIONS:  # without TCP_NODELAY: both event loops set it
            sock.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if self._head is None or self.complete:
            self.abort()  # bytes that nobody asked for: whatever they are, this connection cannot be trusted
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep_alive = False
            if not self._message_complete:  # what follows a complete answer cannot spoil it
                self.abort(self._error(Failure.BAD_ANSWER, "the engine's answer is not valid HTTP"))
                return
        response = self._response
        if response is None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.abort(self._error(Failure.BAD_ANSWER, "the engine's response headers are too large"))
            return
        if self._body:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            if response.deliver(body):
                self._active = True
        if self._message_complete:
            assert self._transport is not None
            # An answer that came before the request was written out leaves the rest of the request in the pipe.
            if self._keep_alive and not self._transport.get_write_buffer_size():
                self.complete = True
            else:
                self.abort()
            response.end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._head is not None and not self.complete:
            if self._answered:
                self._fail(self._error(Failure.BROKEN, "the engine closed the connection in the middle of its answer"))
            else:
                error = self._error(Failure.RESET, "the engine closed the connection without an answer")
                error.is_stale = self.exchanges > 1
                self._fail(error)
        # Each knows this connection: they would be cycles of garbage.
        self._head = self._response = None
        del self._parser

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._message_complete:
            raise ValueError("a second answer to one request")  # feed_data raises HttpParserError for it
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is None:  # what follows the body is no news to anybody, and has no bound
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600 or self._parser.get_http_version()[0] != "1":
            raise ValueError("not an answer of HTTP/1")  # feed_data raises HttpParserError for it
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
            self._response.end(error)
        elif self._head is not None and not self._head.done():
            self._head.set_exception(error)

    def _error(self, failure: Failure, message: str) -> UpstreamError:
        return upstream_error(failure, self.backend, message)
