"""The process that subscribes, as those see it who have started it."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import proxy
from proxy.fleet.kv_events.messages import InstanceReport, SubscribeTo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.fleet.kv_events.messages import EventSource

_END_SECONDS: Final = 2.0
_LINE_BYTES: Final = 1024 * 1024
_read_told: Final = msgspec.json.Decoder(InstanceReport).decode
_encode: Final = msgspec.json.Encoder().encode


class Process:
    """One that runs; see `started`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._wanted: list[EventSource] | None = None

    def want(self, sources: list[EventSource]) -> None:
        """Have it subscribe to these, and to no others any more."""
        if sources != self._wanted:
            self._wanted = sources
            assert self._process.stdin is not None
            self._process.stdin.write(_encode(SubscribeTo(sources)) + b"\n")

    async def told(self) -> AsyncIterator[InstanceReport]:
        """What it tells, until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield _read_told(line)

    async def ended(self) -> int:
        """Wait for its end, and return its exit code, negative for a signal."""
        return await self._process.wait()


@asynccontextmanager
async def started() -> AsyncIterator[Process]:
    """Leaving ends it. Raises OSError if it cannot be started."""
    # Its own directory comes first, whatever is called `proxy` in the working directory.
    path = os.pathsep.join(filter(None, (str(Path(proxy.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "proxy.fleet.kv_events.subscriber"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield Process(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
