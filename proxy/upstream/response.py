"""The answers of engines, from their first bytes until their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from proxy.common.errors import Failure, UpstreamError
from proxy.upstream.connection import BodySink, EngineConnection, make_upstream_error
from proxy.wire.openai import engine_error_text
from proxy.wire.sglang import reports_lack_of_kv_memory

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from proxy.upstream.fast_forward import TokenFormat

_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024


class Response:
    """One answer of an engine, which is the EngineExchange of its connection. Its body goes to an attached BodySink.

    Leaving its `with` block returns the connection, or closes it if the answer is incomplete.
    """

    def __init__(
        self, connection: EngineConnection, on_head: Callable[[UpstreamError | None], None] | None = None
    ) -> None:
        """Store `on_head`, which is called once: after status and headers have arrived, or with an error.

        None: only the whole body matters, and `collect_body` is called next.
        """
        self.backend = connection.backend
        self._mask_key = connection.mask_key
        self.status = 0
        """Status of the answer; 0 until its headers have arrived."""
        self.headers: Mapping[str, str] = {}
        """Headers by lower-case name. If a name is repeated, the last value is used."""
        self.limit_silence = connection.treat_as_stream
        """See EngineConnection."""
        self._on_head = on_head
        self._connection = connection
        self._arrived_pieces: list[bytes] = []
        self.on_body_data: Callable[[bytes], bool | None] = self._arrived_pieces.append
        """The method of the attached sink. Until one is attached, it keeps the body."""
        self._sink: BodySink | None = None
        self._on_body: Callable[[bytes, UpstreamError | None], None] | None = None
        self._size = 0  # of a body that is collected
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
        """Whether the status of the answer is 2xx."""
        return 200 <= self.status < 300

    def make_failure(self, failure: Failure, message: str) -> UpstreamError:
        """Return the error for an answer that arrived but cannot be used."""
        return make_upstream_error(failure, self.backend, message)

    def make_unreadable_error(self, message: str) -> UpstreamError:
        """Return the error for an answer with members of an unexpected form; see UpstreamError."""
        error = self.make_failure(Failure.BAD_ANSWER, message)
        error.is_unreadable_answer = True
        return error

    def make_refusal(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """Return the error for an engine's error answer. The client receives its body without the gateway key."""
        failure = Failure.RECOMPUTED if reports_lack_of_kv_memory(status, body) else Failure.STATUS
        if body is not None:
            body = self._mask_key(body)
        error = make_upstream_error(
            failure, self.backend, message, engine_status=status, answer_body=body, headers=headers
        )
        if body is not None:
            error.engine_words = engine_error_text(body)
        return error

    @property
    def is_body_complete(self) -> bool:
        """Whether the whole body has arrived. The current call of the Sink then has the end of the body."""
        return self._connection.reader.is_complete

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which the answer's body arrives."""
        return self._connection.loop

    def attach_sink(self, sink: BodySink) -> None:
        """Pass the body to `sink`, beginning with the part that has already arrived."""
        if self._arrived_pieces:
            arrived = b"".join(self._arrived_pieces)
            self._arrived_pieces.clear()
            sink.on_body_data(arrived)
        if self._ended:
            sink.on_body_end(self._error)
        else:
            self.on_body_data, self._sink = sink.on_body_data, sink

    def collect_body(self, on_body: Callable[[bytes, UpstreamError | None], None]) -> None:
        """Call `on_body` once: with the whole body, or with an error if it broke off or is too large."""
        self._on_body = on_body
        if self._arrived_pieces:
            arrived = b"".join(self._arrived_pieces)
            self._arrived_pieces.clear()
            self._add_piece(arrived)
        if self._ended:
            self.on_body_end(self._error)
        else:
            self.on_body_data = self._add_piece

    async def read_body(self) -> bytes:
        """Return the whole body. Raises UpstreamError if it broke off or is too large."""
        whole: asyncio.Future[bytes] = self.event_loop.create_future()

        def read(body: bytes, error: UpstreamError | None) -> None:
            if not whole.done():
                whole.set_result(body) if error is None else whole.set_exception(error)

        self.collect_body(read)
        return await whole

    def pause_reading(self) -> None:
        """Stop reading from the engine, so that TCP flow control slows it down."""
        self._connection.set_reading_paused(True)

    def resume_reading(self) -> None:
        """Read from the engine again after `pause_reading`."""
        self._connection.set_reading_paused(False)

    def pass_tokens_on(self, tokens: TokenFormat | None) -> None:
        """Call `EngineConnection.pass_tokens_on`, unless the answer has ended."""
        if not self._ended:
            self._connection.pass_tokens_on(tokens)

    def abort_exchange(self, error: UpstreamError) -> None:
        """Close the connection and pass the error to the Sink, unless the answer has ended."""
        if not self._ended:
            self._connection.abort_connection(error)

    # Exchange

    def on_answer_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        on_head, self._on_head = self._on_head, None
        if on_head is not None:
            on_head(None)

    def on_body_end(self, error: UpstreamError | None) -> None:
        self._ended, self._error = True, error
        if self._on_head is not None:
            assert error is not None
            self._on_head(error)
        self.on_body_data = self._arrived_pieces.append  # drops the reference cycle with the sink
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.on_body_end(error)
        elif self._on_body is not None:
            on_body, self._on_body = self._on_body, None
            body = b"" if error is not None else b"".join(self._arrived_pieces)
            self._arrived_pieces.clear()
            on_body(body, error)

    def can_move_to_other_backend(self) -> bool:
        return self._sink is None or self._sink.can_move_to_other_backend()

    def _add_piece(self, data: bytes) -> bool:
        self._size += len(data)
        if self._size <= _MAX_ANSWER_BYTES:
            self._arrived_pieces.append(data)
        elif self._on_body is not None:
            self._arrived_pieces.clear()
            on_body, self._on_body = self._on_body, None
            on_body(b"", _make_too_large_error(self))
        return False  # only a complete body is progress


def _make_too_large_error(response: Response) -> UpstreamError:
    return response.make_failure(Failure.BAD_ANSWER, "the engine's answer is too large")
