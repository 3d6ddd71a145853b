"""Accepts client connections, with limits for their number and for idle times.

An HttpListener serves one application with aiohttp. It limits the number of connections and the time for request
headers, answers invalid requests in the format of the gateway, and can stop accepting without closing open connections.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
import time
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Self, cast

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.common.errors import GatewayError, Overloaded
from proxy.listener import replies
from proxy.listener.body import AWAITS_CONTINUE
from proxy.listener.connection import (
    LINGERING_SECONDS,
    MALFORMED,
    AiohttpConnection,
    FirstProtocol,
    end_writing,
    find_refusal,
)
from proxy.listener.header_deadlines import HeaderDeadlines
from proxy.listener.tls import TlsHandshake
from proxy.wire.ids import make_request_id

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from aiohttp.http import RawRequestMessage

    from proxy.observe.metrics import Metrics
    from proxy.settings import Listen

logger = logging.getLogger(__name__)

# The rest is for connections to engines: at least one for each request of a client.
_SHARE_OF_FDS: Final = 0.45
# Share of connections above the limit that receive an error. More are closed without an answer.
_TOLD_SHARE: Final = 0.1
_FULL_LINE_SECONDS: Final = 10.0
# A client sends its request as soon as it is connected. Connections that were accepted last have this time for it.
_LAST_HEADS_SECONDS: Final = 1.0

# A NAT gateway or load balancer forgets a connection that is idle for some minutes, as during a long answer that is not
# streamed. Accepted sockets inherit these options. Connections to engines also have TCP_USER_TIMEOUT, which would cut
# off clients that read slowly before `listen.write_timeout_seconds`.
_KEEPALIVE_OPTIONS: Final = [
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    )
    if hasattr(socket, name)
]


class HttpListener:
    """The listening sockets and connections of one application. Leaving `async with` cuts off running answers.

    `clock` is monotonic. Time limits are checked at each tick, so they end up to `tick_seconds` late.
    """

    def __init__(
        self,
        app: web.Application,
        listen: Listen,
        metrics: Metrics,
        *,
        tick_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._closes_after_each_answer = False
        self.is_closing = True
        """Whether every connection closes after its next answer."""
        app.on_response_prepare.append(self._on_prepare)
        self._app_runner = web.AppRunner(
            app,
            handle_signals=False,
            # Otherwise a handler continues after its client disconnected.
            handler_cancellation=True,
            shutdown_timeout=0.05,  # remaining requests have had their time; 0 means no limit
        )
        self._metrics = metrics
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._listening_sockets: list[tuple[asyncio.Server, socket.socket]] = []
        self.first_protocol: Callable[[], FirstProtocol] | None = None
        """Makes the protocol that reads new connections first. None: aiohttp reads them."""
        self.tls: ssl.SSLContext | None = None
        """Context of new connections. None: clients connect without TLS."""
        self._handshakes: set[TlsHandshake] = set()
        self._connections: set[AiohttpConnection | FirstProtocol] = set()
        self._first_protocols: set[FirstProtocol] = set()
        self._idle_since: dict[AiohttpConnection | FirstProtocol, float] = {}  # noted by `close_idle_connections`
        self.header_deadlines = HeaderDeadlines[asyncio.Transport](clock)
        """The connections that wait for the headers of a request."""
        self._rejected_connections: dict[AiohttpConnection | FirstProtocol, tuple[float, asyncio.Transport]] = {}
        self._next_limit_log_at = -_FULL_LINE_SECONDS
        self.set_limits(listen)

    def set_limits(self, listen: Listen) -> None:
        """Change the limits. `keepalive_seconds` applies to new connections."""
        self._listen = listen
        self._max_connections = listen.max_connections or connections_for_fds()

    @property
    def connection_count(self) -> int:
        """The number of open client connections, including those in a TLS handshake."""
        return len(self._connections) + len(self._handshakes)

    async def __aenter__(self) -> Self:
        await self._app_runner.setup()
        server = self._app_runner.server
        assert server is not None
        self._server = server
        self._serve, server.request_handler = server.request_handler, self._handle_request
        self._make_aiohttp_request, server.request_factory = server.request_factory, self._make_request
        self._on_tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticking.cancel()
        for listener, _ in self._listening_sockets:
            listener.close()
        handshakes = tuple(self._handshakes)
        for handshake in handshakes:
            handshake.cancel_handshake()
        await asyncio.gather(
            *(each.handshake_task for each in handshakes if each.handshake_task is not None), return_exceptions=True
        )
        for _, transport in tuple(self._rejected_connections.values()):
            transport.abort()
        for first in tuple(self._first_protocols):
            first.cut_connection()
        await self._app_runner.cleanup()

    async def listen_on(self, listening_socket: socket.socket) -> None:
        """Accept connections on a listening socket."""
        listening_socket.setblocking(False)
        for level, option, value in _KEEPALIVE_OPTIONS:
            listening_socket.setsockopt(level, option, value)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            self._accept_connection, sock=listening_socket, backlog=self._listen.backlog
        )
        self._listening_sockets.append((listener, listening_socket))
        self.is_closing = self._closes_after_each_answer

    def stop_listening_for_takeover(self) -> None:
        """Stop listening while another process continues. Each connection stays open until its next answer."""
        for listener, _ in self._listening_sockets:
            listener.close()
        self._listening_sockets.clear()
        self.is_closing = True

    def close_idle_connections(self, seconds: float) -> None:
        """Close connections that were idle for `seconds`, counted from an earlier call."""
        now = self._clock()
        idle = {
            each
            for each in self._connections
            if each.awaits_request and each.client_transport not in self.header_deadlines
        }
        self._idle_since = {each: self._idle_since.get(each, now) for each in idle}
        for connection, since in self._idle_since.items():
            if now - since >= seconds:
                connection.end_after_answer()

    async def stop_accepting(self) -> None:
        """Stop listening. Close each connection after the answer under way, or now if there is none.

        Clients that are already connected, even only to the kernel, still get an answer. Returns when the requests of
        all of them are running, or after a second.
        """
        loop = asyncio.get_running_loop()
        queued: list[socket.socket] = []
        for listener, sock in self._listening_sockets:
            queued += _accept_all(sock)  # the kernel resets them when the socket closes
            listener.close()
        self._listening_sockets.clear()
        self.is_closing = True
        await asyncio.gather(*(loop.connect_accepted_socket(self._accept_connection, sock) for sock in queued))
        for _ in range(2):
            await asyncio.sleep(0)  # one turn of the loop, which reads the arrived data
        for connection in tuple(self._connections):
            if connection.client_transport not in self.header_deadlines:
                connection.end_after_answer()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_HEADS_SECONDS):
                if handshakes := [each.handshake_task for each in self._handshakes if each.handshake_task is not None]:
                    await asyncio.wait(handshakes)
                await self.header_deadlines.wait_until_empty()

    def close_overdue_connections(self) -> None:
        """Close the connections whose time limits have passed."""
        for transport, has_begun in self.header_deadlines.overdue_connections(self._listen.header_seconds):
            cast("AiohttpConnection | FirstProtocol", transport.get_protocol()).end_connection(
                _slow_header_error() if has_begun else None
            )
            self.header_deadlines.stop_timing(transport)
        now = self._clock()
        for first in tuple(self._first_protocols):
            first.enforce_time_limits(now, self._listen.keepalive_seconds)
        over = self._clock() - LINGERING_SECONDS
        for _, transport in tuple(takewhile(lambda each: each[0] <= over, self._rejected_connections.values())):
            transport.abort()

    # Calls from connections

    @property
    def closes_after_each_answer(self) -> bool:
        """Whether connections close after each answer. They also do after listening has ended."""
        return self._closes_after_each_answer

    @closes_after_each_answer.setter
    def closes_after_each_answer(self, closes: bool) -> None:
        self._closes_after_each_answer = closes
        self.is_closing = closes or not self._listening_sockets

    def register_connection(self, connection: AiohttpConnection | FirstProtocol, transport: asyncio.Transport) -> bool:
        """Register a connection. Returns False if the limit is reached; the connection gets an error and closes."""
        if len(self._connections) >= self._max_connections:
            self._reject_connection(connection, transport)
            return False
        self._connections.add(connection)
        if not isinstance(connection, AiohttpConnection):
            self._first_protocols.add(connection)
        self._metrics.connections.inc()
        self.header_deadlines.start_timing(transport)
        return True

    def hand_to_aiohttp(self, first_protocol: FirstProtocol, data: bytes) -> None:
        """Let aiohttp take over a connection. `data`: the first bytes that are not answered yet."""
        transport, connection = first_protocol.client_transport, self._make_aiohttp_connection()
        self._first_protocols.discard(first_protocol)
        self._connections.discard(first_protocol)
        self._connections.add(connection)
        transport.set_protocol(connection)
        connection.resume_from(first_protocol, data)

    def return_to_first_protocol(self, first_protocol: FirstProtocol, connection: AiohttpConnection) -> None:
        """Give a connection back to the protocol that handed it to aiohttp."""
        self._connections.discard(connection)
        self._connections.add(first_protocol)
        self._first_protocols.add(first_protocol)
        first_protocol.client_transport.set_protocol(first_protocol)

    def remove_connection(self, connection: AiohttpConnection | FirstProtocol) -> None:
        """Remove a closed connection from the listener."""
        self.header_deadlines.stop_timing(connection.client_transport)
        self._rejected_connections.pop(connection, None)
        self._first_protocols.discard(cast("FirstProtocol", connection))
        if connection in self._connections:
            self._connections.remove(connection)
            self._metrics.connections.dec()

    def count_head_bytes(self, connection: AiohttpConnection, size_bytes: int) -> int:
        """Count a part of the headers of a request. Returns their size so far."""
        if connection.client_transport not in self.header_deadlines:
            self.header_deadlines.start_timing(connection.client_transport)
            connection.stop_idle_timer()
        return self.header_deadlines.add_header_bytes(connection.client_transport, size_bytes)

    def make_refusal_bytes(
        self, connection: AiohttpConnection | FirstProtocol, error: GatewayError, request_id: str
    ) -> bytes:
        """Count and log an error of a request that reaches no middleware. Returns the bytes of the answer."""
        self.header_deadlines.stop_timing(connection.client_transport)
        reason = replies.rejection_reason(error)
        if reason is not None:
            self._metrics.rejected_total.labels(reason).inc()
        self.log_unexpected_error(connection, error, request_id)
        return replies.closing_error_bytes(error, request_id)

    def log_unexpected_error(
        self, connection: AiohttpConnection | FirstProtocol, error: GatewayError, request_id: str
    ) -> None:
        """Log an unexpected error of a request."""
        if error.code == MALFORMED:
            self._metrics.http_parse_errors_total.inc()
        fields = {"id": request_id, "client": connection.client_address, "code": error.status}
        logger.info("listener: request rejected: %s", error.message, extra={"fields": fields})

    def _reject_connection(self, connection: AiohttpConnection | FirstProtocol, transport: asyncio.Transport) -> None:
        self._metrics.rejected_total.labels("connections").inc()
        now = self._clock()
        self._log_connection_limit(now)
        connection.close()  # its data is ignored
        if len(self._rejected_connections) >= self._max_connections * _TOLD_SHARE:
            transport.abort()
            return
        error = Overloaded("this gateway has reached its limit of client connections", code="too_many_connections")
        transport.write(replies.closing_error_bytes(error, make_request_id()))
        self._rejected_connections[connection] = (now, transport)
        end_writing(transport)

    def _log_connection_limit(self, now: float) -> None:
        if now >= self._next_limit_log_at:
            self._next_limit_log_at = now + _FULL_LINE_SECONDS
            logger.warning("listener: new connections rejected: the limit of %d is reached", self._max_connections)

    # Calls from the event loop, and from TLS handshakes

    def _accept_connection(self) -> asyncio.Protocol:
        if self.tls is None:
            return self._make_connection()
        if self.connection_count >= self._max_connections * (1 + _TOLD_SHARE):
            self._metrics.rejected_total.labels("connections").inc()
            self._log_connection_limit(self._clock())
            return _ClosingProtocol()
        seconds = self._listen.header_seconds
        handshake = TlsHandshake(self.tls, seconds, self._make_connection, self._on_handshake_end)
        self._handshakes.add(handshake)
        return handshake

    def _make_connection(self) -> AiohttpConnection | FirstProtocol:
        return self._make_aiohttp_connection() if self.first_protocol is None else self.first_protocol()

    def _on_handshake_end(self, handshake: TlsHandshake, reason: str | None) -> None:
        self._handshakes.discard(handshake)
        if reason is not None:
            self._metrics.tls_handshake_failures_total.inc()
            logger.info(
                "listener: TLS handshake failed: %s", reason, extra={"fields": {"client": handshake.client_address}}
            )

    # Calls from aiohttp

    def _make_aiohttp_connection(self) -> AiohttpConnection:
        return AiohttpConnection(
            self,
            self._server,
            keepalive_timeout=self._listen.keepalive_seconds,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGERING_SECONDS,
            read_bufsize=64 * 1024,
        )

    def _make_request(self, message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        """Make a request object from the message that aiohttp has parsed, without an `Expect: 100-continue` header."""
        if message.upgrade:  # the parser drops the bytes after it
            message = message._replace(should_close=True)
        expectation = message.headers.get(hdrs.EXPECT)
        if expectation is None or (message.version == HttpVersion11 and expectation.lower() != "100-continue"):
            return self._make_aiohttp_request(message, *rest)
        # aiohttp would send `100 Continue` before a handler could reject the request. `read_body` sends it instead.
        headers = CIMultiDict(message.headers)
        del headers[hdrs.EXPECT]
        request = self._make_aiohttp_request(message._replace(headers=CIMultiDictProxy(headers)), *rest)
        if message.version == HttpVersion11:  # an older client does not know it (RFC 9110 10.1.1)
            request[AWAITS_CONTINUE] = True
        return request

    async def _handle_request(self, request: web.BaseRequest) -> web.StreamResponse:
        self.header_deadlines.stop_timing(cast("AiohttpConnection", request.protocol).client_transport)
        problem = find_refusal(request)
        if problem is not None:
            raise problem
        return await self._serve(request)

    async def _on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        # HTTP/1.0 has no chunks, so a body without a length ends with the connection (RFC 9112 6.3).
        has_no_end = request.version < HttpVersion11 and response.content_length is None
        if has_no_end or self.is_closing:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # aiohttp has set its headers already

    def _on_tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_seconds, self._on_tick)
        self.close_overdue_connections()


class _ClosingProtocol(asyncio.Protocol):
    """A protocol that closes each new connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


def _slow_header_error() -> GatewayError:
    return GatewayError("the headers of the request did not arrive in time", code="slow_header", status=408)


def _accept_all(listening_socket: socket.socket) -> Iterator[socket.socket]:
    """Accept the connections that are waiting in the kernel."""
    with suppress(OSError):  # no more connections, or no file descriptor left
        while True:
            yield listening_socket.accept()[0]


def connections_for_fds() -> int:
    """Return the number of client connections that the limit of file descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(soft * _SHARE_OF_FDS)
