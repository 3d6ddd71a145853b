"""Replays loads that change with elastic instances, and compares them with every fixed split and a clairvoyant."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from lab.common.output import aligned
from lab.replay.drawn import DRAWN, drawn
from lab.replay.figures import Slo, average
from lab.replay.fleet import Course, Fleet, Replay
from lab.replay.policies import OURS, policies
from lab.replay.sweep import Progress, fleets, replay_options, replayed, write_json
from lab.replay.trace import Request
from lab.replay.worlds import SHAPES
from proxy.balancer.roster import RoleMove
from proxy.balancer.split import MoveAdvice, MovePlanner, take_fleet_sample
from proxy.common.backend import Role
from proxy.settings.fleet import Elastic

_SAMPLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a day."""

    name: str
    begins_at: float
    ends_at: float


@dataclass(slots=True)
class Row:
    """The result of one run."""

    day: str
    policy: str
    """`elastic`, `clairvoyant`, or a fixed split."""
    seed: int
    goodput: float
    """Mean over the phases of the share of good answers."""
    moves: int
    phases: dict[str, float] = field(default_factory=dict)
    """Share of good answers of each phase."""


class ElasticReplay(Replay):
    """A replay whose controller moves instances. All of them are elastic."""

    def __init__(self, fleet: Fleet, *policy: Any, options: Elastic, until: float, **more: Any) -> None:
        """Create engines and the gateway. `until`: end of the day in seconds. `options`: of the controller."""
        super().__init__(fleet, *policy, **more)
        self.moves: list[tuple[float, MoveAdvice]] = []
        self._fleet = fleet
        self._options = options
        self._until = until
        self._planner = MovePlanner(lambda: options)
        self._gateway = self._gateways[0]

    async def run(self, requests: Sequence[Request]) -> None:
        """See Replay."""
        controller = asyncio.create_task(self._control())
        await super().run(requests)
        await controller

    async def _control(self) -> None:
        while self._loop.time() < self._until:
            await asyncio.sleep(_SAMPLE_SECONDS)
            waiting = sum(worker.admission.waiting_count for worker in self.workers)
            sample = take_fleet_sample(
                self.pools,
                self._gateway.scoreboard,
                waiting,
                self._loop.time(),
                token_seconds=self._options.token_seconds,
            )
            advice = self._planner.add_sample(sample)
            if advice is not None:
                self._planner.record_move(advice)
                self.moves.append((self._loop.time(), advice))
                await self._move(advice.new_role)

    async def _move(self, to: Role) -> None:
        """Move the instance with the least load to a role, as the product does."""
        board, roster = self._gateway.scoreboard, self._gateway.roster
        pool = self.pools.pool_of(Role.DECODE if to is Role.PREFILL else Role.PREFILL)
        backend = min(pool.eligible_backends(), key=lambda each: board.running_requests(each.slot))
        now, evacuate_after = self._loop.time(), self._options.evacuate_after_seconds
        roster.begin_move(backend, RoleMove(to, now + self._options.drain_seconds), None)
        while board.open_leases(backend.slot):
            await asyncio.sleep(_SAMPLE_SECONDS)
            if evacuate_after is not None and self._loop.time() >= now + evacuate_after:
                self.engines[backend].evacuate()
        moved = roster.finish_move(backend)
        assert moved is not None
        del self.engines[backend]
        self.engines[moved] = next(self._fleet.engines(to))
        self.pools.pool_of(to).all_backends()
        self._gateway.health.on_probe(moved, True, "moved")


def day(
    names: Sequence[str], fleet: Fleet, options: argparse.Namespace, seed: int
) -> tuple[list[Phase], list[Request]]:
    """Return the phases and the requests of a day.

    The rate of a phase fills its best split to `--loads`, by the work of its requests on this hardware.
    """
    rng = random.Random(seed)
    instances = fleet.prefillers + fleet.decoders
    phases, requests, began, block = [], list[Request](), 0.0, 0
    for number, name in enumerate(names):
        pattern = drawn(name, 400)
        work = average([sum(_work(fleet, each)) for each in pattern])
        rate = options.loads[0] * instances / work
        count = max(20, round(rate * options.phase_seconds))
        ends = began + options.phase_seconds
        phases.append(Phase(f"{number + 1} {name}", began, ends))
        at = began
        for each in drawn(name, count):
            at += rng.expovariate(rate)
            if at >= ends:
                break
            requests.append(replace(each, at=at, blocks=tuple(block + one for one in each.blocks)))
        block += 1 + max(max(each.blocks) for each in drawn(name, count))
        began = ends
    return phases, requests


