"""Two programs at the same time on one core, their engines and loads on another: what one costs beside the other.

A core that slows down slows both, and each empties the caches of the other, as on a busy machine. So the ratio of
their CPU times tells more than two measurements one after the other, on machines whose cores change their speed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from math import nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lab.bench.figures import FIGURES, Measurement, Measurements
from lab.bench.load import PATIENCE_SECONDS
from lab.bench.loads import Program, ask
from lab.bench.scenarios import SHORT_STREAM
from lab.common.proc import cpu_seconds, resident_bytes
from lab.common.processes import free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.bench.load import Result
    from lab.bench.scenarios import Scenario
    from lab.common.peers import Peer

_ENGINES_PER_ROLE = 2
_WARM_UP_SECONDS = 1.0
# They need what is not measured here: engines without a program before them, and another scenario.
_NOT_TOLD = ("added_p50", "added_p99", "cpu_per_further_token")


class Duel:
    """Two peers and their engines. Everything that it starts ends with `stack`."""

    def __init__(self, stack: ExitStack, directory: Path, peers: tuple[Peer, Peer], *, tells_ids: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("--duel needs two cores: one for the programs, one for the engines and the loads")
        self._beside = ["taskset", "-c", str(cores[1])]
        self._shared = ["taskset", "-c", str(cores[0])]
        self._directory = directory
        self._peers = peers
        self._tells_ids = tells_ids
        self._kept = [stack.enter_context(self._running(peer, index)) for index, peer in enumerate(peers)]
        self._ask(self._kept, SHORT_STREAM, _WARM_UP_SECONDS, PATIENCE_SECONDS)

    def measure(self, scenario: Scenario, seconds: float) -> list[Measurement]:
        """One measurement of each peer."""
        if not scenario.afresh:
            return self._measure(self._kept, scenario, seconds)
        with ExitStack() as stack:
            fresh = [stack.enter_context(self._running(peer, index)) for index, peer in enumerate(self._peers)]
            self._ask(fresh, SHORT_STREAM, _WARM_UP_SECONDS, PATIENCE_SECONDS)
            return self._measure(fresh, scenario, seconds)

    def _measure(self, programs: Sequence[Program], scenario: Scenario, seconds: float) -> list[Measurement]:
        pids = [program.pid for program in programs if program.pid is not None]
        before = [(cpu_seconds(pid), resident_bytes(pid)) for pid in pids]
        results = self._ask(programs, scenario.name, seconds, scenario.seconds + 2 * PATIENCE_SECONDS)
        return [
            Measurement(result, cpu_seconds(pid) - cpu_before, bytes_before, bytes_at_most)
            for pid, (cpu_before, bytes_before), (result, bytes_at_most) in zip(pids, before, results, strict=True)
        ]

    def _ask(
        self, programs: Sequence[Program], scenario: str, seconds: float, patience: float
    ) -> list[tuple[Result, float]]:
        return ask(programs, scenario, seconds, patience, self._directory, self._beside)

    @contextmanager
    def _running(self, peer: Peer, index: int) -> Iterator[Program]:
        """A program in front of engines of its own."""
        log = self._directory / f"{index}-{peer.name}.log"
        ports = free_ports(2 * _ENGINES_PER_ROLE + 1)
        prefill, decode, port = ports[:_ENGINES_PER_ROLE], ports[_ENGINES_PER_ROLE:-1], ports[-1]
        words = [",".join(map(str, prefill)), ",".join(map(str, decode)), *([] if self._tells_ids else ["without-ids"])]
        engines = [*self._beside, sys.executable, "-m", "lab.bench.engines", *words]
        with running(f"the engines of {peer.name}", engines, decode[-1], log.with_suffix(".engines.log")):
            command = [*self._shared, *peer.command(port, prefill, decode)]
            with running(peer.name, command, port, log) as pid:
                wait_until_ready(peer.name, port, peer.ready_path)
                yield Program(peer.name, port, pid, directly=peer.is_one_hop)


def fight(
    peers: tuple[Peer, Peer], scenarios: Sequence[Scenario], seconds: float, rounds: int, *, tells_ids: bool
) -> Measurements:
    """All rounds of all scenarios that both can do on one core."""
    measurements = Measurements(tuple(peer.name for peer in peers))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        duel = Duel(stack, directory, peers, tells_ids=tells_ids)
        for scenario in scenarios:
            for number in range(rounds):
                for peer, taken in zip(peers, duel.measure(scenario, seconds), strict=True):
                    measurements.add(peer.name, scenario.name, taken)
                print(f"round {number + 1}, {scenario.title}", file=sys.stderr, flush=True)
    return measurements


def verdict(scenarios: Sequence[Scenario], measurements: Measurements) -> str:
    """A line for each figure: of both, and the median of the rounds' ratios with the lowest and the highest."""
    ours, theirs = measurements.programs
    lines = [f"{'':58}{ours:>14}{theirs:>16}   ratio"]
    for scenario in scenarios:
        lines.append(scenario.title)
        for name in scenario.figures:
            if name in _NOT_TOLD:
                continue
            values = [measurements.figure(program, scenario.name, name) for program in (ours, theirs)]
            told = "".join(f"{value:{width},.1f}" for value, width in zip(values, (14, 16), strict=True))
            lines.append(f"  {FIGURES[name].label:56}{told}   {_spread(_ratios(measurements, scenario.name, name))}")
        errors = [measurements.figure(program, scenario.name, "errors") for program in (ours, theirs)]
        lines.append(f"  {'errors':56}{errors[0]:14.0f}{errors[1]:16.0f}")
    return "\n".join(lines)


def ratios(scenarios: Sequence[Scenario], duels: Sequence[Measurements]) -> str:
    """Several duels of the same program as one table in Markdown: a row for each figure, a column of ratios for each
    peer.
    """
    peers = [duel.programs[1] for duel in duels]
    lines = [_row("", *(f"{duels[0].programs[0]} / {peer}" for peer in peers)), _row(*["---"] * (1 + len(peers)))]
    for scenario in scenarios:
        for name in scenario.figures:
            if name not in _NOT_TOLD:
                spreads = [_spread(_ratios(duel, scenario.name, name)) for duel in duels]
                lines.append(_row(f"{scenario.title}: {FIGURES[name].label}", *spreads))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ratios(measurements: Measurements, scenario: str, figure: str) -> list[float]:
    """One for each round."""
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
