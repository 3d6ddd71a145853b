"""Simulated engines take as long as the hardware that scripts/replay knows: one cost for both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lab.replay.virtual_time import VirtualLoop, run
from proxy.sim.engine.scheduler import Scheduler
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES
from proxy.sim.options import Options


class Generated:
    """A sequence of which only the times of its tokens matter."""

    def __init__(self, prompt_tokens: int, cached_tokens: int, answer_tokens: int) -> None:
        self.prompt = [0] * prompt_tokens
        self.output: list[int] = []
        self.cached_tokens = cached_tokens
        self.prefill_tokens = prompt_tokens - cached_tokens
        self.on_admitted = None
        self.ready_at = 0.0
        self.times: list[float] = []
        self._answer_tokens = answer_tokens

    @property
    def is_live(self) -> bool:
        return len(self.output) < self._answer_tokens

    def step(self, count: int) -> bool:
        self.output += [0] * count
        self.times.append(asyncio.get_running_loop().time())
        return self.is_live


def scheduled(options: Options, *sequences: Generated) -> None:
    """All submitted at once, in virtual time, until the last token."""

    async def course() -> None:
        scheduler = Scheduler(options, lambda tokens: None)
        scheduler.start()
        for sequence in sequences:
            each: Any = sequence
            scheduler.submit(each)
        while any(sequence.is_live for sequence in sequences):  # noqa: ASYNC110 time jumps, and nobody tells
            await asyncio.sleep(0.01)
        scheduler.stop()

    run(course(), VirtualLoop())


@pytest.mark.parametrize("name", MACHINES)
def test_prompts_take_what_they_take_on_the_machine(name: str) -> None:
    cost = MACHINES[name].cost
    first, second = Generated(8000, 0, 1), Generated(8000, 6000, 1)
    scheduled(Options(machine=name), first, second)
    assert first.times == [pytest.approx(cost.prefill(8000), abs=1e-6)]
    assert second.times == [pytest.approx(cost.prefill(8000) + cost.prefill(2000, 6000), abs=1e-6)]


@pytest.mark.parametrize("sequences", [1, 8, 12])
def test_steps_take_longer_past_the_knee(sequences: int) -> None:
    cost = MACHINES["kimi-k2-thinking-a3"].cost
    all_ = [Generated(10, 10, 50) for _ in range(sequences)]
    scheduled(Options(machine="kimi-k2-thinking-a3"), *all_)
    paces = [(each.times[-1] - each.times[0]) / 49 for each in all_]
    assert paces == [pytest.approx(cost.decode(sequences, 0), abs=1e-6)] * sequences


def test_without_a_machine_the_delays_say_how_long_work_takes() -> None:
    options = Options(prefill_ms_per_1k_tokens=50.0, decode_step_ms=10.0, decode_step_ms_per_seq=1.0)
    assert options.cost == Cost(prompt_token=5e-5, step=0.01, step_sequence=0.001)
    lone = Generated(2000, 0, 3)
    scheduled(options, lone)
    assert lone.times == pytest.approx([0.1, 0.111, 0.122], abs=1e-6)
