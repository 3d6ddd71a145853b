"""The course of a run: programs are started when they are needed, and measured by load generators."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.bench.figures import NOT_RESUMING, Measurement
from lab.bench.load import PATIENCE_SECONDS, Result
from lab.bench.scenarios import LARGE_PROMPT, PACED, SHORT_ANSWER, SHORT_STREAM, SLOW_5000, Scenario, named
from lab.common.fleet import Fleet
from lab.common.peers import REFERENCE, Peer, ours
from lab.common.proc import cpu_seconds, resident_bytes
from lab.common.processes import Program, clean_environment

ENGINES_PER_ROLE: Final = 2
_WARM_UP_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """Something that listens. Without a program it is an engine itself. `directly`: it is asked as a decoder is."""

    port: int
    program: Program | None
    directly: bool = False


def measured(
    asked: Sequence[Asked], scenario: Scenario, seconds: float, directory: Path, under: Sequence[str] = ()
) -> list[Measurement]:
    """Run a load generator against each program, all at once. Exits when one does not end in time. `under`: words
    before each generator's command.
    """
    pids = [None if each.program is None else each.program.pid for each in asked]
    used = [0.0 if pid is None else cpu_seconds(pid) for pid in pids]
    before = [0.0 if pid is None else resident_bytes(pid) for pid in pids]
    at_most = list(before)
    deadline = time.monotonic() + scenario.seconds + 2 * PATIENCE_SECONDS
    outputs = [directory / f"result-{each.port}.json" for each in asked]
    with ExitStack() as stack:
        processes = []
        for each, output in zip(asked, outputs, strict=True):
            command = [*under, sys.executable, "-m", "lab.bench.load", str(each.port), scenario.name, str(seconds)]
            command += ["directly"] if each.directly else []
            file = stack.enter_context(output.open("wb"))
            processes.append(stack.enter_context(subprocess.Popen(command, env=clean_environment(), stdout=file)))
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                sys.exit("a load generator did not end in time")
            at_most = [
                most if pid is None else max(most, resident_bytes(pid)) for most, pid in zip(at_most, pids, strict=True)
            ]
            time.sleep(_LOOK_SECONDS)
    if any(process.returncode for process in processes):
        sys.exit("a load generator failed")
    results = [Result.from_json(output.read_text()) for output in outputs]
    return [
        Measurement(result) if pid is None else Measurement(result, cpu_seconds(pid) - cpu_before, bytes_before, most)
        for result, pid, cpu_before, bytes_before, most in zip(results, pids, used, before, at_most, strict=True)
    ]


def takes_part(peer: Peer, scenario: Scenario) -> bool:
    """Whether a program is worth its time in a scenario."""
    if peer.name == NOT_RESUMING:
        return scenario.name in (SHORT_STREAM, SHORT_ANSWER, PACED, LARGE_PROMPT)
    # The reference cannot begin 5,000 streams within the time that they last.
    return not (peer.name == REFERENCE and scenario.name == SLOW_5000)


def not_resuming(directory: Path | None) -> Peer:
    """This gateway without exact resume, so without the token ids that it takes. `directory`: see `ours`."""
    return Peer(NOT_RESUMING, ("env", "PROXY_RESUME__MODE=restart-only", *ours(directory).words), "/readyz")


class Course:
    """Programs in front of the same engines, one after the other."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._kept: dict[tuple[str, bool], Program] = {}
        fleet.cheap_engines(ENGINES_PER_ROLE, ENGINES_PER_ROLE)

    def measure(self, peer: Peer, scenario: Scenario) -> Measurement:
        """One measurement of one program."""
        if scenario.afresh:
            with self._fleet.program(peer) as program:
                self._warm_up(program)
                return self._measure(Asked(program.port, program), scenario)
        program = self._program(peer, saturating=scenario.saturates and bool(peer.saturating))
        return self._measure(Asked(program.port, program), scenario)

    def measure_directly(self, scenario: Scenario) -> Measurement:
        """One measurement of an engine, with nothing between."""
        return self._measure(Asked(self._fleet.decode[0], None, directly=True), scenario)

    def _program(self, peer: Peer, *, saturating: bool) -> Program:
        """Started when it is first needed."""
        key = (peer.name, saturating)
        if key not in self._kept:
            self._kept[key] = self._fleet.keep(self._fleet.program(peer, saturating=saturating))
            self._warm_up(self._kept[key])
        return self._kept[key]

    def _warm_up(self, program: Program) -> None:
        measured([Asked(program.port, program)], named(SHORT_STREAM), _WARM_UP_SECONDS, self._fleet.directory)

    def _measure(self, asked: Asked, scenario: Scenario) -> Measurement:
        (measurement,) = measured([asked], scenario, self._seconds, self._fleet.directory)
        return measurement
