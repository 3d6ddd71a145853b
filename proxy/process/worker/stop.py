"""Signals that stop a worker."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.process.takeover import Successor

_LOOK_SECONDS: Final = 1.0


class Stop:
    """The request to stop.

    The first signal asks the worker to drain; the second, or the end of the supervisor, to stop now. SIGUSR2 means a
    takeover: without a supervisor, this process starts the successor and drains when that accepts; with one, the signal
    says that the successor accepts. A request to drain before that stops the successor, too.
    """

    def __init__(self, alive_fd: int | None, start_successor: Callable[[], Successor | None]) -> None:
        """Keep the parts. `alive_fd`: see `run`. `start_successor` returns None if there can be no successor."""
        self.requested = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_code = 0
        self.has_successor = False
        """Whether this worker drains because another process accepts on the same sockets."""
        self.is_supervised = alive_fd is not None
        self._start_successor = start_successor
        self._successor: Successor | None = None
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR2, self._hand_over if self.is_supervised else self._begin_handing_over)
        if alive_fd is not None:
            loop.add_reader(alive_fd, self._on_supervisor_gone, alive_fd)

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set():
            self.now.set()
            self.exit_code = 128 + number
        self._stop_successor()
        self.requested.set()

    def _on_supervisor_gone(self, alive_fd: int) -> None:
        self._loop.remove_reader(alive_fd)
        self.requested.set()
        self.now.set()

    def _hand_over(self) -> None:
        if not self.requested.is_set():
            self.has_successor = True
            self.requested.set()

    def _begin_handing_over(self) -> None:
        if self._successor is None and not self.requested.is_set():
            self._successor = self._start_successor()
            self._await_successor()

    def _stop_successor(self) -> None:
        """Stop the successor, unless it has just taken over."""
        if self._successor is not None:
            self._look()
        if self._successor is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._successor.fileno())
            self._successor.stop()
            self._successor = None

    def _await_successor(self) -> None:
        if self._successor is not None:
            self._loop.add_reader(self._successor.fileno(), self._look)
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        assert self._successor is not None
        self._timer.cancel()
        self._loop.remove_reader(self._successor.fileno())
        has_taken_over = self._successor.look()
        if has_taken_over is None:
            self._await_successor()
            return
        self._successor = None
        if has_taken_over:
            self._hand_over()
