"""Least load stays least load across workers: how far off the picks of several are, against those of one.

Bursts of requests on new connections, which the kernel spreads over the workers, go to one gateway after the other,
with more workers each, in front of the same engines. The engines are one process, so that the truth has one clock: at
each arrival, what the chosen engine has to do already, less what the least loaded engine of its role has.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from lab.common.engines import Script
from lab.common.fleet import STOPS_SOON, Fleet, Gateway
from lab.common.load import Crowd, scripted
from lab.common.output import aligned
from lab.common.proc import accepted
from lab.common.processes import allow_many_files, unwind_on_signals

_PREFILLERS, _DECODERS = 4, 8
_PATIENCE_SECONDS = 30.0
_NOTES = """
Error: requests in flight at the engine that was chosen, less those at the engine of its role that has fewest, when the
request arrives there; none: the share of picks without one. Weighted: the same in what the gateway weighs, tokens (a
prefiller's KV cache left aside), divided by the weight of an average request. With even prompts all requests weigh the
same, so both say the same; with mixed ones the gateway evens out tokens, so only the weighted error says how good the
picks are.
One worker has errors, too: a decoder is chosen before the prefiller is asked, so requests reach it in another order
than they were placed in, and of an answer that has ended the engine knows before the gateway does. Workers that wait
for a core between a pick and its request add to that.
Connections: those open just after each burst, added up; the kernel decides who accepts."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bursts. The same draw for every gateway."""

    name: str
    prompt_bytes: tuple[int, int]
    max_tokens: tuple[int, int]


_LOADS = (Load("even", (2000, 2000), (256, 256)), Load("mixed", (200, 30_000), (16, 1024)))


@dataclass(slots=True)
class Seen:
    """Of one gateway under one load."""

    arrivals: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    connections: Counter[int] = field(default_factory=Counter)
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Picks:
    """How far off the picks of one role were."""

    count: int
    mean_error: float
    p99: int
    most: int
    right: float
    """The share of picks without an error."""
    weighted: float
    """The mean error in weights, in those of an average request."""


def picks(arrivals: Sequence[dict[str, int]]) -> Picks:
    """Judge what the engines of a role recorded."""
    errors = sorted(arrival["excess_requests"] for arrival in arrivals)
    count = len(errors)
    average = sum(arrival["weight"] for arrival in arrivals) / count
    weighted = sum(arrival["excess_weight"] for arrival in arrivals) / count / average
    return Picks(count, sum(errors) / count, errors[count * 99 // 100], errors[-1], errors.count(0) / count, weighted)


async def _burst(load: Load, options: argparse.Namespace, gateway: Gateway, seen: Seen) -> None:
    draw = random.Random(options.seed)
    crowds = []
    for number in range(options.bursts):
        words = [
            scripted(gateway.port, draw.randint(*load.prompt_bytes), draw.randint(*load.max_tokens), script)
            for script in (Script(tokens=draw.randint(5, 60), step_ms=20, prefill_ms=20) for _ in range(options.size))
        ]
        crowd = Crowd(gateway.port)
        crowds.append(crowd)
        async with asyncio.TaskGroup() as group:
            for each in words:
                group.create_task(crowd.open(each))
        seen.connections += await asyncio.to_thread(accepted, gateway.pid, gateway.port)
        if number % 3 == 2:  # quiet, until everybody is idle
            for earlier in crowds:
                await earlier.ended(_PATIENCE_SECONDS)
        await asyncio.sleep(draw.uniform(0.1, 0.6))
    for crowd in crowds:
        await crowd.ended(_PATIENCE_SECONDS)
        seen.errors += crowd.errors.total()


def _rows(load: Load, workers: int, seen: Seen) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for role, arrivals in seen.arrivals.items():
        found = picks(arrivals)
        totals = Counter(arrival["engine"] for arrival in arrivals)
        rows.append(
            (
                *(load.name, role, str(workers), str(found.count), f"{found.mean_error:.2f}"),
                *(str(found.p99), str(found.most), f"{found.right:.0%}", f"{found.weighted:.2f}"),
                f"{min(totals.values())}-{max(totals.values())}",
                *(" ".join(str(count) for _, count in sorted(seen.connections.items())), str(seen.errors)),
            )
        )
    return rows


_HEADS = ("load", "role", "workers", "picks", "mean error", "p99", "max", "none", "weighted", "requests per engine")


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    allow_many_files()
    rows: list[tuple[str, ...]] = [(*_HEADS, "connections per worker", "failed")]
    with Fleet() as fleet:
        fleet.cheap_engines(_PREFILLERS, _DECODERS)
        for load in _LOADS:
            for workers in options.workers:
                with fleet.gateway("--workers", str(workers), environment=STOPS_SOON) as gateway:
                    seen = Seen()
                    fleet.ask_engines("/arrivals")
                    uvloop.run(_burst(load, options, gateway, seen))
                    seen.arrivals = fleet.ask_engines("/arrivals")
                    rows += _rows(load, workers, seen)
                print(f"{load.name} prompts, {workers} workers: done", file=sys.stderr, flush=True)
    print(aligned(rows))
    print(_NOTES)
    sys.exit(any(row[-1] != "0" for row in rows[1:]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/pick-error", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="of each gateway (default: 1 2 4)")
    parser.add_argument("--bursts", type=int, default=12, help="of each load (default: 12)")
    parser.add_argument("--size", type=int, default=100, help="requests in a burst (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
