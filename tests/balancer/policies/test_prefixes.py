"""Tests of cached prefixes: sent prompts, evictions and the engine's reports."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from proxy.balancer.policies import prefixes
from proxy.balancer.policies.prefixes import CacheCount, CachedPrefixes, CacheReach
from proxy.sim.hardware.work import KvBlocks


def keys(*names: int) -> list[int]:
    return list(names)


def ends(count: int, piece: int = 100) -> list[float]:
    return [float(piece * (place + 1)) for place in range(count)]


def sent(cached: CachedPrefixes, *names: int, piece: int = 100) -> list[int]:
    """Send a prompt, and return its new pieces."""
    hit = cached.count_cached_pieces(names)
    known = cached.record_prompt(names, ends(len(names), piece), piece * (len(names) - hit))
    return [name for name, reading in zip(names, known, strict=True) if reading is None]


def learned(cached: CachedPrefixes, reported: float) -> None:
    odometer = cached.token_odometer
    known = cached.record_prompt(keys(1, 2, 3), ends(3), 0.0)
    cached.learn_from_report(known, odometer, ends(3), expected_tokens=300, reported_tokens=reported)


def test_sent_prompt_is_cached_up_to_the_first_difference() -> None:
    cached = CachedPrefixes()
    sent(cached, 1, 2, 3)
    assert [cached.count_cached_pieces(each) for each in (keys(1, 2, 3, 4), keys(1, 2, 9), keys(9, 2, 3), [])] == [
        3,
        2,
        0,
        0,
    ]


def test_prefix_is_evicted_from_its_tail() -> None:
    cached = CachedPrefixes()
    cached.capacity_tokens = 1000
    sent(cached, *range(5))
    sent(cached, *range(10, 17))
    assert cached.count_cached_pieces(keys(*range(5))) == 3
    sent(cached, *range(20, 23))
    assert cached.count_cached_pieces(keys(*range(5))) == 0


def test_block_size_is_learned_from_reported_tokens() -> None:
    cached = CachedPrefixes()
    assert cached.predict_found_tokens(ends(5), 3, 900) == 300
    cached.learn_block_size(16_384)  # one report shows no block size
    assert cached.predict_found_tokens(ends(5), 3, 900) == 300
    cached.learn_block_size(16_384 + 3 * 128)
    assert [cached.predict_found_tokens(ends(5), hit, 900) for hit in (0, 1, 2, 3, 5)] == [0, 0, 128, 256, 384]
    cached.learn_block_size(0)
    cached.learn_block_size(4097)
    assert cached.predict_found_tokens(ends(5), 3, 900) == 300


def test_last_token_of_a_prompt_is_always_computed() -> None:
    cached = CachedPrefixes()
    assert cached.predict_found_tokens(ends(5), 5, 500) == 499
    cached.learn_block_size(256)
    cached.learn_block_size(384)
    assert cached.predict_found_tokens([512.0], 1, 512) == 384


def test_reused_prefix_stays_cached() -> None:
    cached = CachedPrefixes()
    cached.capacity_tokens = 1000
    for round_ in range(20):
        sent(cached, 1, 2)
        sent(cached, *range(100 * (round_ + 1), 100 * (round_ + 1) + 6))
    assert cached.count_cached_pieces(keys(1, 2)) == 2


def test_failed_prompt_drops_only_its_new_pieces() -> None:
    cached = CachedPrefixes()
    sent(cached, 1, 2)
    cached.drop_keys(sent(cached, 1, 2, 3))
    assert cached.count_cached_pieces(keys(1, 2, 3)) == 2


def test_trust_falls_when_nothing_is_cached() -> None:
    cached = CachedPrefixes()
    sent(cached, 1, 2, 3)
    for _ in range(10):
        learned(cached, reported=0)
    assert cached.hit_trust < 0.1
    for _ in range(10):
        learned(cached, reported=300)
    assert cached.hit_trust > 0.85


@pytest.mark.parametrize("capacity", [200_000, 3_000_000])
def test_capacity_is_learned_from_cached_tokens(capacity: int) -> None:
    """Compare with a simulated cache of this size, from any initial estimate."""
    cached, blocks, rng = CachedPrefixes(), KvBlocks(capacity // 1000), random.Random(1)
    for _ in range(3000):
        family = int(rng.paretovariate(0.4)) % 900
        names = [1000 * family + piece for piece in range(12)] + [10**9 + rng.randrange(10**9)]
        expected, odometer = cached.count_cached_pieces(names), cached.token_odometer
        found = blocks.take(names, len(names))
        assert found is not None
        held, hits = found
        blocks.name(held, names)
        blocks.give_back(held)
        known = cached.record_prompt(names, ends(len(names), 1000), 1000 * (len(names) - hits))
        cached.learn_from_report(known, odometer, ends(len(names), 1000), 1000 * expected, 1000 * hits)
    assert cached.capacity_tokens == pytest.approx(capacity, rel=0.35)


@pytest.mark.interpreted
def test_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_KEYS", 100)
    cached = CachedPrefixes()
    for number in range(100):
        sent(cached, *range(10 * number, 10 * number + 10))
    assert len(cached) <= 210
    assert cached.count_cached_pieces(keys(*range(990, 1000))) == 10


def test_evicted_prefix_is_forgotten_later() -> None:
    cached = CachedPrefixes()
    cached.capacity_tokens = 1000
    for number in range(100):
        sent(cached, *range(10 * number, 10 * number + 5))
    assert len(cached) <= 40


def test_restart_empties_the_cache() -> None:
    cached = CachedPrefixes()
    sent(cached, 1, 2)
    cached.forget_all()
    assert cached.count_cached_pieces(keys(1, 2)) == 0


def test_reported_evictions_set_the_capacity() -> None:
    cached = CachedPrefixes()
    cached.apply_count(
        CacheCount(stored_tokens=0, reach_tokens=0, has_evicted=False, cleared_at_tokens=0), computing_tokens=0
    )
    assert cached.capacity_tokens == 1_000_000
    cached.apply_count(
        CacheCount(stored_tokens=2_000_000, reach_tokens=2_000_000, has_evicted=False, cleared_at_tokens=0),
        computing_tokens=0,
    )
    assert cached.capacity_tokens == 2_000_000
    cached.apply_count(
        CacheCount(stored_tokens=2_000_000, reach_tokens=500, has_evicted=True, cleared_at_tokens=0), computing_tokens=0
    )
    assert cached.capacity_tokens == 500
    learned(cached, reported=300)
    learned(cached, reported=0)
    assert cached.capacity_tokens == 500


def test_tokens_of_other_clients_evict_prefixes() -> None:
    cached = CachedPrefixes()
    cached.apply_count(
        CacheCount(stored_tokens=7000, reach_tokens=1000, has_evicted=True, cleared_at_tokens=0), computing_tokens=0
    )
    sent(cached, 1, 2, 3)
    cached.apply_count(
        CacheCount(stored_tokens=7000, reach_tokens=1000, has_evicted=True, cleared_at_tokens=0), computing_tokens=300
    )
    assert cached.count_cached_pieces(keys(1, 2, 3)) == 3
    cached.apply_count(
        CacheCount(stored_tokens=7300, reach_tokens=1000, has_evicted=True, cleared_at_tokens=0), computing_tokens=0
    )
    assert cached.count_cached_pieces(keys(1, 2, 3)) == 3
    cached.apply_count(
        CacheCount(stored_tokens=8400, reach_tokens=1000, has_evicted=True, cleared_at_tokens=0), computing_tokens=0
    )
    assert cached.count_cached_pieces(keys(1, 2, 3)) == 0


def test_restarted_count_and_cleared_cache_are_applied_once() -> None:
    cached = CachedPrefixes()
    assert not cached.apply_count(
        CacheCount(stored_tokens=7000, reach_tokens=0, has_evicted=False, cleared_at_tokens=3), computing_tokens=0
    )
    assert not cached.apply_count(
        CacheCount(stored_tokens=7000, reach_tokens=0, has_evicted=False, cleared_at_tokens=3), computing_tokens=0
    )
    assert cached.apply_count(
        CacheCount(stored_tokens=7000, reach_tokens=0, has_evicted=False, cleared_at_tokens=4), computing_tokens=0
    )
    odometer = cached.token_odometer
    assert not cached.apply_count(
        CacheCount(stored_tokens=10, reach_tokens=0, has_evicted=False, cleared_at_tokens=0), computing_tokens=0
    )
    assert cached.token_odometer == odometer


@dataclass
class Conversations:
    """Conversations that take turns at a simulated cache with blocks of this size."""

    block_tokens: int
    capacity: int
    exact: bool = True
    """`is_exact`: cached tokens are reported as the gateway counts them. Otherwise they differ by up to a tenth."""
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)

    def hold(self, conversations: int, *, turns: int = 800) -> float:
        """Return the share of the prompts' tokens that the gateway expects to be cached, of those that were."""
        blocks, rng = KvBlocks(self.capacity // self.block_tokens), random.Random(1)
        lengths = [0] * conversations
        expected_tokens = cached_tokens = 0.0
        for _ in range(turns):
            who = rng.randrange(conversations)
            before = lengths[who] or 5000
            length = lengths[who] = before + rng.randrange(300, 3000) if before < 40_000 else 5000
            names = [
                10**6 * (who + 1) * (end > 4000) + end
                for end in range(self.block_tokens, length + 1, self.block_tokens)
            ]
            found = blocks.take(names, -(-length // self.block_tokens))
            assert found is not None
            held, hits = found
            blocks.name(held, names)
            blocks.give_back(held)
            told = min(self.block_tokens * hits, length - 1)
            pieces = [600 * (place + 1) for place in range(length // 600)]
            keys = [10**6 * (who + 1) * (end > 4000) + end for end in pieces]
            ends = [float(end) for end in pieces]
            cached, odometer = self.cached, self.cached.token_odometer
            expected = cached.predict_found_tokens(ends, cached.count_cached_pieces(keys), length)
            known = cached.record_prompt(keys, ends, length - told)
            cached.learn_block_size(told)
            estimate = told if self.exact else min(length - 1.0, told * rng.uniform(0.9, 1.1))
            cached.learn_from_report(known, odometer, ends, expected, estimate)
            expected_tokens += expected
            cached_tokens += told
        return expected_tokens / cached_tokens


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("block_tokens", [16, 256, 544, 1024, 2048])
def test_coarse_blocks_do_not_lower_the_learned_capacity(block_tokens: int, exact: bool) -> None:
    conversations = Conversations(block_tokens, capacity=10_000_000, exact=exact)
    assert conversations.hold(32) == pytest.approx(1.0, abs=0.1)
    assert conversations.cached.capacity_tokens >= 1_000_000
    assert conversations.cached.hit_trust > 0.8


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("block_tokens", [16, 544, 2048])
def test_small_cache_with_coarse_blocks_is_learned(block_tokens: int, exact: bool) -> None:
    conversations = Conversations(block_tokens, capacity=300_000, exact=exact)
    conversations.hold(60)
    assert conversations.cached.capacity_tokens == pytest.approx(300_000, rel=0.5)


@pytest.mark.parametrize(("block_tokens", "missed_age"), [(16, 50_600.0), (2048, None)])
def test_missing_piece_within_one_block_is_no_eviction(block_tokens: int, missed_age: float | None) -> None:
    """An engine reports no cached tokens of a prompt that is shorter than its blocks."""
    cached = CachedPrefixes()
    for blocks in range(1, 40):
        cached.learn_block_size(blocks * block_tokens)
    keys, ends = [1, 2, 3], [600.0, 1200.0, 1800.0]
    cached.record_prompt(keys, ends, 0.0)
    odometer = cached.token_odometer = 50_000.0
    known = cached.record_prompt(keys, ends, 1800.0)
    assert cached.learn_from_report(known, odometer, ends, 0.0, 0.0) == (None, missed_age)


def shown(
    reach: CacheReach, found_up_to: float, *, answers: int = 400, most: float = 10_000_000, seed: int = 1
) -> None:
    """Show answers whose prefixes have ages up to `most`, and are found up to an age."""
    rng = random.Random(1)
    for _ in range(answers):
        age = most * rng.random() ** 3
        if age <= found_up_to:
            reach.learn_from_ages(age, None)
        else:
            reach.learn_from_ages(1000.0, age)  # the common prefix of all prompts is found


@pytest.mark.parametrize("tokens", [100_000, 300_000, 1_000_000, 4_000_000])
def test_reach_is_the_age_beyond_which_prefixes_are_missed(tokens: int) -> None:
    reach = CacheReach()
    shown(reach, tokens)
    assert reach.reach_tokens == pytest.approx(tokens, rel=0.3)


def test_reach_is_unknown_while_everything_is_found() -> None:
    reach = CacheReach()
    shown(reach, 10_000_000)
    assert reach.reach_tokens is None
    assert reach.longest_found_age == pytest.approx(10_000_000, rel=0.3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_reach_is_unknown_when_misses_do_not_depend_on_the_age(share: float) -> None:
    rng = random.Random(1)
    reach = CacheReach()
    for _ in range(2000):
        age = 10_000_000 * rng.random() ** 3
        reach.learn_from_ages(None, age) if rng.random() < share else reach.learn_from_ages(age, None)
        assert reach.reach_tokens is None


def test_reach_is_unknown_when_each_answer_finds_most_and_misses_the_end() -> None:
    rng = random.Random(1)
    reach = CacheReach()
    for _ in range(2000):
        age = 10_000_000 * rng.random() ** 3
        reach.learn_from_ages(age, age + 500)
        assert reach.reach_tokens is None


def test_reach_is_dropped_when_prefixes_beyond_it_are_found() -> None:
    reach = CacheReach()
    shown(reach, 300_000)
    assert reach.reach_tokens is not None
    shown(reach, 10_000_000, answers=100)
    assert reach.reach_tokens is None or reach.reach_tokens > 5_000_000


def test_reach_follows_a_cache_that_becomes_smaller() -> None:
    reach = CacheReach()
    shown(reach, 2_000_000)
    shown(reach, 200_000, answers=1500)
    assert reach.reach_tokens == pytest.approx(200_000, rel=0.3)


def test_tokens_beyond_the_reach_of_the_device_are_loaded_from_a_lower_tier() -> None:
    cached = CachedPrefixes()
    cached.record_prompt(keys(1, 2, 3), ends(3), 300)
    cached.record_prompt(keys(7, 8), ends(2), 200)
    assert cached.predict_loaded_tokens(keys(1, 2, 3), ends(3), 300) == 0
    for on_device, loaded in ((200, 300), (350, 200), (450, 100), (600, 0), (0, 0)):
        cached.apply_count(
            CacheCount(0, reach_tokens=10_000, has_evicted=True, cleared_at_tokens=0, device_reach_tokens=on_device),
            computing_tokens=0,
        )
        assert cached.predict_loaded_tokens(keys(1, 2, 3), ends(3), 300) == loaded
    assert cached.predict_loaded_tokens(keys(1, 2, 3), ends(3), 0) == 0
