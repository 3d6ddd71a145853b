"""Takeover by another gateway: the old process starts the new one and passes its listening sockets on.

Both processes share the kernel's queues, so no connection is refused. The new process accepts when it is ready, and
reports that; then the old one stops accepting and drains. A new process that does not start, or does not become ready,
is stopped, and the old one continues.

Both hold one end of a channel, which is a pair of sockets. Each worker of the new process reports once that it accepts,
by one byte with the number of workers. The end of the channel means that the other process has done its part, or has
died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

logger = logging.getLogger("proxy.takeover")

_VARIABLE: Final = "PDPROXY_PREDECESSOR"
"""The descriptors that the new process inherits, as JSON: `channel`, `sockets` by name, `instances`."""
_READY_SECONDS: Final = 120.0
_MOST_WORKERS: Final = 255
_PRIVATE: Final = ("PROMETHEUS_MULTIPROC_DIR", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Environment variables that are meant for one process and not for its successor."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """Things that a new process gets from the process that started it."""

    message_channel: socket.socket
    sockets_by_name: Mapping[str, socket.socket]
    """Listening sockets, by their names in Listeners."""
    roster_state: Any
    """Contents of its roster, see Roster; None if they could not be passed on."""

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Return them, or None if no gateway has started this process. Removes the variable from the environment."""
        told = environ.pop(_VARIABLE, None)
        if told is None:
            return None
        fds = orjson.loads(told)
        with open(fds["instances"], "rb") as file:
            file.seek(0)
            instances = orjson.loads(file.read())
        return cls(
            message_channel=_inherited_socket(fds["channel"]),
            sockets_by_name={name: _inherited_socket(fd) for name, fd in fds["sockets"].items()},
            roster_state=instances,
        )

    def report_accepting(self, workers: int) -> None:
        """Report that this worker accepts connections. `workers`: number of workers."""
        with suppress(OSError):  # the old process has ended
            self.message_channel.send(bytes([min(workers, _MOST_WORKERS)]))

    async def wait_until_gone(self) -> None:
        """Wait until the old process drains or has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.message_channel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.message_channel)


class Successor:
    """The new process, as seen by the process that started it.

    The owner calls `check_takeover` when the descriptor is readable, and at intervals, until it returns a result, or
    calls `stop_process`.
    """

    def __init__(self, sockets: Mapping[str, socket.socket], instances: Any) -> None:
        """Start it with these listening sockets and the contents of the roster. Raises OSError."""
        self._deadline = time.monotonic() + _READY_SECONDS
        self._accepting_workers = 0
        self._channel, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.enter_context(theirs)
            stack.enter_context(self._channel)
            file = stack.enter_context(os.fdopen(os.memfd_create("instances"), "w+b"))
            file.write(orjson.dumps(instances))
            file.flush()
            passed = {name: sock.fileno() for name, sock in sockets.items()}
            told = {"channel": theirs.fileno(), "sockets": passed, "instances": file.fileno()}
            self.pid = _spawn_successor(orjson.dumps(told).decode(), [theirs.fileno(), file.fileno(), *passed.values()])
            theirs.close()
            file.close()
            stack.pop_all()  # from here on, `check_takeover` and `stop_process` close it
        self._channel.setblocking(False)
        logger.info("takeover: successor is started: process %d", self.pid)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the successor is ready."""
        return self._channel.fileno()

    def check_takeover(self) -> bool | None:
        """Return whether it has taken over, so that this process may drain; None if that is not decided.

        If it has not, it is stopped, and one line has the reason.
        """
        try:
            heard = self._channel.recv(_MOST_WORKERS)
        except BlockingIOError:
            if time.monotonic() < self._deadline:
                return None
            self._give_up_takeover(f"is not ready after {_READY_SECONDS:g} s")
            return False
        except OSError:
            heard = b""
        if not heard:
            self._give_up_takeover("has ended")
            return False
        self._accepting_workers += len(heard)
        if self._accepting_workers < heard[-1]:
            return None
        logger.info("takeover: complete: process %d serves", self.pid)
        self._channel.close()
        return True

    def stop_process(self) -> None:
        """Stop it, because this process must stop before `check_takeover` has a result."""
        logger.info("takeover: successor stopped, because this process stops: process %d", self.pid)
        self._end_process()

    def _give_up_takeover(self, why: str) -> None:
        logger.error("takeover: failed, this process goes on serving: successor process %d %s", self.pid, why)
        self._end_process()

    def _end_process(self) -> None:
        with suppress(OSError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGTERM)
        self._channel.close()  # last, because it tells the other process that this one is gone and that it must serve


def command_line() -> list[str]:
    """Return the command line of this program, which starts the version that is installed now."""
    words = sys.orig_argv
    # the script names its interpreter, which may be another one after an upgrade
    if len(words) > 1 and os.path.isfile(words[1]) and os.access(words[1], os.X_OK):
        return words[1:]
    return [sys.executable, *words[1:]]


def _spawn_successor(handover_message: str, fds: Sequence[int]) -> int:
    environ = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    environ[_VARIABLE] = handover_message
    words = command_line()
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawnp(words[0], words, environ, setsigmask=(), setsigdef=(signal.SIGUSR2, signal.SIGHUP))
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def _inherited_socket(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
