"""Blocking GET requests for commands and the supervisor, which have no event loop."""

from __future__ import annotations

import http.client
import ssl
from typing import NamedTuple


class HttpResponse(NamedTuple):
    """A complete HTTP response with any status."""

    status: int
    server: str | None
    """The `Server` header, or None without one."""
    body: bytes
    """The body of the response; empty if the caller did not request it."""


class HttpRequestError(Exception):
    """An HTTP request got no valid response. The text has the reason.

    Connecting failed, the connection broke, a read or write timed out, or the peer did not send HTTP.

    Attributes:
        is_hang_up: Whether the peer closed the connection after it was made, with its TLS handshake if there was one.
            A peer that accepts only clients with a certificate does so.
    """

    def __init__(self, text: str, *, is_hang_up: bool = False) -> None:
        super().__init__(text)
        self.is_hang_up = is_hang_up


def get_blocking(
    host: str,
    port: int,
    path: str,
    timeout_seconds: float,
    *,
    wants_body: bool = False,
    tls: ssl.SSLContext | None = None,
) -> HttpResponse:
    """Send a blocking GET request over HTTP/1.1, and return the response. Raises HttpRequestError.

    Args:
        host: Host name or address.
        port: TCP port.
        path: Path of the request.
        timeout_seconds: Limit for each read and write, in seconds.
        wants_body: Whether to read the body. The body of an unknown program may never end.
        tls: Context of the connection; None: without TLS.
    """
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=tls)
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        connection.request("GET", path)
        answer = connection.getresponse()
        return HttpResponse(answer.status, answer.getheader("Server"), answer.read() if wants_body else b"")
    except (OSError, http.client.HTTPException) as error:
        is_hang_up = is_connected and isinstance(error, ConnectionError | ssl.SSLError)
        raise HttpRequestError(describe_request_error(error), is_hang_up=is_hang_up) from None
    finally:
        connection.close()


def describe_request_error(error: object) -> str:
    """Return the reason of a failed request, without anything that the peer sent."""
    is_other_protocol = isinstance(error, http.client.BadStatusLine | http.client.UnknownProtocol)
    if is_other_protocol and not isinstance(error, ConnectionError):  # a closed connection is a BadStatusLine, too
        return "the other side does not speak HTTP"
    return str(error)


def local_tls(has_tls: bool) -> ssl.SSLContext | None:
    """Return a context for a gateway on this host, or None without TLS.

    It verifies nothing: certificates do not name loopback addresses, and no request with it carries a secret.
    """
    if not has_tls:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
