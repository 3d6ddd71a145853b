"""How far the selections of several workers are from the least loaded engine, compared with one worker.

Bursts of requests on new connections, which the kernel spreads over the workers, go to gateways with more and more
workers in front of the same engines. The engines are one process with one clock: at each arrival, the load of the
chosen engine is compared with the least load of its role.
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
Error: requests in flight at the chosen engine, minus the fewest at an engine of its role, when the request arrives;
none: the share of selections without error. Weighted: the same in the gateway's weights, tokens (without a prefiller's
KV cache), relative to an average request. Even prompts have equal weights, so both errors are equal. With mixed prompts
the gateway balances tokens, so only the weighted error measures it.
A single worker has errors, too: a decoder is selected before the prefill, so requests arrive in another order, and an
engine knows of the end of an answer before the gateway. Workers that wait for a core between selection and request add
errors.
Connections: sum of those open just after each burst. The kernel distributes them."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bursts, the same for every gateway."""

    name: str
    prompt_bytes: tuple[int, int]
    max_tokens: tuple[int, int]


_LOADS = (Load("even", (2000, 2000), (256, 256)), Load("mixed", (200, 30_000), (16, 1024)))


@dataclass(slots=True)
class Results:
    """Results of one gateway under one load."""

    arrivals: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    connections: Counter[int] = field(default_factory=Counter)
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Picks:
    """Errors of the selections for one role."""

    count: int
    mean_error: float
    p99: int
    most: int
    right: float
    """Share of selections without an error."""
    weighted: float
    """Mean error in weights, relative to an average request."""


def picks(arrivals: Sequence[dict[str, int]]) -> Picks:
    """Compute the errors from the arrivals at a role's engines."""
    errors = sorted(arrival["excess_requests"] for arrival in arrivals)
    count = len(errors)
    average = sum(arrival["weight"] for arrival in arrivals) / count
    weighted = sum(arrival["excess_weight"] for arrival in arrivals) / count / average
    return Picks(count, sum(errors) / count, errors[count * 99 // 100], errors[-1], errors.count(0) / count, weighted)


async def _burst(load: Load, options: argparse.Namespace, gateway: Gateway, results: Results) -> None:
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
        results.connections += await asyncio.to_thread(accepted, gateway.pid, gateway.port)
        if number % 3 == 2:  # wait until all streams have ended
            for earlier in crowds:
                await earlier.ended(_PATIENCE_SECONDS)
        await asyncio.sleep(draw.uniform(0.1, 0.6))
    for crowd in crowds:
        await crowd.ended(_PATIENCE_SECONDS)
        results.errors += crowd.errors.total()


def _rows(load: Load, workers: int, results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for role, arrivals in results.arrivals.items():
        found = picks(arrivals)
        totals = Counter(arrival["engine"] for arrival in arrivals)
        rows.append(
            (
                *(load.name, role, str(workers), str(found.count), f"{found.mean_error:.2f}"),
                *(str(found.p99), str(found.most), f"{found.right:.0%}", f"{found.weighted:.2f}"),
                f"{min(totals.values())}-{max(totals.values())}",
                *(" ".join(str(count) for _, count in sorted(results.connections.items())), str(results.errors)),
            )
        )
    return rows


_HEADS = ("load", "role", "workers", "picks", "mean error", "p99", "max", "none", "weighted", "requests per engine")


def main() -> None:
    unwind_on_signals()
    options = _options()
    allow_many_files()
    rows: list[tuple[str, ...]] = [(*_HEADS, "connections per worker", "failed")]
    with Fleet() as fleet:
        fleet.cheap_engines(_PREFILLERS, _DECODERS)
        for load in _LOADS:
            for workers in options.workers:
                with fleet.gateway("--workers", str(workers), environment=STOPS_SOON) as gateway:
                    results = Results()
                    fleet.ask_engines("/arrivals")
                    uvloop.run(_burst(load, options, gateway, results))
                    results.arrivals = fleet.ask_engines("/arrivals")
                    rows += _rows(load, workers, results)
                print(f"{load.name} prompts, {workers} workers: done", file=sys.stderr, flush=True)
    print(aligned(rows))
    print(_NOTES)
    sys.exit(any(row[-1] != "0" for row in rows[1:]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/pick-error", description=__doc__)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4], help="workers of each gateway (default: 1 2 4)"
    )
    parser.add_argument("--bursts", type=int, default=12, help="bursts of each load (default: 12)")
    parser.add_argument("--size", type=int, default=100, help="requests in a burst (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random draws (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
