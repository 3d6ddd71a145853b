"""The client's side of a streamed answer on the fast path; see flow/client.py, which is the same on aiohttp's road."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from proxy.errors import ClientStalled
from proxy.flow.keep_alive import KeepAlive

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Streaming
    from proxy.upstream.fast_forward import Output


class Client(Protocol):
    """A client's connection; `FastConnection` is one."""

    transport: asyncio.Transport
    is_paused: bool
    """The client reads slower than we write."""
    on_full: Callable[[], None] | None
    """Called when it begins to."""

    async def drained(self) -> None:
        """Wait until the client has read enough."""

    def end_after_answer(self) -> None:
        """Close it when the request under way has ended."""

    def done(self, now: float) -> None:
        """The request under way has ended, and its answer was written."""


class FastStream:
    """One streamed answer on one connection: its headers go out with its first bytes, and chunks behind them."""

    __slots__ = (
        *("_connection", "_head", "_keep_alive", "_keep_alive_bytes", "_passed_over", "_request_id"),
        *("_write_timeout_seconds", "is_committed"),
    )

    def __init__(
        self, connection: Client, head: Callable[[str, Client], bytes], request_id: str, write_timeout_seconds: float
    ) -> None:
        """`head`: makes status line and headers, with the blank line, of the answer to a request on a connection."""
        self._keep_alive: KeepAlive | None = None
        self._keep_alive_bytes = b""
        self.is_committed = False
        """The status and headers have gone out, so that an error can only be told inside the stream."""
        self._connection = connection
        self._head = head
        self._request_id = request_id
        self._passed_over = 0
        self._write_timeout_seconds = write_timeout_seconds

    @property
    def has_answer(self) -> bool:
        """Return whether some of the answer was written."""
        return self.is_committed if self._keep_alive is None else self._keep_alive.has_answer

    @property
    def line(self) -> Output | None:
        """Where chunks can be written as they are; None as long as there is something to write before."""
        if not self.is_committed:
            return None
        return self._connection.transport if self._keep_alive is None else self._keep_alive

    @property
    def protocol(self) -> Client:
        """Of the client's connection."""
        return self._connection

    def pass_over(self, size_bytes: int) -> None:
        """The next so many bytes have been written before."""
        self._passed_over = size_bytes

    def write(self, data: bytes) -> bool:
        """Send bytes of the answer. True when `attend` must be awaited before more is read for this client."""
        if self._passed_over:
            passed_over = min(self._passed_over, len(data))
            self._passed_over -= passed_over
            data = data[passed_over:]
        if not data:  # as a chunk it would be the end mark of the body (RFC 9112 7.1)
            return False
        if self._keep_alive is not None:
            self._keep_alive.answered()
        connection = self._connection
        transport = connection.transport
        if transport.is_closing():
            return False
        if self.is_committed:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.is_committed = True
            transport.write(b"%b%x\r\n%b\r\n" % (self._head(self._request_id, connection), len(data), data))
        return connection.is_paused

    def keep_alive_by(self, times: Streaming, data: bytes) -> None:
        """Send these bytes when the stream is silent, from now on until `close`; see KeepAlive."""
        self._keep_alive_bytes = data
        self._keep_alive = kept = KeepAlive(times, self)
        kept.transport = self._connection.transport

    def close(self) -> None:
        """Send nothing more by itself."""
        if self._keep_alive is not None:
            self._keep_alive.stop()

    # KeptStream

    def is_begun(self) -> bool:
        """See KeptStream."""
        return self.is_committed

    def keep_alive(self) -> None:
        """See KeptStream. Nothing is sent to a client that does not read."""
        connection, data = self._connection, self._keep_alive_bytes
        if connection.is_paused or connection.transport.is_closing():
            return
        head = b"" if self.is_committed else self._head(self._request_id, connection)
        self.is_committed = True
        connection.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))

    async def attend(self) -> None:
        """Wait until the client has read enough. Raises ClientStalled."""
        if not self._connection.is_paused:
            return
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await self._connection.drained()
        except TimeoutError:
            self._connection.transport.abort()
            raise ClientStalled from None

    def end(self, last: bytes) -> None:
        """Send the last bytes and the end mark: the client can tell that it is complete."""
        head = b"" if self.is_committed else self._head(self._request_id, self._connection)
        self.is_committed = True
        self._connection.transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(last), last))

    async def finish(self, last: bytes) -> None:
        """`end`, and wait until the client has read enough. Raises ClientStalled."""
        self.end(last)
        await self.attend()

    def break_off(self, event: bytes) -> None:
        """End a committed stream with an event that tells why it is not complete, and close the connection.

        The end mark of the body is not sent, so that clients which ignore error events see a failure, too.
        """
        self.write(event)
        transport = self._connection.transport
        transport.close()  # after what was written; a client that does not take it gets no more time than usual
        asyncio.get_running_loop().call_later(self._write_timeout_seconds, transport.abort)
