"""Finds out which user opened a connection from this host, as Linux reports it in /proc.

A reverse proxy on this host connects from loopback for any client, and need not add a header. It usually runs as
another user or in another container, and both can be seen: `/proc/net/tcp` has the user of each socket, and
`/proc/PID/fd` the sockets of each process in this container.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNKNOWN: Final = "the system does not report which user opened the connection"
_CHUNK_BYTES: Final = 1 << 18


class _SocketOwner(NamedTuple):
    """The process user that owns a socket."""

    uid: int
    inode: int


def find_owner_objection(peer_address: tuple[Any, ...], local_address: tuple[Any, ...]) -> str | None:
    """Return why another user may have opened a connection; None if the gateway's user did, in this container.

    It reads up to one line for each socket of the host, so call it in a thread.

    Args:
        peer_address: The address and port from which the connection comes.
        local_address: The gateway's own address and port of the connection.
    """
    try:
        owner = _find_socket_owner(peer_address, local_address)
        if owner is None or owner.uid == _unmapped_uid():
            return _UNKNOWN
        if owner.uid != os.geteuid():
            return f"a program of another user (uid {owner.uid}) opened the connection, as a reverse proxy does"
        if not _is_of_this_container(owner):
            return "a program of another container opened the connection, as a reverse proxy does"
    except (OSError, ValueError):  # no Linux, or a sandbox without /proc
        return _UNKNOWN
    return None


def _find_socket_owner(peer_address: tuple[Any, ...], local_address: tuple[Any, ...]) -> _SocketOwner | None:
    """Return the owner of the socket at the other end, or None if it is not visible."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):  # a host without IPv6 has no such table
            addresses = b" %s %s " % (
                _as_in_kernel_table(peer_address, family),
                _as_in_kernel_table(local_address, family),
            )
            if (row := _rest_of_line(Path("/proc/net", table), addresses)) is not None:
                # After the two addresses: state, queues, timer, retransmissions, uid, timeout, inode.
                fields = row.split()
                owner = _SocketOwner(uid=int(fields[4]), inode=int(fields[6]))
                return owner if owner.inode else None  # a socket that was closed counts as root's
    return None


def _as_in_kernel_table(address: tuple[Any, ...], family: socket.AddressFamily) -> bytes:
    """Write an address and port as the kernel does: words of 32 bits in the order of this processor."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if family is socket.AF_INET6 and ip.version == 4:
        ip = ipaddress.IPv6Address(f"::ffff:{ip}")
    words = struct.unpack(f"={len(ip.packed) // 4}I", ip.packed)
    return ("".join(f"{word:08X}" for word in words) + f":{address[1]:04X}").encode()


def _rest_of_line(kernel_table: Path, address_bytes: bytes) -> bytes | None:
    """Return the rest of the line that contains `address_bytes`; None if no line does.

    The table is not split into lines, because it may have a hundred thousand.
    """
    with open(kernel_table, "rb", buffering=0) as file:
        kept = b""
        while chunk := file.read(_CHUNK_BYTES):
            kept += chunk
            place = kept.find(address_bytes)
            if place >= 0 and (end := kept.find(b"\n", place)) >= 0:
                return kept[place + len(address_bytes) : end]
            kept = kept[kept.rfind(b"\n") + 1 :]
    return None


def _unmapped_uid() -> int:
    """Return the uid that the kernel reports for users who do not exist in this user namespace."""
    return int(Path("/proc/sys/kernel/overflowuid").read_bytes())


def _is_of_this_container(owner: _SocketOwner) -> bool:
    """Return whether a process of this container has the socket.

    Containers of one pod share loopback and often the user, but not the processes. Some processes hide their files from
    their own user, such as sshd behind which an operator works. Such a process may have the socket. Root sees all.
    """
    here = os.readlink("/proc/self/ns/pid")
    is_one_hidden = False
    for pid in _process_ids():
        with suppress(FileNotFoundError, ProcessLookupError):
            if _effective_uid(pid) == owner.uid:
                try:
                    if os.readlink(f"/proc/{pid}/ns/pid") == here and _has_socket(pid, owner.inode):
                        return True
                except PermissionError:
                    is_one_hidden = True
    return is_one_hidden and owner.uid != 0


def _process_ids() -> Iterator[int]:
    """Yield the IDs of all processes, the newest first. This process is last, because it has many files."""
    own = os.getpid()
    yield from sorted(
        (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own), reverse=True
    )
    yield own


def _effective_uid(pid: int) -> int:
    _, _, rest = Path(f"/proc/{pid}/status").read_bytes().partition(b"\nUid:")
    return int(rest.split(maxsplit=2)[1])


def _has_socket(pid: int, inode: int) -> bool:
    name = f"socket:[{inode}]"
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") == name:
                return True
    return False
