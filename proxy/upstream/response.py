"""An engine's answer as it arrives, and who takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from proxy.errors import Failure, UpstreamError
from proxy.upstream.connection import upstream_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping
    from types import TracebackType

    from proxy.upstream.connection import Connection, Sink

_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024


class Response:
    """An engine's answer whose status line and headers have arrived; the body goes to whoever attaches.

    `with` it: leaving gives the connection back, or drops it when the answer is not complete. There is nothing to wait
    for. It is the Exchange of those who await: `Upstream.open` begins it, and gives it out when it has arrived.
    """

    __slots__ = ("_arrived", "_connection", "_ended", "_error", "_sink", "arrival", "backend", "headers", "status")

    def __init__(self, connection: Connection) -> None:
        self.backend = connection.backend
        self.status = 0
        self.headers: Mapping[str, str] = {}
        """Lower-case names; the last one of equal names."""
        self.arrival: asyncio.Future[None] = connection.loop.create_future()
        """Done when status and headers have arrived; with an UpstreamError when they will not."""
        self._connection = connection
        self._sink: Sink | None = None
        self._arrived: list[bytes] = []
        self._ended = False
        self._error: UpstreamError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.on_exchanged(self._connection)

    @property
    def is_success(self) -> bool:
        """Whether its status says so."""
        return 200 <= self.status < 300

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """On which the body arrives."""
        return self._connection.loop

    def attach(self, sink: Sink) -> None:
        """Give the body to `sink`, beginning with what has arrived already."""
        if self._arrived:
            arrived = b"".join(self._arrived)
            self._arrived.clear()
            sink.received(arrived)
        if self._ended:
            sink.ended(self._error)
        else:
            self._sink = sink

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when it ends early or is larger than the bound."""
        reader = _Reader(self)
        self.attach(reader)
        return await reader.whole

    def pause(self) -> None:
        """Stop reading from the engine: TCP flow control then holds its output back."""
        self._connection.pause(True)

    def resume(self) -> None:
        """Read again after `pause`."""
        self._connection.pause(False)

    def abort(self, error: UpstreamError) -> None:
        """Drop the connection now, and tell this error to whoever takes the body; nothing when the answer has ended."""
        if not self._ended:
            self._connection.abort(error)

    def limit_silence(self, seconds: float) -> None:
        """From now on this is a stream, which may take as long as it likes: it fails with TIMEOUT when the engine sends
        nothing of the answer for so long, with STALLED when it does so on all streams while others of its role go on.
        """
        self._connection.limit_silence(seconds)

    def fail(self, failure: Failure, message: str) -> UpstreamError:
        """The error for an answer that arrived but cannot be used."""
        return upstream_error(failure, self.backend, message)

    def refuse(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """The error for an engine's own refusal, which reaches the client in its own words."""
        return upstream_error(Failure.STATUS, self.backend, message, engine_status=status, body=body, headers=headers)

    # Exchange

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        if not self.arrival.done():
            self.arrival.set_result(None)

    def received(self, data: bytes) -> bool:
        if self._sink is not None:
            return self._sink.received(data)
        self._arrived.append(data)
        return False

    def ended(self, error: UpstreamError | None) -> None:
        self._ended, self._error = True, error
        if not self.arrival.done():
            assert error is not None
            self.arrival.set_exception(error)
        sink, self._sink = self._sink, None  # a sink knows its response: one cycle of garbage less
        if sink is not None:
            sink.ended(error)


class _Reader:
    """The Sink behind `Response.read`."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._parts: list[bytes] = []
        self._size = 0
        self.whole: asyncio.Future[bytes] = response.loop.create_future()

    def received(self, data: bytes) -> bool:
        self._size += len(data)
        if self._size <= _MAX_ANSWER_BYTES:
            self._parts.append(data)
        elif not self.whole.done():
            self._parts.clear()
            self.whole.set_exception(self._response.fail(Failure.BAD_ANSWER, "the engine's answer is too large"))
        return False  # it is not there before it is there whole

    def ended(self, error: UpstreamError | None) -> None:
        if self.whole.done():
            return
        if error is None:
            self.whole.set_result(b"".join(self._parts))
        else:
            self.whole.set_exception(error)
