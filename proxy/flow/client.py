"""The client's side of a streamed answer.

Headers are committed with the first bytes of the answer, so whatever fails before them is still an ordinary HTTP error.
They leave in one packet, and so do the last bytes and the end mark: a system call costs as much as a whole token.
In between, bytes are framed and written to the socket in the caller's call stack; only a client that reads too slowly
costs a wait.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, cast

from aiohttp import HttpVersion11, web

from proxy.errors import ClientStalled
from proxy.flow.keep_alive import KeepAlive
from proxy.wire import openai

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.errors import GatewayError
    from proxy.settings import Streaming
    from proxy.upstream.fast_forward import Output

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise collect tokens before it passes them on
}


# An empty socket buffer takes this many bytes at once (asyncio and uvloop set their high-water mark at 64 KiB).
_NO_WAIT_BYTES: Final = 32 * 1024


class Pausable(Protocol):
    """The protocol of the client's connection."""

    on_full: Callable[[], None] | None
    """Called when the client begins to read slower than we write."""


class ClientWriter(Protocol):
    """Where a streamed answer goes; `ClientStream` is one."""

    @property
    def line(self) -> Output | None:
        """Where chunks of HTTP/1.1 can be written as they are; None as long as there is something to write before, and
        for clients that do not know chunks.
        """

    @property
    def protocol(self) -> Pausable:
        """Of the client's connection."""

    def write(self, data: bytes) -> bool:
        """Send bytes of the answer. True when `attend` must be awaited before more is read for this client."""

    async def attend(self) -> None:
        """Wait until the client has read enough. Raises ClientStalled."""


class _Answer(web.StreamResponse):
    # aiohttp's own switch, which it uses for web.Response: the headers wait for the first bytes of the body.
    _send_headers_immediately = False


class ClientStream:
    """One streamed answer to one client; shared by the units of a request that was split."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        write_timeout_seconds: float,
        times: Streaming,
        keep_alive: bytes,
    ) -> None:
        """`keep_alive`: what is sent when the stream is silent; see KeepAlive."""
        self.error_event: Callable[[GatewayError], bytes] = openai.error_event
        """What tells the client in the middle of its stream that it is not complete."""
        self.response = _Answer(headers={**_HEADERS, **headers})
        self._request = request
        self._protocol = request.protocol  # bound once: it is asked with every part of the answer
        self._write_timeout_seconds = write_timeout_seconds
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._chunked = request.version >= HttpVersion11
        self._is_committing = False
        self._keep_alive_bytes = keep_alive
        self._keep_alive = KeepAlive(times, self) if times.keeps_alive else None
        self._beginning: asyncio.Task[None] | None = None
        """Commits the headers of a stream that has no part of the answer yet."""

    @property
    def has_output(self) -> bool:
        """Return whether anything was written, be it still held here."""
        return self._transport is not None or bool(self._unsent)

    @property
    def has_answer(self) -> bool:
        """Return whether some of the answer was written, be it still held here."""
        return self.has_output if self._keep_alive is None else self._keep_alive.has_answer

    @property
    def is_committed(self) -> bool:
        """Have the status and headers gone out? Then an error can only be told inside the stream."""
        return self._transport is not None

    @property
    def line(self) -> Output | None:
        """See ClientWriter."""
        if not self._chunked or self._transport is None:
            return None
        return self._transport if self._keep_alive is None else self._keep_alive

    @property
    def protocol(self) -> Pausable:
        """See ClientWriter."""
        return cast("Pausable", self._protocol)  # our listener's

    def write(self, data: bytes) -> bool:
        """Send bytes of the answer. True when `attend` must be awaited before more is read for this client."""
        if not data:  # as a chunk it would be the end mark of the body (RFC 9112 7.1)
            return False
        if self._keep_alive is not None:
            self._keep_alive.answered()
        transport = self._transport
        if transport is None:
            self._unsent.append(data)
            return True
        if transport.is_closing():
            return False  # the client has left; the handler is about to be cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return self._protocol.writing_paused

    async def attend(self) -> None:
        """Commit the headers if that is due, and wait until the client has read enough. Raises ClientStalled."""
        await self.settled()
        if self._transport is None and self._unsent:
            await self._commit()
        if self._protocol.writing_paused:
            writer = await self.response.prepare(self._request)
            if writer is not None:
                await self._in_time(writer.drain(), _NO_WAIT_BYTES)

    async def finish(self, last: bytes) -> None:
        """Send the last bytes and the end mark: the client can tell that it is complete. Raises ClientStalled."""
        await self.settled()
        if self._transport is None:
            self._is_committing = True
            await self.response.prepare(self._request)
            self._transport = self._request.transport
        last = b"".join((*self._unsent, last))
        self._unsent.clear()
        await self._in_time(self.response.write_eof(last), len(last))

    async def settled(self) -> None:
        """Wait until headers are committed, if they are about to be without any of the answer."""
        if self._beginning is not None:
            await self._beginning
            self._beginning = None

    def close(self) -> None:
        """Send nothing more by itself."""
        if self._keep_alive is not None:
            self._keep_alive.stop()
        if self._beginning is not None:
            self._beginning.cancel()

    # KeptStream

    def is_begun(self) -> bool:
        """See KeptStream."""
        return self._transport is not None

    def keep_alive(self) -> None:
        """See KeptStream. Nothing is sent to a client that does not read."""
        transport = self._transport
        if transport is None:
            if not self._is_committing and not self._unsent:
                self._unsent.append(self._keep_alive_bytes)
                self._beginning = asyncio.create_task(self._begin())
        elif not transport.is_closing() and not self._protocol.writing_paused:
            data = self._keep_alive_bytes
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def _begin(self) -> None:
        with suppress(ClientStalled, ConnectionError):  # the client is gone, and the answer's task is told
            await self._commit()

    def break_off(self, error: GatewayError) -> None:
        """End a committed stream with an event that tells why it is not complete, and close the connection.

        The end mark of the body is not sent, so that clients which ignore error events see a failure, too.
        """
        self.write(self.error_event(error))
        transport = self._transport
        if transport is not None:
            transport.close()  # after what was written; a client that does not take it gets no more time than usual
            asyncio.get_running_loop().call_later(self._write_timeout_seconds, transport.abort)

    async def _in_time(self, sending: Awaitable[None], size: int) -> None:
        """Await something that sends `size` bytes; a deadline is set up only if it can come to a wait at all."""
        transport = self._request.transport
        if transport is None or (size < _NO_WAIT_BYTES and not transport.get_write_buffer_size()):
            await sending
            return
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await sending
        except TimeoutError:
            transport.abort()
            raise ClientStalled from None

    async def _commit(self) -> None:
        self._is_committing = True
        await self.response.prepare(self._request)
        while self._unsent:
            unsent = b"".join(self._unsent)
            self._unsent.clear()
            await self._in_time(self.response.write(unsent), len(unsent))
        self._transport = self._request.transport
        if self._keep_alive is not None:
            self._keep_alive.transport = self._transport
