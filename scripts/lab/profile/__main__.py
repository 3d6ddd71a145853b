"""CPU time of the gateway by part, from py-spy's samples of its stacks under load.

Each sample counts for the innermost frame that belongs to one of the parts below. Samples hit system calls more often
than their time alone explains, so parts that wait for the kernel appear too large.
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

# A frame is `function (file:line)`. It belongs to the first part whose pattern matches.
PARTS: Final = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("system calls: writing", r"(Connection\.send|StreamWriter\._writelines|ClientWriter\.write) \("),
        ("system calls: reading and waiting; the event loop", r"asyncio/runners"),
        ("client side: aiohttp", r"aiohttp/|proxy/listener"),
        ("access line and metrics", r"logging/|prometheus_client/|proxy/observe"),
        (
            "selection: leases, loads, health, admission",
            r"proxy/balancer|proxy/gateway/(admission|retry)",
        ),
        ("bodies: parsing, splicing, cost", r"proxy/wire/document|proxy/dialects/(call|requests|fanout)"),
        ("legs: connectors and connections to engines", r"proxy/connectors|proxy/upstream"),
        (
            "answer: events, transcript, client",
            r"proxy/wire|proxy/dialects|proxy/resume|proxy/gateway/(relay|delivery|client_writer|answers)",
        ),
        ("request: route, attempts, contexts", r"proxy/api|proxy/gateway|contextlib"),
        ("everything else", r"^$"),
    )
)


def main() -> None:
    """Measure the scenarios one after the other, and print a table for each."""
    parser = argparse.ArgumentParser(
        prog="scripts/profile", description="Show the distribution of the gateway's CPU time."
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each scenario (default: 10)")
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        metavar="COUNT",
        help="also list this number of functions with the most time in themselves",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="list the most expensive functions of the compiled gateway, by perf"
    )
    parser.add_argument("--choosing", action="store_true", help="measure only the selection of a prefiller")
    parser.add_argument(
        "--instructions", action="store_true", help="count machine instructions of a request, by Valgrind"
    )
    parser.add_argument(
        "--scraping", action="store_true", help="measure the duration of a scrape, and its effect on streams"
    )
    parser.add_argument(
        "--fleet-size", action="store_true", help="measure selection by the number of instances and workers"
    )
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
        total_us, title = cost(measurement, name)
        print(title)
        print(_table(stacks.splitlines(), total_us))
        if options.functions:
            print(functions(stacks.splitlines(), total_us, options.functions))


def _record(pid: int, output: Path) -> Sequence[str]:
    """Return the command that writes collapsed stacks until it is interrupted."""
    spy = str(PEERS.python.with_name("py-spy"))
    rate = str(_SAMPLES_PER_SECOND)
    return (spy, "record", "--pid", str(pid), "--format", "raw", "--rate", rate, "--output", str(output))


def _table(stacks: Iterable[str], total_us: float) -> str:
    """Return the parts in their order, each with its CPU time."""
    samples: Counter[str] = Counter()
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        samples[part_of(frames.split(";"))] += int(count)
    total = max(1, samples.total())
    lines = [f"  {total_us * samples[part] / total:7.1f}  {part}" for part, _ in PARTS]
    return "\n".join(lines) + "\n"


def functions(stacks: Iterable[str], total_us: float, count: int) -> str:
    """Return the functions of the gateway with the most CPU time, including C code that they call."""
    samples: Counter[str] = Counter()
    for line in stacks:
        frames, _, number = line.rpartition(" ")
        innermost = next((frame for frame in reversed(frames.split(";")) if "proxy/" in frame), "(outside the gateway)")
        samples[re.sub(r":\d+\)$", ")", innermost)] += int(number)
    total = max(1, samples.total())
    lines = [f"  {total_us * number / total:7.1f}  {name}" for name, number in samples.most_common(count)]
    return "".join(f"{line}\n" for line in lines)


def part_of(frames: list[str]) -> str:
    """Return the part of the innermost frame that has one. Standard library frames belong to their callers."""
    return next(part for frame in (*reversed(frames), "") for part, pattern in PARTS if pattern.search(frame))


if __name__ == "__main__":
    main()
