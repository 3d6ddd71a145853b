"""Working sets in closed loops: throughput survives more sessions than fit, and nothing changes where all fit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from lab.replay import virtual_time
from lab.replay.conversations import Conversations, Gaps, Workload
from lab.replay.fleet import Fleet
from lab.replay.policies import AFFINITY, OURS, policies
from lab.replay.sessions import ClosedLoop, Row, row
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import Machine
from proxy.sim.hardware.work import Shape

_SECONDS = 450.0
_SMALL = Workload(shared_tokens=4096, turns=20.0, gaps=Gaps(longest=30.0))


def machine(kv_tokens: int) -> Machine:
    """Return engines like those of the instrument, with smaller caches, so that fewer sessions fill them."""
    return Machine(
        "small",
        Cost(prompt=0.05, prompt_token=1.4e-4, attention=3e-9, step=0.015),
        Shape(max_num_seqs=1, max_num_batched_tokens=16_384, kv_tokens=kv_tokens),
        Shape(max_num_seqs=1024, max_num_batched_tokens=8_192, kv_tokens=100_000_000),
    )


def ran(policy: str, sessions: int, workload: Workload = _SMALL, *, workers: int = 1, beside: int = 0) -> Row:
    """Run sessions on two prefillers with caches of 200,000 tokens, and return the figures."""
    fleet = Fleet(2, 2, machine(200_000), machine(200_000))
    made: list[ClosedLoop] = []

    async def course() -> None:
        made.append(ClosedLoop(fleet, *policies(fleet, "least_load")[policy], seed=1, workers=workers))
        numbers = {"main": sessions, "beside": beside}
        await made[0].run_sessions(Conversations(workload, (), 1), numbers, _SECONDS, random.Random(1))
        await asyncio.sleep(0)

    virtual_time.run(course(), virtual_time.VirtualLoop())
    left = [each.admission.waiting_count + each.admission.running_count for each in made[0].workers]
    assert left == [0] * workers
    assert all(
        sets.waiting_turn_count == 0
        for each in made[0].workers
        if (sets := each.pools.prefill.working_sets) is not None
    )
    label = {
        "policy": policy,
        "read_back": "off",
        "skip_prefill": "-",
        "sessions": sessions,
        "seed": 1,
        "fleet": fleet.name,
        "fits": 0,
    }
    return row(made[0], label, _SECONDS)


def test_throughput_survives_twice_the_sessions_that_fit() -> None:
    ours, before = ran(OURS, 48), ran(AFFINITY, 48)
    assert ours.turns_per_second > 1.5 * before.turns_per_second
    assert ours.rejected == 0
    assert ours.ttft_max < 240


def test_working_sets_change_nothing_where_everything_fits() -> None:
    assert ran(OURS, 6).turns_per_second == ran(AFFINITY, 6).turns_per_second


def test_single_turns_are_served_as_without_working_sets() -> None:
    single = replace(_SMALL, single_turns=1.0)
    assert ran(OURS, 20, single).turns_per_second == ran(AFFINITY, 20, single).turns_per_second


def test_subagents_forks_compaction_and_coarse_lookups_do_no_harm() -> None:
    kind = replace(_SMALL, subagents=0.05, forks=0.1, compaction_tokens=20_000, keeps_last_block=True)
    assert ran(OURS, 20, kind).turns_per_second > 0.95 * ran(AFFINITY, 20, kind).turns_per_second


def test_few_sessions_of_one_key_do_not_suffer_from_many_of_another() -> None:
    alone, beside = ran(OURS, 3), ran(OURS, 60, beside=3)
    assert beside.beside_seconds_per_turn < 3 * alone.seconds_per_turn_p50
