"""The schedulers of simulated engines in virtual time, and engines on known hardware over real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import aiohttp
import pytest

from lab.replay.virtual_time import VirtualLoop, run
from proxy.sim.engine import SimulatedEngine
from proxy.sim.engine.scheduler import MachineCache, MachineScheduler, Scheduler
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES
from proxy.sim.hardware.work import Shape
from proxy.sim.options import Options

NAME = "kimi-k2-thinking-a3"
COST = MACHINES[NAME].cost


class Generated:
    """A sequence of which only the times of its tokens matter."""

    cache_salt = ""
    ready_at = 0.0

    def __init__(
        self, prompt: list[int], max_tokens: int, ends_after: int | None = None, *, cached_tokens: int = 0
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.output: list[int] = []
        self.cached_tokens = cached_tokens
        self.prefill_tokens = len(prompt) - cached_tokens
        self.on_admitted: Callable[[], object] | None = None
        self.times: list[float] = []
        self._ends_after = ends_after or max_tokens

    @property
    def is_live(self) -> bool:
        return len(self.output) < self._ends_after

    def step(self, count: int) -> bool:
        self.output += [0] * count
        self.times.append(asyncio.get_running_loop().time())
        return self.is_live


def simple(options: Options) -> Scheduler:
    return Scheduler(options, lambda tokens: None)


def on_machine(options: Options, shape: Shape | None = None) -> MachineScheduler:
    """Return the scheduler of the options' hardware. `shape`: None for its own."""
    shape = shape or options.shape
    assert shape is not None
    return MachineScheduler(options, shape, lambda tokens: None)


AnyScheduler = TypeVar("AnyScheduler", bound=Scheduler | MachineScheduler)


def scheduled(scheduler: AnyScheduler, *sequences: Generated) -> AnyScheduler:
    """Submit all at once, and run in virtual time until the last token. A sequence that fetches KV has it at once."""

    async def course() -> None:
        scheduler.start()
        for sequence in sequences:
            each: Any = sequence
            if not sequence.prefill_tokens:
                sequence.on_admitted = partial(asyncio.get_running_loop().call_soon, scheduler.begin, each)
            scheduler.submit(each)
        while scheduler.running + scheduler.waiting:  # noqa: ASYNC110 time jumps, and no event reports it
            await asyncio.sleep(0.5)
        scheduler.stop()

    run(course(), VirtualLoop())
    return scheduler


def prompt(tokens: int, first: int = 0) -> list[int]:
    return [(first + number) % 250 for number in range(tokens)]


def fetched(tokens: int, answer: int, first: int = 0) -> Generated:
    return Generated(prompt(tokens, first), answer, cached_tokens=tokens)


@pytest.mark.parametrize("name", MACHINES)
def test_prompts_take_what_they_take_on_the_machine(name: str) -> None:
    cost = MACHINES[name].cost
    first, second = Generated(prompt(8000), 1), Generated(prompt(8000), 1, cached_tokens=6000)
    scheduled(simple(Options(machine=name)), first, second)
    assert first.times == [pytest.approx(cost.prefill(8000), abs=1e-6)]
    assert second.times == [pytest.approx(cost.prefill(8000) + cost.prefill(2000, 6000), abs=1e-6)]


def test_without_a_machine_the_delays_say_how_long_work_takes() -> None:
    options = Options(prefill_ms_per_1k_tokens=50.0, decode_step_ms=10.0, decode_step_ms_per_seq=1.0)
    assert options.cost == Cost(prompt_token=5e-5, step=0.01, step_sequence=0.001)
    lone = Generated(prompt(2000), 3)
    scheduled(simple(options), lone)
    assert lone.times == pytest.approx([0.1, 0.111, 0.122], abs=1e-6)


def test_prompts_are_computed_one_after_the_other_and_what_is_cached_is_not() -> None:
    options = Options(machine=NAME, role="prefill", block_size=1000)
    first, second = Generated(prompt(8000), 1), Generated([*prompt(6000), *prompt(2000, 99)], 1)
    scheduler = scheduled(on_machine(options), first, second)
    assert first.times == [pytest.approx(COST.prefill(8000))]
    assert second.times == [pytest.approx(COST.prefill(8000) + COST.prefill(2000, 6000))]
    assert (first.cached_tokens, second.cached_tokens) == (0, 6000)
    assert scheduler.used_blocks == 0


