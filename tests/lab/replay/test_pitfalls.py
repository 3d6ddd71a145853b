"""Conditions under which predicted seconds must not be worse than token counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.replay import virtual_time
from lab.replay.figures import Figures, Slo, figures
from lab.replay.fleet import Fleet, Replay
from lab.replay.policies import policies
from lab.replay.trace import Request
from proxy.sim.hardware.machines import MACHINES
from tests.lab.replay.conftest import MACHINE
from tests.lab.replay.ranks import RANKS, FleetOfRanks

FLEET = Fleet(4, 4, MACHINE, MACHINE)
TOLERANCE = 0.03
BLOCK = 512


def conversations(seed: int, count: int, requests_per_second: float) -> list[Request]:
    """Return turns of conversations, each with the previous prompt as its prefix."""
    rng = random.Random(seed)
    open_ones: list[list[int]] = []
    names = iter(range(1, 10**9))
    return [request(at, _turn(rng, open_ones, names), rng) for at in _times(rng, count, requests_per_second)]


def _turn(rng: random.Random, open_ones: list[list[int]], names: Iterator[int]) -> list[int]:
    if not open_ones or rng.random() < 0.4:
        open_ones.append([next(names) for _ in range(rng.randint(1, 6))])
    conversation = rng.choice(open_ones)
    conversation += [next(names) for _ in range(rng.randint(1, 3))]
    if len(conversation) > 16:
        open_ones.remove(conversation)
    return conversation


def unique(seed: int, count: int, requests_per_second: float) -> list[Request]:
    """Return prompts without common prefixes."""
    rng = random.Random(seed)
    names = iter(range(1, 10**9))
    return [
        request(at, [next(names) for _ in range(min(40, int(rng.paretovariate(1.2))) + 1)], rng)
        for at in _times(rng, count, requests_per_second)
    ]


def hot(seed: int, count: int, requests_per_second: float) -> list[Request]:
    """Return prompts of which nine in ten begin with the same 6,000 tokens."""
    rng = random.Random(seed)
    names = iter(range(100, 10**9))
    return [
        request(at, [*(range(12) if rng.random() < 0.9 else ()), next(names), next(names)], rng)
        for at in _times(rng, count, requests_per_second)
    ]


def request(at: float, blocks: Sequence[int], rng: random.Random) -> Request:
    return Request(at, BLOCK * len(blocks) + rng.randrange(1, BLOCK), 8, (*blocks, rng.randrange(10**9, 10**12)))


def _times(rng: random.Random, count: int, per_second: float) -> list[float]:
    at = 0.0
    return [at := at + rng.expovariate(per_second) for _ in range(count)]


def run(
    requests: Sequence[Request], policy: str, fleet: Fleet = FLEET, made: list[Replay] | None = None, **options: Any
) -> tuple[Figures, Replay]:
    made = [] if made is None else made

    async def course() -> None:
        prefill, decode = policies(fleet, "least_tokens")[policy]
        made.append(Replay(fleet, prefill, decode, seed=1, **options))
        await made[0].run(requests)

    virtual_time.run(course(), virtual_time.VirtualLoop())
    return figures(made[0], fleet, Slo()), made[0]


def never_worse(requests: Sequence[Request], fleet: Fleet = FLEET, **options: Any) -> tuple[Figures, Figures]:
    """Return the figures for predicted seconds and for token counts, which must not be better."""
    ours, today = (run(requests, policy, fleet, **options)[0] for policy in ("least_load", "least_tokens"))
    assert ours.good >= today.good - TOLERANCE, f"{ours.good:.3f} instead of {today.good:.3f}"
    return ours, today


def test_least_load_with_caches_has_more_answers_in_time() -> None:
    """Check the baseline of all other tests: a load at which the choice matters."""
    ours, today = never_worse(conversations(1, 400, 1.1))
    assert ours.good > today.good + 0.1
    assert ours.mean < today.mean / 1.5


def test_least_load_with_unreported_cached_tokens() -> None:
    ours, today = never_worse(conversations(2, 400, 0.95), tells_cached=False)
    assert ours.good > today.good


def test_least_load_with_prefillers_without_cache() -> None:
    def forget(replay: Replay) -> None:
        for engine in replay.engines.values():
            engine.batch.blocks.forget()

    assert_never_worse_with(forget, conversations(3, 400, 0.75))


def assert_never_worse_with(after_each: Callable[[Replay], None], requests: Sequence[Request]) -> None:
    """Compare both policies. `after_each` is called after every request."""
    good = []
    for policy in ("least_load", "least_tokens"):
        replays: list[Replay] = []

        async def course(policy: str = policy, replays: list[Replay] = replays) -> None:
            prefill, decode = policies(FLEET, "least_tokens")[policy]
            replays.append(Replay(FLEET, prefill, decode, seed=1, on_end=lambda: after_each(replays[0])))
            await replays[0].run(requests)

        virtual_time.run(course(), virtual_time.VirtualLoop())
        good.append(figures(replays[0], FLEET, Slo()).good)
    assert good[0] >= good[1] - TOLERANCE


@pytest.mark.parametrize("kv_tokens", [40_960, 409_600])
def test_least_load_with_smaller_caches_than_assumed(kv_tokens: int) -> None:
    """Check that a policy adapts from an assumed cache of a million tokens."""
    small = replace(MACHINE, prefill=replace(MACHINE.prefill, kv_tokens=kv_tokens))
    never_worse(conversations(4, 400, 0.9), Fleet(4, 4, small, MACHINE))


def test_kv_events_report_cache_size_and_losses() -> None:
    """Compare prefillers with small caches that are emptied at times, with and without KV events."""
    small = replace(MACHINE, prefill=replace(MACHINE.prefill, kv_tokens=81_920))

    def course(kv_events: bool) -> tuple[int, float]:
        made: list[Replay] = []
        ends = itertools.count(1)

        def on_end() -> None:
            if next(ends) % 100 == 0:
                for engine in made[0].engines.values():
                    engine.batch.blocks.forget()

        requests = conversations(4, 400, 0.9)
        found, _ = run(requests, "least_load", Fleet(4, 4, small, MACHINE), made, kv_events=kv_events, on_end=on_end)
        return sum(abs(course.expected_tokens - course.cached_tokens) for course in made[0].courses), found.mean

    (wrong, mean), (wrong_without, mean_without) = course(kv_events=True), course(kv_events=False)
    assert wrong < wrong_without / 3
    assert mean < 1.03 * mean_without


def test_least_load_with_silently_lost_cache() -> None:
    ended = 0

    def restart(replay: Replay) -> None:
        nonlocal ended
        ended += 1
        if ended % 100 == 0:
            next(iter(replay.engines.values())).batch.blocks.forget()

    assert_never_worse_with(restart, conversations(5, 400, 0.9))


@pytest.mark.parametrize("load", [conversations, unique])
def test_least_load_with_a_prefiller_at_half_speed(load: Callable[..., list[Request]]) -> None:
    never_worse(load(6, 400, 0.9), replace(FLEET, slow=0.5))


@pytest.mark.parametrize("load", [conversations, unique])
def test_least_load_with_several_engines_behind_one_address(load: Callable[..., list[Request]]) -> None:
    never_worse(load(14, 800, 0.6 * RANKS * 2 / 4), FleetOfRanks(2, 4, MACHINE, MACHINE))


@pytest.mark.parametrize(("is_blind", "per_second"), [(False, 2.0), (True, 1.6)])
@pytest.mark.parametrize("load", [conversations, unique])
def test_requests_for_unreported_ranks_are_not_queued_near_saturation(
    load: Callable[..., list[Request]], is_blind: bool, per_second: float
) -> None:
    never_worse(load(14, 400, per_second), FleetOfRanks(2, 4, MACHINE, MACHINE, is_blind=is_blind))


def test_reported_ranks_improve_results_a_little_near_saturation() -> None:
    fleet = FleetOfRanks(2, 4, MACHINE, MACHINE, tells_ranks=True)
    both = [never_worse(unique(seed, 600, 3.0), fleet) for seed in (14, 15, 16)]
    assert sum(ours.good - today.good for ours, today in both) > 0.01 * len(both)


def test_random_distribution_among_ranks_is_detected() -> None:
    never_worse(conversations(14, 400, 1.6), FleetOfRanks(2, 4, MACHINE, MACHINE, tells_ranks=True, is_blind=True))


@pytest.mark.parametrize("slow", [None, 0.5])
def test_time_of_batched_prompts_is_predicted(slow: float | None) -> None:
    machine = MACHINES["kimi-k2.5-h200"]
    figures, _ = run(conversations(15, 1000, 17.0), "least_load", Fleet(4, 4, machine, machine, slow))
    assert figures.off_p50 <= 0.08
    assert figures.off_p95 <= 0.25


@pytest.mark.parametrize("load", [conversations, unique])
def test_least_load_with_gateways_that_share_nothing(load: Callable[..., list[Request]]) -> None:
    never_worse(load(7, 400, 0.7), gateways=3)


@pytest.mark.parametrize("per_second", [0.9, 1.4])
def test_least_load_with_unique_prompts_that_flush_caches(per_second: float) -> None:
    never_worse(unique(8, 400, per_second))


def test_common_prefix_is_soon_cached_on_all_prefillers() -> None:
    requests = hot(9, 400, 3.0)
    never_worse(requests)
    assert run(requests, "least_load")[0].imbalance <= 1.15


def test_several_workers_equal_one() -> None:
    # A single short run varies: either policy may be ten percent behind.
    traces = [conversations(seed, 400, 0.9) for seed in (10, 11, 12, 13)]
    one, four = ([run(requests, "least_load", workers=workers)[0] for requests in traces] for workers in (1, 4))
    assert sum(figures.mean for figures in four) <= 1.05 * sum(figures.mean for figures in one)
    assert sum(figures.good for figures in four) >= sum(figures.good for figures in one) - len(traces) * TOLERANCE


def test_sharing_gateways_equal_one() -> None:
    # Lag is measured rarely, because prefills take seconds and each measurement takes real time.
    replicas = {"url": "redis://in-memory", "interval_seconds": 2.0, "ttl_seconds": 5.0, "news_seconds": 0.1}
    requests = conversations(10, 300, 0.9)
    one, alone, sharing = (
        run(requests, "least_load", **options)[0]
        for options in ({}, {"gateways": 3}, {"gateways": 3, "replicas": replicas})
    )
    assert sharing.mean <= 1.1 * one.mean < 0.8 * alone.mean
    assert sharing.hits >= 0.95 * one.hits > alone.hits
