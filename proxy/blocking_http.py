"""One GET, for commands and for the supervisor, which have no event loop."""

from __future__ import annotations

import http.client
from typing import NamedTuple


class Answer(NamedTuple):
    """A whole answer, with whatever status. `server`: its header of that name; None: it has none."""

    status: int
    server: str | None
    body: bytes


class NoAnswer(Exception):
    """There was no connection, it broke, it took too long, or what came was no HTTP; the text says what."""


def get(host: str, port: int, path: str, timeout_seconds: float) -> Answer:
    """GET a path over HTTP/1.1 without TLS. `timeout_seconds`: for each read and write. Raises NoAnswer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("Server"), answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error)) from None
    finally:
        connection.close()
