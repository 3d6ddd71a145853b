"""Who tries to reach a port of this host, whether anybody listens there or not.

Packets on the loopback interface, filtered in the kernel: nothing stands between the programs that are measured. Needs
CAP_NET_RAW, which root has.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_SO_ATTACH_FILTER = 26
_SYN, _ACK = 0x02, 0x10


class Sniffer:
    """Notes when a new connection to 127.0.0.1:`port` is asked for, or bytes are sent to it. `with` it."""

    def __init__(self, port: int) -> None:
        self.touches: list[float] = []
        """Seconds of the monotonic clock."""
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        except PermissionError:
            sys.exit("watching the loopback interface needs root, or CAP_NET_RAW")
        _attach(self._socket, port)
        self._socket.bind(("lo", _ETH_P_ALL))
        self._socket.settimeout(0.1)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                packet, address = self._socket.recvfrom(128)
            except TimeoutError:
                continue
            # On this interface every packet is seen twice, going and coming.
            if address[2] == _PACKET_OUTGOING and touches(packet):
                self.touches.append(time.monotonic())


def touches(packet: bytes) -> bool:
    """Whether an IPv4 TCP packet opens a connection or carries bytes; acknowledgements and ends do neither."""
    header_bytes = 4 * (packet[0] & 0x0F)
    (total_bytes,) = struct.unpack_from(">H", packet, 2)
    offset, flags = packet[header_bytes + 12], packet[header_bytes + 13]
    return flags & (_SYN | _ACK) == _SYN or total_bytes > header_bytes + 4 * (offset >> 4)


def _attach(sock: socket.socket, port: int) -> None:
    """Have the kernel drop everything but IPv4 TCP packets to a port. `man 7 socket`, linux/filter.h."""
    program = [
        (0x30, 0, 0, 9),  # the protocol
        (0x15, 0, 4, socket.IPPROTO_TCP),
        (0xB1, 0, 0, 0),  # over the IP header
        (0x48, 0, 0, 2),  # the destination port
        (0x15, 0, 1, port),
        (0x06, 0, 0, 0xFFFF),  # take
        (0x06, 0, 0, 0),  # drop
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
