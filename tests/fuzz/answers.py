"""An engine that sends arbitrary bytes over a network that cuts and then breaks the connection."""

from __future__ import annotations

import asyncio
import atexit
import socket
from dataclasses import dataclass
from typing import Final, cast

import h11

from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.upstream.connection import EngineConnection
from proxy.upstream.response import Response
from proxy.upstream.upstream import RequestHeads
from tests.fuzz.cutting import cut, singly, spelled, words

LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)

ENGINE = Backend(Role.DECODE, "127.0.0.1", 7100)
_heads = RequestHeads(EngineKeys(None))

# A long head is rejected unless it arrives in one piece.
_LONG_HEAD_BYTES = 60_000


WORDS: Final = words(
    r"""
    HTTP/1.1\x20200\x20OK\r\n HTTP/1.1\x20503\x20Busy\r\n HTTP/1.0\x20200\x20OK\r\n
    HTTP/1.1\x20100\x20Continue\r\n\r\n HTTP/1.1\x20204\x20No\x20Content\r\n
    HTTP/1.1\x20304\x20Not\x20Modified\r\n HTTP/1.1\x20101\x20Switching\x20Protocols\r\n HTTP/2\x20200\r\n
    Content-Length:\x20 Transfer-Encoding:\x20 chunked identity gzip,\x20chunked Connection:\x20close\r\n
    Connection:\x20keep-alive\r\n Connection:\x20upgrade\r\nUpgrade:\x20h2c\r\n \r\n \r\n\r\n 0\r\n\r\n
    2\r\nab\r\n ;x=1\r\n 0\r\nX:\x201\r\n\r\n Content-Length:\x202\r\n\r\nok Trailer:\x20X\r\n
    Set-Cookie:\x20a\r\n X:\x20 \x80\xff x*300 fffffffffffffffff -1 +2
    """
)


_SOCKET: Final = socket.socket()
"""Holder of the options of connections. It never connects."""
atexit.register(_SOCKET.close)


class Line:
    """A transport without a peer, which closes on `abort`."""

    def __init__(self) -> None:
        self.is_lost = False

    def is_closing(self) -> bool:
        return self.is_lost

    def abort(self) -> None:
        self.is_lost = True

    def get_extra_info(self, _: str) -> Line:
        return self  # its own socket

    def fileno(self) -> int:
        return _SOCKET.fileno()

    def write(self, _: object) -> None:
        pass

    def writelines(self, _: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def connected(line: Line) -> EngineConnection:
    """Return a connection to the engine."""
    connection = EngineConnection(ENGINE, asyncio.get_running_loop(), lambda _: None, _heads.render_head, lambda: 0.0)
    connection.connection_made(cast("asyncio.Transport", line))
    return connection


class Body:
    """A Sink that checks the order of its calls."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.ends: list[UpstreamError | None] = []

    def on_body_data(self, data: bytes) -> bool:
        assert data
        assert not self.ends
        self.parts.append(data)
        return True

    def can_move_to_other_backend(self) -> bool:
        return True

    def on_body_end(self, error: UpstreamError | None) -> None:
        assert not self.ends
        self.ends.append(error)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an exchange. `failure` is None for a complete answer."""

    failure: Failure | None
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def check_answers(data: bytes) -> None:
    """Check that an exchange ends in a complete answer or one UpstreamError, independent of the cuts."""
    stream = spelled(data[1:], WORDS)
    pieces = cut(data[0] if data else 0, stream)
    outcomes = LOOP.run_until_complete(_outcomes(stream, pieces))
    if len(stream) > _LONG_HEAD_BYTES:
        return
    whole, *others = outcomes
    for other in others:
        assert other.failure == whole.failure
        if whole.failure is None:
            assert other == whole
        elif whole.status and other.status:
            assert (other.status, other.headers) == (whole.status, whole.headers)
            assert other.body.startswith(whole.body)
    if whole.failure is None and (read := second_opinion(stream)) is not None:
        assert read == (whole.status, whole.body)


async def _outcomes(stream: bytes, pieces: list[bytes]) -> list[Outcome]:
    return [
        _exchange([stream], attaches_late=False),
        _exchange(pieces, attaches_late=False),
        _exchange(pieces, attaches_late=True),
        _exchange(singly(stream), attaches_late=False),
    ]


def _exchange(pieces: list[bytes], *, attaches_late: bool) -> Outcome:
    """Send a request on a new connection, receive these pieces, and lose the connection."""
    line, body = Line(), Body()
    connection = connected(line)
    heads: list[UpstreamError | None] = []
    response = Response(connection, heads.append)
    connection.begin_exchange(response, "/", b"", {}, answer_seconds=1.0)
    attached = False
    for piece in filter(None, pieces):
        if line.is_lost:
            break
        connection.data_received(piece)
        if not attached and not attaches_late and response.status:
            response.attach_sink(body)
            attached = True
    connection.connection_lost(None)
    (error,) = heads
    if error is not None:
        return Outcome(error.failure)
    if not attached:
        response.attach_sink(body)
    (end,) = body.ends
    failure = None if end is None else end.failure
    return Outcome(failure, response.status, tuple(response.headers.items()), b"".join(body.parts))


def second_opinion(stream: bytes) -> tuple[int, bytes] | None:
    """Return status and body as h11 reads them, or None without a complete answer to a POST."""
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "engine"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    status, body = 0, bytearray()
    try:
        reader.receive_data(stream)
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, bytes(body)
