"""The parts that the requests of one worker share, and the heads of their answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from proxy import SERVER
from proxy.listener import replies

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.common.errors import GatewayError
    from proxy.dialects.base import Dialect
    from proxy.gateway.client_writer import ClientConnection
    from proxy.gateway.lanes import Lanes
    from proxy.listener.drain import DrainManager
    from proxy.listener.http_listener import HttpListener
    from proxy.observe.metrics import Metrics
    from proxy.observe.observers import RequestObservers
    from proxy.settings import Settings
    from proxy.upstream import Upstream

_ID_HEADER: Final = "X-Request-Id"
_ID_FIELD: Final = b"X-Request-Id: "
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\n" + _ID_FIELD
)
_BODY_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
# For clients of HTTP/1.0.
_OLD_STREAM_HEAD: Final = _STREAM_HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
_OLD_BODY_HEAD: Final = _BODY_HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
_CLOSE: Final = b"Connection: close\r\n"


@dataclass(slots=True, kw_only=True, eq=False)
class RequestParts:
    """The parts of one worker that its requests share. Only the settings ever change."""

    all_lanes: Lanes
    upstream: Upstream
    drain_manager: DrainManager
    http_listener: HttpListener
    request_observers: RequestObservers
    metrics: Metrics
    settings: Settings
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float] = time.monotonic
    """The clock of request records, in seconds."""
    _date_lines_now: bytes = field(default=b"", init=False)
    """The header lines `Date` and `Server` of the present second."""
    _date_second: int = field(default=-1, init=False)
    """The present second, by `clock`."""
    keeps_streams_alive: bool = False
    """Whether silent streams get keep-alive bytes. Follows `settings`."""

    # Heads of answers. While the listener is closing, they tell the client that the connection will be closed.

    def make_stream_head(self, id_header: str, request_id: str, client: ClientConnection) -> bytes:
        """Return the head of a streamed answer. `id_header`: see Dialect.request_id_header."""
        begin, framing = _STREAM_HEAD, b"Transfer-Encoding: chunked\r\n"
        if not client.supports_chunked_encoding:
            begin, framing = _OLD_STREAM_HEAD, b""
        closing = self._make_connection_field(client, has_end_mark=client.supports_chunked_encoding)
        ids, more = request_id.encode(), _optional_fields(id_header, request_id, client)
        return b"%b%b\r\n%b%b%b%b\r\n" % (begin, ids, framing, self._make_date_lines(), more, closing)

    def make_body_head(self, id_header: str, request_id: str, client: ClientConnection, body_bytes: int) -> bytes:
        """Return the head of an answer that is one JSON body."""
        begin = (_BODY_HEAD if client.supports_chunked_encoding else _OLD_BODY_HEAD) % body_bytes
        closing = self._make_connection_field(client)
        ids, more = request_id.encode(), _optional_fields(id_header, request_id, client)
        return b"%b%b%b%b\r\n%b%b\r\n" % (begin, self._make_date_lines(), _ID_FIELD, ids, more, closing)

    def make_error_answer(
        self, dialect: Dialect, error: GatewayError, request_id: str, client: ClientConnection
    ) -> bytes:
        """Return the whole answer to a failed request."""
        response = replies.error_response(error, dialect.error_body(error))
        closes = bool(self._make_connection_field(client))
        more = _optional_fields(dialect.request_id_header, request_id, client)
        return replies.response_bytes(response, request_id, closes_connection=closes, more_headers=more)

    def make_unexpected_error(self, dialect: Dialect, error: BaseException) -> GatewayError:
        """Log an unexpected error, and return the error for the client."""
        return replies.log_unexpected_exception("POST", dialect.path, error)

    def _make_date_lines(self) -> bytes:
        """Return the header lines `Date` and `Server`."""
        second = int(self.clock())
        if second != self._date_second:
            self._date_second = second
            self._date_lines_now = f"Date: {formatdate(usegmt=True)}\r\nServer: {SERVER}\r\n".encode()
        return self._date_lines_now

    def _make_connection_field(self, client: ClientConnection, *, has_end_mark: bool = True) -> bytes:
        """Return `Connection: close` and close the connection after this answer, or return an empty line.

        `has_end_mark`: whether the client can find the end of the body while the connection stays open.
        """
        if has_end_mark and not self.http_listener.is_closing:
            return b""
        client.end_after_answer()
        return _CLOSE


def _optional_fields(id_header: str, request_id: str, client: ClientConnection) -> bytes:
    """Return the header lines that only some answers have."""
    if id_header == _ID_HEADER:
        return client.additional_header_lines
    return b"%b: %b\r\n%b" % (id_header.encode(), request_id.encode(), client.additional_header_lines)
