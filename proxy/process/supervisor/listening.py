"""Opens the sockets from which all workers accept connections."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from contextlib import ExitStack
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from proxy import SERVER
from proxy.common import blocking_http
from proxy.process.shared import ListeningSockets
from proxy.settings import Settings, SettingsError, connectable_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping


_ADMIN_BACKLOG: Final = 128
_NO_SOCKETS: Final[Mapping[str, socket.socket]] = MappingProxyType({})


class PortInUse(OSError):
    """Another process listens at the address."""

    def __init__(self, text: str, host: str, port: int) -> None:
        super().__init__(text)
        self.host = host
        self.port = port


def open_listeners(settings: Settings, given: Mapping[str, socket.socket] = _NO_SOCKETS) -> ListeningSockets:
    """Return the listening sockets. `given`: open sockets by their names in Listeners.

    Raises OSError with one sentence for the operator, and SettingsError, also if a given socket has another address
    than in the settings.
    """
    admin = settings.admin
    with ExitStack() as stack:

        def open_if(name: str, host: str, port: int | None, backlog: int = _ADMIN_BACKLOG) -> socket.socket | None:
            if port is None:
                if name in given:
                    raise SettingsError(f"a socket for {name} was passed, but no port is configured for it")
                return None
            if name in given:
                # It stays open after an error, because the next attempt may need it.
                return _check_given_socket(name, given[name], host, port)
            return stack.enter_context(create_listener(host, port, backlog))

        clients = open_if("clients", settings.listen.host, settings.listen.port, settings.listen.backlog)
        assert clients is not None
        admins, probes = open_if("admin", admin.host, admin.port), open_if("probes", admin.host, admin.probe_port)
        callbacks = [stack.enter_context(listener) for listener in _callback_listeners(settings)]
        listeners = ListeningSockets(clients, admins, probes, callbacks)
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


def _resolve_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def _check_given_socket(name: str, listener: socket.socket, host: str, port: int) -> socket.socket:
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
        _, wanted = _resolve_address(host, port)
    except OSError:
        wanted = (host, port)
    if bound[0] != wanted[0] or port not in (0, bound[1]):
        where, given = f"{host}:{port}", ":".join(map(str, bound[:2]))
        raise SettingsError(f"{what} listens at {given}, but {where} is configured")
    return listener


def create_listener(host: str, port: int, backlog: int = _ADMIN_BACKLOG) -> socket.socket:
    """Return a listening socket. Raises OSError with one sentence for the operator.

    A name with several addresses gets its first IPv4 one, because people expect an answer at `localhost`. `::` listens
    on IPv4, too.
    """
    try:
        family, address = _resolve_address(host, port)
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=host == "::")
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        text = f"cannot listen on {where}: {str(reason).lower()}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(text, host, port) from error
        raise OSError(text) from error


# Listening sockets that systemd has opened for this process (sd_listen_fds(3), systemd.socket(5)).


_FIRST_PASSED_FD: Final = 3
CLIENT_SOCKET: Final = "clients"
SOCKET_NAMES: Final = (CLIENT_SOCKET, "admin", "probes")
"""Names of such sockets (FileDescriptorName=). A single socket needs no name."""


def take_systemd_sockets(environ: MutableMapping[str, str]) -> Mapping[str, socket.socket]:
    """Return the sockets by name, which may be none, and remove their variables from the environment.

    Raises SettingsError.
    """
    pid, count, called = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    names = called.split(":") if called else [""] * int(count)
    if len(names) == 1 and names[0] not in SOCKET_NAMES:
        names = [CLIENT_SOCKET]
    if len(names) != int(count) or len(set(names)) < len(names) or not set(names) <= set(SOCKET_NAMES):
        raise SettingsError(
            f"systemd passes sockets called {', '.join(map(repr, names))}: FileDescriptorName= has to be one of "
            f"{', '.join(SOCKET_NAMES)}, each at most once"
        )
    sockets = {}
    for fd, name in enumerate(names, _FIRST_PASSED_FD):
        os.set_inheritable(fd, False)
        sockets[name] = socket.socket(fileno=fd)
    return sockets


# Listening at ports that a predecessor still has: a gateway keeps its ports while it drains.


logger = logging.getLogger("proxy.supervisor.succession")

_PREDECESSOR_POLL_SECONDS: Final = 0.1
_PROBE_TIMEOUT_SECONDS: Final = 1.0
# Time from the end of a drain, or of a part of it, until the port is free.
_PORT_RELEASE_SECONDS: Final = 3.0


def listen_after_predecessor(
    settings: Settings,
    given: Mapping[str, socket.socket] = MappingProxyType({}),
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> ListeningSockets:
    """Listen like `open_listeners`, but wait for ports that are in use.

    The limit is the time of a drain, if a draining gateway has the ports. Another process has the time that a gateway
    needs to free its clients' port after a signal. Raises as `open_listeners`.
    """
    drain = settings.drain
    began = clock()
    seconds = drain.not_ready_seconds + _PORT_RELEASE_SECONDS
    is_told = is_drain = False
    while True:
        try:
            return open_listeners(settings, given)
        except PortInUse as error:
            if not is_told:
                is_told = True
                told = "listener: waiting for port %d, which is in use: %g s, or as long as a gateway drains there"
                logger.info(told, error.port, seconds)
            if clock() - began >= seconds:
                if is_drain or not _is_predecessor_draining(settings, error.host, error.port):
                    raise
                is_drain = True
                seconds += drain.streams_seconds
        sleep(_PREDECESSOR_POLL_SECONDS)


def _is_predecessor_draining(settings: Settings, host: str, port: int) -> bool:
    """Return whether the listening process is a gateway that is not ready, as during a drain.

    A port for callbacks has no such route, but answers with the gateway's name.
    """
    try:
        tls = blocking_http.local_tls(settings.has_tls(port))
        answer = blocking_http.get_blocking(connectable_host(host), port, "/readyz", _PROBE_TIMEOUT_SECONDS, tls=tls)
    except blocking_http.HttpRequestError:
        return False
    return answer.server == SERVER and answer.status != HTTPStatus.OK
