"""Client connections that aiohttp reads. Invalid requests get errors in the format of the gateway.

aiohttp would answer an invalid request with plain text that quotes it, and log a traceback. The private names
`_waiter`, `_messages` and `_current_request` of its connection are used here. A test fails when one of them is gone.

A client that closes its side of the connection counts as disconnected, because it cannot be distinguished from one that
only has nothing more to send.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, cast

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http import HttpProcessingError, RawRequestMessage
from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong

from proxy.common.errors import GatewayError
from proxy.listener import replies
from proxy.wire.ids import make_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.listener.http_listener import HttpListener

LINGERING_SECONDS: Final = 2.0
"""Time for which a connection stays open after its last answer, unless the client closes it. If it closed while the
client is sending, the reset could overtake the answer (RFC 9112 9.6)."""

# aiohttp limits the size of each header and their number, which would allow a megabyte for each connection.
_MAX_HEAD_BYTES: Final = 64 * 1024


class AiohttpConnection(web.RequestHandler):
    """A client connection that HttpListener accepted and aiohttp reads."""

    __slots__ = (
        "_is_head_request",
        "_drain_future",
        "_first_protocol",
        "_http_listener",
        "client_transport",
        "on_full",
    )

    def __init__(self, http_listener: HttpListener, server: web.Server, **options: object) -> None:
        """Store the listener. `aiohttp.web.RequestHandler` describes the options."""
        super().__init__(server, loop=asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        self._http_listener = http_listener
        self.on_full: Callable[[], None] | None = None
        """Called when the client begins to read more slowly than the gateway writes."""
        self.client_transport: asyncio.Transport
        """The transport; it stays set after the connection is lost."""
        self._drain_future: asyncio.Future[None] | None = None
        self._is_head_request = False
        """Whether the data that aiohttp could not parse began as a HEAD request."""
        self._first_protocol: FirstProtocol | None = None
        """The protocol that read the connection before, and that may read the next request; None if there is none."""

    @property
    def awaits_request(self) -> bool:
        """Whether no answer is under way and no part of a request has arrived."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def client_address(self) -> str:
        """Return the address of the client of this connection."""
        return str(self.peername[0]) if isinstance(self.peername, tuple) else "-"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client_transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        if self._http_listener.register_connection(self, self.client_transport):
            self.take_over_connection(self.client_transport)

    def take_over_connection(self, transport: asyncio.Transport) -> None:
        """Continue with a connection that another reader has accepted."""
        self.client_transport = transport
        super().connection_made(transport)
        self.stop_idle_timer()

    def resume_from(self, first_protocol: FirstProtocol, data: bytes) -> None:
        """Take over from another protocol. `data`: the first bytes that are not answered yet."""
        self.take_over_connection(first_protocol.client_transport)
        self.data_received(data)
        if first_protocol.is_one_request(data):
            self._first_protocol = first_protocol

    def _is_reclaimed(self, first_protocol: FirstProtocol, data: bytes) -> bool:
        """Return the connection to `first_protocol` if that accepts the data. Returns whether it was returned."""
        transport = self.client_transport
        if not self.awaits_request or transport.get_write_buffer_size() or not first_protocol.should_reclaim(data):
            return False
        self.transport = None  # or it would be closed
        super().connection_lost(None)
        self._http_listener.return_to_first_protocol(first_protocol, self)
        first_protocol.data_received(data)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._wake_writers()
        self._http_listener.remove_connection(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.on_full is not None:
            self.on_full()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wake_writers()

    async def drained(self) -> None:
        """Wait until the client has read enough to continue writing."""
        while self.writing_paused and not self.client_transport.is_closing():
            self._drain_future = asyncio.get_running_loop().create_future()
            await self._drain_future

    def _wake_writers(self) -> None:
        if self._drain_future is not None and not self._drain_future.done():
            self._drain_future.set_result(None)

    def stop_idle_timer(self) -> None:
        """Stop the idle timer of aiohttp, because a request is expected or has begun."""
        self.keep_alive(True)

    def data_received(self, data: bytes) -> None:
        first = self._first_protocol
        if first is not None and data:  # aiohttp calls it with no data, to process data that it has kept
            if self._is_reclaimed(first, data):
                return
            # The end of a request is known only while each one arrives alone and in one piece.
            if not first.is_one_request(data):
                self._first_protocol = None
        super().data_received(data)
        if self.awaits_request:
            if data and self._http_listener.count_head_bytes(self, len(data)) > _MAX_HEAD_BYTES:
                self.end_connection(make_malformed_error("the headers are too long", status=431))
        elif self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            self._is_head_request = data.startswith(b"HEAD ")
            self._on_unreadable_data(make_unreadable_error(self._messages[-1][0].exc))

    def end_connection(self, error: GatewayError | None = None) -> None:
        """Close a connection whose request has not begun. `error`: sent to the client before; None: nothing is sent."""
        if error is not None and self.transport is not None:
            self.transport.write(self._http_listener.make_refusal_bytes(self, error, make_request_id()))
        self.force_close()

    def end_after_answer(self) -> None:
        """Close the connection after the answer under way, or now if there is none.

        After `close`, aiohttp ignores all data, even the rest of a body. So `close` is not called before the body is
        complete. The answer to such a request has `Connection: close`.
        """
        request = self._current_request
        if self.awaits_request:
            self.end_connection()
        elif request is not None and request.content.is_eof() and not self._messages:
            self.close()

    def _on_unreadable_data(self, error: GatewayError) -> None:
        """Handle data that aiohttp could not read.

        Usually it is in the queue of aiohttp, and `handle_error` answers it in its turn. If it belongs to a body, the
        readers of the body get the error here, because aiohttp would let them wait for the rest.
        """
        current = self._current_request
        body = self._messages[-2][1] if len(self._messages) > 1 else current.content if current else None
        if body is None or body.is_eof():
            return
        self._http_listener.log_unexpected_error(self, error, make_request_id())
        body.set_exception(error)
        body.feed_eof()  # otherwise aiohttp would continue to read after the answer
        self.close()  # after that answer; requests in the queue get none

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to invalid requests, and to exceptions outside of the middlewares."""
        request_id = replies.request_id_of(request)
        asks_for_head = request.method == hdrs.METH_HEAD
        if isinstance(exc, GatewayError):
            words = self._http_listener.make_refusal_bytes(self, exc, request_id)
        elif isinstance(exc, HttpProcessingError):
            words = self._http_listener.make_refusal_bytes(self, make_unreadable_error(exc), request_id)
            asks_for_head = self._is_head_request
        else:
            words = replies.closing_error_bytes(
                replies.log_unexpected_exception(request.method, request.path, exc), request_id
            )
        if request.writer.output_size:
            raise ConnectionResetError("a part of another answer has been sent")
        if asks_for_head:  # its answer is only a head (RFC 9110 9.3.2)
            head, blank, _ = words.partition(b"\r\n\r\n")
            words = head + blank
        return _FixedBytesResponse(words, self, has_body=not request.content.is_eof())


class _FixedBytesResponse(web.StreamResponse):
    """An answer whose bytes are fixed. The connection closes after it."""

    def __init__(self, words: bytes, connection: AiohttpConnection, *, has_body: bool) -> None:
        super().__init__()
        self.force_close()
        self._response_bytes = words
        self._client_connection = connection
        self._has_body = has_body

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing, because the bytes of the response are complete."""

    async def write_eof(self, data: bytes = b"") -> None:
        transport = self._client_connection.transport
        if transport is None:
            return
        transport.write(self._response_bytes)
        end_writing(transport)
        if not self._has_body:  # aiohttp waits for the end of a body itself
            self._client_connection.close()  # ignores further data
            await asyncio.sleep(LINGERING_SECONDS)  # cancelled when the client closes


def end_writing(transport: asyncio.Transport) -> None:
    """Tell the client that nothing follows. A connection with TLS also ends: it has no half-closed state."""
    if transport.can_write_eof():
        transport.write_eof()
    else:
        transport.close()


class FirstProtocol(asyncio.Protocol, ABC):
    """A protocol that reads new connections before aiohttp does.

    It calls the listener as an AiohttpConnection does, and may hand a connection to aiohttp with `hand_to_aiohttp`. It
    can get the connection back when it is certain that a request ends where the next data begins.
    """

    __slots__ = ()

    client_transport: asyncio.Transport
    """The transport; it stays set after the connection is lost."""
    client_address: str
    """The address at the other end of the connection; `-` if it is unknown."""

    @property
    @abstractmethod
    def awaits_request(self) -> bool:
        """Whether no answer is under way and no part of a request has arrived."""

    @abstractmethod
    def end_connection(self, error: GatewayError | None = None) -> None:
        """Close a connection whose request has not begun. `error`: sent to the client before; None: nothing is sent."""

    @abstractmethod
    def end_after_answer(self) -> None:
        """Close the connection after the answer under way, or now if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Ignore all further data of the connection."""

    @abstractmethod
    def cut_connection(self) -> None:
        """Close the connection at once, even during an answer."""

    @abstractmethod
    def enforce_time_limits(self, now: float, keepalive_seconds: float) -> None:
        """Close the connection if it was idle for `keepalive_seconds`. `now`: the listener's clock time."""

    @staticmethod
    @abstractmethod
    def is_one_request(data: bytes) -> bool:
        """Return whether the data is surely one complete request with nothing after it."""

    @abstractmethod
    def should_reclaim(self, data: bytes) -> bool:
        """Return whether this protocol takes back a connection that it handed over.

        If so, it receives this data, which begins a request.
        """


# Requests of the wrong form
#
# Neither the client nor the log sees a quotation. A request that begins at the wrong byte begins inside a prompt.

MALFORMED: Final = "malformed_http"
"""Error code of requests that are not valid HTTP."""

# Exceptions of aiohttp whose text quotes the request, and the texts that replace it.
_WORDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (LineTooLong, "the request line or a header is too long"),
    (InvalidHeader, "a header is not valid"),
    (InvalidURLError, "the request target is not valid"),
)
_has_no_quotation: Final = re.compile(
    r"(Missing|Duplicate) '[A-Za-z-]+' header [a-z ]+\."
    r"|Too many headers received"
    r"|Received HTTPS traffic on an HTTP port"
).fullmatch

