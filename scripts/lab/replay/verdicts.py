"""Compares the controller of elastic instances in drawn worlds with the best fixed split and a clairvoyant."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from lab.common.output import aligned
from lab.replay.figures import Slo, average
from lab.replay.fleet import Fleet
from lab.replay.queues import Job, QueueModel
from lab.replay.sweep import write_json
from lab.replay.trace import Request
from lab.replay.worlds import SHAPES, World, draw_world
from proxy.settings.fleet import Elastic

Shares = Mapping[int, float]
"""Shares of good answers by the number of the phase."""

# In a world in which no split serves more, the fleet is too small for each burst of the load.
_LEAST_GOODPUT: Final = 0.8
# Splits with so little less goodput are as good as the best one for the clairvoyant, who avoids moves.
_EQUAL: Final = 0.005
# The load of these worlds does not change, so they begin with the best fixed split.
_CONSTANT: Final = ("steady", "all prefill", "all decode")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The controller in one world, beside the best fixed split and the clairvoyant."""

    day: str
    """Seed and shape of the world."""
    policy: str
    """`elastic`, `clairvoyant`, or the best fixed split."""
    goodput: float
    moves: int
    turns: int
    """Moves in the other direction than the one before."""
    phases: dict[str, float] = field(default_factory=dict)


def compare(world: World, options: Elastic, slo: Slo) -> tuple[Verdict, Verdict, Verdict] | None:
    """Return the controller, the best fixed split and the clairvoyant; None if the fleet is too small for the load."""
    requests = world.requests()
    phases = sorted({phase for phase, _ in requests if phase >= 0})
    fixed, alone = dict[int, Shares](), dict[int, dict[int, float]]()
    for prefillers in world.candidates():
        fleet = world.with_split(prefillers)
        fixed[prefillers] = _shares(fleet, requests, _run(fleet, requests).jobs, slo)
        for phase in phases:
            if len(phases) == 1:
                share = fixed[prefillers][phase]
            else:
                mine = [(number, request) for number, request in requests if number == phase]
                share = _shares(fleet, mine, _run(fleet, mine).jobs, slo)[phase]
            alone.setdefault(phase, {})[prefillers] = share
    means = {prefillers: average(shares.values()) for prefillers, shares in fixed.items()}
    best = max(means, key=lambda prefillers: means[prefillers])
    begins = world.with_split(best) if world.shape in _CONSTANT else world.fleet
    known = {str(phase): max(shares.values()) for phase, shares in alone.items()}
    if average(known.values()) < _LEAST_GOODPUT:
        return None
    run = _run(begins, requests, options, world.seconds)
    shares = _shares(begins, requests, run.jobs, slo)
    turns = sum(before[1].new_role is not after[1].new_role for before, after in pairwise(run.moves))
    return (
        Verdict(world.name, "elastic", average(shares.values()), len(run.moves), turns, _named(shares)),
        Verdict(world.name, world.with_split(best).name, means[best], 0, 0, _named(fixed[best])),
        Verdict(world.name, "clairvoyant", average(known.values()), _fewest(begins, alone.values()), 0, known),
    )


def _run(
    fleet: Fleet, requests: Sequence[tuple[int, Request]], options: Elastic | None = None, until: float = 0.0
) -> QueueModel:
    model = QueueModel(fleet, options, until)
    model.run([request for _, request in requests])
    return model


def _shares(fleet: Fleet, requests: Sequence[tuple[int, Request]], jobs: Iterable[Job], slo: Slo) -> Shares:
    """Return the share of good answers of each phase; see Slo."""
    phases = {request.at: phase for phase, request in requests}
    counts, good = Counter[int](), Counter[int]()
    for job in jobs:
        assert job.first_token_at is not None
        assert job.ended_at is not None
        phase, wait = phases[job.request.at], job.first_token_at - job.request.at
        pace = (job.ended_at - job.first_token_at) / (job.request.output_tokens - 1)
        limit = slo.base_seconds + slo.factor * fleet.work_seconds(job.request)
        counts[phase] += 1
        good[phase] += wait <= limit and pace <= slo.token_seconds
    return {phase: good[phase] / counts[phase] for phase in counts if phase >= 0}


def _fewest(begins: Fleet, alone: Iterable[Mapping[int, float]]) -> int:
    """Return the fewest moves of a path through splits that are as good as the best one of each phase."""
    moves = {begins.prefillers: 0}
    for shares in alone:
        best = max(shares.values())
        good = [prefillers for prefillers, share in shares.items() if share >= best - _EQUAL]
        moves = {each: min(count + abs(each - before) for before, count in moves.items()) for each in good}
    return min(moves.values())


def _named(shares: Shares) -> dict[str, float]:
    return {str(phase): share for phase, share in shares.items()}


def report(options: argparse.Namespace) -> str:
    """Compare the controller in the worlds of each seed, write the file of the command line, and return the table."""
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    elastic = Elastic(**dict(pair.split("=") for pair in options.elastic_options))
    rows = list[Verdict]()
    table: list[Sequence[str]] = [("world", "elastic", "best fixed", "clairvoyant", "moves", "clairvoyant's", "turns")]
    for seed in options.elastic_worlds:
        for shape in options.shapes or SHAPES:
            compared = compare(draw_world(seed, shape), elastic, slo)
            if compared is None:
                continue
            rows += compared
            ours, fixed, known = compared
            goodputs = (f"{ours.goodput:.1%}", f"{fixed.goodput:.1%} ({fixed.policy})", f"{known.goodput:.1%}")
            table.append((ours.day, *goodputs, str(ours.moves), str(known.moves), str(ours.turns)))
    write_json(options, rows)
    return "\n".join([aligned(table), "", _summary(rows)])


def _summary(rows: Sequence[Verdict]) -> str:
    triples = list(zip(rows[::3], rows[1::3], rows[2::3], strict=True))
    if not triples:
        return "no world has a split that serves its load"
    means = [average([each.goodput for each in column]) for column in zip(*triples, strict=True)]
    near = sum(ours.goodput >= 0.95 * known.goodput for ours, _, known in triples)
    calm = sum(ours.goodput >= 0.98 * fixed.goodput for ours, fixed, _ in triples)
    few = sum(ours.moves <= 1.5 * known.moves for ours, _, known in triples)
    moves = [sum(each.moves for each in column) for column in zip(*triples, strict=True)]
    return (
        f"{len(triples)} worlds: goodput {means[0]:.1%}, best fixed split {means[1]:.1%}, clairvoyant {means[2]:.1%}; "
        f"{moves[0]} moves (clairvoyant: {moves[2]}). At least 98 % of the best fixed split in {calm} worlds, at least "
        f"95 % of the clairvoyant in {near}, at most 1.5 times its moves in {few}."
    )
