"""A duel: two programs at the same time on one core, their engines and loads on another.

A core that slows down slows both programs, and each empties the caches of the other, as on a busy machine. So the ratio
of their CPU times is more reliable than two consecutive measurements.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from math import nan
from pathlib import Path
from statistics import median
from typing import Final

from lab.bench.course import ENGINES_PER_ROLE, FIGURES, Endpoint, Measurement, Measurements, measured
from lab.bench.scenarios import SHORT_STREAM, Scenario, named
from lab.common.fleet import Fleet
from lab.common.peers import OURS, RUST_ROUTERS, Peer, ours, routers
from lab.common.processes import HOST

HAPROXY: Final = "haproxy"
_WARM_UP_SECONDS: Final = 1.0
# Figures that need engines without a program, or another scenario.
_UNAVAILABLE: Final = ("added_p50", "added_p99", "cpu_per_further_token")
# Client keys with limits that no request reaches, so that their cost is measured, too.
_CLIENT_KEYS: Final = "keys: [{name: bench, key: bench, max_concurrent: 100000, requests_per_minute: 100000000}]\n"


def dueller(directory: Path, connector: str, checkout: Path | None = None, name: str = OURS) -> Peer:
    """Return pdproxy, or another checkout of it, with client keys and one worker.

    `directory`: for the file of keys.
    """
    keys = directory / "keys.yaml"
    keys.write_text(_CLIENT_KEYS)
    keys.chmod(0o600)
    settings = (f"PROXY_AUTH__CLIENT_KEYS_FILE={keys}", f"PROXY_CONNECTOR={connector}")
    return Peer(name, ("env", *settings, *ours(checkout).words), "/readyz")


def opponent(name: str, called_from: Path, directory: Path, connector: str) -> Peer:
    """Return the peer of this name: a router in Rust, HAProxy, or another checkout of pdproxy. Exits if there is none.

    A checkout's path is relative to `called_from`. It is started with this connector.
    """
    if name == HAPROXY:
        return _haproxy(directory)
    found = [peer for peer in routers() if peer.name == name] if name in RUST_ROUTERS else []
    if found:
        return found[0]
    checkout = called_from / name
    if (checkout / "proxy" / "__main__.py").is_file():
        return dueller(directory, connector, checkout, checkout.resolve().name)
    sys.exit(f"--duel: {name} is neither {', '.join(RUST_ROUTERS)}, {HAPROXY} nor a checkout of this gateway")


def _haproxy(directory: Path) -> Peer:
    """Return HAProxy, the lower bound: a relay in C that only forwards to decoders."""
    if shutil.which(HAPROXY) is None:
        sys.exit("--duel haproxy: haproxy is not on the PATH (Debian: apt-get install haproxy)")

    # HAProxy takes two descriptors per connection, and does not start if it may not open as many.
    most = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)

    def spelling(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
        servers = [f"  server d{index} {HOST}:{engine}" for index, engine in enumerate(decode)]
        configuration = [
            *("global", "  nbthread 1", f"  maxconn {most}", "defaults", "  mode http", "  balance roundrobin"),
            *("  timeout client 1h", "  timeout server 1h", "  timeout connect 5s", "  http-reuse always"),
            "  option http-no-delay",  # otherwise it delays tokens by up to 200 ms
            *("frontend front", f"  bind {HOST}:{port}", "  default_backend engines", "backend engines", *servers),
        ]
        file = directory / f"haproxy-{port}.cfg"
        file.write_text("\n".join(configuration) + "\n")
        return ["-db", "-f", str(file)]

    return Peer(HAPROXY, (HAPROXY,), "/", spelling, is_one_hop=True)


class Duel:
    """Two peers and their engines. Everything that it starts ends with `stack`."""

    def __init__(self, stack: ExitStack, peers: tuple[Peer, Peer], *, sends_ids: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("--duel needs two cores: one for the programs, one for the engines and the loads")
        self._beside = ["taskset", "-c", str(cores[1])]
        self._shared = ["taskset", "-c", str(cores[0])]
        self._directory = stack.enter_context(Fleet()).directory
        self._peers = peers
        self._engine_flags = () if sends_ids else ("without-ids",)
        self._kept = self._started(stack)

    def measure(self, scenario: Scenario, seconds: float) -> list[Measurement]:
        """Measure both peers once."""
        if not scenario.needs_fresh_program:
            return self._measured(self._kept, scenario, seconds)
        with ExitStack() as stack:
            return self._measured(self._started(stack), scenario, seconds)

    def _measured(self, endpoints: Sequence[Endpoint], scenario: Scenario, seconds: float) -> list[Measurement]:
        return measured(endpoints, scenario, seconds, self._directory, self._beside)

    def _started(self, stack: ExitStack) -> list[Endpoint]:
        """Start both programs, each in front of separate engines."""
        endpoints = []
        for peer in self._peers:
            fleet = stack.enter_context(Fleet())
            fleet.cheap_engines(ENGINES_PER_ROLE, ENGINES_PER_ROLE, *self._engine_flags, under=self._beside)
            program = fleet.keep(fleet.program(peer, under=self._shared))
            endpoints.append(Endpoint(program.port, program, directly=peer.is_one_hop))
        self._measured(endpoints, named(SHORT_STREAM), _WARM_UP_SECONDS)
        return endpoints


def fight(
    peers: tuple[Peer, Peer], scenarios: Sequence[Scenario], seconds: float, rounds: int, *, sends_ids: bool
) -> Measurements:
    """Run all rounds of all scenarios."""
    measurements = Measurements(tuple(peer.name for peer in peers))
    with ExitStack() as stack:
        duel = Duel(stack, peers, sends_ids=sends_ids)
        for scenario in scenarios:
            for number in range(rounds):
                for peer, measurement in zip(peers, duel.measure(scenario, seconds), strict=True):
                    measurements.add(peer.name, scenario.name, measurement)
                print(f"round {number + 1}, {scenario.title}", file=sys.stderr, flush=True)
    return measurements


def verdict(scenarios: Sequence[Scenario], measurements: Measurements) -> str:
    """Return a line for each figure: both values, and the median ratio with its lowest and highest value."""
    ours, theirs = measurements.programs
    lines = [f"{'':58}{ours:>14}{theirs:>16}   ratio"]
    for scenario in scenarios:
        lines.append(scenario.title)
        for name in scenario.figures:
            if name in _UNAVAILABLE:
                continue
            values = [measurements.figure(program, scenario.name, name) for program in (ours, theirs)]
            cells = "".join(f"{value:{width},.1f}" for value, width in zip(values, (14, 16), strict=True))
            lines.append(f"  {FIGURES[name].label:56}{cells}   {_spread(_ratios(measurements, scenario.name, name))}")
        errors = [measurements.figure(program, scenario.name, "errors") for program in (ours, theirs)]
        lines.append(f"  {'errors':56}{errors[0]:14.0f}{errors[1]:16.0f}")
    return "\n".join(lines)


def ratios(scenarios: Sequence[Scenario], duels: Sequence[Measurements]) -> str:
    """Return several duels of a program as a Markdown table: a row per figure, a column of ratios per peer."""
    peers = [duel.programs[1] for duel in duels]
    lines = [_row("", *(f"{duels[0].programs[0]} / {peer}" for peer in peers)), _row(*["---"] * (1 + len(peers)))]
    for scenario in scenarios:
        for name in scenario.figures:
            if name not in _UNAVAILABLE:
                spreads = [_spread(_ratios(duel, scenario.name, name)) for duel in duels]
                lines.append(_row(f"{scenario.title}: {FIGURES[name].label}", *spreads))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ratios(measurements: Measurements, scenario: str, figure: str) -> list[float]:
    """Return the ratio of each round."""
    ratios = []
    ours, theirs = measurements.programs
    for one, other in zip(measurements.of(ours, scenario), measurements.of(theirs, scenario), strict=True):
        alone = Measurements((ours, theirs))
        alone.add(ours, scenario, one)
        alone.add(theirs, scenario, other)
        base = alone.figure(theirs, scenario, figure)
        ratios.append(alone.figure(ours, scenario, figure) / base if base else nan)
    return ratios


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
