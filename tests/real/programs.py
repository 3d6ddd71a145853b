"""Engines, gateways and what else is needed, as processes of this machine.

Everything listens on 127.0.0.1. Each process is the head of a session of its own, so that whatever it started ends
with it, and its output is in a file.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
MODEL = "tiny"
# Five engines load at the same time on, perhaps, two cores.
READY_SECONDS = 600.0
STOP_SECONDS = 20.0


def free_ports() -> Iterator[int]:
    """Ports nobody uses now.

    Not those the kernel gives away: an engine takes its port when it has loaded, and engines that load meanwhile are
    given hundreds.
    """
    for port in random.sample(range(20_000, 30_000), 10_000):
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        yield port


class Program:
    """One process that serves HTTP."""

    def __init__(
        self,
        name: str,
        port: int,
        command: Sequence[object],
        log: Path,
        environment: Mapping[str, str],
        bootstrap_port: int | None = None,
    ) -> None:
        """`bootstrap_port`: where decoders ask a prefiller, if its connector has such a server."""
        self.name = name
        self.port = port
        self.bootstrap_port = bootstrap_port
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(environment)
        self.start()

    def start(self) -> None:
        """Start it; once more, after its end, with the same port and the same log."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self, path: str) -> None:
        """Until `path` answers 200."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                raise RuntimeError(f"{self.name} did not become ready; its output, {self.log}, ends with:\n{end}")
            time.sleep(0.25)

    def _answers(self, path: str) -> bool:
        try:
            with closing(http.client.HTTPConnection(HOST, self.port, timeout=10)) as connection:
                connection.request("GET", path)
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        """Wait for the end; what is left of the session then is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """`kill -9` for every process of the session that does anything.

        Not for Python's resource trackers, which remove the shared memory that the others have left, and end.
        """
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with suppress(OSError):  # processes come and go
                is_ours = os.getsid(pid) == self._process.pid
                if is_ours and b"multiprocessing.resource_tracker" not in (directory / "cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()


def stop(programs: Iterable[Program]) -> None:
    programs = list(programs)
    for program in programs:
        program.terminate()
    for program in programs:
        program.wait()


def endpoints(prefillers: Sequence[Program], decoders: Sequence[Program]) -> list[object]:
    """How the gateway is told of these engines."""
    words: list[object] = []
    for program in prefillers:
        words += ["--prefill", f"http://{HOST}:{program.port}"]
        words += [] if program.bootstrap_port is None else [program.bootstrap_port]
    return words + [word for program in decoders for word in ("--decode", f"http://{HOST}:{program.port}")]


def start_gateway(port: int, log: Path, *words: object, ready_path: str = "/readyz", **variables: str) -> Program:
    """`python -m proxy` with more words on its command line and more variables in its environment."""
    command = [sys.executable, "-m", "proxy", "--host", HOST, "--port", port, "--log-format", "json", *words]
    # What is set for another gateway must not change this one.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    environment["PROXY_DRAIN__NOT_READY_SECONDS"] = "0"  # nobody looks whether it is ready before it goes
    gateway = Program("gateway", port, command, log, environment | variables)
    try:
        gateway.wait_until_ready(ready_path)
    except BaseException:
        stop([gateway])
        raise
    return gateway
