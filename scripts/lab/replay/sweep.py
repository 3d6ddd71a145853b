"""Runs of every policy on every trace, fleet, load and seed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from lab.common.processes import called_from
from lab.replay import virtual_time
from lab.replay.figures import Case, Run, Slo, figures
from lab.replay.fleet import TRANSFER_SECONDS_PER_TOKEN, Fleet, MakePolicy, Replay
from lab.replay.policies import CLAIRVOYANT, TODAY, peer_names, policies
from lab.replay.trace import Request, bursty, faster, spread
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Machine
from proxy.sim.hardware.work import Shape

AGENTS: Final = Machine(
    "agents",
    Cost(prompt=0.05, prompt_token=3.45e-5, attention=1.2e-10, step=0.015),
    Shape(max_num_seqs=1, max_num_batched_tokens=16_384, kv_tokens=1_000_000),
    Shape(max_num_seqs=1024, max_num_batched_tokens=8_192, kv_tokens=100_000_000),
)
"""Engines for sessions: decoders are never short of memory or slots, so the caches of prefillers decide."""

HARDWARE: Final[Mapping[str, Machine]] = {**MACHINES, AGENTS.name: AGENTS}
"""Machines by the names of the command line."""

_URL: Final = "redis://in-memory"
SHARED: Final[Mapping[str, Mapping[str, object] | None]] = {
    "nothing": None,
    "exchanges": {"url": _URL, "news_seconds": None},
    "news": {"url": _URL},
}


def fleets(options: argparse.Namespace) -> list[Fleet]:
    """Return the fleets of the command line."""
    machine = HARDWARE[options.machine]
    if options.prefill_kv_tokens is not None:
        machine = replace(machine, prefill=replace(machine.prefill, kv_tokens=options.prefill_kv_tokens))
    decode = HARDWARE[options.decode_machine]
    return [
        Fleet(
            prefillers,
            decoders,
            prefill_machine=machine,
            decode_machine=decode,
            slow=slow,
            speed=options.speed,
            link_seconds=TRANSFER_SECONDS_PER_TOKEN * options.kv_kilobytes / 70 * 25 / options.link_gbytes,
            slow_links=options.slow_links,
            slow_factor=options.slow_factor,
        )
        for prefillers, decoders, slow in options.fleets
    ]


def sweep(options: argparse.Namespace, traces: dict[str, list[Request]]) -> list[Run]:
    """Run everything, with a line on standard error for each run."""
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    plan = [
        (trace, fleet, name, load, seed)
        for trace in traces
        for fleet in fleets(options)
        for name in _names(options, fleet)
        for load in options.loads
        for seed in options.seeds
    ]
    runs = []
    for number, (trace, fleet, name, load, seed) in enumerate(plan, 1):
        requests = timed_arrivals(fleet, traces[trace], load, seed, options)
        case = Case(trace, fleet.name)
        progress = Progress(f"{number}/{len(plan)} {case}, {name}, load {load:g}, seed {seed}", len(requests))
        both = policies(fleet, options.decode_policy)[name]
        replay = in_virtual_time(fleet, both, requests, seed, options, progress)
        runs.append(Run(case, name, load, seed, figures(replay, fleet, slo)))
        progress.ended()
    return runs


def _names(options: argparse.Namespace, fleet: Fleet) -> Sequence[str]:
    if options.policies:
        return list(options.policies)
    if options.margins:
        return [options.margins, TODAY, *peer_names(), CLAIRVOYANT]
    return list(policies(fleet, options.decode_policy))


def arrivals(fleet: Fleet, requests: Sequence[Request], load: float, seed: int) -> list[Request]:
    """Return the requests of a trace, timed for this load of the fleet at its speed."""
    evened = spread(requests, random.Random(seed))
    native = sum(map(fleet.work_seconds, evened)) / evened[-1].at / fleet.capacity
    return faster(evened, fleet.speed * load / native)


def timed_arrivals(
    fleet: Fleet, requests: Sequence[Request], load: float, seed: int, options: argparse.Namespace
) -> list[Request]:
    """Return the requests as `arrivals` does, in bursts if the command line says so."""
    timed = arrivals(fleet, requests, load, seed)
    return timed if options.bursts is None else bursty(timed, options.bursts)


def in_virtual_time(
    fleet: Fleet,
    policy: tuple[MakePolicy, MakePolicy],
    requests: Sequence[Request],
    seed: int,
    options: argparse.Namespace,
    progress: Progress,
) -> Replay:
    """Run a replay in virtual time with the options of the command line."""

    def make() -> Replay:
        return Replay(fleet, *policy, seed=seed, on_end=progress.step, **replay_options(options))

    return replayed(make, requests)


def replay_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of Replay that the command line sets."""
    return {
        "workers": options.workers,
        "gateways": options.gateways,
        "replicas": SHARED[options.share],
        "kv_events": options.kv_events,
        "max_running_prefill": options.max_running_prefill,
        "max_running_decode": options.max_running_decode,
        "tells_cached": not options.untold,
        "learns_handoffs": not options.ignore_links,
    }


def replayed(make: Callable[[], Replay], requests: Sequence[Request]) -> Replay:
    """Run a replay in virtual time. `make` is called on the virtual loop."""
    made: list[Replay] = []

    async def course() -> None:
        made.append(make())
        await made[0].run(requests)

    virtual_time.run(course(), virtual_time.VirtualLoop())
    return made[0]


def write_json(options: argparse.Namespace, rows: Sequence[Any]) -> None:
    """Write dictionaries or dataclasses to the file of --json, if there is one."""
    if options.json is not None:
        (called_from() / options.json).write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))


class Progress:
    """A progress line on standard error, rewritten during the run on a terminal."""

    def __init__(self, name: str, requests: int) -> None:
        self._name = name
        self._requests = requests
        self._ended = 0
        self._began = time.monotonic()
        self._is_live = sys.stderr.isatty()

    def step(self) -> None:
        """Count a request that has ended."""
        self._ended += 1
        if self._is_live and self._ended % 200 == 0:
            print(f"\r{self._name}: {self._ended} of {self._requests}", end="", file=sys.stderr, flush=True)

    def ended(self) -> None:
        """Print the time since the beginning."""
        seconds = time.monotonic() - self._began
        start = "\r" if self._is_live else ""
        print(f"{start}{self._name}: {self._ended} requests in {seconds:.1f} s", file=sys.stderr, flush=True)
