"""Do several gateways that share their loads place requests as one does? And what if the store is gone?

The same bursts go through one gateway, through three that know nothing of each other, and through three that share, in
front of the same engines, which are one process, so that the truth has one clock: at each arrival, what the chosen
engine has to do already, less what the least loaded engine of its role has. With a trace also goodput: see replayed.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from lab.common.gateways import become_aware
from lab.common.invocation import allow_many_files, called_from, unwind_on_signals
from lab.common.processes import free_ports
from lab.common.scripted import programs
from lab.common.scripted.clients import Crowd, request
from lab.common.scripted.engines import Script
from lab.common.store import store
from lab.common.table import aligned
from lab.test_replicas import replayed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFILLERS, _DECODERS, _GATEWAYS = 4, 8, 3
_PATIENCE_SECONDS = 30.0
# What they weigh is known exactly, and prompts that begin alike do not attract each other.
_POLICIES = {"PROXY_BALANCE__PREFILL_POLICY": "least_tokens", "PROXY_BALANCE__DECODE_POLICY": "least_tokens"}
_GONE, _BACK = "replicas: the store does not answer", "replicas: the store answers again"
_NOTES = """
Error: requests in flight at the engine that was chosen, less those at the engine of its role that has fewest, when the
request arrives there. Weighted: the same in what the gateways weigh, tokens (a prefiller's KV cache left aside),
divided by the weight of an average request. One gateway has errors, too: see scripts/pick-error."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Of one way to deploy."""

    rows: list[tuple[str, ...]]
    error: float
    """Weighted, of both roles together."""
    failed: int


@contextmanager
def _gateways(engines: programs.Engines, count: int, logs: Path, store_url: str | None) -> Iterator[list[int]]:
    """Their ports."""
    settings = dict(_POLICIES)
    if store_url is not None:
        settings["PROXY_REPLICAS__URL"] = store_url
    with ExitStack() as stack:
        ports = []
        for number in range(count):
            directory = logs / str(number)
            directory.mkdir(parents=True, exist_ok=True)
            ports.append(stack.enter_context(programs.gateway(engines, 1, directory, settings))[0])
        yield ports


async def _bursts(options: argparse.Namespace, ports: Sequence[int]) -> int:
    """Requests by whichever gateway comes, the same draw each time; how many failed."""
    draw = random.Random(options.seed)
    crowds = {port: Crowd(port) for port in ports}
    for _ in range(options.bursts):
        for _ in range(options.size):
            await asyncio.sleep(draw.expovariate(options.rate))
            port = ports[int(draw.random() * len(ports))]
            script = Script(tokens=draw.randint(50, 400), step_ms=20, prefill_ms=draw.randint(100, 1500))
            await crowds[port].open(request(port, draw.randint(200, 8000), draw.randint(16, 512), script))
        await asyncio.sleep(draw.uniform(0.5, 1.5))
    for crowd in crowds.values():
        await crowd.ended(_PATIENCE_SECONDS)
    return sum(sum(crowd.outcomes.errors.values()) for crowd in crowds.values())


def _measure(name: str, engines: programs.Engines, options: argparse.Namespace, ports: Sequence[int]) -> _Found:
    engines.ask("/arrivals")
    failed = uvloop.run(_bursts(options, ports))
    told: dict[str, Any] = engines.ask("/arrivals")
    rows: list[tuple[str, ...]] = []
    means = {}
    for role, arrivals in told.items():
        errors = sorted(arrival["excess_requests"] for arrival in arrivals)
        average = sum(arrival["weight"] for arrival in arrivals) / len(arrivals)
        weighted = sum(arrival["excess_weight"] for arrival in arrivals) / len(arrivals) / average
        means[role] = weighted
        figures = (
            f"{sum(errors) / len(errors):.2f}",
            str(errors[len(errors) * 99 // 100]),
            str(errors[-1]),
            f"{weighted:.2f}",
        )
        rows.append((name, role, str(len(errors)), *figures, str(failed)))
    return _Found(rows, sum(means.values()), failed)


def _lose_store(engines: programs.Engines, options: argparse.Namespace, logs: Path) -> list[str]:
    """Kill the store under load, and start it again; what went wrong."""
    logs.mkdir()
    (port,) = free_ports(1)

    def told(line: str) -> list[int]:
        paths = [logs / str(number) / "gateway-1.log" for number in range(_GATEWAYS)]
        return [path.read_text(errors="replace").count(line) for path in paths]

    with ExitStack() as stack:
        until_lost = stack.enter_context(ExitStack())
        url = until_lost.enter_context(store(port, logs))
        ports = stack.enter_context(_gateways(engines, _GATEWAYS, logs, url))
        become_aware(ports, _GATEWAYS - 1)
        until_lost.close()
        failed = uvloop.run(_bursts(options, ports))
        become_aware(ports, 0)
        stack.enter_context(store(port, logs))
        become_aware(ports, _GATEWAYS - 1)
        lines = told(_GONE), told(_BACK)
    print(
        f"The store gone under load: {failed} requests failed; lines of each gateway: {lines[0]} gone, {lines[1]} back"
    )
    wrong = [f"{failed} requests failed without the store"] if failed else []
    return wrong + ([] if lines == ([1] * _GATEWAYS, [1] * _GATEWAYS) else ["not one line each way"])


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    allow_many_files()
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = stack.enter_context(programs.engines(_PREFILLERS, _DECODERS, logs))
        url = stack.enter_context(store(free_ports(1)[0], logs))
        ways: dict[str, tuple[int, str | None]] = {
            "1": (1, None),
            f"{_GATEWAYS}, not sharing": (_GATEWAYS, None),
            f"{_GATEWAYS}, sharing": (_GATEWAYS, url),
        }
        found = {}
        for name, (count, shared) in ways.items():
            with _gateways(engines, count, logs / name, shared) as ports:
                if shared is not None:
                    become_aware(ports, _GATEWAYS - 1)
                found[name] = _measure(name, engines, options, ports)
            print(f"{name}: done", file=sys.stderr, flush=True)
        heads = ("gateways", "role", "picks", "mean error", "p99", "max", "weighted", "failed")
        print(aligned([heads, *(row for one in found.values() for row in one.rows)]))
        print(_NOTES)
        wrong = _lose_store(engines, options, logs / "lost")
    _, alone, sharing = found.values()
    wrong += [f"{one.failed} requests failed" for one in found.values() if one.failed]
    if sharing.error >= alone.error:
        wrong.append("sharing has not made picks better")
    if options.trace is not None:
        wrong += replayed.compare(options.trace, options.requests, options.seed)
    sys.exit("; ".join(wrong) or None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-replicas", description=__doc__)
    parser.add_argument("--bursts", type=int, default=3, help="through each deployment (default: 3)")
    parser.add_argument("--size", type=int, default=50, help="requests in a burst (default: 50)")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second in a burst (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: 1)")
    parser.add_argument("--trace", type=Path, help="replay this, too, on engines that batch, as scripts/replay does")
    parser.add_argument("--requests", type=int, default=400, help="of the trace (default: 400)")
    options = parser.parse_args()
    options.trace = options.trace and called_from() / options.trace
    return options


if __name__ == "__main__":
    main()
