"""Kill an engine under load, and measure how long requests still go to it, for one program after the other.

A packet sniffer records connection attempts to the engine, so no component is inserted between the programs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import uvloop

from lab.common import peers
from lab.common.fleet import Fleet
from lab.common.load import Connections, Load, post
from lab.common.output import aligned
from lab.common.processes import Program, called_from, unwind_on_signals

_REQUESTS_PER_SECOND = 50
_TOKENS = 20
_PATIENCE_SECONDS = 10.0
_BODY = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Write down what the river said to the bridge."}],
    "max_tokens": _TOKENS,
    "stream": True,
}
_WARM_UP_SECONDS = 2.0
_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_SO_ATTACH_FILTER = 26
_SYN, _ACK = 0x02, 0x10

_NOUNS = {"prefill": "prefiller", "decode": "decoder"}
_NOTES = f"""
2 prefillers and 2 decoders, {_REQUESTS_PER_SECOND} streamed requests a second; then `kill -9` of one of them.
Last touch: the last time that a connection to it was opened, or bytes were sent to it. pdproxy runs without periodic
health checks, so all touches are requests, and it detects the failure by them alone.
Errors: statuses other than 200, streams with an error event or without [DONE], broken connections."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kill. `last_touch_seconds` counts from the kill. None without a touch."""

    last_touch_seconds: float | None
    touches: int
    errors: dict[str, int]
    request_count: int


def main() -> None:
    unwind_on_signals()
    options = _options()
    compared = [_without_health_checks(peers.ours())]
    if options.reference is not None:
        compared.append(peers.reference(called_from() / options.reference))
    rows: list[tuple[str, ...]] = [("program", "killed", "last touch, s", "touches", "errors", "of requests")]
    for role in _NOUNS:
        for peer in compared:
            measured = []
            for number in range(1, options.rounds + 1):
                measured.append(_measure(peer, role, options.seconds))
                print(f"round {number}, {peer.name}, {_NOUNS[role]}: {measured[-1]}", file=sys.stderr, flush=True)
            rows.append((peer.name, _NOUNS[role], *_row(measured, options.seconds)))
    print(f"\nMedians of {options.rounds}.\n")
    print(aligned(rows))
    print(_NOTES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/kill-timing", description=__doc__)
    parser.add_argument(
        "--reference", type=Path, metavar="PATH", help="vllm-ascend's load_balance_proxy_server_example.py"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="time to watch after the kill (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="kills per median (default: 3)")
    options = parser.parse_args()
    if not 1 <= options.seconds <= 60 or not 1 <= options.rounds <= 20:
        parser.error("--seconds must be 1 to 60 and --rounds 1 to 20")
    return options


def _without_health_checks(peer: peers.Peer) -> peers.Peer:
    """Disable health checks except the first, so that all touches are requests."""
    never = [f"PROXY_HEALTH__{name}=3600" for name in ("INTERVAL_SECONDS", "CHANGING_INTERVAL_SECONDS")]
    return peers.Peer(peer.name, ("env", *never, *peer.words), peer.ready_path)


def _measure(peer: peers.Peer, role: str, seconds: float) -> Measurement:
    """Start new engines and the program, and kill the first engine of a role."""
    with Fleet() as fleet:
        fleet.mock_engines(2, 2, "--decode-step-ms", "10", "--prefill-ms-per-1k-tokens", "100")
        program = fleet.keep(fleet.program(peer))
        return uvloop.run(_kill(program.port, fleet.engines[role][0], seconds))


async def _kill(port: int, engine: Program, seconds: float) -> Measurement:
    connections = Connections(port)
    request = post(port, _BODY)

    async def ask(_: int) -> str:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            answer = await connections.ask(request)
        return answer.problem() or ("" if answer.pieces > _TOKENS // 4 else "too short")

    load = Load(ask)
    with Sniffer(engine.port) as sniffer:
        async with load.at_rate(_REQUESTS_PER_SECOND):
            await asyncio.sleep(_WARM_UP_SECONDS)
            if load.problems:
                sys.exit(f"errors before the kill: {load.failures()}")
            engine.send(signal.SIGKILL)
            killed = time.monotonic()
            count_before = load.request_count
            await asyncio.sleep(seconds)
            request_count = load.request_count - count_before
            touches = [at - killed for at in sniffer.touches if at > killed]
    return Measurement(max(touches, default=None), len(touches), dict(load.failures(killed)), request_count)


def _row(measured: list[Measurement], seconds: float) -> tuple[str, ...]:
    # A touch in the last half second means that touches have not stopped.
    last = median(m.last_touch_seconds or 0.0 for m in measured)
    touched = "until the end" if last > seconds - 0.5 else f"{last:.3f}"
    errors = f"{median(sum(m.errors.values()) for m in measured):.0f}"
    return (
        touched,
        f"{median(m.touches for m in measured):.0f}",
        errors,
        f"{median(m.request_count for m in measured):.0f}",
    )


# Packets on the loopback interface, filtered in the kernel. Needs CAP_NET_RAW, which root has.


class Sniffer:
    """Records connection attempts and bytes to 127.0.0.1:`port`. Use it with `with`."""

    def __init__(self, port: int) -> None:
        self.touches: list[float] = []
        """Times of the monotonic clock."""
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

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                packet, address = self._socket.recvfrom(128)
            except TimeoutError:
                continue
            # The loopback interface shows each packet twice, outgoing and incoming.
            if address[2] == _PACKET_OUTGOING and touches(packet):
                self.touches.append(time.monotonic())


def touches(packet: bytes) -> bool:
    """Return whether an IPv4 TCP packet opens a connection or carries bytes."""
    header_bytes = 4 * (packet[0] & 0x0F)
    (total_bytes,) = struct.unpack_from(">H", packet, 2)
    offset, flags = packet[header_bytes + 12], packet[header_bytes + 13]
    return flags & (_SYN | _ACK) == _SYN or total_bytes > header_bytes + 4 * (offset >> 4)


def _attach(sock: socket.socket, port: int) -> None:
    """Filter packets in the kernel: IPv4 TCP packets to a port. See `man 7 socket` and linux/filter.h."""
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


if __name__ == "__main__":
    main()