@pytest.mark.parametrize("sequences", [1, 8, 12])
@pytest.mark.parametrize("new", [simple, on_machine])
def test_steps_take_longer_past_the_knee(
    new: Callable[[Options], Scheduler | MachineScheduler], sequences: int
) -> None:
    all_ = [fetched(100, 50) for _ in range(sequences)]
    scheduled(new(Options(machine=NAME, role="decode")), *all_)
    paces = [(each.times[30] - each.times[10]) / 20 for each in all_]
    assert paces == [pytest.approx(COST.decode(sequences, 0))] * sequences


def test_more_than_there_may_be_wait() -> None:
    all_ = [fetched(100, 2) for _ in range(13)]
    scheduled(on_machine(Options(machine=NAME, role="decode")), *all_)
    ends = sorted(each.times[-1] for each in all_)
    assert ends[-1] > ends[-2]


def test_sequence_that_finds_no_memory_has_the_last_one_preempted() -> None:
    options = Options(machine=NAME, role="decode", block_size=10)
    assert options.shape is not None
    shape = replace(options.shape, kv_tokens=300, max_num_batched_tokens=100)
    first, last = fetched(100, 100), fetched(100, 100, first=125)
    scheduler = scheduled(on_machine(options, shape), first, last)
    assert (len(first.output), len(last.output)) == (100, 100)
    assert scheduler.preemptions == 1
    assert last.times[-1] > first.times[-1]
    assert scheduler.used_blocks == 0


def test_kv_that_does_not_come_is_computed() -> None:
    lost = Generated(prompt(1000), 1)
    lost.on_admitted = lambda: None
    options = Options(machine=NAME, role="decode", block_size=100)

    async def course() -> None:
        scheduler = on_machine(options)
        scheduler.start()
        each: Any = lost
        scheduler.submit(each)
        assert (scheduler.running, scheduler.used_blocks) == (1, 11)
        await asyncio.sleep(3.0)
        assert not lost.times
        scheduler.begin(each)
        await asyncio.sleep(60.0)
        scheduler.drop(each)
        scheduler.begin(each)

    run(course(), VirtualLoop())
    assert lost.times == [pytest.approx(3.0 + COST.prefill(1000))]


def test_answer_that_ends_early_leaves_its_memory() -> None:
    early = Generated(prompt(50), 1000, ends_after=3)
    scheduler = scheduled(on_machine(Options(machine=NAME, role="both")), early)
    assert (len(early.output), scheduler.used_blocks, scheduler.running) == (3, 0, 0)


def test_dropped_request_leaves_the_machine() -> None:
    async def course() -> None:
        scheduler = on_machine(Options(machine=NAME, role="decode"))
        scheduler.start()
        all_: list[Any] = [Generated(prompt(500, number), 500) for number in range(14)]
        for sequence in all_:
            scheduler.submit(sequence)
        await asyncio.sleep(0.5)  # the first one's step
        assert (scheduler.running, scheduler.waiting) == (12, 2)
        for sequence in all_[1:]:
            scheduler.drop(sequence)
        assert (scheduler.running, scheduler.waiting) == (1, 0)
        scheduler.stop()
        assert (scheduler.running, scheduler.used_blocks) == (0, 0)

    run(course(), VirtualLoop())


def test_cache_is_what_is_in_memory() -> None:
    options = Options(machine=NAME, role="prefill", block_size=100)
    scheduler = scheduled(on_machine(options), Generated(prompt(500), 1))
    cache = MachineCache(scheduler.batch, 100)
    assert (cache.add(prompt(500)), cache.add(prompt(501)), cache.add(prompt(500), "salt")) == (400, 500, 0)
    assert (cache.queries, cache.hits) == (1501, 900)
    cache.clear()
    assert cache.add(prompt(500)) == 0


async def test_engine_reports_its_memory_and_its_hits() -> None:
    body = {"model": "sim", "prompt": "x" * 600, "max_tokens": 2}
    async with SimulatedEngine(machine="kimi-k2.5-h200", role="decode") as engine, aiohttp.ClientSession() as session:
        cached = []
        for _ in range(2):
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                told = await answer.json()
                cached.append((told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        async with session.get(f"{engine.url}/metrics") as answer:
            metrics = await answer.text()
    assert cached == [0, 512]
    blocks = MACHINES["kimi-k2.5-h200"].decode.kv_tokens // 128
    assert f'num_gpu_blocks="{blocks}"' in metrics
    found = {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", metrics, re.MULTILINE)}
    assert (found["prefix_cache_hits_total"], found["num_preemptions_total"]) == (512, 0)
    assert (found["kv_cache_usage_perc"], found["num_requests_running"]) == (0, 0)
