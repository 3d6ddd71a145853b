"""Packets that count as an attempt to reach a dead engine."""

from __future__ import annotations

import struct

import pytest

from lab.kill_timing import touches

SYN, ACK, FIN, RST, PSH = 0x02, 0x10, 0x01, 0x04, 0x08


def packet(flags: int, *, data: bytes = b"", ip_options: int = 0, tcp_options: int = 0) -> bytes:
    """Return an IPv4 packet with TCP, as the kernel delivers it. Checksums are ignored."""
    header_bytes, tcp_bytes = 20 + ip_options, 20 + tcp_options
    total = header_bytes + tcp_bytes + len(data)
    ip = struct.pack(">BBHHHBBH4s4s", 0x40 | header_bytes // 4, 0, total, 0, 0, 64, 6, 0, b"\x7f\0\0\1", b"\x7f\0\0\1")
    tcp = struct.pack(">HHIIBBHHH", 40000, 7100, 0, 0, tcp_bytes // 4 << 4, flags, 0, 0, 0)
    return ip + bytes(ip_options) + tcp + bytes(tcp_options) + data


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (packet(SYN, tcp_options=20), True),
        (packet(SYN | ACK, tcp_options=20), False),
        (packet(ACK), False),
        (packet(ACK, tcp_options=12), False),
        (packet(ACK | PSH, data=b"GET"), True),
        (packet(ACK | PSH, data=b"G", tcp_options=12, ip_options=4), True),
        (packet(ACK | FIN), False),
        (packet(RST), False),
        (packet(SYN, ip_options=8), True),
    ],
)
def test_only_connection_attempts_and_data_are_touches(one: bytes, expected: bool) -> None:
    assert touches(one) is expected
