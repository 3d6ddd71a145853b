"""Opening the sockets that all workers accept from."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from proxy.settings import SettingsError
from proxy.shared import Listeners

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.settings import Settings

_ADMIN_BACKLOG: Final = 128


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
    if not settings.connector_traits.needs_callback_port:
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
