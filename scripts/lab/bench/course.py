"""Measurements: programs are started when they are needed, and measured by load generators."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

from lab.bench.load import PATIENCE_SECONDS, Result
from lab.bench.scenarios import LARGE_PROMPT, PACED, SHORT_ANSWER, SHORT_STREAM, SLOW_5000, Scenario, named
from lab.common.fleet import Fleet
from lab.common.load import Histogram
from lab.common.peers import REFERENCE, RUST_ROUTERS, Peer, ours
from lab.common.proc import cpu_seconds, resident_bytes
from lab.common.processes import Program, clean_environment

Of: TypeAlias = Callable[["Measurements", str, str], float]


DIRECT: Final = "direct"
"""Name for the engines without a program."""
NOT_RESUMING: Final = "not resuming"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one scenario: its result, and the CPU time and memory of the program. NaN without a program."""

    result: Result
    cpu_seconds: float = nan
    bytes_before: float = nan
    max_bytes: float = nan


@dataclass(frozen=True, slots=True)
class Measurements:
    """All measurements, by program and scenario."""

    programs: tuple[str, ...]
    _taken: dict[tuple[str, str], list[Measurement]] = field(default_factory=dict)

    def add(self, program: str, scenario: str, measurement: Measurement) -> None:
        self._taken.setdefault((program, scenario), []).append(measurement)

    def of(self, program: str, scenario: str) -> list[Measurement]:
        """Return the measurements, none if the program was not measured."""
        return self._taken.get((program, scenario), [])

    def figure(self, program: str, scenario: str, name: str) -> float:
        """Return the median of the rounds, or NaN without measurements."""
        return FIGURES[name].of(self, program, scenario)

    def has_errors(self) -> bool:
        return any(m.result.errors for taken in self._taken.values() for m in taken)

    def better_router(self, scenario: str, name: str) -> float:
        """Return the figure of the better router in Rust, or NaN without one."""
        values = [self.figure(router, scenario, name) for router in RUST_ROUTERS]
        known = [value for value in values if not isnan(value)]
        better = max if FIGURES[name].more_is_better else min
        return better(known, default=nan)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure. `of` computes it for a program and a scenario."""

    label: str
    of: Of
    more_is_better: bool = False
    decimals: int = 1


def _median(of: Callable[[Measurement], float]) -> Of:
    def figure(measurements: Measurements, program: str, scenario: str) -> float:
        return median([of(m) for m in measurements.of(program, scenario)] or [nan])

    return figure


def _cpu_per(count: Callable[[Result], int]) -> Of:
    return _median(lambda m: 1e6 * m.cpu_seconds / max(1, count(m.result)))


def _further_token(measurements: Measurements, program: str, scenario: str) -> float:
    """Return the CPU time per token after the first: without the cost of as many 1-token streams."""
    request = measurements.figure(program, SHORT_STREAM, "cpu_per_request")
    further = _median(
        lambda m: (1e6 * m.cpu_seconds - request * m.result.completed) / max(1, m.result.tokens - m.result.completed)
    )
    return further(measurements, program, scenario)


def _first_token(share: float) -> Of:
    return _median(lambda m: Histogram(m.result.first_tokens).milliseconds(share))


def _gap(share: float) -> Of:
    return _median(lambda m: Histogram(m.result.gaps).milliseconds(share))


def _errors(measurements: Measurements, program: str, scenario: str) -> float:
    """Return the number of errors of all rounds."""
    taken = measurements.of(program, scenario)
    return sum(sum(m.result.errors.values()) for m in taken) if taken else nan


def _added(of: Of) -> Of:
    """Return the difference to a run without a program."""

    def figure(measurements: Measurements, program: str, scenario: str) -> float:
        return of(measurements, program, scenario) - of(measurements, DIRECT, scenario)

    return figure


FIGURES = {
    "cpu_per_request": Figure("CPU, µs per request", _cpu_per(lambda r: r.completed)),
    "cpu_per_token": Figure("CPU, µs per token, requests included", _cpu_per(lambda r: r.tokens)),
    "cpu_per_further_token": Figure("CPU, µs per further token", _further_token),
    "requests_per_second": Figure("requests/s", _median(lambda m: m.result.completed / m.result.seconds), True, 0),
    "first_token_p50": Figure("first token, ms, p50", _first_token(0.5)),
    "first_token_p99": Figure("first token, ms, p99", _first_token(0.99)),
    "added_p50": Figure("added to the first token, ms, p50", _added(_first_token(0.5))),
    "added_p99": Figure("added to the first token, ms, p99", _added(_first_token(0.99))),
    "gap_p99": Figure("between tokens, ms, p99", _gap(0.99)),
    "memory": Figure("memory, MiB", _median(lambda m: m.max_bytes / 2**20)),
    "memory_per_stream": Figure(
        "memory, KiB per stream",
        _median(lambda m: (m.max_bytes - m.bytes_before) / 1024 / max(1, m.result.open_at_once)),
    ),
    "beside": Figure("8 MiB images answered per second", _median(lambda m: m.result.beside / m.result.seconds), True),
    "errors": Figure("errors", _errors, decimals=0),
}


ENGINES_PER_ROLE: Final = 2
_WARM_UP_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A program, or an engine if `program` is None. `directly`: requests are those for a decoder."""

    port: int
    program: Program | None
    directly: bool = False


