"""Processes on this machine: free ports, programs that run to their end, and programs that listen."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Final, Self
from urllib.request import ProxyHandler, Request, build_opener

from lab.common.proc import tree


def called_from() -> Path:
    """Return the directory that relative paths on the command line refer to.

    Scripts change to the project's directory and pass the original one in CALLED_FROM.
    """
    return Path(os.environ.get("CALLED_FROM", "."))


def unwind_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGINT, so that `with` blocks stop all processes."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda received, _: sys.exit(128 + received))


def allow_many_files() -> None:
    """Raise the limit of open files to the maximum, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


HOST = "127.0.0.1"
_READY_SECONDS = 60.0
"""Programs start at the same time, on machines that may be busy."""
_STOP_SECONDS = 5.0
_LAST_LINES = 60
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CLAIMS: Final[list[socket.socket]] = []
"""Open as long as this process runs."""
_open: Final = build_opener(ProxyHandler({})).open  # ignores http_proxy


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def quiet_ports(count: int) -> list[int]:
    """Return free ports that stay free while their program is down.

    The kernel gives them to no outgoing connection, and this function to no other run.
    """
    is_linux = _GIVEN.exists()
    first_given = int(_GIVEN.read_text().split()[0]) if is_linux else 32_768
    ports: list[int] = []
    for port in random.sample(range(10_000, first_given), 400 + 4 * count):
        with suppress(OSError), socket.create_server((HOST, port)):
            if is_linux:
                _claim(port)
            ports.append(port)
        if len(ports) == count:
            return ports
    sys.exit("there are not enough free ports")


def _claim(port: int) -> None:
    """Claim a port by an abstract socket name, which lives as long as this process. Raises OSError if it is taken."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pdproxy-lab-port-{port}")
    except OSError:
        claim.close()
        raise
    _CLAIMS.append(claim)


def fetch(url: str, body: bytes | None = None, method: str | None = None) -> bytes:
    """Return the body of the answer to a GET, or to a POST if `body` is given.

    Raises OSError, also for an error status.
    """
    with _open(Request(url, body, {"Content-Type": "application/json"}, method=method), timeout=30) as answer:
        return bytes(answer.read())


def finished(
    words: Sequence[str],
    patience_seconds: float,
    environment: Mapping[str, str] | None = None,
    at: Path | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; both its streams are in `stdout`. Raises TimeoutExpired.

    `environment`: in addition to a clean one. `at`: its working directory. `given`: its standard input.
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
    """Return this process's environment without pdproxy's and OpenAI's variables, with `lab` importable.

    Gateways stop without a delay, because no load balancer watches their readiness.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    return {
        **kept,
        "PROXY_DRAIN__NOT_READY_SECONDS": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@dataclass(kw_only=True, eq=False)
class Program:
    """A program that listens on a port. It runs and answers inside its `with` block; `end` and `start` restart it."""

    name: str
    command: Sequence[str]
    port: int
    output: Path | int
    """File, to which output is appended, or a descriptor."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to a clean environment."""
    host: str = HOST
    ready_path: str = ""
    """Path that answers 200 once the program is ready. Empty: it is ready when it accepts connections."""
    under: Sequence[str] = ()
    """Words of a program that starts this one."""
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the program was started and has ended since."""
        return self._process is not None and self._process.poll() is not None

    def text(self) -> str:
        """Return the output file."""
        return self.output.read_text(errors="replace") if isinstance(self.output, Path) else ""

    def start(self) -> None:
        """Start the program without waiting for it."""
        with ExitStack() as stack:
            output = self.output if isinstance(self.output, int) else stack.enter_context(self.output.open("ab"))
            self._process = subprocess.Popen(
                (*self.under, *self.command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **self.environment},
            )

    def wait(self) -> None:
        """Wait until the program answers. Exits with the end of its output if it does not start."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._answers():
            if self.has_ended or time.monotonic() > deadline:
                last = "\n".join(self.text().splitlines()[-_LAST_LINES:])
                sys.exit(f"{self.name} did not start; its output ends with:\n{last}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        with suppress(OSError, HTTPException):
            if self.ready_path:
                fetch(self.url + self.ready_path)
            else:
                socket.create_connection((self.host, self.port), timeout=1).close()
            return True
        return False

    def restart(self) -> None:
        """Start the program again and wait until it answers."""
        self.start()
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the program by a signal, or after a while by SIGKILL, even if it was stopped."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        self.send(number)
        self.send(signal.SIGCONT)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in reversed(tree(self._process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
