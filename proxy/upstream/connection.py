"""One connection to one backend, and what it tells of an answer.

Whoever begins an Exchange hears of its answer in the call stack of the socket's read: no future, no task. Response is
the one that tasks await.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, Protocol, cast

from proxy.common.errors import Failure, UpstreamError
from proxy.upstream.answer_reader import AnswerReader
from proxy.upstream.any_answer import BadAnswer
from proxy.upstream.fast_forward import FastForward
from proxy.wire.document import length_of, pieces_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from proxy.common.backend import Backend
    from proxy.upstream.fast_forward import Tokens
    from proxy.wire.document import Body

_MAX_HEAD_BYTES: Final = 64 * 1024
# A copy of a longer request costs more than what it spares.
_JOINED_BYTES: Final = 64 * 1024

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


class Sink(Protocol):
    """Takes the body of an answer as it arrives. Both methods are called from the event loop's read callback."""

    def received(self, data: bytes, /) -> bool | None:
        """The body bytes of one read from the socket, in order, never empty.

        Whether any of the answer was in them, for streams: a sign of life is none of it, nor is what is not whole yet.
        None is no.
        """

    def ended(self, error: UpstreamError | None) -> None:
        """No more bytes. None: the body is complete. Called once."""


class Exchange(Sink, Protocol):
    """One request on a connection, told what becomes of it: `answered` at most once, `received` for each read that has
    some of the body, and `ended` once, unless the connection was released before.

    All may call back into the connection. `ended` may come from within `EngineConnection.abort`, and without
    `answered`: then there is an error. When it tells None, the connection can be released at once, and carry the next
    exchange.
    """

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The status, from 200 on, and headers have arrived: lower-case names; the last one of equal names."""


class EngineConnection(FastForward):
    """One connection to one backend: idle, or busy with exactly one exchange."""

    def __init__(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        on_exchanged: Callable[[EngineConnection], None],
        head: Callable[[Backend, str, int, Mapping[str, str]], bytes],
        clock: Callable[[], float],
        address: str | None = None,
    ) -> None:
        """`on_exchanged`: takes the connection back when whoever began an exchange needs it no longer.

        `head`: renders that of a request; see RequestHeads.

        `address`: the one of the backend's name that it goes to; None: the backend has no name but this address.
        """
        super().__init__()
        self.backend = backend
        self.address = address
        self.loop = loop  # to ask asyncio for it costs a system call in Python 3.11
        self.on_exchanged = on_exchanged
        self._head = head
        self._clock = clock
        self.mask_key: Callable[[bytes], bytes] = bytes
        """Takes the gateway's own key out of an engine's refusal, which goes to the client in the engine's words."""
        self.is_reused = False
        """It has carried an exchange before."""
        self.usable_until = 0.0
        """As long as it is idle: when it is too old for another exchange."""
        self.closed = False
        self.complete = True
        """None was begun, or the last one's answer has arrived whole, and the connection can carry another."""
        self.is_paused = False
        """We hold the engine back."""
        self.transport: asyncio.Transport
        """Set when it is connected."""
        self.reader = AnswerReader()
        self._exchange: Exchange | None = None
        """Whom to tell; None before the first exchange, and when one has ended or was released."""
        self._head_bytes = 0
        self._has_head = False
        """The exchange was told status and headers."""
        self.quiet_since = 0.0
        """The clock time of the last look that has found any of the answer, or of its request."""
        self._limit_seconds = 0.0
        self._is_stream = False
        self.has_begun = False
        """Part of a streamed answer has arrived, so that the next one may be expected soon."""
        self.moved_seconds = 0.0
        """How long the parts took that the last look at silence has found; 0: that is not known."""
        self._is_timed = False
        """A look has found parts of the stream, from which on others are timed."""

    # What Upstream does with it

    @property
    def is_reusable(self) -> bool:
        """Has its exchange ended well, and is it still open? A transport that has seen EOF reports the loss later."""
        return self.complete and not self.closed and not self.transport.is_closing()

    @property
    def is_stream(self) -> bool:
        """Is a streamed answer under way, that is, one with a bound on its gaps?"""
        return self._is_stream and not self.complete and not self.closed

    def begin(
        self, exchange: Exchange, path: str, body: Body, headers: Mapping[str, str], *, answer_seconds: float
    ) -> None:
        """Send a request, see Upstream.open, and tell the exchange of its answer.

        `answer_seconds` bounds the wait for the whole answer, unless `limit_silence` is called when it has begun.
        """
        self.complete = self._has_head = False
        self._is_stream = self.has_begun = self._is_timed = False
        self.arrivals = 0
        self._head_bytes = 0
        self._exchange = exchange
        self.quiet_since, self._limit_seconds = self._clock(), answer_seconds
        if isinstance(body, bytes) and len(body) <= _JOINED_BYTES:  # uvloop writes one piece with less ado
            self.transport.write(self._head(self.backend, path, len(body), headers) + body)
        else:
            self.transport.writelines((self._head(self.backend, path, length_of(body), headers), *pieces_of(body)))

    def release(self) -> None:
        """The exchange is told nothing more; dropped unless its answer has arrived whole."""
        self._exchange = self._tokens = None
        if self.is_reusable:
            self.pause(False)
        else:
            self.abort()

    def limit_silence(self, seconds: float, has_begun: bool = False) -> None:
        """From now on this is a stream, which may take as long as it likes: it fails with TIMEOUT when the engine sends
        nothing of the answer for so long, with STALLED when it does so on all streams while others of its role go on.

        `has_begun`: part of the answer has arrived, see Silences.
        """
        self._limit_seconds = seconds
        self._is_stream = True
        self.has_begun |= has_begun
        self.arrivals += 1

    def is_silent_since(self, since: float) -> bool:
        """Has nothing of the answer under way arrived since then? `since`: a `quiet_since` of this connection."""
        is_over = self.complete or self.closed or self.is_paused
        return not is_over and not self.arrivals and self.quiet_since == since

    def check_silence(self, now: float, lost_seconds: float) -> int:
        """Fail the exchange if its answer is not there in time, or a stream's next part. Return how many parts have
        arrived since the last look; -1: it has failed, or we hold it back.

        Time spent paused by us does not count, nor do `lost_seconds` in which this process did not run. Bytes are no
        progress by themselves: an engine, or what lies before it, can send some for ever and never come to an end.
        """
        arrivals = self.arrivals
        if self.is_paused:
            self.arrivals, self.quiet_since, self._is_timed = 0, now, False
            return -1
        if arrivals:
            self.moved_seconds = now - self.quiet_since if self._is_timed else 0.0
            self.arrivals, self.quiet_since, self._is_timed = 0, now, self.has_begun
            return arrivals
        if lost_seconds:
            self.quiet_since = min(self.quiet_since + lost_seconds, now)
        if now - self.quiet_since > self._limit_seconds:
            stage = "an answer" if not self._has_head else "more of the answer"
            self.abort(self._error(Failure.TIMEOUT, f"waited {self._limit_seconds:g} s for {stage}"))
            return -1
        return 0

    def lose(self, message: str) -> None:
        """Fail the exchange as if the engine had closed the connection. `message` says of the instance what it does."""
        failure = Failure.BROKEN if self._has_head or self._head_bytes else Failure.RESET
        self.abort(self._error(failure, message))

    def stall(self, message: str) -> None:
        """Fail the exchange because the engine hangs."""
        self.abort(self._error(Failure.STALLED, message))

    def pass_on(self, tokens: Tokens | None) -> None:
        """Send the next reads to the client as they arrive, the framing of chunks included, as far as they are such
        tokens: that is progress. What comes behind them, and all that follows, the exchange receives. None: all.

        For a chunked answer, of which all that has arrived are whole chunks; nothing happens for any other.
        """
        if self.reader.is_between_chunks:
            self._tokens = tokens

    def pause(self, paused: bool) -> None:
        if self.closed or paused == self.is_paused:
            return
        self.is_paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def abort(self, error: UpstreamError | None = None) -> None:
        """Drop the connection at once: the engine sees it and stops working for us."""
        if not self.closed:
            self.closed = True
            self.transport.abort()
        if error is not None:
            self._end(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        # What uvloop gives out as a socket makes a new one for each option. The family does not matter to them.
        descriptor = transport.get_extra_info("socket").fileno()
        sock = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            for option in SOCKET_OPTIONS:  # without TCP_NODELAY: both event loops set it
                sock.setsockopt(*option)
        finally:
            sock.detach()  # it is the transport's

    def _read(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abort()  # bytes that nobody asked for: whatever they are, this connection cannot be trusted
            return
        reader = self.reader
        try:
            body = reader.feed(data)
        except BadAnswer:
            if reader.status and not self._has_head:
                exchange.answered(reader.status, reader.headers)
            self.abort(self._error(Failure.BAD_ANSWER, "the engine's answer is not valid HTTP"))
            return
        if not self._has_head:
            if not reader.status:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.abort(self._error(Failure.BAD_ANSWER, "the engine's response headers are too large"))
                return
            self._has_head = True
            exchange.answered(reader.status, reader.headers)
        if body and self._exchange is exchange and exchange.received(body):  # it may have left
            self.arrivals += 1
        if reader.is_complete and self._exchange is exchange:
            # An answer that came before the request was written out leaves the rest of the request in the pipe.
            if reader.keeps_alive and not self.transport.get_write_buffer_size():
                self.complete = True
            else:
                self.abort()
            self._exchange = None
            exchange.ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._exchange is not None:
            if self._has_head or self._head_bytes:
                error = self._error(Failure.BROKEN, "the engine closed the connection in the middle of its answer")
            else:
                error = self._error(Failure.RESET, "the engine closed the connection without an answer")
                error.is_stale = self.is_reused
            self._end(error)
        self.reader.close()

    def _end(self, error: UpstreamError | None) -> None:
        self._tokens = None
        exchange, self._exchange = self._exchange, None  # an exchange knows its connection: one cycle of garbage less
        if exchange is not None:
            exchange.ended(error)

    def _error(self, failure: Failure, message: str) -> UpstreamError:
        return upstream_error(failure, self.backend, message)


def upstream_error(
    failure: Failure,
    backend: Backend,
    message: str,
    *,
    engine_status: int | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> UpstreamError:
    """An error whose text clients may see: it names the role, while the address stays in the log.

    The keywords are UpstreamError's: what the engine itself answered.
    """
    text = f"{backend.role.value} instance: {message}"
    return UpstreamError(failure, backend, text, engine_status=engine_status, body=body, headers=headers)
