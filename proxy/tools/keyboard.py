"""Single keys from a terminal, for tools that refresh their output."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


class Keyboard:
    """Reads keys without the return key while it is entered. Without a terminal it only waits.

    Ctrl-C raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self._terminal: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._before = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """Wait for a key, and return its character. Empty: none was pressed, or a special key such as an arrow."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._terminal, 64).decode(errors="ignore")
        if not pressed:  # the terminal is gone
            self._terminal = None
        return pressed if len(pressed) == 1 else ""
