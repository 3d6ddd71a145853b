"""Child processes: started with their output in a file, always stopped, and asked for their CPU time and memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HOST = "127.0.0.1"
_READY_SECONDS = 30.0
_STOP_SECONDS = 5.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def free_ports(count: int) -> list[int]:
    """Ports nobody uses now: all are taken at the same time, so that they differ, and then let go."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def clean_environment() -> dict[str, str]:
    """Ours, without what is set for another gateway, and with this package importable. Gateways stop without a delay:
    there is no load balancer that has to notice.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    return {
        **kept,
        "PROXY_DRAIN__NOT_READY_SECONDS": "0",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A process that accepts connections on `port`; yields its id. Stopped on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean_environment(), **(environment or {})},
        )
    try:
        _wait_until_open(name, process, port, log)
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in reversed(_tree(process.pid)):
                os.kill(pid, 9)
            process.wait()


def _wait_until_open(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
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


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of all that descend from it, and of those that have ended already."""
    seconds = 0.0
    for member in _tree(pid):
        stat = _stat(member)
        if stat is not None:
            seconds += _clock_seconds(member)
            seconds += sum(int(value) for value in stat[13:15]) / _TICKS_PER_SECOND  # of children waited for
    return seconds


def _clock_seconds(pid: int) -> float:
    """The CPU clock of another process, with all its threads, to the nanosecond; /proc counts in ticks of 10 ms. The
    number of that clock is clock_getcpuclockid(3)'s.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def resident_bytes(pid: int) -> int:
    """Memory of a process and of all that descend from it; what they share counts for each."""
    pages = 0
    for member in _tree(pid):
        stat = _stat(member)
        pages += 0 if stat is None else int(stat[21])
    return pages * _PAGE_BYTES


def _tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    tree = [pid]
    for member in tree:
        tree += [child for child, stat in parents.items() if stat is not None and int(stat[1]) == member]
    return tree


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name, which may contain anything; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