_VERSIONS: Final = (HttpVersion11, HttpVersion10)
_is_host: Final = re.compile(r"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*").fullmatch  # RFC 3986 3.2.2 and 3.2.3

# Headers that must not be repeated: software that uses the first one and software that uses the last one would see
# different callers.
_CREDENTIALS: Final = (hdrs.AUTHORIZATION, "X-Api-Key", "X-Admin-Key")


def make_malformed_error(reason: str, status: int = 400) -> GatewayError:
    """Return the error for a request that is not valid HTTP."""
    return GatewayError(f"the request is not valid HTTP/1.1: {reason}", code=MALFORMED, status=status)


def make_unreadable_error(http_problem: BaseException) -> GatewayError:
    """Return the error for a request that aiohttp could not read."""
    for kind, words in _WORDS:
        if isinstance(http_problem, kind):
            return make_malformed_error(words, status=431 if kind is LineTooLong else 400)
    message = http_problem.message if isinstance(http_problem, HttpProcessingError) else ""
    message, separator, _ = message.partition(":\n\n")  # a quotation follows the message of llhttp
    if not separator and not _has_no_quotation(message):
        return make_malformed_error("it cannot be read")
    reason = " ".join(message.split())
    if reason.startswith("Too many headers"):
        return make_malformed_error(reason, status=431)
    return make_malformed_error(reason, status=505 if reason.endswith("Invalid HTTP version") else 400)


