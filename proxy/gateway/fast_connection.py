"""One client's connection, as long as all that comes on it are plain requests, one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from proxy.gateway.request_head import is_one_request, read_head
from proxy.listener.first_protocol import FirstProtocol
from proxy.listener.replies import accepted_id, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.common.errors import GatewayError
    from proxy.gateway.intake import Intake
    from proxy.gateway.request import Request
    from proxy.gateway.request_head import Head
    from proxy.listener.http_listener import HttpListener

# A body that takes longer than this has the deadlines of a slow one, which are aiohttp's road's.
_BODY_SECONDS: Final = 1.0
# More of further requests is not read before the one under way has ended.
_MAX_PENDING_BYTES: Final = 64 * 1024
# Of requests that look plain and are not; then no further one is tried. To hand a connection over and to have it back
# costs more than to leave it.
_MOST_ODD: Final = 4


class FastConnection(FirstProtocol):
    """What a HttpListener makes for each connection that it accepts, if the fast path is on."""

    __slots__ = (
        *("_body", "_closes", "_drained", "_head", "_held_bytes", "_last", "_listener", "_missing_bytes", "_intake"),
        *(
            "_odd",
            "_owes_head",
            "_pending",
            "_request",
            "_since",
            "door",
            "is_paused",
            "knows_chunks",
            "on_full",
            "transport",
        ),
    )

    def __init__(self, intake: Intake, listener: HttpListener) -> None:
        self._intake = intake
        self._listener = listener
        self.transport: asyncio.Transport
        self.is_paused = False
        """The client reads slower than we write."""
        self.on_full: Callable[[], None] | None = None
        """Called when it begins to."""
        self.knows_chunks = True
        """See ClientConnection: all plain requests are of HTTP/1.1."""
        self._request: Request | None = None
        """Whose answer is under way."""
        self._since: float | None = None
        """Since when nothing is being answered, or a body is on its way; None: otherwise."""
        self._closes = False
        """The connection ends when nothing is being answered on it."""
        self._pending: list[bytes] = []
        """What came behind the request under way."""
        self._head: Head | None = None
        """Of the request whose body is on its way."""
        self._last: Head | None = intake.last_head
        """Of the request that came last, here or before on another connection: one application's are alike."""
        self._body: list[bytes] = []
        """What there is of that request, if it came in pieces, its head included."""
        self._missing_bytes = 0
        self._held_bytes = 0
        self._owes_head = True
        """The listener waits for the headers of a request."""
        self._odd = 0
        """How many requests in a row have looked plain and were not."""
        self._drained: asyncio.Future[None] | None = None

    @property
    def client(self) -> str:
        """The address of the other side."""
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "-"

    # FirstProtocol

    @property
    def awaits_request(self) -> bool:
        """Nothing is being answered here, and nothing has arrived that could be."""
        return self._request is None and self._head is None

    def end(self, error: GatewayError | None = None) -> None:
        """Close a connection that awaits a request; an error is told before."""
        if error is not None:
            self.transport.write(self._listener.refuse(self, error, new_request_id()))
        self.transport.close()

    def end_after_answer(self) -> None:
        """Close it as soon as nothing is being answered on it."""
        self._closes = True
        if self._request is None and self._head is None:
            self.transport.close()

    def close(self) -> None:
        """What comes from now on is not looked at."""
        self._closes = True
        self._pending.clear()

    def cut(self) -> None:
        """End it, and what is being answered on it, now."""
        self.transport.abort()
        self._lose()

    def sweep(self, now: float, keepalive_seconds: float) -> None:
        """Look at what takes time; see HttpListener.sweep."""
        if self._since is None:
            return
        if self._head is not None:
            if now - self._since > _BODY_SECONDS:
                self._leave_unfinished()
        elif now - self._since > keepalive_seconds:
            self.transport.close()

    @staticmethod
    def is_one_request(data: bytes) -> bool:
        """See FirstProtocol."""
        return is_one_request(data)

    def takes_back(self, data: bytes) -> bool:
        """Whether this begins a request that may be plain."""
        if self._closes or self._odd >= _MOST_ODD:
            return False
        head = read_head(data, self._last)
        if head is None or head.path not in self._intake.paths:
            return False
        self._last = head
        self._owes_head = True
        return True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = self.door = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._listener.accept(self, self.transport)

    def data_received(self, data: bytes) -> None:
        """Take what was read. One function for what a request begins with, as each that is called costs more."""
        if self._request is not None:
            self._keep(data)
            return
        if self._head is not None:
            self._receive(self._head, data)
            return
        if self._closes:
            return
        intake = self._intake
        head = read_head(data, self._last)
        if head is None or head.path not in intake.paths:
            self._leave(data)
            return
        self._last = intake.last_head = head
        if self._owes_head:
            self._owes_head = False
            self._listener.headers_arrived(self)
        size_bytes = head.size_bytes
        missing_bytes = size_bytes + head.body_bytes - len(data)
        if missing_bytes == 0:
            if not self._begin(head, data[size_bytes:], intake.parts.clock()):
                self._leave(data)
        elif missing_bytes < 0 or not intake.takes(head) or not self._take(len(data)):
            self._leave(data)
        else:
            self._head, self._missing_bytes, self._since = head, missing_bytes, intake.parts.clock()
            self._body.append(data)

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.on_full is not None:
            self.on_full()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._listener.forget(self)

    # ClientConnection

    def head_fields(self) -> bytes:
        """See ClientConnection."""
        return b""

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        while self.is_paused and not self.transport.is_closing():
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def done(self, now: float) -> None:
        """The request under way has ended, and its answer was written."""
        self._request = self.on_full = None
        if self._closes:
            self.transport.close()
        elif self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self.transport.resume_reading()
            self.data_received(data)
        else:
            self._since = now

    # How

    def _receive(self, head: Head, data: bytes) -> None:
        """Another piece of a body."""
        self._body.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes < 0 or not self._take(len(data)):
            self._leave_unfinished()
        elif self._missing_bytes == 0:
            self._let_go()
            self._head = None
            assert self._since is not None
            pieces, self._body = self._body, []
            first, *more = pieces
            # Copied once, however long it is and however many pieces came.
            if not self._begin(head, b"".join((memoryview(first)[head.size_bytes :], *more)), self._since):
                self._leave(b"".join(pieces))

    def _begin(self, head: Head, body: bytes, since: float) -> bool:
        """All of a request is there. False: it is not plain, and nothing has happened."""
        self._since = None
        request = self._request = self._intake.begin(self, head, body)
        if request is None:
            self._odd += 1
            return False
        self._odd = 0
        request_id = accepted_id(head.fields.get("x-request-id", ""))
        request.start(self._intake.parts.observers.begin(request.label, request_id, head.passed_on, since))
        return True

    def _keep(self, data: bytes) -> None:
        self._pending.append(data)
        if sum(map(len, self._pending)) > _MAX_PENDING_BYTES:
            self.transport.pause_reading()

    def _leave(self, data: bytes) -> None:
        """From now on the connection is aiohttp's, with what has come that is not answered."""
        self._since = None
        self._listener.hand_over(self, data)

    def _leave_unfinished(self) -> None:
        """It is aiohttp's in the middle of a body."""
        self._let_go()
        self._head = None
        pieces, self._body = self._body, []
        self._leave(b"".join(pieces))

    def _take(self, body_bytes: int) -> bool:
        """Account for so many bytes more; False: there is no room for them."""
        has_room = self._intake.buffers.take(body_bytes)
        if has_room:
            self._held_bytes += body_bytes
        return has_room

    def _let_go(self) -> None:
        self._intake.buffers.give_back(self._held_bytes)
        self._held_bytes = 0

    def _lose(self) -> None:
        self._let_go()
        self.resume_writing()
        request, self._request = self._request, None
        if request is not None:
            request.left()
