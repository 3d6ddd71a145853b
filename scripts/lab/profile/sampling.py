"""The gateway with default settings under a load of scripts/bench, and a profiler that samples its stacks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lab.bench.course import ENGINES_PER_ROLE, Endpoint, Measurement, measured
from lab.bench.scenarios import PACED, SHORT_ANSWER, SHORT_STREAM, named
from lab.common import peers
from lab.common.fleet import Fleet
from lab.common.processes import Program

SAMPLED: Final = (SHORT_STREAM, SHORT_ANSWER, PACED)
"""Scenarios in which stacks are sampled."""


@contextmanager
def serving(*under: str, package: Path | None = None) -> Iterator[tuple[Fleet, Program]]:
    """Run cheap engines and the gateway in front of them.

    `under`: words of a program that runs the gateway. `package`: directory of the gateway, or None for the project's.
    """
    with Fleet() as fleet:
        fleet.cheap_engines(ENGINES_PER_ROLE, ENGINES_PER_ROLE)
        yield fleet, fleet.keep(fleet.program(peers.ours(package), under=under))


def ask(fleet: Fleet, program: Program, scenario: str, seconds: float) -> Measurement:
    """Measure a scenario of the bench once."""
    endpoints = [Endpoint(program.port, program)]
    (measurement,) = measured(endpoints, named(scenario, seconds), seconds, fleet.directory)
    return measurement


def cost(measurement: Measurement, scenario: str) -> tuple[float, str]:
    """Return the µs of CPU per token or request of a scenario, and a sentence with them."""
    result = measurement.result
    per, count = ("token", result.tokens) if scenario == PACED else ("request", result.completed)
    microseconds = 1e6 * measurement.cpu_seconds / max(1, count)
    return microseconds, f"{named(scenario).title}: {microseconds:.1f} µs CPU per {per}"


def sampled(
    scenario: str,
    seconds: float,
    record: Callable[[int, Path], Sequence[str]],
    read: Callable[[Path], str],
    package: Path | None = None,
) -> tuple[Measurement, str]:
    """Measure a scenario while a command records the gateway's stacks, which `read` returns as text."""
    with serving(package=package) as (fleet, program):
        ask(fleet, program, SHORT_STREAM, 0.5)  # a warm-up
        output = fleet.directory / "recorded"
        silent = subprocess.DEVNULL
        with subprocess.Popen(record(program.pid, output), stdout=silent, stderr=silent) as recording:
            measurement = ask(fleet, program, scenario, seconds)
            recording.send_signal(signal.SIGINT)
        return measurement, read(output)
