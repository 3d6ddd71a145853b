"""Every program on every trace, fleet, load and seed, one after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from lab.common.output import aligned
from lab.replay.figures import Case, Run, Slo, figures
from lab.replay.policies import policies
from lab.replay.sockets.course import over_sockets
from lab.replay.sockets.programs import programs
from lab.replay.sweep import Progress, fleets, in_virtual_time, timed_arrivals

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from lab.replay.fleet import Fleet
    from lab.replay.sockets.course import SocketReplay
    from lab.replay.sockets.programs import Program
    from lab.replay.trace import Request

# Timers of this process may be late by so much of the time of the machines, or the run says little.
_MOST_LATE_SECONDS: Final = 0.2


def sweep_sockets(options: argparse.Namespace, traces: dict[str, list[Request]]) -> tuple[list[Run], str]:
    """All runs, and in words what the machine made of them."""
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    known = list(programs(options))
    runs: list[Run] = []
    rows: list[Sequence[str]] = [
        ("program", "trace, fleet", "load", "CPU a request", "told a request", "late, mean", "late, p99")
    ]
    for trace, requests in traces.items():
        for fleet in fleets(options):
            for program in known:
                for load in options.loads:
                    for seed in options.seeds:
                        case = Case(trace, fleet.name)
                        timed = timed_arrivals(fleet, requests, load, seed, options)
                        replay = _one(case, fleet, program, timed, load, seed)
                        runs.append(Run(case, program.name, load, seed, figures(replay, fleet, slo)))
                        rows.append((program.name, str(case), f"{load:g}", *_strain(replay, fleet)))
                        if program.policy is not None:
                            both = policies(fleet, options.decode_policy)[program.policy]
                            name = f"{program.name}, virtual time"
                            progress = Progress(f"{case}, {name}, load {load:g}, seed {seed}", len(timed))
                            virtual = in_virtual_time(fleet, both, timed, seed, options, progress)
                            runs.append(Run(case, name, load, seed, figures(virtual, fleet, slo)))
    told = (
        f"{aligned(rows)}\n\nLate is by how much requests were sent after their time, told as at speed 1, and so is the"
        f" work of engines. Where its mean is above {_MOST_LATE_SECONDS:g} s this machine does not keep up; fewer"
        " engines or a lower --speed tell more then."
    )
    return sorted(runs, key=lambda run: (str(run.case), run.load)), told


def _one(
    case: Case, fleet: Fleet, program: Program, requests: Sequence[Request], load: float, seed: int
) -> SocketReplay:
    began = time.monotonic()
    progress = Progress(f"{case}, {program.name}, load {load:g}, seed {seed}", len(requests))
    replay = over_sockets(fleet, program, requests, progress.step)
    progress.ended(time.monotonic() - began)
    return replay


def _strain(replay: SocketReplay, fleet: Fleet) -> Sequence[str]:
    late = sorted(fleet.speed * each for each in replay.late_seconds)
    return (
        f"{1000 * replay.cpu_seconds / len(replay.courses):.2f} ms",
        f"{replay.news_bytes / len(replay.courses):.0f} B",
        f"{sum(late) / len(late):.3f} s",
        f"{late[int(0.99 * len(late))]:.3f} s",
    )
