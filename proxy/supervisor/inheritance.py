"""What all workers inherit from the process that starts them: listening sockets and shared memory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from proxy.balancer.bulletin import Bulletin
from proxy.balancer.misfits import Misfits
from proxy.balancer.roster import Roster
from proxy.balancer.scoreboard import Scoreboard
from proxy.balancer.suspect_memory import SuspectMemory
from proxy.callers import KeyUsage
from proxy.configuration import Configuration
from proxy.settings import SettingsError
from proxy.supervisor.watchdog import Heartbeats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from proxy.settings import Loaded, Settings

_ADMIN_BACKLOG: Final = 128


@dataclass(frozen=True, slots=True)
class Listeners:
    """Made before the first worker so that no port is bound twice. None: there is no such port."""

    clients: socket.socket
    admin: socket.socket | None = None
    probes: socket.socket | None = None
    callbacks: Sequence[socket.socket] = ()
    """Where engines call back, one for each worker: what they have to say is for one of them. A worker that takes the
    place of another has its port, too. Empty: there is nothing to call back for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's copies. May be called again."""
        for listener in (self.clients, self.admin, self.probes, *self.callbacks):
            if listener is not None:
                listener.close()


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers inherit and share."""

    configuration: Configuration
    listeners: Listeners
    scoreboard: Scoreboard
    roster: Roster
    key_usage: KeyUsage
    bulletin: Bulletin = field(default_factory=Bulletin)
    misfits: Misfits = field(default_factory=Misfits)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    suspects: SuspectMemory = field(default_factory=SuspectMemory)

    def erase(self, worker: int) -> None:
        """Forget what a worker that is dead had counted."""
        self.scoreboard.erase(worker)
        self.key_usage.erase(worker)


RunWorker = Callable[[Shared, int, int | None], int]
"""`worker.run`: serves until it is drained and returns the exit code. It is given the worker's number, and the reading
end of a pipe that closes when the supervisor is gone, None without a supervisor."""


class PortInUse(OSError):
    """Somebody else listens there."""

    def __init__(self, text: str, host: str, port: int) -> None:
        super().__init__(text)
        self.host = host
        self.port = port


def listen(settings: Settings) -> Listeners:
    """The listening sockets. Raises OSError whose text is one sentence for the operator, and SettingsError."""
    admin = settings.admin
    with ExitStack() as stack:

        def open_if(port: int | None) -> socket.socket | None:
            return None if port is None else stack.enter_context(create_listener(admin.host, port))

        clients = stack.enter_context(
            create_listener(settings.listen.host, settings.listen.port, settings.listen.backlog)
        )
        callbacks = [stack.enter_context(listener) for listener in _callback_listeners(settings)]
        listeners = Listeners(clients, open_if(admin.port), open_if(admin.probe_port), callbacks)
        stack.pop_all()  # all of them are there: from here on they are closed together
        return listeners


def _callback_listeners(settings: Settings) -> Iterator[socket.socket]:
    if settings.connector != "ascend_layerwise":
        return
    try:
        settings.callback_host  # noqa: B018 raises
    except ValueError as error:
        raise SettingsError(str(error)) from None
    host, first = settings.layerwise.host or settings.listen.host, settings.layerwise.port
    for worker in range(settings.workers):
        yield create_listener(host, first and first + worker, settings.listen.backlog)


def create_listener(host: str, port: int, backlog: int = _ADMIN_BACKLOG) -> socket.socket:
    """A listening socket. Raises OSError whose text is one sentence for the operator.

    A name with several addresses gets its first IPv4 one, because `localhost` is expected to answer there; `::` listens
    on IPv4, too.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=host == "::")
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        text = f"cannot listen on {where}: {str(reason).lower()}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(text, host, port) from error
        raise OSError(text) from error


def share(loaded: Loaded, load: Callable[[], Loaded], listeners: Listeners) -> Shared:
    """Made before the first worker is forked; with room to add as many instances again. Raises SettingsError."""
    settings = loaded.settings
    prefill = [(endpoint.host, endpoint.port, endpoint.bootstrap_port) for endpoint in settings.prefill]
    decode = [(endpoint.host, endpoint.port) for endpoint in settings.decode]
    encode = [(endpoint.host, endpoint.port) for endpoint in settings.encode]
    slots = max(1024, 2 * (len(prefill) + len(decode) + len(encode)))
    scoreboard = Scoreboard(workers=settings.workers, slots=slots)
    roster = Roster(prefill, decode, scoreboard, encode)
    return Shared(
        *(Configuration(loaded, load, roster), listeners, scoreboard, roster),
        KeyUsage(workers=settings.workers),
        heartbeats=Heartbeats(settings.workers),
    )
