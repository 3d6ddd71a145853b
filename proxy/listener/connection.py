"""One client connection: aiohttp's, except that whatever is no request we serve is answered in our words, and closed.

aiohttp would answer it in plain text that quotes it, and log it with a traceback. Of its private names these are used:
`_waiter`, `_messages` and `_current_request` of its connection. A test tells when one of them is gone.

A client that closes its side of the connection has left, as far as we can tell: nothing distinguishes it from one that
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
from proxy.wire.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.listener.http_listener import HttpListener

LINGERING_SECONDS: Final = 2.0
"""After its last answer a connection is open for so long, or until the client closes it. Were it closed while the
client is still sending, the reset could overtake the answer (RFC 9112 9.6)."""

# aiohttp limits each header and their number, which comes to a megabyte for each connection.
_MAX_HEAD_BYTES: Final = 64 * 1024


class AiohttpConnection(web.RequestHandler):
    """A client's connection that HttpListener accepted and aiohttp reads. `options`: see aiohttp's RequestHandler."""

    __slots__ = ("_asks_for_head", "_drained", "_first", "_front", "client_transport", "on_full")

    def __init__(self, front: HttpListener, server: web.Server, **options: object) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        self._front = front
        self.on_full: Callable[[], None] | None = None
        """Called when the client begins to read slower than we write."""
        self.client_transport: asyncio.Transport
        """The transport, also when the connection is lost."""
        self._drained: asyncio.Future[None] | None = None
        self._asks_for_head = False
        """Whether what aiohttp could not read began as a HEAD."""
        self._first: FirstProtocol | None = None
        """Who had the connection before, and may have it back with what comes next; None: nobody."""

    @property
    def awaits_request(self) -> bool:
        """Nothing is being answered here, and nothing has arrived that could be."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def client(self) -> str:
        """The address of the other side."""
        return str(self.peername[0]) if isinstance(self.peername, tuple) else "-"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client_transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        if self._front.accept(self, self.client_transport):
            self.take_over(self.client_transport)

    def take_over(self, transport: asyncio.Transport) -> None:
        """Go on with a connection that was accepted."""
        self.client_transport = transport
        super().connection_made(transport)
        self.leave_idle()

    def resume_from(self, first: FirstProtocol, data: bytes) -> None:
        """Take over from another protocol, with what has arrived and is not answered yet."""
        self.take_over(first.client_transport)
        self.data_received(data)
        if first.is_one_request(data):
            self._first = first

    def _is_reclaimed(self, first: FirstProtocol, data: bytes) -> bool:
        """Let who had the connection before go on, if it takes what has come now. aiohttp is done with it."""
        transport = self.client_transport
        if not self.awaits_request or transport.get_write_buffer_size() or not first.reclaims(data):
            return False
        self.transport = None  # or it would be closed
        super().connection_lost(None)
        self._front.return_to_first(first, self)
        first.data_received(data)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._tell_drained()
        self._front.forget(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.on_full is not None:
            self.on_full()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._tell_drained()

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        while self.writing_paused and not self.client_transport.is_closing():
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def _tell_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def leave_idle(self) -> None:
        """A request is expected now, or has begun: aiohttp's timer for idle connections is none for that."""
        self.keep_alive(True)

    def data_received(self, data: bytes) -> None:
        first = self._first
        if first is not None and data:  # aiohttp itself calls it without any, to look at what it has kept
            if self._is_reclaimed(first, data):
                return
            # Where a request ends is known only as long as each comes alone, and in one piece.
            if not first.is_one_request(data):
                self._first = None
        super().data_received(data)
        if self.awaits_request:
            if data and self._front.on_head(self, len(data)) > _MAX_HEAD_BYTES:
                self.end(malformed("the headers are too long", status=431))
        elif self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            self._asks_for_head = data.startswith(b"HEAD ")
            self._on_unreadable(unreadable(self._messages[-1][0].exc))

    def end(self, error: GatewayError | None = None) -> None:
        """Close a connection that awaits a request; an error is told before."""
        if error is not None and self.transport is not None:
            self.transport.write(self._front.refuse(self, error, new_id()))
        self.force_close()

    def end_after_answer(self) -> None:
        """Close a connection as soon as nothing is being answered on it.

        Once aiohttp was told, it looks at nothing that comes, not even the rest of a body: so it is not told before
        that is there. The answer to such a request says `Connection: close`.
        """
        request = self._current_request
        if self.awaits_request:
            self.end()
        elif request is not None and request.content.is_eof() and not self._messages:
            self.close()

    def _on_unreadable(self, error: GatewayError) -> None:
        """What aiohttp could not read is in its queue, to be answered in its turn by `handle_error`.

        Unless it belongs to a body, for whose rest aiohttp would let everybody wait: then those who read it are told.
        """
        current = self._current_request
        body = self._messages[-2][1] if len(self._messages) > 1 else current.content if current else None
        if body is None or body.is_eof():
            return
        self._front.report(self, error, new_id())
        body.set_exception(error)
        body.feed_eof()  # or aiohttp would read on after the answer
        self.close()  # after that answer; what is in the queue gets none

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what aiohttp could not read, and to what was raised outside of the middlewares."""
        request_id = replies.request_id(request)
        asks_for_head = request.method == hdrs.METH_HEAD
        if isinstance(exc, GatewayError):
            words = self._front.refuse(self, exc, request_id)
        elif isinstance(exc, HttpProcessingError):
            words = self._front.refuse(self, unreadable(exc), request_id)
            asks_for_head = self._asks_for_head
        else:
            words = replies.last_words(replies.unexpected(request.method, request.path, exc), request_id)
        if request.writer.output_size:
            raise ConnectionResetError("a part of another answer is out")
        if asks_for_head:  # the answer is only the head of what others get (RFC 9110 9.3.2)
            head, blank, _ = words.partition(b"\r\n\r\n")
            words = head + blank
        return _LastWords(words, self, has_body=not request.content.is_eof())


class _LastWords(web.StreamResponse):
    """Bytes that are written as they are, whatever the request was, before the connection is closed."""

    def __init__(self, words: bytes, connection: AiohttpConnection, *, has_body: bool) -> None:
        super().__init__()
        self.force_close()
        self._words = words
        self._connection = connection
        self._has_body = has_body

    async def prepare(self, request: web.BaseRequest) -> None:
        """There is nothing to prepare."""

    async def write_eof(self, data: bytes = b"") -> None:
        transport = self._connection.transport
        if transport is None:
            return
        transport.write(self._words)
        transport.write_eof()
        if not self._has_body:  # for the end of which aiohttp waits as long as we do here
            self._connection.close()  # from now on what comes is not looked at
            await asyncio.sleep(LINGERING_SECONDS)  # cancelled when the client closes


class FirstProtocol(asyncio.Protocol, ABC):
    """Reads a new connection before aiohttp does.

    It calls the listener as an AiohttpConnection does, and also its `hand_to_aiohttp`.
    It may have the connection back once it is certain that a request ends where the next bytes begin.
    """

    __slots__ = ()

    client_transport: asyncio.Transport
    """The transport, also when the connection is lost."""

    @property
    @abstractmethod
    def client(self) -> str:
        """The address of the other side."""

    @property
    @abstractmethod
    def awaits_request(self) -> bool:
        """Nothing is being answered here, and nothing has arrived that could be."""

    @abstractmethod
    def end(self, error: GatewayError | None = None) -> None:
        """Close a connection that awaits a request; an error is told before."""

    @abstractmethod
    def end_after_answer(self) -> None:
        """Close it as soon as nothing is being answered on it."""

    @abstractmethod
    def close(self) -> None:
        """What comes from now on is not looked at."""

    @abstractmethod
    def cut(self) -> None:
        """End it, and what is being answered on it, now."""

    @abstractmethod
    def sweep(self, now: float, keepalive_seconds: float) -> None:
        """Close it if it has been idle for so long. Called at each tick, with the time of the listener's clock."""

    @staticmethod
    @abstractmethod
    def is_one_request(data: bytes) -> bool:
        """Whether this is certainly one request, with nothing missing and nothing behind it."""

    @abstractmethod
    def reclaims(self, data: bytes) -> bool:
        """Whether it goes on with a connection that it has handed over. It is given these bytes then, with which a
        request begins.
        """


# Requests of the wrong form
#
# Neither the client nor the log sees a quotation. A request that begins at the wrong byte begins inside a prompt.

MALFORMED: Final = "malformed_http"
"""The code of every error about the form of a request."""

# Exceptions of aiohttp whose text is a quotation, and what is told instead.
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

# Who counts the first one and who counts the last one see two different callers.
_CREDENTIALS: Final = (hdrs.AUTHORIZATION, "X-Api-Key", "X-Admin-Key")


def malformed(reason: str, status: int = 400) -> GatewayError:
    """The error for a request of the wrong form."""
    return GatewayError(f"the request is not valid HTTP/1.1: {reason}", code=MALFORMED, status=status)


def unreadable(problem: BaseException) -> GatewayError:
    """The error for what aiohttp could not read."""
    for kind, words in _WORDS:
        if isinstance(problem, kind):
            return malformed(words, status=431 if kind is LineTooLong else 400)
    told = problem.message if isinstance(problem, HttpProcessingError) else ""
    told, separator, _ = told.partition(":\n\n")  # llhttp's own words, then the quotation
    if not separator and not _has_no_quotation(told):
        return malformed("it cannot be read")
    reason = " ".join(told.split())
    if reason.startswith("Too many headers"):
        return malformed(reason, status=431)
    return malformed(reason, status=505 if reason.endswith("Invalid HTTP version") else 400)


def refusal_of(request: web.BaseRequest) -> GatewayError | None:
    """What is wrong with a request that aiohttp could read; None when a route may see it."""
    headers, version, target = request.headers, request.version, request.raw_path
    coding = headers.get(hdrs.TRANSFER_ENCODING)
    if version not in _VERSIONS:
        return malformed("the version is not 1.1 or 1.0", status=505)
    if coding is not None and coding.lower() != "chunked":
        # llhttp takes any list that ends in chunked, and others in front of us may not.
        return malformed("the transfer encoding is not chunked", status=501)
    if coding is not None and version == HttpVersion10:
        return malformed("HTTP/1.0 has no transfer encodings")  # RFC 9112 6.1
    if not _is_host(headers.get(hdrs.HOST, "")):
        return malformed("the Host header is not valid")
    for name in _CREDENTIALS:
        if len(headers.getall(name, ())) > 1:
            return malformed("it has more than one credential of the same kind")
    if request.method == hdrs.METH_CONNECT:
        return GatewayError("this gateway does not support CONNECT", code="method_not_allowed", status=405)
    # RFC 9112 3.2.2 has every server accept the absolute form. Only its path counts: no URL is made of the rest.
    if not (target.startswith("/") or target == "*" or target.lower().startswith(("http://", "https://"))):
        return malformed("the request target is not valid")
    if hdrs.EXPECT in headers:  # the one that can be met was taken out
        return GatewayError(
            "the only expectation that this gateway meets is 100-continue", code="expectation_failed", status=417
        )
    return None
