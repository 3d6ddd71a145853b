"""Listening sockets that systemd has opened for this process (sd_listen_fds(3), systemd.socket(5))."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

_FIRST_FD: Final = 3
CLIENTS: Final = "clients"
NAMES: Final = (CLIENTS, "admin", "probes")
"""Names of such sockets (FileDescriptorName=). A single socket needs no name."""


def activated(environ: MutableMapping[str, str]) -> Mapping[str, socket.socket]:
    """Return the sockets by name, which may be none, and remove their variables from the environment.

    Raises SettingsError.
    """
    pid, count, called = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    names = called.split(":") if called else [""] * int(count)
    if len(names) == 1 and names[0] not in NAMES:
        names = [CLIENTS]
    if len(names) != int(count) or len(set(names)) < len(names) or not set(names) <= set(NAMES):
        raise SettingsError(
            f"systemd passes sockets called {', '.join(map(repr, names))}: FileDescriptorName= has to be one of "
            f"{', '.join(NAMES)}, each at most once"
        )
    sockets = {}
    for fd, name in enumerate(names, _FIRST_FD):
        os.set_inheritable(fd, False)
        sockets[name] = socket.socket(fileno=fd)
    return sockets
