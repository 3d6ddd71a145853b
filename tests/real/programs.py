"""Engines, gateways and services as processes of this machine.

Everything listens on 127.0.0.1. Each process leads its own session, through which its children are found and stopped.
Its output goes to a file.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

HOST = "127.0.0.1"
MODEL = "tiny"
# Five engines may load at the same time on two cores.
READY_SECONDS = 600.0
STOP_SECONDS = 20.0


def free_ports() -> Iterator[int]:
    """Ports that are free now, in random order.

    They lie below the kernel's ephemeral ports: an engine listens only when it has loaded, and other engines that load
    meanwhile take hundreds of those.
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
        per_start: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Start the program.

        `bootstrap_port`: port of a prefiller's bootstrap server; None if it has none. `per_start`: returns variables of
        the environment that differ at each start.
        """
        self.name = name
        self.port = port
        self.bootstrap_port = bootstrap_port
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(environment)
        self._per_start = per_start
        self.start()

    def start(self) -> None:
        """Start the process, or start it again after its end, with the same port and log."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **self._per_start()},
                start_new_session=True,
            )

    def wait_until_ready(self, path: str) -> None:
        """Wait until GET `path` answers 200. Raises RuntimeError with the end of the log if that takes too long."""
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

    def child(self, title: str) -> int:
        """Return the id of the process of the session whose command line has this title."""
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with suppress(OSError):  # processes come and go
                if os.getsid(pid) == self._process.pid and title.encode() in (directory / "cmdline").read_bytes():
                    return pid
        raise ProcessLookupError(title)

    def wait(self) -> None:
        """Wait for the end of the process, at most STOP_SECONDS, and kill what is left of its session."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """`kill -9` for every process of the session, except Python's resource trackers.

        These remove the shared memory of the others, and then exit.
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
    """Return the gateway's command-line arguments for these engines."""
    words: list[object] = []
    for program in prefillers:
        words += ["--prefill", f"http://{HOST}:{program.port}"]
        words += [] if program.bootstrap_port is None else [program.bootstrap_port]
    return words + [word for program in decoders for word in ("--decode", f"http://{HOST}:{program.port}")]


def start_gateway(port: int, log: Path, *words: object, ready_path: str = "/readyz", **variables: str) -> Program:
    """Start `python -m proxy` with these arguments and environment variables, and wait until it is ready."""
    command = [sys.executable, "-m", "proxy", "--host", HOST, "--port", port, "--log-format", "json", *words]
    # Variables of the caller must not configure this gateway.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    environment["PROXY_DRAIN__NOT_READY_SECONDS"] = "0"  # no load balancer has to notice that it stops
    gateway = Program("gateway", port, command, log, environment | variables)
    try:
        gateway.wait_until_ready(ready_path)
    except BaseException:
        stop([gateway])
        raise
    return gateway
