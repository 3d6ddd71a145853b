"""Writes a streamed answer to the client.

Headers are sent with the first bytes of the answer, so an earlier failure is an ordinary HTTP error. The last bytes
are sent with the end mark, because a system call costs as much as a token. Only a slow client needs a wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from proxy.common.errors import ClientStalled

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Streaming
    from proxy.upstream.fast_forward import ClientOutput


class ClientConnection(Protocol):
    """The connection of a client, while one request on it is served."""

    transport: asyncio.Transport
    on_write_buffer_full: Callable[[], None] | None
    """Called when the client begins to read more slowly than we write."""
    supports_chunked_encoding: bool
    """Whether the client speaks HTTP/1.1. Otherwise a stream ends with the connection (RFC 9112 6.3)."""

    @property
    def is_writing_paused(self) -> bool:
        """Whether the client reads more slowly than we write."""

    @property
    def additional_header_lines(self) -> bytes:
        """Additional header lines of the answer, each with CRLF."""

    async def wait_until_drained(self) -> None:
        """Wait until the client has read enough."""

    def end_after_answer(self) -> None:
        """Close the connection after the present request."""

    def finish_request(self, now: float) -> None:
        """Continue with the next request after the present one has ended. `now`: monotonic seconds."""


class KeepAlive:
    """Sends bytes when a stream has been silent for a time. It is the Output of tokens that bypass their reader."""

    def __init__(self, keep_alive_times: Streaming, client_writer: ClientWriter) -> None:
        """Start the timer of keep-alive bytes, which runs until `stop_timer`."""
        self._after_seconds = keep_alive_times.keep_alive_after_seconds
        self._interval_seconds = keep_alive_times.keep_alive_seconds
        self._client_writer: ClientWriter | None = client_writer
        self._loop = asyncio.get_running_loop()
        self._now: Callable[[], float] = self._loop.time
        self.last_written_at = self._now()
        """Time of the last write, in seconds of the event loop."""
        self.has_answer_begun = False
        """Whether some of the answer was written."""
        self.transport: asyncio.Transport | None = None
        """The connection of the client. None before the status and headers were sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._set_timer(is_begun=False)

    def record_answer_write(self) -> None:
        """Record that a part of the answer is written now."""
        self.has_answer_begun = True
        self.last_written_at = self._now()

    def stop_timer(self) -> None:
        """Stop sending keep-alive bytes."""
        self._client_writer = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Output

    def write(self, data: bytes) -> None:
        """Write a chunk of the answer that is framed already."""
        self.last_written_at = self._now()
        assert self.transport is not None
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self.transport is None or self.transport.is_closing()

    def _send_if_silent(self) -> None:
        """Send bytes if the stream has been silent for long enough, and set the timer again."""
        stream = self._client_writer
        if stream is None:
            return
        is_begun, now = stream.is_head_sent, self._now()
        limit = self._interval_seconds if is_begun else self._after_seconds
        if limit is not None and now - self.last_written_at >= limit:
            stream.send_keep_alive()
            self.last_written_at, is_begun = now, True
        self._set_timer(is_begun=is_begun)

    def _set_timer(self, *, is_begun: bool) -> None:
        """Set the timer for the time when bytes may be due. A stream that has not begun may begin at any time."""
        interval, after = self._interval_seconds, self._after_seconds
        due = []
        if interval is not None:
            due.append((self.last_written_at if is_begun else self._now()) + interval)
        if after is not None and not is_begun:
            due.append(self.last_written_at + after)
        self._timer = self._loop.call_at(min(due), self._send_if_silent) if due else None


