"""Reads plain requests, one after the other, from the connection of a client. aiohttp reads all others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from proxy.common.endpoints import find_client_address
from proxy.gateway.intake import is_one_request, read_head
from proxy.gateway.long_body import LongBodyReader
from proxy.listener.connection import FirstProtocol
from proxy.listener.replies import choose_request_id
from proxy.wire.ids import make_request_id
from proxy.wire.weight import LONG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.common.errors import GatewayError
    from proxy.gateway.intake import Intake, RequestHead
    from proxy.gateway.request import Request
    from proxy.listener.http_listener import HttpListener
    from proxy.wire.document import Document


# A body that takes longer than this goes to aiohttp, which has the deadlines for slow bodies.
_BODY_SECONDS: Final = 1.0
# Reading pauses when more bytes of further requests have arrived during a request.
_MAX_PENDING_BYTES: Final = 64 * 1024
# After this number of requests in a row that were not plain, the connection stays with aiohttp. Each change costs more
# than plain requests save.
_MAX_MISSES: Final = 4


class FastConnection(FirstProtocol):
    """The first protocol of each accepted connection, if `listen.fast_path` is on."""

    def __init__(self, intake: Intake, listener: HttpListener) -> None:
        self._intake = intake
        self._listener = listener
        self.transport: asyncio.Transport
        self.is_writing_paused = False
        """Whether the client reads more slowly than we write."""
        self.on_write_buffer_full: Callable[[], None] | None = None
        """Called when `is_writing_paused` becomes True."""
        self.supports_chunked_encoding = True
        """See ClientConnection. All plain requests are HTTP/1.1."""
        self.additional_header_lines = b""
        """See ClientConnection. Answers to plain requests have no additional header lines."""
        self._request: Request | None = None
        """The request that is being served. None: there is none."""
        self._request_begun_at: float | None = None
        """Monotonic seconds at which the connection became idle or a body began. None: a request is being served."""
        self._closes_after_answer = False
        """Whether the connection is to be closed when no request is being served."""
        self._pending_pieces: list[bytes] = []
        """Bytes that arrived after the present request."""
        self._head: RequestHead | None = None
        """The head of the request whose body is arriving. None: no body is arriving."""
        self._last_head: RequestHead | None = intake.last_head
        """The head of the last request of any connection, because the heads of one application are alike."""
        self._body_pieces: list[bytes] = []
        """The pieces of the request whose body is arriving, with its head. They are empty for a long body."""
        self._long_body_reader: LongBodyReader | None = None
        """Reads the long body that is arriving. None: there is none."""
        self._missing_bytes = 0
        """Bytes of this request that have not arrived."""
        self._held_bytes = 0
        """Bytes of this request in the account of request bodies."""
        self._awaits_head = True
        """Whether the listener waits for the headers of a request."""
        self._miss_count = 0
        """Requests in a row that looked plain and were not."""
        self.client_address = "-"
        self._drain_future: asyncio.Future[None] | None = None
        """Done when the client has read enough. None: nothing has waited for it."""

    # FirstProtocol

    @property
    def awaits_request(self) -> bool:
        """Whether no request is being served and none has begun to arrive."""
        return self._request is None and self._head is None

    def end_connection(self, error: GatewayError | None = None) -> None:
        """Close a connection whose request has not begun. `error`: sent to the client before; None: nothing is sent."""
        if error is not None:
            self.transport.write(self._listener.make_refusal_bytes(self, error, make_request_id()))
        self.transport.close()

    def end_after_answer(self) -> None:
        """Close the connection after the present request."""
        self._closes_after_answer = True
        if self._request is None and self._head is None:
            self.transport.close()

    def close(self) -> None:
        """Ignore all bytes that arrive from now on, and close after the present request."""
        self._closes_after_answer = True
        self._pending_pieces.clear()

    def cut_connection(self) -> None:
        """Abort the connection and the present request."""
        self.transport.abort()
        self._disconnect_request()

    def enforce_time_limits(self, now: float, keepalive_seconds: float) -> None:
        """Enforce the time limits for idle connections and bodies. See HttpListener.close_overdue_connections."""
        if self._request_begun_at is None:
            return
        if self._head is not None:
            reader = self._long_body_reader
            if now - self._request_begun_at > _BODY_SECONDS if reader is None else reader.is_late(now):
                self.hand_over_unfinished()
        elif now - self._request_begun_at > keepalive_seconds:
            self.transport.close()

    @staticmethod
    def is_one_request(data: bytes) -> bool:
        return is_one_request(data)

    def should_reclaim(self, data: bytes) -> bool:
        """Return whether the bytes begin a request that may be plain."""
        if self._closes_after_answer or self._miss_count >= _MAX_MISSES:
            return False
        head = read_head(data, self._last_head)
        if head is None or head.request_path not in self._intake.paths:
            return False
        self._last_head = head
        self._awaits_head = True
        return True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = self.client_transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.client_address = str(peer[0])
        self._listener.register_connection(self, self.transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. One function handles the begin of a request, because calls are expensive."""
        if self._request is not None:
            self._pending_pieces.append(data)
            if sum(map(len, self._pending_pieces)) > _MAX_PENDING_BYTES:
                self.transport.pause_reading()
            return
        if self._head is not None:
            self._receive_body_piece(self._head, data)
            return
        if self._closes_after_answer:
            return
        intake = self._intake
        head = read_head(data, self._last_head)
        if head is None or head.request_path not in intake.paths:
            self._hand_over_to_aiohttp(data)
            return
        self._last_head = intake.last_head = head
        if self._awaits_head:
            self._awaits_head = False
            self._listener.header_deadlines.stop_timing(self.transport)
        size_bytes = head.head_size_bytes
        missing_bytes = size_bytes + head.body_bytes - len(data)
        if missing_bytes == 0:
            if not self._begin_request(head, data[size_bytes:], intake.request_parts.clock()):
                self._hand_over_to_aiohttp(data)
        elif missing_bytes < 0 or not intake.waits_for_body(head) or not self.reserve_body_memory(len(data)):
            self._hand_over_to_aiohttp(data)
        else:
            self._head, self._missing_bytes, self._request_begun_at = head, missing_bytes, intake.request_parts.clock()
            if head.body_bytes <= LONG_BYTES:
                self._body_pieces.append(data)
            else:
                self._long_body_reader = LongBodyReader(self, intake, head, data, self._request_begun_at)
                self._let_read(self._long_body_reader)

    def pause_writing(self) -> None:
        self.is_writing_paused = True
        if self.on_write_buffer_full is not None:
            self.on_write_buffer_full()

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        if self._drain_future is not None and not self._drain_future.done():
            self._drain_future.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnect_request()
        self._listener.remove_connection(self)

    # ClientConnection

    async def wait_until_drained(self) -> None:
        """Wait until the client has read enough."""
        while self.is_writing_paused and not self.transport.is_closing():
            self._drain_future = asyncio.get_running_loop().create_future()
            await self._drain_future

    def finish_request(self, now: float) -> None:
        self._request = self.on_write_buffer_full = None
        if self._closes_after_answer:
            self.transport.close()
        elif self._pending_pieces:
            data = b"".join(self._pending_pieces)
            self._pending_pieces.clear()
            self.transport.resume_reading()
            self.data_received(data)
        else:
            self._request_begun_at = now

    # For LongBodyReader

    def reserve_body_memory(self, size_bytes: int) -> bool:
        """Count bytes of a body in memory. Return False if there is no room for them."""
        has_room = self._intake.body_buffers.reserve_bytes(size_bytes)
        if has_room:
            self._held_bytes += size_bytes
        return has_room

    def hand_over_unfinished(self) -> None:
        """Hand the connection to aiohttp in the middle of a body."""
        self._release_body_bytes()
        self._head = None
        pieces, self._body_pieces = self._body_pieces, []
        reader, self._long_body_reader = self._long_body_reader, None
        if reader is not None:
            pieces = [reader.arrived_bytes()]
            reader.end()
            self._let_read(self)
        self._hand_over_to_aiohttp(b"".join(pieces))

    def begin_long_request(
        self, raw_head: bytes, head: RequestHead, raw_body: bytes, since: float, document: Document | None
    ) -> None:
        """Begin a request whose long body has arrived. `document` None: aiohttp's reader serves or rejects it."""
        self._release_body_bytes()
        self._head = self._long_body_reader = None
        self._let_read(self)
        if document is None or not self._begin_request(head, raw_body, since, document):
            self._hand_over_to_aiohttp(raw_head + raw_body)

    def _receive_body_piece(self, head: RequestHead, data: bytes) -> None:
        """Handle another piece of a request body."""
        self._body_pieces.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes < 0 or not self.reserve_body_memory(len(data)):
            self.hand_over_unfinished()
        elif self._missing_bytes == 0:
            self._release_body_bytes()
            self._head = None
            assert self._request_begun_at is not None
            pieces, self._body_pieces = self._body_pieces, []
            first, *more = pieces
            # One copy, whatever the number of pieces.
            if not self._begin_request(
                head, b"".join((memoryview(first)[head.head_size_bytes :], *more)), self._request_begun_at
            ):
                self._hand_over_to_aiohttp(b"".join(pieces))

    def _let_read(self, protocol: asyncio.BaseProtocol) -> None:
        """Let a protocol read the connection. The event loop does not change the buffer of a running read."""
        self.transport.pause_reading()
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()

    def _begin_request(self, head: RequestHead, body: bytes, since: float, document: Document | None = None) -> bool:
        """Begin a request that has arrived completely. Return False if it is not plain."""
        self._request_begun_at = None
        request = self._request = self._intake.begin_request(self, head, body, document)
        if request is None:
            self._miss_count += 1
            return False
        self._miss_count = 0
        parts = self._intake.request_parts
        request_id = choose_request_id(head.header_fields.get("x-request-id", ""))
        label = self._intake.dialects_by_path[head.request_path].label
        record = parts.request_observers.begin_record(label, request_id, head.headers_for_engines, since)
        record.client = self.client_address
        if networks := parts.settings.listen.trusted_proxies:
            record.client = find_client_address(
                self.client_address, [head.header_fields.get("x-forwarded-for", "")], networks
            )
        request.start_serving(record)
        return True

    def _hand_over_to_aiohttp(self, data: bytes) -> None:
        """Hand the connection to aiohttp, with the bytes that are not answered."""
        self._request_begun_at = None
        self._listener.hand_to_aiohttp(self, data)

    def _release_body_bytes(self) -> None:
        self._intake.body_buffers.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def _disconnect_request(self) -> None:
        self._release_body_bytes()
        self.resume_writing()
        if self._long_body_reader is not None:
            self._long_body_reader.end()
            self._head = self._long_body_reader = None
        request, self._request = self._request, None
        if request is not None:
            request.on_disconnect()