def find_refusal(request: web.BaseRequest) -> GatewayError | None:
    """Return the error of a request that aiohttp could parse but that no route may handle; None if there is none."""
    headers, version, target = request.headers, request.version, request.raw_path
    coding = headers.get(hdrs.TRANSFER_ENCODING)
    if version not in _VERSIONS:
        return make_malformed_error("the version is not 1.1 or 1.0", status=505)
    if coding is not None and coding.lower() != "chunked":
        # llhttp accepts any list that ends in chunked, and proxies before the gateway may not.
        return make_malformed_error("the transfer encoding is not chunked", status=501)
    if coding is not None and version == HttpVersion10:
        return make_malformed_error("HTTP/1.0 has no transfer encodings")  # RFC 9112 6.1
    if not _is_host(headers.get(hdrs.HOST, "")):
        return make_malformed_error("the Host header is not valid")
    for name in _CREDENTIALS:
        if len(headers.getall(name, ())) > 1:
            return make_malformed_error("it has more than one credential of the same kind")
    if request.method == hdrs.METH_CONNECT:
        return GatewayError("this gateway does not support CONNECT", code="method_not_allowed", status=405)
    # RFC 9112 3.2.2 has every server accept the absolute form. Only its path counts: no URL is made of the rest.
    if not (target.startswith("/") or target == "*" or target.lower().startswith(("http://", "https://"))):
        return make_malformed_error("the request target is not valid")
    if hdrs.EXPECT in headers:  # 100-continue was removed before
        return GatewayError(
            "the only expectation that this gateway meets is 100-continue", code="expectation_failed", status=417
        )
    return None
