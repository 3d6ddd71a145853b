"""Reads a long request body from the socket into one buffer, then checks and parses it.

Joining pieces would copy the whole body, which takes as long as reading it. Checking and parsing take milliseconds
each, so the event loop handles other connections in between.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import TYPE_CHECKING, Final, Protocol

from proxy.common.errors import ShuttingDown

if TYPE_CHECKING:
    from proxy.common.errors import GatewayError
    from proxy.gateway.intake import Intake, RequestHead
    from proxy.wire.document import Document

# A body that is slower goes to aiohttp's reader, which has the deadlines for slow bodies.
_FIRST_SECONDS: Final = 1.0
_BYTES_PER_SECOND: Final = 4 * 1024 * 1024


class BodyReceiver(Protocol):
    """The connection of a client that sends a long body."""

    transport: asyncio.Transport

    def reserve_body_memory(self, size_bytes: int) -> bool:
        """Count bytes of a body in memory. Return False if there is no room for them."""

    def begin_long_request(
        self, raw_head: bytes, head: RequestHead, raw_body: bytes, since: float, document: Document | None
    ) -> None:
        """Begin a request whose long body has arrived. `document` None: aiohttp's reader serves or rejects it."""

    def hand_over_unfinished(self) -> None:
        """Hand the connection to aiohttp in the middle of a body."""

    def end_connection(self, error: GatewayError | None = None) -> None:
        """Close the connection. `error`: sent to the client before; None: nothing is sent."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class LongBodyReader(asyncio.BufferedProtocol):
    """The protocol of a connection while a long body arrives. It reads no byte after the body.

    It counts as a request for a shutdown, from the first byte of the body until the request begins.
    """

    def __init__(self, connection: BodyReceiver, intake: Intake, head: RequestHead, data: bytes, since: float) -> None:
        """Begin with the bytes that have arrived. The rest of the buffer uses no memory until its bytes arrive.

        Args:
            connection: Gets the body, and all other events of the connection.
            intake: Checks and parses the body.
            head: The head of the request.
            data: The bytes of the head and of the body that have arrived.
            since: Monotonic seconds at which the head arrived.
        """
        self.head = head
        self.since = since
        self._connection = connection
        self._intake = intake
        self._raw_head = data[: head.head_size_bytes]
        self._buffer = BytesIO(bytes(head.body_bytes))  # no copy, because there is no other reference
        self._view = self._buffer.getbuffer()
        first_part = memoryview(data)[head.head_size_bytes :]
        self._view[: len(first_part)] = first_part
        self.received_bytes = len(first_part)
        """Bytes of the body that have arrived."""
        self._is_ended = False
        intake.request_parts.drain_manager.count_request(self)

    def is_late(self, now: float) -> bool:
        """Return whether the body arrives too slowly for this reader. `now`: monotonic seconds."""
        if self.received_bytes == self.head.body_bytes:
            return False
        seconds = _FIRST_SECONDS + self.received_bytes / _BYTES_PER_SECOND
        return now - self.since > min(
            seconds, max(_FIRST_SECONDS, self._intake.request_parts.settings.listen.body_seconds / 2)
        )

    def end(self) -> None:
        """Stop counting as a request, and ignore the body. Repeated calls have no effect."""
        if not self._is_ended:
            self._is_ended = True
            self._intake.request_parts.drain_manager.stop_counting_request(self)

    def arrived_bytes(self) -> bytes:
        """Return the head and the bytes of the body that have arrived."""
        return b"".join((self._raw_head, self._view[: self.received_bytes]))

    def cut_off_request(self) -> None:
        """Reject the request, because the gateway shuts down."""
        self._connection.end_connection(ShuttingDown())

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self.received_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if not self._connection.reserve_body_memory(nbytes):
            self._connection.hand_over_unfinished()
        elif self.received_bytes == self.head.body_bytes:
            self._connection.transport.pause_reading()
            self._intake.request_parts.loop.call_soon(self._check)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def _check(self) -> None:
        if self._is_ended:
            return
        self._view.release()
        raw_body = self._buffer.getvalue()  # no copy
        memory_bytes = self._intake.bound_long_body_memory(self.head, raw_body)
        if memory_bytes is None or not self._connection.reserve_body_memory(memory_bytes):
            self._finish(raw_body, None)
        else:
            self._intake.request_parts.loop.call_soon(self._parse, raw_body)

    def _parse(self, raw_body: bytes) -> None:
        if not self._is_ended:
            self._intake.request_parts.loop.call_soon(self._finish, raw_body, self._intake.parse_long_body(raw_body))

    def _finish(self, raw_body: bytes, document: Document | None) -> None:
        """Begin the request. `document` None: aiohttp's reader must count the elements of the body, or reject it."""
        if self._is_ended or self._connection.transport.is_closing():
            return
        self._connection.begin_long_request(self._raw_head, self.head, raw_body, self.since, document)
        self.end()
