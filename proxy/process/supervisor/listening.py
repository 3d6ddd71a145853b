"""Opens the sockets from which all workers accept connections."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from proxy.process.shared import Listeners
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.settings import Settings

_ADMIN_BACKLOG: Final = 128
_NONE: Final[Mapping[str, socket.socket]] = MappingProxyType({})


class PortInUse(OSError):
    """Another process listens at this address."""

    def __init__(self, text: str, host: str, port: int) -> None:
        super().__init__(text)
        self.host = host
        self.port = port


def listen(settings: Settings, given: Mapping[str, socket.socket] = _NONE) -> Listeners:
    """Return the listening sockets. `given`: open sockets by their names in Listeners.

    Raises OSError with one sentence for the operator, and SettingsError, also if a given socket has another address
    than in the settings.
    """
    admin = settings.admin
    with ExitStack() as stack:

        def open_if(name: str, host: str, port: int | None, backlog: int = _ADMIN_BACKLOG) -> socket.socket | None:
            if port is None:
                if name in given:
                    raise SettingsError(f"this process was given a socket for {name}, for which there is no port")
                return None
            if name in given:
                return _checked(name, given[name], host, port)  # not closed here, because the next attempt may need it
            return stack.enter_context(create_listener(host, port, backlog))

        clients = open_if("clients", settings.listen.host, settings.listen.port, settings.listen.backlog)
        assert clients is not None
        admins, probes = open_if("admin", admin.host, admin.port), open_if("probes", admin.host, admin.probe_port)
        callbacks = [stack.enter_context(listener) for listener in _callback_listeners(settings)]
        listeners = Listeners(clients, admins, probes, callbacks)
        stack.pop_all()  # from here on all are closed together
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


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def _checked(name: str, listener: socket.socket, host: str, port: int) -> socket.socket:
    """Return a given socket if its address is that of the settings, which access to administration depends on.

    Raises SettingsError.
    """
    what = f"the socket for {name} that this process was given"
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type is not socket.SOCK_STREAM:
        raise SettingsError(f"{what} is not a TCP socket: ListenStream= of a systemd socket must name a port")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise SettingsError(f"{what} does not listen; of a systemd socket, Accept= has to be no")
    bound = listener.getsockname()
    try:
        _, wanted = _address(host, port)
    except OSError:
        wanted = (host, port)
    if bound[0] != wanted[0] or port not in (0, bound[1]):
        where, given = f"{host}:{port}", ":".join(map(str, bound[:2]))
        raise SettingsError(f"{what} is at {given}, and not at {where}")
    return listener


def create_listener(host: str, port: int, backlog: int = _ADMIN_BACKLOG) -> socket.socket:
    """Return a listening socket. Raises OSError with one sentence for the operator.

    A name with several addresses gets its first IPv4 one, because people expect an answer at `localhost`. `::` listens
    on IPv4, too.
    """
    try:
        family, address = _address(host, port)
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=host == "::")
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        text = f"cannot listen on {where}: {str(reason).lower()}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(text, host, port) from error
        raise OSError(text) from error