def measured(
    endpoints: Sequence[Endpoint], scenario: Scenario, seconds: float, directory: Path, under: Sequence[str] = ()
) -> list[Measurement]:
    """Run a load generator against each endpoint, all at once. Exits if one does not end in time.

    `under`: words before each generator's command.
    """
    pids = [None if each.program is None else each.program.pid for each in endpoints]
    used = [0.0 if pid is None else cpu_seconds(pid) for pid in pids]
    before = [0.0 if pid is None else resident_bytes(pid) for pid in pids]
    max_bytes = list(before)
    deadline = time.monotonic() + scenario.seconds + 2 * PATIENCE_SECONDS
    outputs = [directory / f"result-{each.port}.json" for each in endpoints]
    with ExitStack() as stack:
        processes = []
        for each, output in zip(endpoints, outputs, strict=True):
            command = [*under, sys.executable, "-m", "lab.bench.load", str(each.port), scenario.name, str(seconds)]
            command += ["directly"] if each.directly else []
            file = stack.enter_context(output.open("wb"))
            processes.append(stack.enter_context(subprocess.Popen(command, env=clean_environment(), stdout=file)))
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                sys.exit("a load generator did not end in time")
            max_bytes = [
                highest if pid is None else max(highest, resident_bytes(pid))
                for highest, pid in zip(max_bytes, pids, strict=True)
            ]
            time.sleep(_LOOK_SECONDS)
    if any(process.returncode for process in processes):
        sys.exit("a load generator failed")
    results = [Result.from_json(output.read_text()) for output in outputs]
    return [
        Measurement(result)
        if pid is None
        else Measurement(result, cpu_seconds(pid) - cpu_before, bytes_before, highest)
        for result, pid, cpu_before, bytes_before, highest in zip(results, pids, used, before, max_bytes, strict=True)
    ]


def takes_part(peer: Peer, scenario: Scenario) -> bool:
    """Return whether a program is measured in a scenario."""
    if peer.name == NOT_RESUMING:
        return scenario.name in (SHORT_STREAM, SHORT_ANSWER, PACED, LARGE_PROMPT)
    # The reference cannot begin 5,000 streams within the time that they last.
    return not (peer.name == REFERENCE and scenario.name == SLOW_5000)


def not_resuming(directory: Path | None) -> Peer:
    """Return pdproxy without exact resume, and so without token ids. `directory`: see `ours`."""
    return Peer(NOT_RESUMING, ("env", "PROXY_RESUME__MODE=restart-only", *ours(directory).words), "/readyz")


class Course:
    """Programs in front of the same engines, one after the other."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._kept: dict[tuple[str, bool], Program] = {}
        fleet.cheap_engines(ENGINES_PER_ROLE, ENGINES_PER_ROLE)

    def measure(self, peer: Peer, scenario: Scenario) -> Measurement:
        """Measure one program once."""
        if scenario.needs_fresh_program:
            with self._fleet.program(peer) as program:
                self._warm_up(program)
                return self._measure(Endpoint(program.port, program), scenario)
        program = self._program(peer, saturating=scenario.saturates and bool(peer.saturating))
        return self._measure(Endpoint(program.port, program), scenario)

    def measure_directly(self, scenario: Scenario) -> Measurement:
        """Measure an engine once, without a program in front of it."""
        return self._measure(Endpoint(self._fleet.decode[0], None, directly=True), scenario)

    def _program(self, peer: Peer, *, saturating: bool) -> Program:
        """Return a program, which is started when it is first needed."""
        key = (peer.name, saturating)
        if key not in self._kept:
            self._kept[key] = self._fleet.keep(self._fleet.program(peer, saturating=saturating))
            self._warm_up(self._kept[key])
        return self._kept[key]

    def _warm_up(self, program: Program) -> None:
        measured([Endpoint(program.port, program)], named(SHORT_STREAM), _WARM_UP_SECONDS, self._fleet.directory)

    def _measure(self, endpoint: Endpoint, scenario: Scenario) -> Measurement:
        (measurement,) = measured([endpoint], scenario, self._seconds, self._fleet.directory)
        return measurement
