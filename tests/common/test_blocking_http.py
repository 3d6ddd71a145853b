"""What commands and the supervisor ask with."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from proxy.common import blocking_http


@pytest.fixture
def port() -> Iterator[int]:
    """Return the port of a program whose answers never end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nServer: other\r\nContent-Length: 9\r\n\r\nbegun")
                connection.recv(1)  # until the other side has closed it

        thread = Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(20)


def test_get_returns_the_server_without_reading_the_body(port: int) -> None:
    assert blocking_http.get_blocking("127.0.0.1", port, "/livez", 20) == (200, "other", b"")


def test_get_fails_when_a_requested_body_does_not_arrive(port: int) -> None:
    with pytest.raises(blocking_http.HttpRequestError):
        blocking_http.get_blocking("127.0.0.1", port, "/metrics", 0.2, wants_body=True)


def test_answer_of_another_protocol_is_not_repeated_in_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = Thread(target=serve)
        thread.start()
        with pytest.raises(blocking_http.HttpRequestError, match=r"^the other side does not speak HTTP$"):
            blocking_http.get_blocking("127.0.0.1", server.getsockname()[1], "/livez", 20)
        thread.join(20)
