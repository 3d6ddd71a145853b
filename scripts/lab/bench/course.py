"""The course of a run: engines and programs are started when they are needed, and measured."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

from lab.bench.figures import Measurement
from lab.bench.load import PATIENCE_SECONDS, Result
from lab.bench.loads import Program, ask
from lab.bench.rivals import DIRECT
from lab.bench.scenarios import SHORT_STREAM, Scenario
from lab.common.proc import cpu_seconds, resident_bytes
from lab.common.processes import free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab.common.peers import Peer

_ENGINES_PER_ROLE = 2
_WARM_UP_SECONDS = 0.5


class Course:
    """Engines, and programs in front of them. Everything that it starts ends with `stack`."""

    def __init__(self, stack: ExitStack, directory: Path, seconds: float) -> None:
        self._stack = stack
        self._directory = directory
        self._seconds = seconds
        self._numbers = count()
        self._kept: dict[tuple[str, bool], Program] = {}
        ports = free_ports(2 * _ENGINES_PER_ROLE)
        self._prefill, self._decode = ports[:_ENGINES_PER_ROLE], ports[_ENGINES_PER_ROLE:]
        words = (",".join(map(str, self._prefill)), ",".join(map(str, self._decode)))
        engines = [sys.executable, "-m", "lab.bench.engines", *words]
        stack.enter_context(running("the engines", engines, ports[-1], directory / "engines.log"))

    def measure(self, peer: Peer, scenario: Scenario) -> Measurement:
        """One measurement of one program."""
        if scenario.afresh:
            with self._running(peer, saturating=False) as program:
                return self._measure(program, scenario)
        return self._measure(self._program(peer, saturating=scenario.saturates and bool(peer.saturating)), scenario)

    def measure_directly(self, scenario: Scenario) -> Measurement:
        """One measurement of an engine, with nothing between."""
        return self._measure(Program(DIRECT, self._decode[0], None, directly=True), scenario)

    def _program(self, peer: Peer, *, saturating: bool) -> Program:
        """Started when it is first needed."""
        key = (peer.name, saturating)
        if key not in self._kept:
            self._kept[key] = self._stack.enter_context(self._running(peer, saturating=saturating))
        return self._kept[key]

    @contextmanager
    def _running(self, peer: Peer, *, saturating: bool) -> Iterator[Program]:
        """A program that has answered some requests."""
        (port,) = free_ports(1)
        command = peer.command(port, self._prefill, self._decode, saturating=saturating)
        with running(peer.name, command, port, self._directory / f"{next(self._numbers)}.log") as pid:
            wait_until_ready(peer.name, port, peer.ready_path)
            program = Program(peer.name, port, pid)
            self._ask(program, SHORT_STREAM, _WARM_UP_SECONDS, PATIENCE_SECONDS)
            yield program

    def _measure(self, program: Program, scenario: Scenario) -> Measurement:
        patience = scenario.seconds + 2 * PATIENCE_SECONDS
        if program.pid is None:
            result, _ = self._ask(program, scenario.name, self._seconds, patience)
            return Measurement(result)
        cpu_before, bytes_before = cpu_seconds(program.pid), resident_bytes(program.pid)
        result, bytes_at_most = self._ask(program, scenario.name, self._seconds, patience)
        return Measurement(result, cpu_seconds(program.pid) - cpu_before, bytes_before, bytes_at_most)

    def _ask(self, program: Program, scenario: str, seconds: float, patience: float) -> tuple[Result, float]:
        """Run the load generator once; what came of it, and the most memory that the program had meanwhile."""
        ((result, bytes_at_most),) = ask([program], scenario, seconds, patience, self._directory)
        return result, bytes_at_most
