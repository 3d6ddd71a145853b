"""Where the CPU time of the compiled gateway goes: `scripts/profile --compiled`. perf samples its stacks under load.

py-spy sees only what is not compiled. Here a sample counts for the innermost function of ours that is compiled, with
all that it calls in libraries, or else for the interpreter or the event loop; what of it was the kernel's stands apart.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from lab.bench.scenarios import SHORT_STREAM, scenarios
from lab.common.compiled import NotCompiled, compiled
from lab.common.proc import cpu_seconds
from lab.profile.asking import SAMPLED, ask, cost
from lab.profile.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.load import Result

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
    told = []
    for scenario in scenarios(seconds):
        if scenario.name in SAMPLED:
            result, used_seconds, stacks = _sampled(there, scenario.name, seconds)
            per, total_us = cost(result, used_seconds, scenario.name)
            told.append(f"{scenario.title}: {total_us:.1f} µs CPU per {per}, and of that in the kernel")
            told.append(_lines(list(samples(stacks)), total_us, count))
    return "\n".join(told)


def _sampled(there: Path, scenario: str, seconds: float) -> tuple[Result, float, str]:
    """One scenario: what came of it, the CPU seconds, and the stacks as perf writes them."""
    with tempfile.TemporaryDirectory() as name, serving(directory := Path(name), there=there) as (pid, port):
        ask(port, SHORT_STREAM, 0.5)  # a warm-up
        recorded = str(directory / "recorded")
        perf_of = (*_RECORD, "--output", recorded, "--pid", str(pid))
        with subprocess.Popen(perf_of, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as perf:
            before = cpu_seconds(pid)
            result = ask(port, scenario, seconds)
            used_seconds = cpu_seconds(pid) - before
            perf.send_signal(signal.SIGINT)
        script = ("perf", "script", "--input", recorded, "--fields", "ip,sym,dso")
        stacks = subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        return result, used_seconds, stacks.stdout


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
