"""Blocking GET requests for commands and the supervisor, which have no event loop."""

from __future__ import annotations

import http.client
from typing import NamedTuple


class HttpResponse(NamedTuple):
    """A complete response with any status."""

    status: int
    server: str | None
    """The `Server` header, or None without one."""
    body: bytes
    """The body; empty if the caller did not request it."""


class HttpRequestError(Exception):
    """The request got no valid HTTP response. The text has the reason.

    Connecting failed, the connection broke, a read or write timed out, or the peer did not send HTTP.
    """


def get(host: str, port: int, path: str, timeout_seconds: float, *, wants_body: bool = False) -> HttpResponse:
    """GET a path over HTTP/1.1 without TLS. `timeout_seconds` limits each read and write. Raises HttpRequestError.

    The body is read only with `wants_body`, because the body of an unknown program may never end.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return HttpResponse(answer.status, answer.getheader("Server"), answer.read() if wants_body else b"")
    except (OSError, http.client.HTTPException) as error:
        raise HttpRequestError(str(error)) from None
    finally:
        connection.close()
