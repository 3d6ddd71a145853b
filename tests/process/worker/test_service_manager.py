"""What systemd hears of a service of Type=notify, at a socket as it has one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.process.worker.process import READY, ServiceManager
from tests.scenarios.program import gateway, mock_engine


@contextmanager
def systemd(address: str) -> Iterator[Callable[[], str]]:
    """Yield a function that reads the next message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        receiver.settimeout(15)
        yield lambda: receiver.recv(4096).decode()


@pytest.mark.parametrize("workers", [1, 2])
async def test_systemd_is_notified_of_readiness_and_stop(tmp_path: Path, workers: int) -> None:
    path = str(tmp_path / "notify")
    with systemd(path) as hear:
        async with mock_engine("both") as engine:
            words = ("--connector", "plain", "--decode", engine.url, "--workers", str(workers))
            async with gateway(*words, NOTIFY_SOCKET=path) as program:
                assert await asyncio.to_thread(hear) == "READY=1\nSTATUS=listening"
                heard = {await asyncio.to_thread(hear) for _ in range(2 * workers - 1)}
                assert heard <= {"READY=1\nSTATUS=listening", f"STATUS=ready: {program.url}"}
                program.process.terminate()
                assert await asyncio.to_thread(hear) == "STOPPING=1\nSTATUS=draining"


async def test_systemd_is_notified_while_the_event_loop_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with systemd(path) as hear:
        manager = ServiceManager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000"})
        async with manager.sending_heartbeats():
            assert [await asyncio.to_thread(hear) for _ in range(3)] == ["WATCHDOG=1"] * 3


def test_name_that_begins_with_an_at_sign_is_no_file() -> None:
    with systemd("\0pdproxy-test-of-notify") as hear:
        ServiceManager({"NOTIFY_SOCKET": "@pdproxy-test-of-notify"}).send_state(READY, "listening")
        assert hear() == "READY=1\nSTATUS=listening"


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1"}]
)
async def test_service_manager_does_nothing_when_no_socket_listens(environ: dict[str, str]) -> None:
    manager = ServiceManager(environ)
    async with manager.sending_heartbeats():
        manager.send_state(READY, "listening")
        await asyncio.sleep(0)
