"""One gateway takes over from another: the old process starts the new one and passes its listening sockets on.

The kernel's queues of both are then the same, so that nobody is refused in between. The new one does not accept before
it is ready; then it says so, and the old one accepts no more and drains. Until then nothing has changed for anybody: a
new one that does not come up, or does not get ready, is told to end.

Both hold one end of a channel (a pair of sockets). Each worker of the new one says once that it accepts, by one byte
that is the number of workers; when the channel ends the other process has done its part, or is gone.
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
"""The descriptors that a new process inherits, as JSON: `channel`, `sockets` by name, `instances`."""
_READY_SECONDS: Final = 120.0
_MOST_WORKERS: Final = 255
_PRIVATE: Final = ("PROMETHEUS_MULTIPROC_DIR", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""What is said to one process and not to the next."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """What a new process has from the one that started it."""

    channel: socket.socket
    sockets: Mapping[str, socket.socket]
    """Listening sockets, by their names in Listeners."""
    instances: Any
    """What its roster had, see Roster; None: it could not be told."""

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Self | None:
        """None: nobody has started this process so. What says it is taken out of the environment."""
        told = environ.pop(_VARIABLE, None)
        if told is None:
            return None
        fds = orjson.loads(told)
        with open(fds["instances"], "rb") as file:
            file.seek(0)
            instances = orjson.loads(file.read())
        return cls(
            channel=_inherited(fds["channel"]),
            sockets={name: _inherited(fd) for name, fd in fds["sockets"].items()},
            instances=instances,
        )

    def tell_accepting(self, workers: int) -> None:
        """This worker accepts connections, one of so many."""
        with suppress(OSError):  # it has ended
            self.channel.send(bytes([min(workers, _MOST_WORKERS)]))

    async def gone(self) -> None:
        """Wait until it has nothing more to say: it drains, or has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.channel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.channel)


class Successor:
    """The process that is to take over, as the one that started it sees it. To be asked (`look`) when its descriptor is
    readable, and now and then, until that has said how it ends, or until `stop`.
    """

    def __init__(self, sockets: Mapping[str, socket.socket], instances: Any) -> None:
        """Start it, with these listening sockets and what the roster has. Raises OSError."""
        self._until = time.monotonic() + _READY_SECONDS
        self._accepting = 0
        self._channel, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.enter_context(theirs)
            stack.enter_context(self._channel)
            file = stack.enter_context(os.fdopen(os.memfd_create("instances"), "w+b"))
            file.write(orjson.dumps(instances))
            file.flush()
            passed = {name: sock.fileno() for name, sock in sockets.items()}
            told = {"channel": theirs.fileno(), "sockets": passed, "instances": file.fileno()}
            self.pid = _spawn(orjson.dumps(told).decode(), [theirs.fileno(), file.fileno(), *passed.values()])
            theirs.close()
            file.close()
            stack.pop_all()  # from here on it is closed by `look` and `stop`
        self._channel.setblocking(False)
        logger.info("process %d is started to take over", self.pid)

    def fileno(self) -> int:
        """For those who wait until something is heard."""
        return self._channel.fileno()

    def look(self) -> bool | None:
        """Whether it has taken over, so that this process may drain; None: that is to be seen. When it has not, it is
        ended, and one line says why.
        """
        try:
            heard = self._channel.recv(_MOST_WORKERS)
        except BlockingIOError:
            if time.monotonic() < self._until:
                return None
            self._give_up(f"is not ready after {_READY_SECONDS:g} s")
            return False
        except OSError:
            heard = b""
        if not heard:
            self._give_up("has ended")
            return False
        self._accepting += len(heard)
        if self._accepting < heard[-1]:
            return None
        logger.info("process %d has taken over", self.pid)
        self._channel.close()
        return True

    def stop(self) -> None:
        """End it, too: this process was told to stop, and `look` has not said yet what becomes of that one."""
        logger.info("process %d, which was to take over, is told to stop, too", self.pid)
        self._end()

    def _give_up(self, why: str) -> None:
        logger.error("process %d, which was to take over, %s: this one goes on", self.pid, why)
        self._end()

    def _end(self) -> None:
        with suppress(OSError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGTERM)
        self._channel.close()  # last: to the other process that means that we are gone, and that it has to serve


def command_line() -> list[str]:
    """The words by which this program was started, which start the one that is installed there now."""
    words = sys.orig_argv
    # The script names its own interpreter, which after an upgrade may be another one than ours.
    if len(words) > 1 and os.path.isfile(words[1]) and os.access(words[1], os.X_OK):
        return words[1:]
    return [sys.executable, *words[1:]]


def _spawn(told: str, fds: Sequence[int]) -> int:
    environ = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    environ[_VARIABLE] = told
    words = command_line()
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawnp(words[0], words, environ, setsigmask=(), setsigdef=(signal.SIGUSR2, signal.SIGHUP))
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def _inherited(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
