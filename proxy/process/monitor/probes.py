"""Answers /livez and /readyz in a thread, so that a busy event loop cannot delay the answers.

It serves one connection at a time, one request for each, and one second for that, because only orchestrators ask. The
thread reads values that the event loop has left, and touches nothing else.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from proxy.common.errors import BadRequest, GatewayError
from proxy.wire.openai import error_body

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWER_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1
_MAX_REQUEST_BYTES: Final = 8192

_ALIVE_PATHS: Final = frozenset({"/livez"})
_READY_PATHS: Final = frozenset({"/readyz", "/health", "/healthz", "/ping"})

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


class ProbeServer:
    """A thread that answers on a listening socket, inside `with`. Several processes may share the socket."""

    def __init__(self, sock: socket.socket, is_alive: Callable[[], bool], is_ready: Callable[[], bool]) -> None:
        """Keep the parts. Both functions are called in the thread. The caller closes the socket later."""
        self._sock = sock
        self._is_alive = is_alive
        self._is_ready = is_ready
        self._has_left = False
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def __enter__(self) -> Self:
        self._sock.setblocking(False)  # another process may accept first
        self._stop, self._stopped = socket.socketpair()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._stopped.close()

    def leave(self) -> None:
        """Accept no further connection, because a successor does. Open connections are answered."""
        self._has_left = True

    def _run(self) -> None:
        while self._waits_for(self._sock) and not self._has_left:
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                continue
            except OSError:  # for example, no free descriptor
                self._waits_for(self._stopped, _PAUSE_SECONDS)
                continue
            with connection, suppress(OSError):  # the prober may close the connection
                self._answer(connection)

    def _waits_for(self, sock: socket.socket, seconds: float | None = None) -> bool:
        """Wait until the socket can be read, or the server stops."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)]
        return bool(ready) and self._stopped.fileno() not in ready

    def _answer(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        until = time.monotonic() + _ANSWER_SECONDS
        request = b""
        while b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
            if not self._waits_for(connection, until - time.monotonic()):
                return
            piece = connection.recv(_MAX_REQUEST_BYTES - len(request))
            if not piece:
                return
            request += piece
        connection.sendall(self._reply(request))

    def _reply(self, request: bytes) -> bytes:
        """Return the answer, as bytes."""
        request_line = request.partition(b"\r\n")[0].decode("latin-1")
        method, _, rest = request_line.partition(" ")
        target, _, version = rest.partition(" ")
        try:
            if b"\r\n\r\n" not in request or not version.startswith("HTTP/1."):
                raise BadRequest("this is not an HTTP/1.1 request, or it is too long")
            self._check(method, target.partition("?")[0])
        except GatewayError as error:
            status, body = error.status, error_body(error)
        else:
            status, body = 200, b'{"status":"ok"}'
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
            "Server: pdproxy\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)

    def _check(self, method: str, path: str) -> None:
        """Raise GatewayError if the check fails."""
        if path not in _ALIVE_PATHS | _READY_PATHS:
            raise GatewayError("there is no such route on this port", code="not_found", status=404)
        if method not in ("GET", "HEAD"):
            raise GatewayError("this route does not support that method", code="method_not_allowed", status=405)
        if not self._is_alive():
            raise GatewayError("the event loop has stalled", code="event_loop_stalled", status=503)
        if path in _READY_PATHS and not self._is_ready():
            raise GatewayError("the gateway is not ready", code="not_ready", status=503)
