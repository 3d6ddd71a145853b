"""Test whether gateways that share their loads distribute requests as one gateway does, also without the store.

The same bursts go through one gateway, three that share nothing, and three that share. All engines are one process with
one clock: at each arrival, the load of the chosen engine is compared with the least load of its role. With a trace,
goodput is compared, too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from lab.common.engines import Script
from lab.common.fleet import STOPS_SOON, Fleet, Gateway, store, store_url, wait_for_peers
from lab.common.load import Crowd, scripted
from lab.common.output import aligned
from lab.common.processes import allow_many_files, called_from, quiet_ports, unwind_on_signals
from lab.pick_error import picks
from lab.test_replicas import replayed

_PREFILLERS, _DECODERS, _GATEWAYS = 4, 8, 3
_PATIENCE_SECONDS = 30.0
# With this policy the weights are known exactly, and equal prefixes have no effect.
_POLICIES = {"PROXY_BALANCE__PREFILL_POLICY": "least_tokens", "PROXY_BALANCE__DECODE_POLICY": "least_tokens"}
_GONE, _BACK = "replicas: the store does not answer", "replicas: the store answers again"
_NOTES = """
Error: requests in flight at the chosen engine, minus the fewest at an engine of its role, when the request arrives.
Weighted: the same in the gateways' weights, tokens (without a prefiller's KV cache), relative to an average request. A
single gateway has errors, too: see scripts/pick-error."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of one deployment."""

    rows: list[tuple[str, ...]]
    error: float
    """Weighted error of both roles together."""
    failed: int


@contextmanager
def _gateways(fleet: Fleet, count: int, store_port: int | None = None) -> Iterator[list[Gateway]]:
    """Run gateways, which share state if there is a store."""
    settings = STOPS_SOON | _POLICIES
    if store_port is not None:
        settings["PROXY_REPLICAS__URL"] = store_url(store_port)
    with ExitStack() as stack:
        gateways = [stack.enter_context(fleet.gateway(environment=settings)) for _ in range(count)]
        if store_port is not None:
            wait_for_peers(gateways, count - 1)
        yield gateways


async def _bursts(options: argparse.Namespace, gateways: Sequence[Gateway]) -> int:
    """Send the same bursts to random gateways. Return the number of failures."""
    draw = random.Random(options.seed)
    crowds = {gateway.port: Crowd(gateway.port) for gateway in gateways}
    for _ in range(options.bursts):
        for _ in range(options.size):
            await asyncio.sleep(draw.expovariate(options.rate))
            port = gateways[int(draw.random() * len(gateways))].port
            script = Script(tokens=draw.randint(50, 400), step_ms=20, prefill_ms=draw.randint(100, 1500))
            await crowds[port].open(scripted(port, draw.randint(200, 8000), draw.randint(16, 512), script))
        await asyncio.sleep(draw.uniform(0.5, 1.5))
    for crowd in crowds.values():
        await crowd.ended(_PATIENCE_SECONDS)
    return sum(crowd.errors.total() for crowd in crowds.values())


def _measure(name: str, fleet: Fleet, options: argparse.Namespace, gateways: Sequence[Gateway]) -> _Result:
    fleet.ask_engines("/arrivals")
    failed = uvloop.run(_bursts(options, gateways))
    rows: list[tuple[str, ...]] = []
    error = 0.0
    for role, arrivals in fleet.ask_engines("/arrivals").items():
        found = picks(arrivals)
        figures = f"{found.mean_error:.2f}", str(found.p99), str(found.most), f"{found.weighted:.2f}"
        rows.append((name, role, str(found.count), *figures, str(failed)))
        error += found.weighted
    return _Result(rows, error, failed)


def _lose_store(fleet: Fleet, options: argparse.Namespace) -> list[str]:
    """Kill the store under load and start it again. Return the problems."""
    (port,) = quiet_ports(1)
    with store(port, fleet.directory) as shared, _gateways(fleet, _GATEWAYS, port) as gateways:
        shared.end()
        failed = uvloop.run(_bursts(options, gateways))
        wait_for_peers(gateways, 0)
        shared.restart()
        wait_for_peers(gateways, _GATEWAYS - 1)
        gone, back = ([gateway.text().count(line) for gateway in gateways] for line in (_GONE, _BACK))
    print(f"Without the store: {failed} requests failed; log lines of each gateway: {gone} lost, {back} recovered")
    wrong = [f"{failed} requests failed without the store"] if failed else []
    return wrong + (
        [] if gone == back == [1] * _GATEWAYS else ["not exactly one log line for the loss and the recovery"]
    )


def main() -> None:
    unwind_on_signals()
    options = _options()
    allow_many_files()
    with Fleet() as fleet:
        fleet.cheap_engines(_PREFILLERS, _DECODERS)
        shared = fleet.keep(store(quiet_ports(1)[0], fleet.directory))
        ways = {
            "1": (1, None),
            f"{_GATEWAYS}, not sharing": (_GATEWAYS, None),
            f"{_GATEWAYS}, sharing": (_GATEWAYS, shared.port),
        }
        found = {}
        for name, (count, port) in ways.items():
            with _gateways(fleet, count, port) as gateways:
                found[name] = _measure(name, fleet, options, gateways)
            print(f"{name}: done", file=sys.stderr, flush=True)
        heads = ("gateways", "role", "picks", "mean error", "p99", "max", "weighted", "failed")
        print(aligned([heads, *(row for one in found.values() for row in one.rows)]))
        print(_NOTES)
        wrong = _lose_store(fleet, options)
    _, alone, sharing = found.values()
    wrong += [f"{one.failed} requests failed" for one in found.values() if one.failed]
    if sharing.error >= alone.error:
        wrong.append("sharing has not reduced the error")
    if options.trace is not None:
        wrong += replayed.compare(options.trace, options.requests, options.seed)
    sys.exit("; ".join(wrong) or None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-replicas", description=__doc__)
    parser.add_argument("--bursts", type=int, default=3, help="bursts through each deployment (default: 3)")
    parser.add_argument("--size", type=int, default=50, help="requests in a burst (default: 50)")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second in a burst (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random draws (default: 1)")
    parser.add_argument("--trace", type=Path, help="also replay this trace as scripts/replay does")
    parser.add_argument("--requests", type=int, default=400, help="requests of the trace (default: 400)")
    options = parser.parse_args()
    options.trace = options.trace and called_from() / options.trace
    return options


if __name__ == "__main__":
    main()
