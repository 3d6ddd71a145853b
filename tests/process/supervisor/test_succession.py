"""How long a gateway waits for its ports, depending on the process that holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from proxy.process.supervisor.listening import PortInUse, listen_after_predecessor
from proxy.settings import Admin, Listen, Settings
from proxy.settings.model import Drain
from tests.clock import Clock

NOT_READY, STREAMS, LETTING_GO = 5.0, 300.0, 3.0
DRAIN = Drain(not_ready_seconds=NOT_READY, streams_seconds=STREAMS)


class Occupant:
    """A process that holds a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.leave: Callable[[], None] = lambda: None


@contextmanager
def occupant(name: str, status: int) -> Iterator[Occupant]:
    class Answer(BaseHTTPRequestHandler):
        server_version, sys_version = name, ""

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def version_string(self) -> str:
            return name

        def log_message(self, *_: object) -> None: ...

    with ExitStack() as stack:
        server = HTTPServer(("127.0.0.1", 0), Answer)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def leave() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        there = Occupant(server.server_address[1])
        stack.callback(leave)
        there.leave = stack.close  # once: again at the end it has nothing left to do
        yield there


def waited(clock: Clock, settings: Settings, there: Occupant, leaves_after: float) -> tuple[float, str]:
    """How long it waited for the occupant, and why it gave up; empty: it did not."""
    began = clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock() - began >= leaves_after:
            there.leave()

    try:
        listen_after_predecessor(settings, clock=clock, sleep=sleep).close()
    except PortInUse as error:
        return clock() - began, str(error)
    return clock() - began, ""


WHO = {
    "a gateway that drains": ("pdproxy", 503, NOT_READY + STREAMS + LETTING_GO),
    "a gateway where engines call back": ("pdproxy", 404, NOT_READY + STREAMS + LETTING_GO),
    "a gateway that goes on": ("pdproxy", 200, NOT_READY + LETTING_GO),
    "another program": ("nginx", 503, NOT_READY + LETTING_GO),
}


@pytest.mark.parametrize(("name", "status", "seconds"), WHO.values(), ids=WHO)
@pytest.mark.parametrize("is_operators", [False, True], ids=["for clients", "for operators"])
def test_owner_of_a_port_decides_the_time_to_wait_for_it(
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    name: str,
    status: int,
    seconds: float,
    is_operators: bool,
) -> None:
    caplog.set_level("INFO", "proxy.supervisor.succession")
    with occupant(name, status) as there:
        port = there.port
        mine, theirs = (0, port) if is_operators else (port, None)
        settings = Settings(listen=Listen(port=mine), admin=Admin(port=theirs), drain=DRAIN)
        given_up_after, why = waited(clock, settings, there, leaves_after=seconds + 1.0)
        assert why == f"cannot listen on 127.0.0.1:{port}: address already in use"
        assert given_up_after == pytest.approx(seconds, abs=0.2)
        assert waited(clock, settings, there, leaves_after=seconds - 1.0)[1] == ""
    told = f"listener: waiting for port {port}, which is in use: 8 s, or as long as a gateway drains there"
    assert [record.getMessage() for record in caplog.records] == [told] * 2


def test_free_port_is_not_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.supervisor.succession")
    listen_after_predecessor(Settings(listen=Listen(port=0)), clock=clock).close()
    assert clock() == 1000.0
    assert not caplog.records
