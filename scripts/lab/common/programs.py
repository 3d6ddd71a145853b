"""Programs that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lab.common.processes import clean_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

_END_SECONDS = 5.0
_LAST_LINES = 20


class Program:
    """`python -m proxy …`, as often as it is started. Its output goes to a file that others write, too. `under` are the
    words of a program that starts it.
    """

    def __init__(self, words: Sequence[str], output: BinaryIO | int, under: Sequence[str] = ()) -> None:
        self._words = words
        self._output = output
        self.under = under
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """It was started, and has ended since."""
        return self._process is not None and self._process.returncode is not None

    def last_words(self) -> str:
        """The end of the file that its output goes to, which others may have written."""
        if isinstance(self._output, int):
            return ""
        return "\n".join(Path(self._output.name).read_text(errors="replace").splitlines()[-_LAST_LINES:])

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(*self.under, sys.executable, "-m", "proxy", *self._words),
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
