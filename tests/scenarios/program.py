"""The program as an operator runs it: a process, its output and its signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.asking import until

ENDS_WITHIN_SECONDS = 60.0
SERVING = r"pdproxy \S+ \((?:compiled|interpreted)\) on (\S+:\d+),"

# aiohttp reads the certificates of all authorities when it is imported, twice. No scenario needs them.
_NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull}


@dataclass
class Program:
    """A running `python -m proxy …`. `output` is what it has written so far, standard error included."""

    process: asyncio.subprocess.Process
    output: str = ""
    url: str = ""
    _readers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        """Return the process ids of the workers, if there are several."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def says(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches."""
        await until(lambda: re.search(pattern, self.output) or self.process.returncode is not None, pattern)
        found = re.search(pattern, self.output)
        assert found, f"the program ended with code {self.process.returncode}:\n{self.output}"
        return found

    async def counts(self, sample: str) -> None:
        """Wait until a scrape shows this line: what other workers have served is counted a moment later."""
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/metrics") as response:
                    if sample in (await response.text()).splitlines():
                        return

    async def ended(self) -> int:
        """Wait for the end; the exit code."""
        async with asyncio.timeout(ENDS_WITHIN_SECONDS):
            return await self.process.wait()

    async def read(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(65536):
            self.output += data.decode()


@asynccontextmanager
async def running(
    words: Sequence[str], says: str, *, under: Sequence[str] = (), **environment: str
) -> AsyncIterator[Program]:
    """Run the program with these words until the end of the block. `says`: the line with its address as group 1.

    `under`: a command that runs what stands behind it.
    """
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(*under, sys.executable, "-m", "proxy", *words),
        cwd=Path(__file__).parents[2],
        env={**inherited, **_NO_CERTIFICATES, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    program = Program(process)
    reading = asyncio.create_task(program.read())
    try:
        program.url = "http://" + (await program.says(says))[1]
        yield program
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


def gateway(*words: str, under: Sequence[str] = (), **environment: str) -> AbstractAsyncContextManager[Program]:
    """Start a gateway at a free port, without a delay for load balancers when it stops."""
    environment = {"PROXY_DRAIN__NOT_READY_SECONDS": "0", "PROXY_KV__SKIP_PREFILL": "false", **environment}
    return running(["--port", "0", *words], SERVING, under=under, **environment)


async def refused(*words: str, stop_when: asyncio.Event | None = None) -> tuple[int, str]:
    """Run a gateway that never begins to serve, and return its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "--port", "0", *words),
        cwd=Path(__file__).parents[2],
        env={**os.environ, **_NO_CERTIFICATES},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(ENDS_WITHIN_SECONDS):
            if stop_when is not None:
                await stop_when.wait()
                process.terminate()
            output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def mock_engine(role: str, *words: str) -> AbstractAsyncContextManager[Program]:
    """Run a simulated engine as a separate process."""
    return running(["mock-engine", "--role", role, *words], r"engine \(\S+\) on http://(\S+)")
