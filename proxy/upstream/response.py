"""An engine's answer as it arrives, and who takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from proxy.errors import Failure, UpstreamError
from proxy.upstream.connection import upstream_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from proxy.upstream.connection import Connection, Sink

_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024


class Response:
    """An engine's answer whose status line and headers have arrived; the body goes to whoever attaches.

    `with` it: leaving gives the connection back, or drops it when the answer is not complete. There is nothing to wait
    for. It is an Exchange, which whoever takes a connection begins; `Upstream.open` does, and gives it out when the
    headers have arrived.
    """

    __slots__ = ("_arrived", "_connection", "_ended", "_error", "_on_head", "_sink", "backend", "headers", "status")

    def __init__(self, connection: Connection, on_head: Callable[[UpstreamError | None], None]) -> None:
        """`on_head` is called once, when status and headers have arrived, or with an error when they will not."""
        self.backend = connection.backend
        self.status = 0
        self.headers: Mapping[str, str] = {}
        """Lower-case names; the last one of equal names."""
        self._on_head: Callable[[UpstreamError | None], None] | None = on_head
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
        whole: asyncio.Future[bytes] = self.loop.create_future()

        def read(body: bytes, error: UpstreamError | None) -> None:
            if not whole.done():
                whole.set_result(body) if error is None else whole.set_exception(error)

        self.attach(BodyReader(self, read))
        return await whole

    def pause(self) -> None:
        """Stop reading from the engine: TCP flow control then holds its output back."""
        self._connection.pause(True)

    def resume(self) -> None:
        """Read again after `pause`."""
        self._connection.pause(False)

    def forward_to(self, take: Callable[[bytes], bytes]) -> None:
        """See Connection.forward_to; nothing when the answer has ended."""
        if not self._ended:
            self._connection.forward_to(take)

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
        on_head, self._on_head = self._on_head, None
        if on_head is not None:
            on_head(None)

    def received(self, data: bytes) -> bool:
        if self._sink is not None:
            return self._sink.received(data)
        self._arrived.append(data)
        return False

    def ended(self, error: UpstreamError | None) -> None:
        self._ended, self._error = True, error
        if self._on_head is not None:
            assert error is not None
            self._on_head(error)
        sink, self._sink = self._sink, None  # a sink knows its response: one cycle of garbage less
        if sink is not None:
            sink.ended(error)


class BodyReader:
    """The Sink for a body that is wanted whole."""

    __slots__ = ("_on_end", "_parts", "_response", "_size")

    def __init__(self, response: Response, on_end: Callable[[bytes, UpstreamError | None], None]) -> None:
        """`on_end` is called once: with the body, or with an error when it ends early or is larger than the bound."""
        self._response = response
        self._on_end: Callable[[bytes, UpstreamError | None], None] | None = on_end
        self._parts: list[bytes] = []
        self._size = 0

    def received(self, data: bytes) -> bool:
        self._size += len(data)
        if self._size <= _MAX_ANSWER_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()
            self._tell(self._response.fail(Failure.BAD_ANSWER, "the engine's answer is too large"))
        return False  # it is not there before it is there whole

    def ended(self, error: UpstreamError | None) -> None:
        self._tell(error)

    def _tell(self, error: UpstreamError | None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(b"".join(self._parts) if error is None else b"", error)
