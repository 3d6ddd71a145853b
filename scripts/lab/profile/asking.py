"""A load of the bench's, from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from lab.bench.load import Result
from lab.bench.scenarios import PACED, SHORT_ANSWER, SHORT_STREAM
from lab.common.processes import clean_environment

SAMPLED: Final = (SHORT_STREAM, SHORT_ANSWER, PACED)
"""The scenarios in which it is looked at where time goes."""


def ask(port: int, scenario: str, seconds: float) -> Result:
    """What came of one scenario."""
    command = [sys.executable, "-m", "lab.bench.load", str(port), scenario, str(seconds)]
    done = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, check=True)
    return Result.from_json(done.stdout.decode())


def cost(result: Result, cpu_seconds: float, scenario: str) -> tuple[str, float]:
    """What is counted in one of SAMPLED, and the µs of CPU that each takes."""
    per, count = ("token", result.tokens) if scenario == PACED else ("request", result.completed)
    return per, 1e6 * cpu_seconds / max(1, count)
