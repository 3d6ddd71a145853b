"""Load generators as child processes: one, or several at the same time, each against a program of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.bench.load import Result
from lab.common.proc import resident_bytes
from lab.common.processes import clean_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Program:
    """Something that listens; without a process it is an engine itself. `directly`: it is asked as a decoder is."""

    name: str
    port: int
    pid: int | None
    directly: bool = False


def ask(
    programs: Sequence[Program],
    scenario: str,
    seconds: float,
    patience_seconds: float,
    directory: Path,
    pinned: Sequence[str] = (),
) -> list[tuple[Result, float]]:
    """Run a load generator against each program, all at once: what came of it, and the most bytes of memory that the
    program had meanwhile. Exits when one does not end in time. `pinned`: words before each generator's command.
    """
    outputs = [directory / f"result-{number}.json" for number in range(len(programs))]
    at_most = [0.0] * len(programs)
    deadline = time.monotonic() + patience_seconds
    with ExitStack() as stack:
        processes = []
        for program, output in zip(programs, outputs, strict=True):
            command = [*pinned, sys.executable, "-m", "lab.bench.load", str(program.port), scenario, str(seconds)]
            if program.directly:
                command.append("directly")
            file = stack.enter_context(output.open("wb"))
            processes.append(stack.enter_context(subprocess.Popen(command, env=clean_environment(), stdout=file)))
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                sys.exit(f"a load generator did not end within {patience_seconds:g} s")
            for number, program in enumerate(programs):
                if program.pid is not None:
                    at_most[number] = max(at_most[number], resident_bytes(program.pid))
            time.sleep(_LOOK_SECONDS)
    if any(process.returncode for process in processes):
        sys.exit("a load generator failed")
    return [(Result.from_json(output.read_text()), most) for output, most in zip(outputs, at_most, strict=True)]