def _work(fleet: Fleet, request: Request) -> tuple[float, float]:
    """Return the seconds that a request takes of a prefiller and of a decoder at its best."""
    decode = fleet.decode_machine
    tokens = request.input_tokens + request.output_tokens // 2
    most = max(1, min(decode.decode.max_num_seqs, decode.decode.kv_tokens // tokens))
    return fleet.work_seconds(request), request.output_tokens / decode.cost.knee_rate(most, tokens)


def goodput(courses: Sequence[Course], phase: Phase, fleet: Fleet, slo: Slo) -> float:
    """Return the share of the requests of a phase with good answers; see Figures."""
    mine = [course for course in courses if phase.begins_at <= course.request.at < phase.ends_at]
    good = 0
    for course in mine:
        wait, pace = course.first_token_seconds, course.token_seconds
        is_in_time = wait is not None and wait <= slo.base_seconds + slo.factor * fleet.work_seconds(course.request)
        good += is_in_time and (pace or 0.0) <= slo.token_seconds
    return good / max(1, len(mine))


class Days:
    """All runs of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
        self.rows: list[Row] = []
        self.log: list[str] = []

    def run(self, names: Sequence[str], seed: int) -> None:
        """Run one day with the controller and with every fixed split."""
        options = self._options
        fleet = fleets(options)[0]
        instances = fleet.prefillers + fleet.decoders
        phases, requests = day(names, fleet, options, seed)
        title = " ".join(dict.fromkeys(names)) if len(set(names)) > 1 else f"steady {names[0]}"
        fixed = list[Row]()
        alone: dict[str, dict[int, float]] = {phase.name: {} for phase in phases}
        for prefillers in options.fixed_splits or range(1, instances):
            other = replace(fleet, prefillers=prefillers, decoders=instances - prefillers)
            fixed.append(self._row(title, other.name, seed, phases, other, self._replay(other, requests, seed)))
            for phase in phases if len(phases) > 1 else ():
                mine = [each for each in requests if phase.begins_at <= each.at < phase.ends_at]
                courses = self._replay(other, mine, seed).courses
                alone[phase.name][prefillers] = goodput(courses, phase, other, self._slo)
            if len(phases) == 1:
                alone[phases[0].name][prefillers] = fixed[-1].goodput
        elastic = Elastic(**dict(pair.split("=") for pair in options.elastic_options))
        until = phases[-1].ends_at
        run = self._replay(fleet, requests, seed, elastic, until)
        assert isinstance(run, ElasticReplay)
        row = self._row(title, "elastic", seed, phases, fleet, run)
        row.moves = len(run.moves)
        path = [max(each.items(), key=lambda item: item[1])[0] for each in alone.values()]
        steps = sum(abs(after - before) for before, after in pairwise([fleet.prefillers, *path]))
        shares = {name: max(each.values()) for name, each in alone.items()}
        knowing = Row(title, "clairvoyant", seed, average(shares.values()), steps, shares)
        self.rows += [*fixed, row, knowing]
        self.log += [f"{at:7.0f} s: {advice}" for at, advice in run.moves]

    def _replay(
        self, fleet: Fleet, requests: Sequence[Request], seed: int, elastic: Elastic | None = None, until: float = 0.0
    ) -> Replay:
        options = self._options
        name = fleet.name if elastic is None else "elastic"
        progress = Progress(f"{name}, seed {seed}", len(requests))
        both = policies(fleet, options.decode_policy)[OURS]
        arguments: dict[str, Any] = {"seed": seed, "on_end": progress.step, **replay_options(options)}

        def make() -> Replay:
            if elastic is None:
                return Replay(fleet, *both, **arguments)
            return ElasticReplay(fleet, *both, options=elastic, until=until, **arguments)

        run = replayed(make, requests)
        progress.ended()
        return run

    def _row(self, day: str, policy: str, seed: int, phases: Sequence[Phase], fleet: Fleet, run: Replay) -> Row:
        shares = {phase.name: goodput(run.courses, phase, fleet, self._slo) for phase in phases}
        return Row(day, policy, seed, average(shares.values()), 0, shares)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic instances."""
    add = parser.add_argument_group("elastic instances").add_argument
    add(
        "--elastic",
        nargs="+",
        choices=DRAWN,
        metavar="NAME",
        help=f"loads of the phases of a day ({', '.join(DRAWN)}): compare the controller of elastic instances, which"
        " begins with --fleet, with every fixed split",
    )
    add(
        "--elastic-worlds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="compare the controller in worlds that these seeds draw, by a fast model of queues: other fleets, lengths "
        "and courses of load",
    )
    add("--shapes", nargs="+", choices=SHAPES, metavar="NAME", help=f"only these courses of load: {', '.join(SHAPES)}")
    add("--phase-seconds", type=float, default=3600.0, help="virtual time of a phase (default: %(default)s)")
    add("--fixed-splits", type=int, nargs="+", metavar="P", help="only these numbers of prefillers (default: all)")
    add("--elastic-options", nargs="+", default=[], metavar="NAME=N", help="options of the section elastic")


def report(options: argparse.Namespace) -> str:
    """Run everything, write the file that the command line names, and return the table."""
    days = Days(options)
    for seed in options.seeds:
        days.run(options.elastic, seed)
    write_json(options, days.rows)
    phases = list(days.rows[0].phases)
    table: list[Sequence[str]] = [("policy", "seed", "goodput", "moves", *phases)]
    table += [
        (
            row.policy,
            str(row.seed),
            f"{row.goodput:.1%}",
            str(row.moves),
            *(f"{row.phases[each]:.1%}" for each in phases),
        )
        for row in days.rows
    ]
    return "\n".join([*days.log, "", aligned(table), "", *_verdicts(days.rows)])


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """Return how the controller compares with the best fixed split and the clairvoyant, for each seed."""
    lines = []
    for seed in dict.fromkeys(row.seed for row in rows):
        mine = [row for row in rows if row.seed == seed]
        elastic, knowing = (next(row for row in mine if row.policy == each) for each in ("elastic", "clairvoyant"))
        best = max((row for row in mine if row not in (elastic, knowing)), key=lambda row: row.goodput)
        lines.append(
            f"seed {seed}: {elastic.goodput / best.goodput:.2f} times the best fixed split ({best.policy}), "
            f"{elastic.goodput / knowing.goodput:.2f} times the clairvoyant, {elastic.moves} moves "
            f"(clairvoyant: {knowing.moves})"
        )
    return lines
