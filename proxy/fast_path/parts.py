"""What the requests on the fast path of one worker are made of, and how their answers begin."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from proxy import SERVER
from proxy.errors import NoBackendAvailable
from proxy.listener import replies

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.connectors.base import Connector
    from proxy.dialects.openai import OpenAi
    from proxy.errors import GatewayError
    from proxy.fast_path.stream import Client
    from proxy.flow.gateway import Gateway
    from proxy.flow.lanes import Lane, Lanes
    from proxy.flow.suspects import Suspects
    from proxy.listener.drain import Drain
    from proxy.listener.http_listener import HttpListener
    from proxy.observe.metrics import Metrics
    from proxy.observe.observers import Observers
    from proxy.settings import Settings, Streaming
    from proxy.upstream import Upstream

# Around the id of the request; the moment's date is put in once a second.
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\nX-Request-Id: "
)
_BEHIND_STREAM_ID: Final = b"\r\nTransfer-Encoding: chunked\r\nDate: %%b\r\nServer: %b\r\n" % SERVER.encode()
_BODY_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %%d\r\nDate: %%b\r\nServer: %b\r\n"
    b"X-Request-Id: %%b\r\n%%b\r\n"
) % SERVER.encode()
_CLOSE: Final = b"Connection: close\r\n"


@dataclass(slots=True, kw_only=True, eq=False)
class FastParts:
    """One worker's. Only what is configured ever changes."""

    gateway: Gateway
    connector: Connector
    suspects: Suspects
    lane: Lane
    """That of these three."""
    lanes: Lanes
    upstream: Upstream
    drain: Drain
    listener: HttpListener
    observers: Observers
    metrics: Metrics
    settings: Settings
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float] = time.monotonic
    """Seconds of the clock that request records have."""
    _date: bytes = field(default=b"", init=False)
    _date_second: int = field(default=-1, init=False)
    _behind_stream_id: bytes = field(default=b"", init=False)
    write_timeout_seconds: float = field(default=0.0, init=False)
    """This and the two below are of the settings, which take longer to read."""
    first_token_seconds: float = field(default=0.0, init=False)
    idle_seconds: float = field(default=0.0, init=False)
    keep_alive: Streaming | None = field(default=None, init=False)
    """How silent streams are kept alive; None: they are not."""

    def __post_init__(self) -> None:
        self.configure(self.settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self.settings = settings
        self.write_timeout_seconds = settings.listen.write_timeout_seconds
        self.first_token_seconds = settings.timeouts.first_token_seconds
        self.idle_seconds = settings.timeouts.idle_seconds
        self.keep_alive = settings.stream if settings.stream.keeps_alive else None

    def of(self, lane: Lane) -> FastParts:
        """The same in another lane."""
        return replace(self, gateway=lane.gateway, connector=lane.connector, suspects=lane.suspects, lane=lane)

    # What a request writes to its client, as aiohttp would. An answer says that its connection ends with it once the
    # listener is closing; one that had begun before may be followed by another request, which is told.

    def stream_head(self, request_id: str, client: Client) -> bytes:
        """The head of a streamed answer."""
        if int(self.clock()) != self._date_second:
            self._tick()
        closing = _closing(client) + b"\r\n" if self.listener.is_closing else b"\r\n"
        return _STREAM_HEAD + request_id.encode() + self._behind_stream_id + closing

    def body_head(self, request_id: str, client: Client, body_bytes: int) -> bytes:
        """The head of an answer that is one JSON body."""
        if int(self.clock()) != self._date_second:
            self._tick()
        closing = _closing(client) if self.listener.is_closing else b""
        return _BODY_HEAD % (body_bytes, self._date, request_id.encode(), closing)

    def error_answer(self, dialect: OpenAi, error: GatewayError, request_id: str, client: Client) -> bytes:
        """The whole answer in place of one that failed, which is counted as refused if it was."""
        self.refused(error)
        response = replies.error_response(error, dialect.error_body(error))
        closes = bool(self.listener.is_closing and _closing(client))
        return replies.written(response, request_id, closes=closes)

    def refused(self, error: GatewayError) -> None:
        """Count a request that was refused before it had an answer. If no instance was there, the error says why."""
        if isinstance(error, NoBackendAvailable):
            self.lane.explain(error)
        replies.count_rejection(self.metrics, error)

    def unexpected(self, dialect: OpenAi, error: BaseException) -> GatewayError:
        """Log what nobody expected; the error for the client."""
        return replies.unexpected("POST", dialect.path, error)

    def _tick(self) -> None:
        self._date_second, self._date = int(self.clock()), formatdate(usegmt=True).encode()
        self._behind_stream_id = _BEHIND_STREAM_ID % self._date


def _closing(client: Client) -> bytes:
    """The header that says so, with which the connection is bound to end."""
    client.end_after_answer()
    return _CLOSE
