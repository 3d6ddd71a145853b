"""Replays over real sockets: programs in front of engines that answer at the times of a hardware model.

Engines and clients run in this process, and each program in processes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

from lab.common import peers
from lab.common.fleet import Fleet as Deployment
from lab.common.fleet import figure, store, store_url, wait_for_peers
from lab.common.load import ask
from lab.common.output import aligned
from lab.common.peers import Peer
from lab.common.proc import cpu_seconds
from lab.common.processes import HOST, Program, quiet_ports
from lab.replay.engines import Engine
from lab.replay.figures import Case, Run, Slo, figures
from lab.replay.fleet import Course, Fleet
from lab.replay.policies import policies
from lab.replay.socket_engines import Engines, request_bytes
from lab.replay.sweep import Progress, fleets, in_virtual_time, timed_arrivals
from lab.replay.trace import Request
from proxy.common.backend import Backend, Role

# Time for an answer. A later one counts as not served.
_PATIENCE_SECONDS: Final = 120.0
_LEAD_SECONDS: Final = 0.5
_ROUTERS_POLICIES: Final = ("cache_aware", "round_robin")
# A run is meaningful only if timers of this process are at most this late, in machine time.
_MAX_LATE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Contender:
    """A program and its policy."""

    name: str
    peer: Peer
    policy: str | None = None
    """pdproxy's prefill policy, or None for another program."""
    copies: int = 1
    """Number of processes. Each request goes to a random one."""
    shares: str = "nothing"
    """Kind of state that the copies share: a value of scripts/replay --share."""


def programs(options: argparse.Namespace) -> Iterator[Contender]:
    """Yield pdproxy with each of the chosen policies, and all other programs that are available."""
    ours = peers.ours()
    for policy in options.policies:
        settings = {
            "BALANCE__PREFILL_POLICY": policy,
            "BALANCE__DECODE_POLICY": options.decode_policy,
            "ADMISSION__MAX_RUNNING_PREFILL": options.max_running_prefill,
            "ADMISSION__MAX_RUNNING_DECODE": options.max_running_decode,
        }
        given = [f"PROXY_{name}={value}" for name, value in settings.items() if value is not None]
        copies, shares = options.gateways, options.share
        name = f"{peers.OURS}, {policy}" + (f", {copies} sharing {shares}" if copies > 1 else "")
        yield Contender(name, replace(ours, words=("env", *given, *ours.words)), policy, copies, shares)
    if options.gateways > 1:
        return  # copies are compared with a single one
    for policy in _ROUTERS_POLICIES:
        for peer in peers.routers(policy):
            yield Contender(f"{peer.name}, {policy}", peer)
    if options.reference is not None:
        yield Contender("vllm-ascend's example", peers.reference(options.reference))


