"""The client's side of a streamed answer.

Headers leave with the first bytes of the answer, so whatever fails before them is still an ordinary HTTP error. The
last bytes leave with the end mark: a system call costs as much as a whole token. Bytes are framed and written in the
caller's call stack; only a client that reads too slowly costs a wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from proxy.common.errors import ClientStalled

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Streaming
    from proxy.upstream.fast_forward import Output


class ClientConnection(Protocol):
    """A client's connection, as long as one request on it is answered."""

    transport: asyncio.Transport
    on_full: Callable[[], None] | None
    """Called when the client begins to read slower than we write."""
    knows_chunks: bool
    """Whether it speaks HTTP/1.1. Otherwise the body of a stream ends with the connection (RFC 9112 6.3)."""

    @property
    def is_paused(self) -> bool:
        """Whether the client reads slower than we write."""

    def head_fields(self) -> bytes:
        """Return the header lines, each with CRLF, that the answer to this request has besides the usual ones."""

    async def drained(self) -> None:
        """Wait until the client has read enough."""

    def end_after_answer(self) -> None:
        """Close the connection when the request under way has ended."""

    def done(self, now: float) -> None:
        """Go on with the next request: this one has ended. `now` is in seconds of the monotonic clock."""


class KeptStream(Protocol):
    """The stream of an answer."""

    def is_begun(self) -> bool:
        """Return whether status and headers have gone out."""

    def keep_alive(self) -> None:
        """Send the bytes between two events, with status and headers if they have not gone out."""


