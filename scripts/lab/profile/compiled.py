"""CPU time of the compiled gateway by function: `--compiled`. perf samples its stacks under load.

py-spy sees only interpreted code. Here a sample counts for the innermost compiled function, including library calls, or
else for the interpreter or the event loop. Kernel time is a separate column.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lab.common.compiled.build import NotCompiled, compiled
from lab.profile.sampling import SAMPLED, cost, sampled

# perf unwinds compiled stacks by debug information, so each sample copies the stack.
_RECORD: Final = ("perf", "record", "--freq=1500", "--event=cpu-clock", "--call-graph=dwarf,24000")
_FRAME: Final = re.compile(r"\s+[0-9a-f]+ (.*?)(?:\+0x[0-9a-f]+)? \((.*)\)")
_COMPILED: Final = "CPyDef_"
_INTERPRETER: Final = "_PyEval_EvalFrameDefault"
_LOOP: Final = ("uv_", "__pyx_")
_KERNEL: Final = "["


class Sample(NamedTuple):
    """A sample of the program's position."""

    owner: str
    """A compiled function, by module, class and name, or another owner."""
    is_kernel: bool


def table(seconds: float, count: int) -> str:
    """Return µs of CPU by function for each scenario, for at most `count` functions."""
    if shutil.which("perf") is None:
        sys.exit("--compiled: perf is not on the PATH (Debian: apt-get install linux-perf)")
    try:
        package = compiled()
    except NotCompiled as error:
        sys.exit(f"--compiled: {error}")
    lines: list[str] = []
    for name in SAMPLED:
        measurement, stacks = sampled(name, seconds, _record, _stacks, package)
        total_us, title = cost(measurement, name)
        lines += [f"{title}, and the kernel's part of it", _lines(list(samples(stacks)), total_us, count)]
    return "\n".join(lines)


def _record(pid: int, output: Path) -> Sequence[str]:
    return (*_RECORD, "--output", str(output), "--pid", str(pid))


def _stacks(output: Path) -> str:
    """Return the stacks that perf recorded, as text."""
    script = ("perf", "script", "--input", str(output), "--fields", "ip,sym,dso")
    return subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout


def samples(stacks: str) -> Iterator[Sample]:
    """Parse perf's output: a line per frame, the innermost first, and an empty line after each stack."""
    for stack in stacks.split("\n\n"):
        frames = [(found[1], found[2]) for line in stack.splitlines() if (found := _FRAME.fullmatch(line))]
        if frames:
            yield Sample(_owner([symbol for symbol, _ in frames]), frames[0][1].startswith(_KERNEL))


def _owner(symbols: list[str]) -> str:
    is_in_loop = False
    for symbol in symbols:
        if symbol.startswith(_COMPILED):
            return ".".join(filter(None, symbol.removeprefix(_COMPILED).split("___")))
        if symbol == _INTERPRETER:  # the loop itself is called by it, in the end
            return "the event loop" if is_in_loop else "interpreted code"
        is_in_loop = is_in_loop or symbol.startswith(_LOOP)
    return "the event loop"


def _lines(taken: list[Sample], total_us: float, count: int) -> str:
    """Return the lines of the table, the largest owner first."""
    owners = Counter(sample.owner for sample in taken)
    kernel = Counter(sample.owner for sample in taken if sample.is_kernel)
    us = total_us / max(1, len(taken))
    lines = [f"  {us * number:7.1f} {us * kernel[owner]:7.1f}  {owner}" for owner, number in owners.most_common(count)]
    return "\n".join([f"  {total_us:7.1f} {us * kernel.total():7.1f}  all", *lines, ""])
