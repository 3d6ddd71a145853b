"""What slow clients do to others: nothing, and they are cut off. Everything listens on 127.0.0.1 and is stopped.

Each attack lasts longer than the gateway's patience. Meanwhile somebody asks for short answers: all of them must come.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field

import uvloop

from lab.common.fleet import Fleet, Gateway
from lab.common.load import CHAT, Load, ask, post
from lab.common.output import aligned
from lab.common.proc import open_fds
from lab.common.processes import unwind_on_signals

_CONNECTIONS = 200
_CONNECTIONS_PER_SECOND = 100
_STALLED_STREAMS = 10
_ATTACK_SECONDS = 15
_PATIENCE = {
    "PROXY_LISTEN__HEADER_SECONDS": "3",
    "PROXY_LISTEN__BODY_SECONDS": "4",
    "PROXY_LISTEN__KEEPALIVE_SECONDS": "4",
    "PROXY_LISTEN__WRITE_TIMEOUT_SECONDS": "3",
}
# Connections come for two seconds, and then it is patient for four.
_RID_WITHIN_SECONDS = 10.0
_CLEAN_PER_SECOND = 20.0
_LOOK_SECONDS = 0.05
_CLEAN_PATIENCE_SECONDS = 10.0
# Connections of those who are not slow, and to the engines.
_OTHERS = 8
# Two cores run the attackers, the engines and the gateway.
_CLEAN_MUST_TAKE_SECONDS = 2.0
_CLEAN = {"model": "sim", "messages": [{"role": "user", "content": "Are you well?"}], "max_tokens": 4}
# Tens of megabytes, so that neither the kernel's buffers nor the gateway's can hold it.
_LARGE = {"model": "sim", "prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": 5}
_CUT = "pdproxy_rejected_total", "pdproxy_streams_broken_total"


@dataclass(slots=True)
class Sockets:
    """What the gateway holds open, as the kernel says, from the beginning of an attack on."""

    pid: int
    held: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        self.held.append((time.monotonic(), open_fds(self.pid)))

    @property
    def most(self) -> int:
        """More than at first."""
        return max(fds for _, fds in self.held) - self.held[0][1]

    @property
    def free_after_seconds(self) -> float | None:
        """When it was rid of the attackers; None if it never was. Others come and go meanwhile."""
        began, at_first = self.held[0]
        crowded = [at for at, fds in self.held if fds > at_first + _OTHERS]
        return None if not crowded or crowded[-1] == self.held[-1][0] else crowded[-1] - began


@dataclass(frozen=True, slots=True)
class Attack:
    """One way of being slow, on one path."""

    name: str
    path: str
    run: Callable[[Gateway, str], Coroutine[None, None, None]]


def _slowhttptest(*flags: str) -> Callable[[Gateway, str], Coroutine[None, None, None]]:
    async def run(gateway: Gateway, path: str) -> None:
        length = ("-c", str(_CONNECTIONS), "-r", str(_CONNECTIONS_PER_SECOND), "-l", str(_ATTACK_SECONDS))
        process = await asyncio.create_subprocess_exec(
            *("slowhttptest", *flags, *length, "-u", gateway.url + path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if b"Exit status" not in output:
            sys.exit(f"slowhttptest failed:\n{output.decode(errors='replace')}")

    return run


async def _take_nothing(gateway: Gateway, path: str) -> None:
    """Ask for long streams and read none of them."""
    with ExitStack() as stack:
        for _ in range(_STALLED_STREAMS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((gateway.host, gateway.port))
            client.sendall(post(gateway.port, _LARGE, path))
        await asyncio.sleep(_ATTACK_SECONDS)


_ATTACKS = (
    # A header, or a piece of body, every second.
    Attack("slow headers", "/livez", _slowhttptest("-H", "-i", "1")),
    Attack("slow body", CHAT, _slowhttptest("-B", "-i", "1", "-s", "8192")),
    # The largest answer to a GET there is, 32 bytes a second.
    Attack("slow reading", "/metrics", _slowhttptest("-X", "-w", "10", "-y", "20", "-n", "1", "-z", "32")),
    Attack("streams nobody reads", "/v1/completions", _take_nothing),
)


async def _suffer(attack: Attack, gateway: Gateway) -> tuple[str, ...]:
    """One attack; a row of the table."""
    seconds: list[float] = []

    async def clean(_: int) -> str:
        """One request of somebody who is not slow, on a connection of its own."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_CLEAN_PATIENCE_SECONDS):
                answer = await ask(gateway.port, post(gateway.port, _CLEAN))
        finally:
            seconds.append(time.monotonic() - began)
        return "" if answer.status == 200 and answer.is_whole else f"status {answer.status}"

    load, sockets = Load(clean), Sockets(gateway.pid)
    before = await asyncio.to_thread(_counted, gateway)
    sockets.look()
    attacking = asyncio.create_task(attack.run(gateway, attack.path))
    async with load.at_rate(_CLEAN_PER_SECOND):
        while not attacking.done():
            await asyncio.sleep(_LOOK_SECONDS)
            sockets.look()
    await attacking
    after = await asyncio.to_thread(_counted, gateway)
    free = sockets.free_after_seconds
    is_well = not load.problems and max(seconds) < _CLEAN_MUST_TAKE_SECONDS
    return (
        attack.name,
        str(sockets.most),
        "never" if free is None else f"{free:.1f}",
        ", ".join(f"{name} {after[name] - before[name]:.0f}" for name in after if after[name] != before[name]) or "-",
        str(load.request_count),
        " ".join(map(str, (len(load.problems), *sorted(load.failures())))),
        f"{max(seconds):.2f}",
        "ok" if is_well and free is not None and free < _RID_WITHIN_SECONDS else "NOT OK",
    )


def _counted(gateway: Gateway) -> dict[str, float]:
    """What the gateway says of those it refused or cut."""
    series = [line.rsplit(" ", 1) for line in gateway.metrics().splitlines() if line.startswith(_CUT)]
    return {" ".join(re.findall(r'"([^"]*)"', name)): float(value) for name, value in series}


async def _attack_all(gateway: Gateway) -> bool:
    heads = ("attack", "connections", "rid of them after, s", "counted as", "others asked", "failed", "slowest, s", "")
    rows: list[tuple[str, ...]] = [heads]
    for attack in _ATTACKS:
        print(f"{attack.name} …", file=sys.stderr, flush=True)
        rows.append(await _suffer(attack, gateway))
    print(f"\n{aligned(rows)}")
    return all(row[-1] == "ok" for row in rows[1:])


def main() -> None:
    """Everything, in turn."""
    unwind_on_signals()
    with Fleet() as fleet:
        fleet.mock_engines(1, 1)
        is_well = uvloop.run(_attack_all(fleet.keep(fleet.gateway(environment=_PATIENCE))))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
