"""The connection to a backend, which passes answers to an Exchange.

An Exchange is called from the read callback of the socket, without futures or tasks. Response is the Exchange for code
that runs in tasks.
"""

from __future__ import annotations

import socket
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, cast

from proxy.common.errors import Failure, UpstreamError
from proxy.upstream.answer_reader import AnswerReader
from proxy.upstream.any_answer import BadAnswer
from proxy.upstream.fast_forward import FastForward, TokenFormat
from proxy.upstream.pump import CLIENT_IS_SLOW, NativePump
from proxy.wire.document import Body, body_length, body_pieces

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from proxy.common.backend import Backend
    from proxy.upstream.gathering import TokenGathering

_MAX_HEAD_BYTES: Final = 64 * 1024
# Copying a longer request into one piece costs more than it saves.
_JOINED_BYTES: Final = 64 * 1024

# A host without power or network closes no connection. After this time without a reply it counts as lost.
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


class BodySink(Protocol):
    """Receives the body of an answer. Both methods are called from the read callback of the event loop."""

    def on_body_data(self, data: bytes, /) -> bool | None:
        """Receive the body bytes of one read from the socket. They arrive in order and are never empty.

        Returns whether they completed a part of the answer, for streams. Comments, heartbeats and incomplete events do
        not count. None means no.
        """

    def on_body_end(self, error: UpstreamError | None) -> None:
        """Handle the end of the body. Called once. `error` None: the body is complete."""

    def can_move_to_other_backend(self) -> bool:
        """Return whether another backend can probably give the same answer, or continue it exactly."""


