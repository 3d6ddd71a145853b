"""Tests of learned handoff times, and of the choices that consider them."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from lab.replay.fleet import Fleet, Replay
from lab.replay.policies import OURS, policies
from lab.replay.sweep import replayed
from lab.replay.trace import Request
from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import Health
from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
from proxy.balancer.policies.handoff_times import HandoffTimes, lacks_memory
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolParts, Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import NoBackendAvailable
from proxy.sim.hardware.machines import MACHINES
from proxy.wire.prefix import NO_PREFIX_KEYS
from tests.balancer.policies.test_least_seconds import Subject
from tests.clock import Clock

TOKENS = 8000
FAST = 0.05


def backends(role: Role, count: int) -> list[Backend]:
    first = 0 if role is Role.PREFILL else 100
    return [Backend(role, f"10.0.{role.value == 'decode':d}.{number}", 7000, first + number) for number in range(count)]


class Pairs:
    """Two prefillers and four decoders. Handoffs take 0.01 s, and on top the time of the link by tokens."""

    def __init__(self, **parts: object) -> None:
        self.clock = Clock()
        self.times = HandoffTimes(PolicyContext(clock=self.clock), **parts)  # type: ignore[arg-type]
        self.prefillers, self.decoders = backends(Role.PREFILL, 2), backends(Role.DECODE, 4)
        self.factors: dict[tuple[int, int], float] = {}

    def hand_over(self, prefiller: int, decoder: int, tokens: int = TOKENS, wait: float = 0.0) -> None:
        seconds = 0.01 + FAST * self.factors.get((prefiller, decoder), 1.0) * tokens / TOKENS + wait
        began = self.clock()
        self.clock.now += seconds
        self.times.record_handoff(self.prefillers[prefiller], self.decoders[decoder], tokens, began, self.clock())

    def run(self, rounds: int, seed: int = 1) -> None:
        """Hand over prompts of several lengths between all pairs."""
        rng = random.Random(seed)
        for _ in range(rounds):
            for prefiller in range(2):
                for decoder in range(4):
                    self.hand_over(prefiller, decoder, rng.randint(500, 2 * TOKENS))
            self.clock.now += 1.0

    def extra(self, prefiller: int) -> list[float] | None:
        candidates = [Candidate(decoder, None, Scoreboard(1, 1)) for decoder in self.decoders]
        return self.times.extra_handoff_seconds(self.prefillers[prefiller], candidates, TOKENS)


def test_handoff_times_find_no_slow_pair_when_all_links_are_alike() -> None:
    pairs = Pairs()
    pairs.run(30)
    assert (pairs.times.slow_pairs_by_decoder, pairs.extra(0)) == ({}, None)


def test_handoff_times_predict_the_excess_of_a_slow_pair() -> None:
    pairs = Pairs()
    pairs.factors[0, 2] = 10.0
    pairs.run(10)
    extra = pairs.extra(0)
    assert extra is not None
    assert extra == pytest.approx([0, 0, 9 * FAST, 0], rel=0.2)
    assert pairs.extra(1) is None
    shown = pairs.times.slow_pairs_of(pairs.decoders[2])
    assert list(shown) == [pairs.prefillers[0].name]
    (slow,) = shown.values()
    assert slow["seconds"] > 5 * slow["ordinary_seconds"]
    assert pairs.times.slow_pairs_of(pairs.decoders[1]) == {}


def test_one_fast_handoff_ends_the_row_of_slow_ones() -> None:
    pairs = Pairs()
    pairs.factors[0, 2] = 10.0
    pairs.run(10)
    prefiller, decoder = pairs.prefillers[0], pairs.decoders[2]
    assert list(pairs.times.slow_handoffs_of(decoder)) == [prefiller.name]
    pairs.factors.clear()
    pairs.run(4)  # a pair with many handoffs learns each fourth one
    assert pairs.times.slow_handoffs_of(decoder) == {}


def test_slow_handoffs_are_named_after_three_in_a_row() -> None:
    """Neither earlier fast handoffs of the pair nor the size of a batch delay that."""
    pairs = Pairs()
    pairs.run(5)
    prefiller, decoder = pairs.prefillers[0], pairs.decoders[2]
    found = []
    for _ in range(5):
        pairs.hand_over(0, 2, wait=4.0)
        found.append(pairs.times.slow_handoffs_of(decoder))
    assert found[:2] == [{}, {}]
    assert found[-1] == {prefiller.name: pytest.approx((4.01 + FAST, 0.01 + FAST), rel=0.1)}


def test_handoff_times_log_a_pair_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy")
    pairs = Pairs()
    pairs.factors[0, 2] = 10.0
    pairs.run(20)
    pairs.factors.clear()
    pairs.run(60)
    assert [record.getMessage() for record in caplog.records] == [
        "handoff times: a pair of instances is slow",
        "handoff times: a pair of instances is no longer slow",
    ]


def test_slow_pair_needs_several_handoffs() -> None:
    pairs = Pairs()
    pairs.run(5)
    pairs.times.record_handoff(Backend(Role.PREFILL, "10.9.9.9", 7000, 9), pairs.decoders[0], TOKENS, 0.0, 9.0)
    pairs.run(5)
    assert pairs.times.slow_pairs_by_decoder == {}


def test_slow_pair_is_tried_again_after_a_while_with_one_request() -> None:
    pairs = Pairs()
    pairs.factors[0, 2] = 10.0
    pairs.run(10)
    pairs.clock.now += 121.0
    assert pairs.extra(0) == [0.0] * 4
    pairs.times.record_pick(pairs.prefillers[0], pairs.decoders[2])
    extra = pairs.extra(0)
    assert extra is not None
    assert extra[2] > FAST


def test_long_handoffs_to_a_full_decoder_are_not_learned() -> None:
    pairs = Pairs(is_full=lambda decoder: decoder.host == "10.0.1.3")
    pairs.run(4)
    for _ in range(30):
        pairs.hand_over(0, 3, wait=5.0)
        pairs.hand_over(1, 3, wait=5.0)
    assert pairs.times.slow_pairs_by_decoder == {}


def test_late_event_loop_teaches_no_handoff_times() -> None:
    clock = Clock()
    times = HandoffTimes(PolicyContext(clock=clock, loop_lag_within=lambda began, ended: 0.3))
    (prefiller,), decoders = backends(Role.PREFILL, 1), backends(Role.DECODE, 2)
    for _ in range(40):
        times.record_handoff(prefiller, decoders[0], TOKENS, clock(), clock() + 0.05)
        times.record_handoff(prefiller, decoders[1], TOKENS, clock(), clock() + 0.5)
        clock.now += 1
    assert times.slow_pairs_by_decoder == {}


def test_prefiller_with_slow_links_only_is_far() -> None:
    pairs = Pairs()
    pairs.factors.update({(1, decoder): 10.0 for decoder in range(4)})
    pairs.run(10)
    near, far = pairs.times.least_extra_handoff_seconds(pairs.prefillers, TOKENS)
    assert (near, far) == (0.0, pytest.approx(9 * FAST, rel=0.2))


def test_handoff_times_forget_a_backend_that_left() -> None:
    pairs = Pairs()
    pairs.factors[0, 2] = 10.0
    pairs.run(10)
    pairs.times.forget_backend(pairs.decoders[2])
    assert pairs.times.slow_pairs_by_decoder == {}


def test_handoff_times_keep_a_bounded_number_of_pairs() -> None:
    clock = Clock()
    times = HandoffTimes(PolicyContext(clock=clock))
    decoders = backends(Role.DECODE, 100)
    for prefiller in backends(Role.PREFILL, 60):
        for decoder in decoders:
            times.record_handoff(prefiller, decoder, TOKENS, 0.0, 0.05)
    assert len(times._pairs_by_names) == 4096


@pytest.mark.parametrize(
    ("facts", "load", "is_full"),
    [
        (None, Load(0, 10**9), False),
        (EngineFacts(kv_memory_tokens=1000), Load(0, 900), True),
        (EngineFacts(kv_memory_tokens=1000), Load(0, 100), False),
        (EngineFacts(max_num_seqs=1), Load(0, 1), True),
    ],
)
def test_decoder_lacks_memory(facts: EngineFacts | None, load: Load, is_full: bool) -> None:
    scoreboard = Scoreboard(1, 1)
    scoreboard.load_row(0).add_load(0, 1, 1, load.compute_tokens, load.kv_tokens)
    assert lacks_memory(scoreboard, Backend(Role.DECODE, "d", 1, 0), facts) is is_full


# Choices


def pools_of(pairs: Pairs, policy: str = "least_load", decoders: int = 4) -> Pools:
    scoreboard = Scoreboard(1, 8)
    roster = Roster([(f"p{n}", 1) for n in range(2)], [(f"d{n}", 1) for n in range(decoders)], scoreboard)
    pairs.prefillers = [member.backend for member in roster.members_of_role(Role.PREFILL)]
    pairs.decoders = [member.backend for member in roster.members_of_role(Role.DECODE)]
    made = {}
    for role in (Role.PREFILL, Role.DECODE):
        context = PolicyContext(role=role, clock=pairs.clock, handoff_predictions=pairs.times)
        parts = PoolParts(
            role=role,
            policy=make_policy(policy, context),
            scoreboard=scoreboard,
            load_row=scoreboard.load_row(0),
            roster=roster,
            health=Health(None, pairs.clock, random.Random(1)),
            clock=pairs.clock,
        )
        made[role] = Pool(parts)
    return Pools(prefill=made[Role.PREFILL], decode=made[Role.DECODE], handoff_times=pairs.times)


def asking() -> PickRequest:
    return PickRequest(Load(TOKENS, TOKENS), Load(256, TOKENS), Subject(TOKENS, NO_PREFIX_KEYS, 256))


@contextmanager
def leased(pools: Pools, request: PickRequest | None = None, count: int = 1) -> Iterator[list[tuple[Backend, Backend]]]:
    """Lease this number of pairs, one after the other, and give them back together."""
    with ExitStack() as stack:
        pairs = []
        for _ in range(count):
            prefiller, decoder = pools.enter_both_leases(request or asking())
            stack.push(decoder)
            stack.push(prefiller)
            pairs.append((prefiller.backend, decoder.backend))
        yield pairs


def test_decoder_is_chosen_by_the_time_of_the_handoff_too() -> None:
    pairs = Pairs()
    pools = pools_of(pairs)
    pairs.factors.update({(0, 0): 10.0, (1, 3): 10.0})
    pairs.run(10)
    chosen = set()
    for _ in range(16):
        with leased(pools) as [(prefiller, decoder)]:
            chosen.add((pairs.prefillers.index(prefiller), pairs.decoders.index(decoder)))
    assert {prefiller for prefiller, _ in chosen} == {0, 1}
    assert not chosen & {(0, 0), (1, 3)}


def test_slow_pair_is_used_when_its_decoder_is_the_only_one() -> None:
    pairs = Pairs()
    pools = pools_of(pairs)
    pairs.factors.update({(0, 0): 10.0, (1, 0): 10.0})
    pairs.run(10)
    request = replace(asking(), avoided_backends=pairs.decoders[1:])
    with leased(pools, request) as [(_, decoder)]:
        assert decoder == pairs.decoders[0]


def test_prefiller_is_given_back_when_there_is_no_decoder() -> None:
    pairs = Pairs()
    pools = pools_of(pairs)
    pairs.factors[0, 0] = 10.0
    pairs.run(10)
    with pytest.raises(NoBackendAvailable):
        pools.enter_both_leases(replace(asking(), avoided_backends=pairs.decoders))
    assert [pools.prefill.scoreboard.open_leases(backend.slot) for backend in pairs.prefillers] == [0, 0]


def test_prefiller_whose_links_are_slow_gets_prompts_when_the_others_are_busy() -> None:
    pairs = Pairs()
    pools = pools_of(pairs)
    pairs.factors.update({(0, decoder): 10.0 for decoder in range(4)})
    pairs.run(10)
    with leased(pools, count=6) as all_leased:
        chosen = [pairs.prefillers.index(prefiller) for prefiller, _ in all_leased]
    assert chosen[0] == 1
    assert 0 in chosen


def test_quarantined_decoder_is_avoided_when_the_prefiller_is_chosen_first() -> None:
    pairs = Pairs()
    pools = pools_of(pairs, decoders=2)
    pairs.decoders += backends(Role.DECODE, 2)
    pairs.factors.update({(0, 2): 10.0, (1, 3): 10.0})
    pairs.run(10)
    for prefiller in pairs.prefillers:
        for _ in range(2):
            pools.pair_quarantine.record_failed_handoff(prefiller, pairs.decoders[0])
    for _ in range(6):
        with leased(pools) as [(_, decoder)]:
            assert decoder == pairs.decoders[1]


def mean_first_token_seconds(learns: bool, **links: int | float) -> float:
    machine = MACHINES["kimi-k2.5-h200"]
    fleet = Fleet(2, 4, machine, machine, link_seconds=5.6e-6, **links)  # type: ignore[arg-type]
    rng = random.Random(5)
    requests = []
    at = 0.0
    for number in range(400):
        at += rng.expovariate(4.0)
        requests.append(Request(at, rng.randint(2000, 16_000), rng.randint(50, 400), (2 * number, 2 * number + 1)))
    both = policies(fleet, OURS)[OURS]
    replay = replayed(lambda: Replay(fleet, *both, seed=1, learns_handoffs=learns), requests)
    seconds = [course.first_token_seconds for course in replay.courses]
    assert None not in seconds
    return sum(each for each in seconds if each is not None) / len(seconds)


def test_first_tokens_come_sooner_when_two_of_eight_links_are_slow() -> None:
    slow: Mapping[str, float] = {"slow_links": 2, "slow_factor": 10.0}
    without, with_times = mean_first_token_seconds(False, **slow), mean_first_token_seconds(True, **slow)
    assert with_times < 0.85 * without


def test_handoff_times_change_nothing_when_no_link_is_slow() -> None:
    assert mean_first_token_seconds(True) == mean_first_token_seconds(False)


def test_prompt_is_computed_after_those_ahead_of_it_for_other_decoders() -> None:
    pairs = Pairs()
    (prefiller, other), (decoder, second, *_) = pairs.prefillers, pairs.decoders
    pairs.times.record_prefill_answer(prefiller, decoder, 10.0, 17.0)
    assert pairs.times.last_answer_ahead(prefiller, second, 11.0) == 17.0
    assert pairs.times.last_answer_ahead(prefiller, second, 9.0) == -math.inf, "it was sent later"
    assert pairs.times.last_answer_ahead(prefiller, decoder, 11.0) == -math.inf, "its own link may be slow"
    assert pairs.times.last_answer_ahead(other, second, 11.0) == -math.inf
    pairs.times.forget_backend(prefiller)
    assert pairs.times.last_answer_ahead(prefiller, second, 11.0) == -math.inf
