"""Where the gateway's CPU time goes: `python -m lab.bench.profile`. py-spy samples its stacks under load.

Each sample counts for the innermost frame that belongs to one of the parts below. A system call is more likely to be
met by a sample than its time alone would make it, so the parts that wait for the kernel come out rather too large.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from lab.common.peers import PEERS
from lab.profile import choosing, compiled, instructions, scraping
from lab.profile.sampling import SAMPLED, cost, sampled

_SAMPLES_PER_SECOND: Final = 500

# A frame is `function (file:line)`. The first part whose pattern is found in it is the frame's.
PARTS: Final = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("system calls: writing", r"(Connection\.send|StreamWriter\._writelines|ClientWriter\.write) \("),
        ("system calls: reading and waiting; the event loop", r"asyncio/runners"),
        ("the client's side: aiohttp", r"aiohttp/|proxy/listener"),
        ("access line and metrics", r"logging/|prometheus_client/|proxy/observe"),
        (
            "whom to ask: leases, loads, health, admission",
            r"proxy/balancer|proxy/gateway/(admission|body_buffers|retry_budget)",
        ),
        ("bodies: parsing, splicing, cost", r"proxy/wire/document|proxy/dialects/(call|requests|fanout)"),
        ("the legs: connector and connections to engines", r"proxy/connectors|proxy/upstream"),
        (
            "the answer: events, transcript, client",
            r"proxy/wire|proxy/dialects|proxy/resume|proxy/gateway/(relay|delivery|chunk_writer|token_shapes|client_writer|answers)",
        ),
        ("the course of a request: route, attempts, contexts", r"proxy/api|proxy/gateway|contextlib"),
        ("everything else", r"^$"),
    )
)


def main() -> None:
    """Measure the scenarios one after the other, and print a table for each."""
    parser = argparse.ArgumentParser(prog="scripts/profile", description="Where the gateway's CPU time goes.")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each scenario (default: 10)")
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        metavar="COUNT",
        help="also so many functions that take most of it themselves",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="the compiled gateway, by perf's samples: which functions take most"
    )
    parser.add_argument("--choosing", action="store_true", help="what choosing a prefiller costs, and nothing else")
    parser.add_argument("--instructions", action="store_true", help="machine instructions of a request, by valgrind")
    parser.add_argument("--scraping", action="store_true", help="what a scrape takes, and what streams notice of it")
    parser.add_argument("--fleet-size", action="store_true", help="the same by the number of instances and of workers")
    options = parser.parse_args()
    if options.compiled:
        print(compiled.table(options.seconds, options.functions or 30))
        return
    if options.fleet_size:
        print(choosing.growth(("least_tokens", "least_load")))
        return
    if options.choosing:
        print(choosing.table(("least_tokens", "least_load")))
        return
    if options.instructions:
        print(instructions.table(options.seconds))
        return
    if options.scraping:
        print(scraping.table(options.seconds))
        return
    seconds = options.seconds
    if not PEERS.provide(("py-spy",)):
        sys.exit("py-spy cannot be installed here")
    for name in SAMPLED:
        measurement, stacks = sampled(name, seconds, _record, lambda output: output.read_text())
        total_us, what = cost(measurement, name)
        print(what)
        print(_table(stacks.splitlines(), total_us))
        if options.functions:
            print(functions(stacks.splitlines(), total_us, options.functions))


def _record(pid: int, output: Path) -> Sequence[str]:
    """The command that writes collapsed stacks until it is interrupted."""
    spy = str(PEERS.python.with_name("py-spy"))
    rate = str(_SAMPLES_PER_SECOND)
    return (spy, "record", "--pid", str(pid), "--format", "raw", "--rate", rate, "--output", str(output))


def _table(stacks: Iterable[str], total_us: float) -> str:
    """The parts in their order, each with its share of the time."""
    samples: Counter[str] = Counter()
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        samples[part_of(frames.split(";"))] += int(count)
    total = max(1, samples.total())
    lines = [f"  {total_us * samples[part] / total:7.1f}  {part}" for part, _ in PARTS]
    return "\n".join(lines) + "\n"


def functions(stacks: Iterable[str], total_us: float, count: int) -> str:
    """The gateway's functions that take most of the time themselves, or in C that they call, a line each."""
    samples: Counter[str] = Counter()
    for line in stacks:
        frames, _, number = line.rpartition(" ")
        innermost = next((frame for frame in reversed(frames.split(";")) if "proxy/" in frame), "none of the gateway's")
        samples[re.sub(r":\d+\)$", ")", innermost)] += int(number)
    total = max(1, samples.total())
    lines = [f"  {total_us * number / total:7.1f}  {name}" for name, number in samples.most_common(count)]
    return "".join(f"{line}\n" for line in lines)


def part_of(frames: list[str]) -> str:
    """The part of the innermost frame that belongs to one; frames of the standard library belong to their callers."""
    return next(part for frame in (*reversed(frames), "") for part, pattern in PARTS if pattern.search(frame))


if __name__ == "__main__":
    main()
