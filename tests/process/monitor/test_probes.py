"""Probes are answered whatever the event loop does, and whatever others send to their port."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from proxy.observe.metrics import Metrics
from proxy.process.monitor import MonitorParts, ProbeServer, WorkerMonitor
from tests.clock import Clock


@contextmanager
def probes(
    is_alive: Callable[[], bool] = lambda: True, is_ready: Callable[[], bool] = lambda: True
) -> Iterator[tuple[str, int]]:
    """Serve probes, and return their address."""
    with socket.create_server(("127.0.0.1", 0)) as sock, ProbeServer(sock, is_alive, is_ready):
        yield sock.getsockname()


def ask(address: tuple[str, int], path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=60.0)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Connection"] == "close"
    return answer.status, body


def send(address: tuple[str, int], request: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    with socket.create_connection(address, timeout=60.0) as client:
        client.sendall(request)
        received = b""
        while piece := client.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/healthz", "/ping", "/livez?verbose=1"])
def test_every_probe_returns_ok_when_the_gateway_is_ready(path: str) -> None:
    with probes() as address:
        assert ask(address, path) == (200, b'{"status":"ok"}')
        head, _, body = send(address, f"HEAD {path} HTTP/1.1\r\n\r\n".encode()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nContent-Length: 15\r\n" in head
        assert body == b""


@pytest.mark.parametrize(
    ("alive", "ready", "path", "status", "code"),
    [
        (True, False, "/livez", 200, None),
        (True, False, "/readyz", 503, "not_ready"),
        (True, False, "/healthz", 503, "not_ready"),
        (False, True, "/livez", 503, "event_loop_stalled"),
        (False, True, "/readyz", 503, "event_loop_stalled"),
    ],
)
def test_probe_says_what_is_wrong(alive: bool, ready: bool, path: str, status: int, code: str | None) -> None:
    with probes(lambda: alive, lambda: ready) as address:
        answered, body = ask(address, path)
        assert answered == status
        assert json.loads(body).get("error", {}).get("code") == code


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics", 404), ("GET", "/livez/", 404), ("POST", "/livez", 405), ("PUT", "/x", 404)],
)
def test_probe_server_answers_no_other_paths(method: str, path: str, status: int) -> None:
    with probes() as address:
        answered, body = ask(address, path, method)
        assert answered == status
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "request_line", ["", "GET", "GET /livez", "GET /livez HTTP/2", "\x00\xff", "GET  /livez HTTP/1.1"]
)
def test_probe_server_refuses_invalid_requests(request_line: str) -> None:
    with probes() as address:
        answer = send(address, request_line.encode("latin-1") + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert ask(address, "/livez")[0] == 200


@pytest.mark.parametrize(("end", "status"), [(b"\r\n\r\n", 200), (b"xxxx", 400)])
def test_request_is_read_to_a_limit(end: bytes, status: int) -> None:
    with probes() as address:
        request = b"GET /livez HTTP/1.1\r\nX: ".ljust(8188, b"x") + end
        assert send(address, request).startswith(b"HTTP/1.1 %d " % status)


def test_client_that_says_nothing_is_left_after_a_second() -> None:
    with probes() as address, socket.create_connection(address, timeout=60.0) as silent:
        silent.sendall(b"GET /livez HTTP/1.1\r\n")
        assert ask(address, "/livez")[0] == 200  # though it came later
        assert silent.recv(1) == b""


def test_probe_client_that_disconnects_does_not_disturb_others() -> None:
    with probes() as address:
        for request in (b"", b"GET /liv", b"GET /livez HTTP/1.1\r\n\r\n"):
            with socket.create_connection(address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                client.sendall(request)
        assert ask(address, "/livez")[0] == 200


def test_server_that_is_left_answers_no_more_even_in_the_middle_of_a_request() -> None:
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        with ProbeServer(sock, lambda: True, lambda: True), socket.create_connection(sock.getsockname()) as client:
            client.sendall(b"GET /livez")
            assert threading.active_count() == threads + 1
        assert threading.active_count() == threads
        with ProbeServer(sock, lambda: True, lambda: True):  # the socket is still the caller's
            assert ask(sock.getsockname(), "/livez")[0] == 200


def test_several_servers_share_one_socket() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        sock.dup() as same,
        ProbeServer(sock, lambda: True, lambda: True),
        ProbeServer(same, lambda: True, lambda: True),
    ):
        assert not sock.getblocking()  # a process that loses the race for a connection must not block
        for _ in range(50):
            assert ask(sock.getsockname(), "/livez")[0] == 200


async def test_probes_are_answered_while_the_event_loop_is_blocked() -> None:
    ticked = asyncio.Event()
    answers: list[tuple[int, bytes]] = []
    async with WorkerMonitor(Metrics(), MonitorParts(tick_callbacks=(ticked.set,), tick_seconds=0.001)) as monitor:
        await ticked.wait()
        with probes(monitor.is_alive, monitor.was_ready) as address:
            client = threading.Thread(
                target=lambda: answers.extend(ask(address, path) for path in ("/livez", "/readyz"))
            )
            client.start()
            client.join()  # and the event loop stands still meanwhile
    assert answers == [(200, b'{"status":"ok"}')] * 2


def test_loop_that_stands_still_for_too_long_is_reported(clock: Clock) -> None:
    monitor = WorkerMonitor(Metrics(), MonitorParts(clock=clock))
    with probes(monitor.is_alive, monitor.was_ready) as address:
        monitor.run_due_measurements()
        assert ask(address, "/readyz")[0] == 200
        clock.now += 31.0
        assert ask(address, "/livez")[0] == ask(address, "/readyz")[0] == 503
        monitor.run_due_measurements()
        assert ask(address, "/livez")[0] == ask(address, "/readyz")[0] == 200
