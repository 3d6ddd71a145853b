"""Machine instructions per request: `--instructions`, by Valgrind's callgrind.

Instruction counts hardly vary with load, so they show changes of one percent. The gateway runs about fifty times slower
under callgrind. Instructions without requests are counted for the same time, and subtracted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lab.bench.scenarios import SHORT_ANSWER, SHORT_STREAM
from lab.profile.sampling import ask, serving

_SCENARIOS: Final = (SHORT_STREAM, SHORT_ANSWER)
_WARM_UP_SECONDS: Final = 4.0
# The total of a dump.
_totals: Final = re.compile(r"^totals: (\d+)$", re.MULTILINE)


def table(seconds: float) -> str:
    """Return thousands of instructions per request, for each scenario."""
    if shutil.which("valgrind") is None:
        sys.exit("--instructions: valgrind is not on the PATH (Debian: apt-get install valgrind)")
    lines = [f"{scenario}: {_per_request(scenario, seconds) / 1000:,.0f} k instructions" for scenario in _SCENARIOS]
    return "\n".join(lines)


def _per_request(scenario: str, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as name:
        counted = Path(name) / "counted"
        valgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counted}")
        with serving(*valgrind) as (fleet, program):
            _control("--instr=on", program.pid)
            ask(fleet, program, scenario, _WARM_UP_SECONDS)
            _control("--zero", program.pid)
            began = time.monotonic()
            result = ask(fleet, program, scenario, seconds).result
            elapsed_seconds = time.monotonic() - began
            _control("--dump", program.pid)
            time.sleep(elapsed_seconds)
            _control("--dump", program.pid)
        busy, idle = (instructions(counted.with_suffix(f".{part}").read_text()) for part in (1, 2))
        if result.errors or not result.completed:
            sys.exit(f"some requests failed: {result.errors}")
        return (busy - idle) / result.completed


def _control(what: str, pid: int) -> None:
    subprocess.run(
        ("callgrind_control", what, str(pid)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )


def instructions(dumped: str) -> int:
    """Return the instructions of a callgrind dump. Raises ValueError without a total."""
    found: Sequence[str] = _totals.findall(dumped)
    if not found:
        raise ValueError("the callgrind dump has no totals")
    return int(found[-1])
