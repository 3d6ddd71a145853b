"""Programs that are killed, stopped and started again, and what the kernel tells of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.processes import HOST, clean_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

_END_SECONDS = 5.0


class Program:
    """`python -m proxy …`, as often as it is started. Its output goes to a file that others write, too."""

    def __init__(self, words: Sequence[str], output: BinaryIO) -> None:
        self._words = words
        self._output = output
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", *self._words),
            env=clean_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Have it end, whatever state it is in."""
        self.send(number)
        self.send(signal.SIGCONT)
        if self._process is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        self.send(signal.SIGKILL)
        await self._process.wait()


def quiet_ports(count: int) -> list[int]:
    """Free ports that no outgoing connection is given, so that they are still free when their owner comes back."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(10_000, first_given), 200):
        with suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    sys.exit("there are not enough free ports")


def children(pid: int) -> list[int]:
    """Of a process that has one thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rss_bytes(pid: int) -> int:
    """Memory in use; 0 of a process that is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def open_fds(pid: int) -> int:
    """File descriptors in use; 0 of a process that is gone."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
