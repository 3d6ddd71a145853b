"""A load of the bench's, from a process of its own."""

from __future__ import annotations

import subprocess
import sys

from lab.bench.load import Result
from lab.common.processes import clean_environment


def ask(port: int, scenario: str, seconds: float) -> Result:
    """What came of one scenario."""
    command = [sys.executable, "-m", "lab.bench.load", str(port), scenario, str(seconds)]
    done = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, check=True)
    return Result.from_json(done.stdout.decode())
