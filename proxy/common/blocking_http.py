"""One GET, for commands and for the supervisor, which have no event loop."""

from __future__ import annotations

import http.client
from typing import NamedTuple


class Answer(NamedTuple):
    """An answer with whatever status. `server`: its header of that name; None: it has none. `body`: empty if it was not
    asked for.
    """

    status: int
    server: str | None
    body: bytes


class NoAnswer(Exception):
    """There was no connection, it broke, it took too long, or what came was no HTTP; the text says what."""


def get(host: str, port: int, path: str, timeout_seconds: float, *, wants_body: bool = False) -> Answer:
    """GET a path over HTTP/1.1 without TLS. `timeout_seconds`: for each read and write. Raises NoAnswer.

    Whoever only asks who is there does not want the body: of another program it may never end.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("Server"), answer.read() if wants_body else b"")
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error)) from None
    finally:
        connection.close()
