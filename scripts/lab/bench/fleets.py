"""CPU time of a request by the number of engines, as a multiple of the time with the smallest fleet.

The gateways run on one core, and cheap engines and clients on another. Each round sends the same requests to all
gateways in turn, and compares figures of the same round. Before each measurement, further requests open connections to
the engines: those of the last round are closed by then, but stay open under steady traffic.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import uvloop

from lab.bench.load import problem
from lab.bench.scenarios import SHORT_STREAM, named
from lab.common.fleet import Fleet, Gateway
from lab.common.load import CHAT, connect, post
from lab.common.output import aligned
from lab.common.peers import ours
from lab.common.proc import cpu_seconds

SIZES: Final = (4, 64, 512)
"""Numbers of engines, half of each role."""
_SCENARIO: Final = named(SHORT_STREAM)
_CONNECTIONS: Final = 32
_REQUESTS: Final = 3200
"""Requests of a gateway in a round."""


def compare_fleets(rounds: int, package: Path | None) -> None:
    """Measure all sizes and print the table. `package`: directory of the gateway, or None for the project's."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("--fleets needs two cores: one for the gateways, one for the engines and the clients")
    os.sched_setaffinity(0, cores[1:])
    words = ("taskset", "-c", str(cores[0]), *ours(package).words)
    with ExitStack() as stack:
        gateways: dict[int, Gateway] = {}
        for size in SIZES:
            fleet = stack.enter_context(Fleet())
            fleet.cheap_engines(size // 2, size // 2)
            gateways[size] = fleet.keep(fleet.gateway(words=words))
        figures = uvloop.run(_measured(gateways, rounds))
    print(f"CPU of the gateway for a 1-token stream, median of {rounds} rounds (middle half).\n")
    print(aligned([("engines", "µs", f"compared with {SIZES[0]}"), *(_row(size, figures) for size in SIZES)]))


async def _measured(gateways: Mapping[int, Gateway], rounds: int) -> Mapping[int, Sequence[float]]:
    """Return µs of a request in each round, by the number of engines."""
    figures: dict[int, list[float]] = {size: [] for size in gateways}
    for number in range(rounds + 1):
        for size, gateway in gateways.items():
            await _send_requests(gateway.port, size)
            before = cpu_seconds(gateway.pid)
            await _send_requests(gateway.port, _REQUESTS)
            if number:  # the first round warms up
                figures[size].append(1e6 * (cpu_seconds(gateway.pid) - before) / _REQUESTS)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return figures


async def _send_requests(port: int, count: int) -> None:
    """Send at least `count` requests over several connections."""
    await asyncio.gather(*(_client(port, -(-count // _CONNECTIONS)) for _ in range(_CONNECTIONS)))


async def _client(port: int, count: int) -> None:
    client = await connect(port)
    request = post(port, _SCENARIO.body(), CHAT)
    for _ in range(count):
        if wrong := problem(_SCENARIO, await client.ask(request)):
            sys.exit(wrong)
    client.transport.close()


def _row(size: int, figures: Mapping[int, Sequence[float]]) -> tuple[str, ...]:
    found = [own / base for own, base in zip(figures[size], figures[SIZES[0]], strict=True)]
    low, _, high = quantiles(found, n=4) if len(found) > 1 else found * 3
    ratio = "" if size == SIZES[0] else f"× {median(found):.2f} ({low:.2f} to {high:.2f})"
    return f"{size}", f"{median(figures[size]):.0f}", ratio
