"""Child processes: started with their output in a file, and always stopped."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.request import urlopen

from lab.common.proc import tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HOST = "127.0.0.1"
_READY_SECONDS = 30.0
_STOP_SECONDS = 5.0
_CLAIMS: Final[list[socket.socket]] = []
"""Held as long as this process is there."""


def free_ports(count: int) -> list[int]:
    """Ports nobody uses now: all are taken at the same time, so that they differ, and then let go."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def quiet_ports(count: int) -> list[int]:
    """Free ports that no outgoing connection is given, nor any other run that asks here, so that they are still free
    when their owner comes back.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(10_000, first_given), 200):
        with suppress(OSError), socket.create_server((HOST, port)):
            _claim(port)
            ports.append(port)
        if len(ports) == count:
            return ports
    sys.exit("there are not enough free ports")


def _claim(port: int) -> None:
    """Keep other runs on this machine from taking a port that is not listened on yet, by an abstract name that goes
    with this process. Raises OSError if one has it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pdproxy-lab-port-{port}")
    except OSError:
        claim.close()
        raise
    _CLAIMS.append(claim)


def finished(
    words: Sequence[str],
    patience_seconds: float,
    environment: Mapping[str, str] | None = None,
    at: Path | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with all that it said on both streams as its `stdout`. Raises TimeoutExpired.

    `environment`: on top of a clean one. `at`: the directory that it ran in. `given`: its standard input.
    """
    return subprocess.run(
        words,
        cwd=at,
        env={**clean_environment(), **(environment or {})},
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience_seconds,
        check=False,
    )


def clean_environment() -> dict[str, str]:
    """Ours, without what is set for another gateway, and with `lab` importable. Gateways stop without a delay:
    there is no load balancer that has to notice.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    return {
        **kept,
        "PROXY_DRAIN__NOT_READY_SECONDS": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
    host: str = HOST,
) -> Iterator[int]:
    """A process that accepts connections on `port` of `host`; yields its id. Stopped on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean_environment(), **(environment or {})},
        )
    try:
        _wait_until_open(name, process, (host, port), log)
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in reversed(tree(process.pid)):
                os.kill(pid, 9)
            process.wait()


def _wait_until_open(name: str, process: subprocess.Popen[bytes], address: tuple[str, int], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            socket.create_connection(address, timeout=1).close()
            return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{name} did not start; its output:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def wait_until_ready(name: str, port: int, path: str) -> None:
    """Until a GET of `path` answers 200."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urlopen(f"http://{HOST}:{port}{path}", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{name} is not ready: {error}")
        time.sleep(0.05)