class SocketReplay:
    """One run. Create it on the loop on which it runs."""

    def __init__(
        self, fleet: Fleet, contender: Contender, requests: Sequence[Request], on_end: Callable[[], None]
    ) -> None:
        self.courses = [Course(request) for request in requests]
        self.engines: dict[Backend, Engine] = {}
        self.late_seconds: list[float] = []
        """Delay of each request behind its time, because this process was busy."""
        self.cpu_seconds = 0.0
        """CPU time of all copies of the program."""
        self.news_bytes = 0.0
        """Bytes that the copies have sent each other."""
        self._contender = contender
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._clocks_apart = perf_counter() - self._loop.time()
        self._gateways: Sequence[Program] = ()
        self._rng = random.Random(len(requests))
        number = fleet.prefillers + fleet.decoders
        ports = quiet_ports(number)
        self._ports = {Role.PREFILL: ports[: fleet.prefillers], Role.DECODE: ports[fleet.prefillers :]}
        slot = 0
        for role, of_role in self._ports.items():
            for port, engine in zip(of_role, fleet.engines(role), strict=True):
                self.engines[Backend(role, HOST, port, slot)] = engine
                slot += 1

    async def run(self) -> None:
        """Run all requests at their times to their ends. Exits if the program does not start."""
        async with Engines(self.engines, self.courses):
            with Deployment() as gateways:
                gateways.prefill, gateways.decode = self._ports[Role.PREFILL], self._ports[Role.DECODE]
                # Starting and stopping block until processes answer, and these send requests to the engines meanwhile.
                try:
                    self._gateways = await asyncio.to_thread(self._start, gateways)
                    before = sum(cpu_seconds(gateway.pid) for gateway in self._gateways)
                    await self._ask_all()
                    self.cpu_seconds = sum(cpu_seconds(gateway.pid) for gateway in self._gateways) - before
                    if self._contender.shares == "news":
                        self.news_bytes = await asyncio.to_thread(self._news_bytes)
                finally:
                    await asyncio.to_thread(gateways.close)

    def _start(self, gateways: Deployment) -> Sequence[Program]:
        """Start the copies of the program."""
        contender, settings = self._contender, dict[str, str]()
        if contender.shares != "nothing":
            (port,) = quiet_ports(1)
            gateways.keep(store(port, gateways.directory))
            settings["PROXY_REPLICAS__URL"] = store_url(port)
        if contender.shares == "exchanges":
            settings["PROXY_REPLICAS__NEWS_SECONDS"] = "null"
        copies = [gateways.program(contender.peer) for _ in range(contender.copies)]
        for copy in copies:
            copy.environment = settings
            gateways.keep(copy)
        if settings:
            wait_for_peers(copies, contender.copies - 1)
        return copies

    def _news_bytes(self) -> float:
        # The metric counts sent and received bytes, and each copy's news reaches all others.
        transferred = sum(figure(gateway, "replicas_news_bytes_total") for gateway in self._gateways)
        return transferred / self._contender.copies

    async def _ask_all(self) -> None:
        began = self._loop.time() + _LEAD_SECONDS
        async with asyncio.TaskGroup() as group:
            for number, course in enumerate(self.courses):
                await asyncio.sleep(began + course.request.at - self._loop.time())
                self.late_seconds.append(max(0.0, self._loop.time() - began - course.request.at))
                group.create_task(self._ask(number, course, began))

    async def _ask(self, number: int, course: Course, began: float) -> None:
        port = self._rng.choice(self._gateways).port
        request = request_bytes(course.request, number, port)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await ask(port, request)
        except OSError:
            pass  # the course has no end, which means not served
        else:
            if not answer.problem() and answer.first_token_at is not None:
                lead = began + self._clocks_apart
                course.first_token_at, course.ended_at = answer.first_token_at - lead, answer.ended_at - lead
        self._on_end()


def over_sockets(
    fleet: Fleet, program: Contender, requests: Sequence[Request], on_end: Callable[[], None]
) -> SocketReplay:
    """Run a replay over sockets, and return it."""
    made: list[SocketReplay] = []

    async def course() -> None:
        made.append(SocketReplay(fleet, program, requests, on_end))
        await made[0].run()

    asyncio.run(course())  # uvloop's clock has milliseconds only, which are long where engines are fast
    return made[0]


def sweep_sockets(options: argparse.Namespace, traces: dict[str, list[Request]]) -> tuple[list[Run], str]:
    """Return all runs, and a note on how well this machine kept up."""
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    known = list(programs(options))
    runs: list[Run] = []
    rows: list[Sequence[str]] = [
        ("program", "trace, fleet", "load", "CPU per request", "shared per request", "late, mean", "late, p99")
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
    note = (
        f"{aligned(rows)}\n\nLate: delay of requests behind their times, converted to speed 1. The engines' work is as"
        f" late. If the mean is above {_MAX_LATE_SECONDS:g} s, this machine does not keep up: use fewer engines or a"
        " lower --speed."
    )
    return sorted(runs, key=lambda run: (str(run.case), run.load)), note


def _one(
    case: Case, fleet: Fleet, program: Contender, requests: Sequence[Request], load: float, seed: int
) -> SocketReplay:
    progress = Progress(f"{case}, {program.name}, load {load:g}, seed {seed}", len(requests))
    replay = over_sockets(fleet, program, requests, progress.step)
    progress.ended()
    return replay


def _strain(replay: SocketReplay, fleet: Fleet) -> Sequence[str]:
    late = sorted(fleet.speed * each for each in replay.late_seconds)
    return (
        f"{1000 * replay.cpu_seconds / len(replay.courses):.2f} ms",
        f"{replay.news_bytes / len(replay.courses):.0f} B",
        f"{sum(late) / len(late):.3f} s",
        f"{late[int(0.99 * len(late))]:.3f} s",
    )