class EngineExchange(BodySink, Protocol):
    """One request to an engine, and its answer, on a connection.

    The connection calls `on_answer_head` at most once, `on_body_data` for each read with a part of the body, and
    `on_body_end` once. It calls none of them after it was released. All may call back into the connection.
    `EngineConnection.abort_connection` may call `on_body_end`, and an error may arrive without `on_answer_head`. After
    `ended(None)` the connection can be released and carry the next exchange at once.
    """

    def on_answer_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status (at least 200) and the headers, by lower-case name.

        Of repeated names, the last value is used.
        """


class EngineConnection(FastForward):
    """A connection to a backend, which is idle or has exactly one exchange."""

    def __init__(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        on_exchanged: Callable[[EngineConnection], None],
        head: Callable[[Backend, str, int, Mapping[str, str]], bytes],
        clock: Callable[[], float],
        address: str | None = None,
    ) -> None:
        """Create a connection to an engine that is not connected yet.

        Args:
            backend: The engine at the other end.
            loop: The event loop of the connection.
            on_exchanged: Takes the connection back after an exchange.
            head: Renders the head of a request; see RequestHeads.
            clock: Returns the time in seconds.
            address: The address of the name of the backend that is used; None: the backend is an address itself.
        """
        super().__init__()
        self.backend = backend
        self.address = address
        self.loop = loop  # asyncio.get_running_loop makes a system call in Python 3.11
        self.on_exchanged = on_exchanged
        self._render_head = head
        self._clock = clock
        self.mask_key: Callable[[bytes], bytes] = bytes
        """Removes the key of the gateway from an error of an engine, which is sent to the client."""
        self.is_reused = False
        """Whether the connection has carried an exchange before."""
        self.usable_until = 0.0
        """Clock time after which an idle connection is too old for another exchange."""
        self.is_closed = False
        self.is_exchange_complete = True
        """Whether no exchange is running and the connection can carry another."""
        self.is_reading_paused = False
        """Whether reading is paused, so that TCP flow control slows the engine down."""
        self.transport: asyncio.Transport
        """The transport, set by `connection_made`."""
        self.reader = AnswerReader()
        self._exchange: EngineExchange | None = None
        """The running exchange; None before the first one, and after one has ended or was released."""
        self._head_bytes = 0
        self._has_head = False
        """Whether the exchange has received the status and headers of its answer."""
        self.quiet_since = 0.0
        """Clock time of the last check of silence that found a new part of the answer, or of the start of the request.
        """
        self._limit_seconds = 0.0
        self._is_stream = False
        self.has_begun = False
        """Whether a part of a streamed answer has arrived, so that the next part is due soon."""
        self.moved_seconds = 0.0
        """The time in seconds in which the parts that the last check found have arrived; 0: unknown."""
        self._is_timed = False
        """Whether a check of silence has found parts of the stream. The time of later parts is then measured."""
        self._pump: NativePump | None = None
        """Forwards tokens in C; None if this process cannot."""
        self._pumped = -1
        """The number of this stream in the pump, which then reads the socket; -1 if the transport reads it."""
        self._is_waiting = False
        """Whether reading is stopped until the next round of the TokenGathering."""

    # Methods for Upstream

    @property
    def is_reusable(self) -> bool:
        """Whether the exchange ended well and the connection is open. A closing transport reports the loss later."""
        return self.is_exchange_complete and not self.is_closed and not self.transport.is_closing()

    @property
    def is_over(self) -> bool:
        """Whether no exchange is running."""
        return self.is_exchange_complete or self.is_closed

    @property
    def is_stream(self) -> bool:
        """Whether a streamed answer is under way. The time between its parts is limited."""
        return self._is_stream and not self.is_over

    def begin_exchange(
        self, exchange: EngineExchange, path: str, body: Body, headers: Mapping[str, str], *, answer_seconds: float
    ) -> None:
        """Send a request, and pass its answer to the exchange. See Upstream.post_and_await_head.

        `answer_seconds` limits the wait for the whole answer, unless `treat_as_stream` is called after it began.
        """
        self._start_exchange(exchange, answer_seconds)
        if isinstance(body, bytes) and len(body) <= _JOINED_BYTES:  # uvloop writes a single piece faster
            self.transport.write(self._render_head(self.backend, path, len(body), headers) + body)
        else:
            self.transport.writelines(
                (self._render_head(self.backend, path, body_length(body), headers), *body_pieces(body))
            )

    def begin_get(self, exchange: EngineExchange, head: bytes) -> None:
        """Send the head of a GET request, and pass its answer to the exchange. The caller bounds the time."""
        self._start_exchange(exchange, inf)
        self.transport.write(head)

    def _start_exchange(self, exchange: EngineExchange, answer_seconds: float) -> None:
        self.is_exchange_complete = self._has_head = False
        self._is_stream = self.has_begun = self._is_timed = False
        self.arrived_tokens = 0
        self._head_bytes = 0
        self._exchange = exchange
        self.quiet_since, self._limit_seconds = self._clock(), answer_seconds

    def release_exchange(self) -> None:
        """End the exchange without further calls to it. The connection closes unless the answer is complete."""
        if self._pumped >= 0:
            self._stop_pumping()
        if self._is_waiting:
            self.stop_waiting()
        self._exchange = self._passed_tokens = None
        if self.is_reusable:
            self.set_reading_paused(False)
        else:
            self.abort_connection()

    def can_move(self) -> bool:
        """Return whether another backend can probably continue the exchange exactly."""
        return self._exchange is None or self._exchange.can_move_to_other_backend()

    def treat_as_stream(self, seconds: float, has_begun: bool = False) -> None:
        """Treat the answer as a stream: limit the time between its parts instead of its total time.

        It fails with TIMEOUT after `seconds` without a new part. It fails with STALLED if the engine sends
        nothing on all its streams while other engines of its role do. `has_begun`: part of the answer has arrived, see
        Silences.
        """
        self._limit_seconds = seconds
        self._is_stream = True
        self.has_begun |= has_begun
        self.arrived_tokens += 1

    def has_been_silent_since(self, since: float) -> bool:
        """Return whether nothing of the running answer has arrived since `since`, a former `quiet_since`."""
        self._count_pumped()
        return not self.is_over and not self.is_reading_paused and not self.arrived_tokens and self.quiet_since == since

    def quiet_seconds(self, checked_at: float) -> float:
        """Return the time in which nothing of the answer had arrived at the last check of silence.

        It is 0 if a part has arrived since. Otherwise an answer would be called silent when its first token arrives
        after a long wait. `checked_at`: clock time of the check.
        """
        return 0.0 if self.arrived_tokens else max(0.0, checked_at - self.quiet_since)

    def check_silence(self, now: float, lost_seconds: float) -> int:
        """Fail the exchange if its answer, or the next part of a stream, is late.

        Returns the number of parts since the last check, or -1 if the exchange failed or reading is paused. Paused time
        does not count, nor do `lost_seconds` in which this process did not run. Bytes that complete no part are no
        progress: an engine or a proxy could send some forever.
        """
        self._count_pumped()
        arrivals = self.arrived_tokens
        if self.is_reading_paused:
            self.arrived_tokens, self.quiet_since, self._is_timed = 0, now, False
            return -1
        if arrivals:
            self.moved_seconds = now - self.quiet_since if self._is_timed else 0.0
            self.arrived_tokens, self.quiet_since, self._is_timed = 0, now, self.has_begun
            return arrivals
        if lost_seconds:
            self.quiet_since = min(self.quiet_since + lost_seconds, now)
        if now - self.quiet_since > self._limit_seconds:
            stage = "an answer" if not self._has_head else "more of the answer"
            self.abort_connection(self._make_error(Failure.TIMEOUT, f"waited {self._limit_seconds:g} s for {stage}"))
            return -1
        return 0

    def fail_as_closed(self, message: str) -> None:
        """Fail the exchange as if the engine had closed the connection.

        `message`: a predicate such as `is down`.
        """
        failure = Failure.BROKEN if self._has_head or self._head_bytes else Failure.RESET
        self.abort_connection(self._make_error(failure, message))

    def fail_as_stalled(self, message: str) -> None:
        """Fail the exchange because the engine hangs. `message` is a predicate about the instance."""
        self.abort_connection(self._make_error(Failure.STALLED, message))

    def pass_tokens_on(self, tokens: TokenFormat | None) -> None:
        """Forward the next reads to the client unchanged, with their chunk framing, while they have this token format.

        They count as progress. The exchange receives everything from the first other bytes on. None: it receives
        everything. Nothing happens unless the answer is chunked and all chunks so far are complete.
        """
        if self._pumped >= 0:
            self._stop_pumping()
        if self.reader.is_between_chunks:
            self._passed_tokens = tokens
            self._is_pump_available = self._pump is not None

    def set_reading_paused(self, paused: bool) -> None:
        if self.is_closed or paused == self.is_reading_paused:
            return
        self._stop_pumping()
        if self._is_waiting:
            self.stop_waiting()
        self.is_reading_paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def abort_connection(self, error: UpstreamError | None = None) -> None:
        """Close the connection at once, so that the engine stops working on the request."""
        if not self.is_closed:
            self._stop_pumping()
            self.is_closed = True
            self.transport.abort()
        if error is not None:
            self._end_exchange(error)

    # The pump, which reads the socket while tokens are passed on in C

    def set_pump(self, pump: NativePump) -> None:
        """Let a pump forward the tokens of this connection in C."""
        self._pump = pump

    def _pump_soon(self, tokens: TokenFormat) -> None:
        if self._may_tokens_wait(tokens):
            return
        self._is_pump_available = False
        # The transport of the client sends the present token at the end of this turn of the event loop.
        self.loop.call_soon(self._begin_pumping, tokens)

    def _begin_pumping(self, tokens: TokenFormat) -> None:
        if (
            self._passed_tokens is not tokens
            or self._pumped >= 0
            or self.is_reading_paused
            or self.transport.is_closing()
        ):
            return
        assert self._pump is not None
        self.stop_waiting()
        self._pumped = self._pump.add_stream(self, tokens)
        if self._pumped >= 0:
            self.transport.pause_reading()
        self._is_pump_available = self._pumped == CLIENT_IS_SLOW

    def take_back_socket(self, unsent: bytes, data: bytes, arrivals: int) -> None:
        """Read the socket again, because the pump has found other bytes than tokens, or the client reads slowly.

        `unsent`: bytes for the client. `data`: bytes of the engine.
        """
        self._pumped = -1
        self.arrived_tokens += arrivals
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        tokens = self._passed_tokens
        if unsent and tokens is not None and tokens.client_output is not None and not tokens.client_output.is_closing():
            tokens.client_output.write(unsent)
        if data:
            self.data_received(data)

    def _stop_pumping(self) -> None:
        """Let the transport read the socket again, if the pump reads it."""
        if self._pumped >= 0:
            assert self._pump is not None
            self.arrived_tokens += self._pump.remove_stream(self._pumped)
            self._pumped = -1
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def _count_pumped(self) -> None:
        """Count the tokens that the pump has forwarded."""
        if self._pumped >= 0:
            assert self._pump is not None
            self.arrived_tokens += self._pump.take_arrived_tokens(self._pumped)

    # Tokens that wait, see TokenGathering

    def begin_gathering(self) -> None:
        """Read the socket at once if the next token may not wait, now that the pump reads in rounds."""
        tokens = self._passed_tokens
        # The pump writes the index of the eighth token, so a smaller one is right or belongs to one of the first.
        if self._pumped >= 0 and tokens is not None and self._may_tokens_wait(tokens):
            self._stop_pumping()
            self._is_pump_available = True

    def _may_tokens_wait(self, tokens: TokenFormat) -> bool:
        """Return whether tokens wait now, but not the next one of this stream."""
        return (
            self.token_gathering is not None
            and self.token_gathering.round_seconds > 0
            and tokens.index < tokens.first_waiting_index
        )

    def _wait_for_round(self, gathering: TokenGathering) -> None:
        if not self._is_waiting and not self.is_reading_paused and not self.transport.is_closing():
            self._is_waiting = True
            self.transport.pause_reading()
            gathering.add_stream(self)

    def stop_waiting(self) -> None:
        """Read the socket again, if reading is stopped until the next round."""
        if self._is_waiting:
            self._is_waiting = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        # The socket object of uvloop makes a new socket for each option. The family does not matter for options.
        descriptor = transport.get_extra_info("socket").fileno()
        sock = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            for option in SOCKET_OPTIONS:  # without TCP_NODELAY: both event loops set it
                sock.setsockopt(*option)
        finally:
            sock.detach()  # it is the transport's

    def _process_read(self, data: bytes) -> None:
        if self._is_waiting:
            self.stop_waiting()  # the answer may end here, and the next one begin
        exchange = self._exchange
        if exchange is None:
            self.abort_connection()  # bytes without a request: the connection cannot be trusted
            return
        reader = self.reader
        try:
            body = reader.add_bytes(data)
        except BadAnswer:
            if reader.status and not self._has_head:
                exchange.on_answer_head(reader.status, reader.headers)
            self.abort_connection(self._make_error(Failure.BAD_ANSWER, "the engine's answer is not valid HTTP"))
            return
        if not self._has_head:
            if not reader.status:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.abort_connection(
                        self._make_error(Failure.BAD_ANSWER, "the engine's response headers are too large")
                    )
                return
            self._has_head = True
            exchange.on_answer_head(reader.status, reader.headers)
        if body and self._exchange is exchange and exchange.on_body_data(body):  # `on_answer_head` may have released it
            self.arrived_tokens += 1
        if reader.is_complete and self._exchange is exchange:
            # If the answer came before the whole request was written, the rest of the request is still in the buffer.
            if reader.keeps_alive and not self.transport.get_write_buffer_size():
                self.is_exchange_complete = True
            else:
                self.abort_connection()
            self._exchange = None
            exchange.on_body_end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_pumping()
        self.is_closed = True
        if self._exchange is not None:
            if self._has_head or self._head_bytes:
                error = self._make_error(Failure.BROKEN, "the engine closed the connection in the middle of its answer")
            else:
                error = self._make_error(Failure.RESET, "the engine closed the connection without an answer")
                error.is_stale_connection = self.is_reused
            self._end_exchange(error)
        self.reader.close_parser()

    def _end_exchange(self, error: UpstreamError | None) -> None:
        self._stop_pumping()
        self._passed_tokens = None
        exchange, self._exchange = self._exchange, None  # drops the reference cycle with the exchange
        if exchange is not None:
            exchange.on_body_end(error)

    def _make_error(self, failure: Failure, message: str) -> UpstreamError:
        return make_upstream_error(failure, self.backend, message)


def make_upstream_error(
    failure: Failure,
    backend: Backend,
    problem: str,
    *,
    engine_status: int | None = None,
    answer_body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> UpstreamError:
    """Return an error whose text is safe for clients. It names the role of the engine, but not its address.

    The keywords are the answer of the engine; see UpstreamError.
    """
    text = f"{backend.role.value} instance: {problem}"
    return UpstreamError(failure, backend, text, engine_status=engine_status, body=answer_body, headers=headers)
