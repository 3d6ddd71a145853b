"""Slow clients: they are disconnected, and do not affect others. Everything runs on 127.0.0.1.

Each attack lasts longer than the gateway's timeouts. Meanwhile all short requests of other clients must succeed.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import uvloop

from lab.common.fleet import Fleet, Gateway
from lab.common.load import CHAT, Load, ask, post, stalled_clients
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
# Connections arrive for 2 s, and the longest timeout is 4 s.
_MAX_DISCONNECT_SECONDS = 10.0
_CLEAN_PER_SECOND = 20.0
_LOOK_SECONDS = 0.05
_CLEAN_PATIENCE_SECONDS = 10.0
# Connections of other clients and to the engines.
_OTHERS = 8
# Two cores run the attackers, the engines and the gateway.
_MAX_CLEAN_SECONDS = 2.0
_CLEAN = {"model": "sim", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
# The answer has tens of megabytes, more than all buffers of the kernel and the gateway.
_LARGE = {"model": "sim", "prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": 5}
_CUT = "pdproxy_rejected_total", "pdproxy_streams_broken_total"


@dataclass(slots=True)
class Sockets:
    """Open file descriptors of the gateway since the beginning of an attack."""

    pid: int
    held: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        self.held.append((time.monotonic(), open_fds(self.pid)))

    @property
    def max_growth(self) -> int:
        """Maximum growth."""
        return max(fds for _, fds in self.held) - self.held[0][1]

    @property
    def free_after_seconds(self) -> float | None:
        """Time until the attackers were disconnected, or None. Other clients' connections are tolerated."""
        began, at_first = self.held[0]
        crowded = [at for at, fds in self.held if fds > at_first + _OTHERS]
        return None if not crowded or crowded[-1] == self.held[-1][0] else crowded[-1] - began


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack on one path."""

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
    """Request long streams and read nothing."""
    with stalled_clients(gateway.port, post(gateway.port, _LARGE, path), _STALLED_STREAMS):
        await asyncio.sleep(_ATTACK_SECONDS)


_ATTACKS = (
    # A header or a piece of the body per second.
    Attack("slow headers", "/livez", _slowhttptest("-H", "-i", "1")),
    Attack("slow body", CHAT, _slowhttptest("-B", "-i", "1", "-s", "8192")),
    # The largest answer to a GET request, read at 32 bytes per second.
    Attack("slow reading", "/metrics", _slowhttptest("-X", "-w", "10", "-y", "20", "-n", "1", "-z", "32")),
    Attack("streams that are not read", "/v1/completions", _take_nothing),
)


async def _measure(attack: Attack, gateway: Gateway) -> tuple[str, ...]:
    """Run one attack. Return its row of the table."""
    seconds: list[float] = []

    async def clean(_: int) -> str:
        """Send one request of a normal client on a new connection."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_CLEAN_PATIENCE_SECONDS):
                answer = await ask(gateway.port, post(gateway.port, _CLEAN))
        finally:
            seconds.append(time.monotonic() - began)
        return "" if answer.status == 200 and answer.is_whole else f"status {answer.status}"

    load, sockets = Load(clean), Sockets(gateway.pid)
    before = await asyncio.to_thread(_cut_counts, gateway)
    sockets.look()
    attacking = asyncio.create_task(attack.run(gateway, attack.path))
    async with load.at_rate(_CLEAN_PER_SECOND):
        while not attacking.done():
            await asyncio.sleep(_LOOK_SECONDS)
            sockets.look()
    await attacking
    after = await asyncio.to_thread(_cut_counts, gateway)
    free = sockets.free_after_seconds
    is_success = not load.problems and max(seconds) < _MAX_CLEAN_SECONDS
    return (
        attack.name,
        str(sockets.max_growth),
        "never" if free is None else f"{free:.1f}",
        ", ".join(f"{name} {after[name] - before[name]:.0f}" for name in after if after[name] != before[name]) or "-",
        str(load.request_count),
        " ".join(map(str, (len(load.problems), *sorted(load.failures())))),
        f"{max(seconds):.2f}",
        "ok" if is_success and free is not None and free < _MAX_DISCONNECT_SECONDS else "NOT OK",
    )


def _cut_counts(gateway: Gateway) -> dict[str, float]:
    """Return the gateway's counts of rejected and cut requests."""
    series = [line.rsplit(" ", 1) for line in gateway.metrics().splitlines() if line.startswith(_CUT)]
    return {" ".join(re.findall(r'"([^"]*)"', name)): float(value) for name, value in series}


async def _attack_all(gateway: Gateway) -> bool:
    heads = (
        "attack",
        "connections",
        "disconnected after, s",
        "counted as",
        "other requests",
        "failed",
        "slowest, s",
        "",
    )
    rows: list[tuple[str, ...]] = [heads]
    for attack in _ATTACKS:
        print(f"{attack.name} …", file=sys.stderr, flush=True)
        rows.append(await _measure(attack, gateway))
    print(f"\n{aligned(rows)}")
    return all(row[-1] == "ok" for row in rows[1:])


def main() -> None:
    unwind_on_signals()
    with Fleet() as fleet:
        fleet.mock_engines(1, 1)
        is_success = uvloop.run(_attack_all(fleet.keep(fleet.gateway(environment=_PATIENCE))))
    sys.exit(not is_success)


if __name__ == "__main__":
    main()
