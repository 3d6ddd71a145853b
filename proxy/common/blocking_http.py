"""One GET, for commands and for the supervisor, which have no event loop."""

from __future__ import annotations

import http.client
from typing import NamedTuple


class HttpResponse(NamedTuple):
    """A complete response of any status."""

    status: int
    server: str | None
    """Its `Server` header, or None without one."""
    body: bytes
    """Empty if the caller did not want it."""


class HttpRequestError(Exception):
    """The request got no valid HTTP response. The text says why.

    Connecting failed, the connection broke, a read or write timed out, or the peer did not send HTTP.
    """


def get(host: str, port: int, path: str, timeout_seconds: float, *, wants_body: bool = False) -> HttpResponse:
    """GET a path over HTTP/1.1 without TLS. `timeout_seconds`: for each read and write. Raises HttpRequestError.

    Whoever only asks who is there does not want the body: of another program it may never end.
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