class ClientWriter:
    """Writes one streamed answer to one client. All units of a request share it."""

    def __init__(
        self,
        connection: ClientConnection,
        head: Callable[[str, str, ClientConnection], bytes],
        id_header: str,
        request_id: str,
        write_timeout_seconds: float,
    ) -> None:
        """Prepare the stream. `head`: returns the status line and headers, see RequestParts.make_stream_head."""
        self.connection = connection
        self.is_head_sent = False
        """Whether the status and headers were sent, so that only the stream itself can report an error."""
        self.gathers_tokens = True
        """Whether tokens may wait for further ones, see TokenGathering."""
        self._make_head = head
        self._id_header = id_header
        self._request_id = request_id
        self._write_timeout_seconds = write_timeout_seconds
        self._delayed_bytes = b""
        """Bytes to send with the next ones."""
        self._keep_alive: KeepAlive | None = None
        self._keep_alive_bytes = b""

    @property
    def has_written_answer(self) -> bool:
        """Whether some of the answer was written to the client."""
        return self.is_head_sent if self._keep_alive is None else self._keep_alive.has_answer_begun

    @property
    def chunk_output(self) -> ClientOutput | None:
        """The output for framed chunks of HTTP/1.1. None: use `write`."""
        if not self.is_head_sent or self._delayed_bytes or not self.connection.supports_chunked_encoding:
            return None
        return self.connection.transport if self._keep_alive is None else self._keep_alive

    def write(self, data: bytes) -> bool:
        """Send bytes of the answer. Return True if the caller must await `wait_until_read` before it reads more."""
        if not data:  # an empty chunk would be the end mark of the body (RFC 9112 7.1)
            return False
        if self._keep_alive is not None:
            self._keep_alive.record_answer_write()
        connection = self.connection
        if connection.transport.is_closing():
            return False
        if self._delayed_bytes:
            data, self._delayed_bytes = self._delayed_bytes + data, b""
        connection.transport.write(self._frame_chunk(data))
        return connection.is_writing_paused

    def write_with_next(self, data: bytes) -> None:
        """Send bytes of the answer together with the next ones, which follow immediately."""
        self._delayed_bytes += data

    def send_while_silent(self, times: Streaming, data: bytes) -> None:
        """Send `data` while the stream is silent, from now until `close`. See KeepAlive."""
        self._keep_alive_bytes = data
        self._keep_alive = kept = KeepAlive(times, self)
        kept.transport = self.connection.transport

    def close(self) -> None:
        """Stop sending keep-alive bytes to the client."""
        if self._keep_alive is not None:
            self._keep_alive.stop_timer()

    def send_keep_alive(self) -> None:
        """Send the keep-alive bytes, with status and headers if needed. A client that does not read gets nothing."""
        connection = self.connection
        if not connection.is_writing_paused and not connection.transport.is_closing():
            connection.transport.write(self._frame_chunk(self._keep_alive_bytes))

    async def wait_until_read(self) -> None:
        """Wait until the client has read enough. Raises ClientStalled."""
        if not self.connection.is_writing_paused:
            return
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await self.connection.wait_until_drained()
        except TimeoutError:
            self.connection.transport.abort()
            raise ClientStalled from None

    def end_stream(self, last_part: bytes) -> None:
        """Send the last bytes and the end mark, which shows the client that the answer is complete."""
        if self._delayed_bytes:
            last_part, self._delayed_bytes = self._delayed_bytes + last_part, b""
        connection = self.connection
        if connection.transport.is_closing():
            return
        framed = self._frame_chunk(last_part) if last_part else self._framed_head()
        connection.transport.write(framed + b"0\r\n\r\n" if connection.supports_chunked_encoding else framed)

    def break_off_stream(self, error_event: bytes) -> None:
        """End a committed stream with an event that reports an error, and close the connection.

        The end mark is not sent, so that clients that ignore error events see a failure, too.
        """
        self.write(error_event)
        transport = self.connection.transport
        transport.close()  # sends the rest first, for which a client that does not read gets the usual time
        asyncio.get_running_loop().call_later(self._write_timeout_seconds, transport.abort)

    def _frame_chunk(self, data: bytes) -> bytes:
        """Return a chunk with these bytes, after the headers if they were not sent."""
        if not self.connection.supports_chunked_encoding:
            return self._framed_head() + data
        if self.is_head_sent:
            return b"%x\r\n%b\r\n" % (len(data), data)
        self.is_head_sent = True
        return b"%b%x\r\n%b\r\n" % (
            self._make_head(self._id_header, self._request_id, self.connection),
            len(data),
            data,
        )

    def _framed_head(self) -> bytes:
        if self.is_head_sent:
            return b""
        self.is_head_sent = True
        return self._make_head(self._id_header, self._request_id, self.connection)
