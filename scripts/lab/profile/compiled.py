"""Where the CPU time of the compiled gateway goes: `scripts/profile --compiled`. perf samples its stacks under load.

py-spy sees only what is not compiled. Here a sample counts for the innermost function of ours that is compiled, with
all that it calls in libraries, or else for the interpreter or the event loop; what of it was the kernel's stands apart.
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

from lab.common.compiled import NotCompiled, compiled
from lab.profile.sampling import SAMPLED, cost, sampled

# The stacks of compiled code are found by what debuggers know, so each sample takes a copy of the stack.
_RECORD: Final = ("perf", "record", "--freq=1500", "--event=cpu-clock", "--call-graph=dwarf,24000")
_FRAME: Final = re.compile(r"\s+[0-9a-f]+ (.*?)(?:\+0x[0-9a-f]+)? \((.*)\)")
_COMPILED: Final = "CPyDef_"
_INTERPRETER: Final = "_PyEval_EvalFrameDefault"
_LOOP: Final = ("uv_", "__pyx_")
_KERNEL: Final = "["


class Sample(NamedTuple):
    """One look at where the program is."""

    owner: str
    """A compiled function, by module, class and name; or what else it is."""
    is_kernel: bool


def table(seconds: float, count: int) -> str:
    """What takes how many µs of CPU, for each scenario: so many functions at most."""
    if shutil.which("perf") is None:
        sys.exit("--compiled: there is no perf on the PATH (Debian: apt-get install linux-perf)")
    try:
        there = compiled()
    except NotCompiled as error:
        sys.exit(f"--compiled: {error}")
    told: list[str] = []
    for name in SAMPLED:
        measurement, stacks = sampled(name, seconds, _record, _stacks, there)
        total_us, what = cost(measurement, name)
        told += [f"{what}, and of that in the kernel", _lines(list(samples(stacks)), total_us, count)]
    return "\n".join(told)


def _record(pid: int, output: Path) -> Sequence[str]:
    return (*_RECORD, "--output", str(output), "--pid", str(pid))


def _stacks(output: Path) -> str:
    """The stacks as perf writes them."""
    script = ("perf", "script", "--input", str(output), "--fields", "ip,sym,dso")
    return subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout


def samples(stacks: str) -> Iterator[Sample]:
    """What perf has written: a line for each frame, the innermost first, and an empty line behind each stack."""
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
            return "the event loop" if is_in_loop else "what is not compiled"
        is_in_loop = is_in_loop or symbol.startswith(_LOOP)
    return "the event loop"


def _lines(taken: list[Sample], total_us: float, count: int) -> str:
    """The largest first."""
    owners = Counter(sample.owner for sample in taken)
    kernel = Counter(sample.owner for sample in taken if sample.is_kernel)
    us = total_us / max(1, len(taken))
    lines = [f"  {us * number:7.1f} {us * kernel[owner]:7.1f}  {owner}" for owner, number in owners.most_common(count)]
    return "\n".join([f"  {total_us:7.1f} {us * kernel.total():7.1f}  all", *lines, ""])