class KeepAlive:
    """Times the silence of one stream. Tokens that bypass their reader are written to it, as an Output."""

    __slots__ = (
        *("_after_seconds", "_interval_seconds", "_loop", "_now", "_stream", "_timer", "has_answer", "transport"),
        "written_at",
    )

    def __init__(self, times: Streaming, stream: KeptStream) -> None:
        """Begin at once, and go on until `stop`."""
        self._after_seconds = times.keep_alive_after_seconds
        self._interval_seconds = times.keep_alive_seconds
        self._stream: KeptStream | None = stream
        self._loop = asyncio.get_running_loop()
        self._now: Callable[[], float] = self._loop.time
        self.written_at = self._now()
        self.has_answer = False
        """Some of the answer was written."""
        self.transport: asyncio.Transport | None = None
        """The client's connection, once status and headers have gone out."""
        self._timer: asyncio.TimerHandle | None = None
        self._wait(is_begun=False)

    def answered(self) -> None:
        """Note that some of the answer is being written."""
        self.has_answer = True
        self.written_at = self._now()

    def stop(self) -> None:
        """Send nothing more."""
        self._stream = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Output

    def write(self, data: bytes) -> None:
        """Write a chunk as it is."""
        self.written_at = self._now()
        assert self.transport is not None
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether nothing can be written any more."""
        return self.transport is None or self.transport.is_closing()

    # How

    def _look(self) -> None:
        stream = self._stream
        if stream is None:
            return
        is_begun, now = stream.is_begun(), self._now()
        limit = self._interval_seconds if is_begun else self._after_seconds
        if limit is not None and now - self.written_at >= limit:
            stream.keep_alive()
            self.written_at, is_begun = now, True
        self._wait(is_begun=is_begun)

    def _wait(self, *, is_begun: bool) -> None:
        """Look again when it may be due. As long as the stream has not begun, it may begin in any moment."""
        interval, after = self._interval_seconds, self._after_seconds
        due = []
        if interval is not None:
            due.append((self.written_at if is_begun else self._now()) + interval)
        if after is not None and not is_begun:
            due.append(self.written_at + after)
        self._timer = self._loop.call_at(min(due), self._look) if due else None


class ClientWriter:
    """Writes one streamed answer to one client. The units of a request that was split share it."""

    __slots__ = (
        "_head",
        "_id_header",
        "_keep_alive",
        "_keep_alive_bytes",
        "_kept",
        "_request_id",
        "_write_timeout_seconds",
        "connection",
        "is_committed",
    )

    def __init__(
        self,
        connection: ClientConnection,
        head: Callable[[str, str, ClientConnection], bytes],
        id_header: str,
        request_id: str,
        write_timeout_seconds: float,
    ) -> None:
        """Write nothing yet. `head` makes the status line and headers; see RequestParts.stream_head."""
        self.connection = connection
        self.is_committed = False
        """Whether status and headers have gone out, so that only the stream itself can report an error."""
        self._head = head
        self._id_header = id_header
        self._request_id = request_id
        self._write_timeout_seconds = write_timeout_seconds
        self._kept = b""
        """Bytes that leave with the next ones."""
        self._keep_alive: KeepAlive | None = None
        self._keep_alive_bytes = b""

    @property
    def has_answer(self) -> bool:
        """Return whether some of the answer was written."""
        return self.is_committed if self._keep_alive is None else self._keep_alive.has_answer

    @property
    def line(self) -> Output | None:
        """Where chunks of HTTP/1.1 can be written as they are; None: bytes go through `write`."""
        if not self.is_committed or self._kept or not self.connection.knows_chunks:
            return None
        return self.connection.transport if self._keep_alive is None else self._keep_alive

    def write(self, data: bytes) -> bool:
        """Send bytes of the answer. Return True when `attend` must be awaited before more is read for this client."""
        if not data:  # as a chunk it would be the end mark of the body (RFC 9112 7.1)
            return False
        if self._keep_alive is not None:
            self._keep_alive.answered()
        connection = self.connection
        if connection.transport.is_closing():
            return False
        if self._kept:
            data, self._kept = self._kept + data, b""
        connection.transport.write(self._framed(data))
        return connection.is_paused

    def keep(self, data: bytes) -> None:
        """Send bytes of the answer with those that follow at once."""
        self._kept += data

    def keep_alive_by(self, times: Streaming, data: bytes) -> None:
        """Send these bytes when the stream is silent, from now on until `close`; see KeepAlive."""
        self._keep_alive_bytes = data
        self._keep_alive = kept = KeepAlive(times, self)
        kept.transport = self.connection.transport

    def close(self) -> None:
        """Send no more keep-alive bytes."""
        if self._keep_alive is not None:
            self._keep_alive.stop()

    # KeptStream

    def is_begun(self) -> bool:
        """See KeptStream."""
        return self.is_committed

    def keep_alive(self) -> None:
        """See KeptStream. Nothing is sent to a client that does not read."""
        connection = self.connection
        if not connection.is_paused and not connection.transport.is_closing():
            connection.transport.write(self._framed(self._keep_alive_bytes))

    async def attend(self) -> None:
        """Wait until the client has read enough. Raises ClientStalled."""
        if not self.connection.is_paused:
            return
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await self.connection.drained()
        except TimeoutError:
            self.connection.transport.abort()
            raise ClientStalled from None

    def end(self, last: bytes) -> None:
        """Send the last bytes and the end mark, by which the client can tell that the answer is complete."""
        if self._kept:
            last, self._kept = self._kept + last, b""
        connection = self.connection
        if connection.transport.is_closing():
            return
        framed = self._framed(last) if last else self._framed_head()
        connection.transport.write(framed + b"0\r\n\r\n" if connection.knows_chunks else framed)

    def break_off(self, event: bytes) -> None:
        """End a committed stream with an event that says why it is not complete, and close the connection.

        The end mark of the body is not sent, so that clients which ignore error events see a failure, too.
        """
        self.write(event)
        transport = self.connection.transport
        transport.close()  # after what was written; a client that does not take it gets no more time than usual
        asyncio.get_running_loop().call_later(self._write_timeout_seconds, transport.abort)

    def _framed(self, data: bytes) -> bytes:
        """Return a chunk with these bytes, behind the headers if they have not gone out."""
        if not self.connection.knows_chunks:
            return self._framed_head() + data
        if self.is_committed:
            return b"%x\r\n%b\r\n" % (len(data), data)
        self.is_committed = True
        return b"%b%x\r\n%b\r\n" % (self._head(self._id_header, self._request_id, self.connection), len(data), data)

    def _framed_head(self) -> bytes:
        if self.is_committed:
            return b""
        self.is_committed = True
        return self._head(self._id_header, self._request_id, self.connection)
