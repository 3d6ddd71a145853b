"""The reach of an engine's cache, learned from its events."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence
from statistics import median

import pytest

from proxy.balancer.policies.prefixes import CacheCount
from proxy.fleet.kv_events import blocks as module
from proxy.fleet.kv_events.blocks import RankBlocks, sum_of_ranks
from proxy.sim.hardware.work import KvBlocks
from proxy.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, UnreadableEvent

SIZE = 16


def stored(
    *hashes: int, parent: int | None = None, group: int | None = None, medium: str | None = None
) -> BlocksStored:
    return BlocksStored(list(hashes), parent, SIZE, medium, group, has_full_attention=True)


def removed(*hashes: int, group: int | None = None, medium: str | None = None) -> BlocksRemoved:
    return BlocksRemoved(list(hashes), medium, group)


class Engine:
    """An engine whose KV memory publishes events to `Blocks`."""

    def __init__(self, count: int, blocks: RankBlocks) -> None:
        self.memory = KvBlocks(count)
        self.memory.watcher = self
        self._blocks = blocks

    def stored(self, parent: Hashable | None, names: Sequence[Hashable]) -> None:
        self._blocks.apply_events([BlocksStored(list(names), parent, SIZE, "GPU", 0, True)])  # type: ignore[arg-type]

    def removed(self, name: Hashable) -> None:
        self._blocks.apply_events([BlocksRemoved([name], "GPU", 0)])  # type: ignore[list-item]

    def cleared(self) -> None:
        self._blocks.apply_events([AllBlocksCleared()])

    def serve(self, *names: int) -> int:
        taken = self.memory.take(names, len(names))
        assert taken is not None
        held, hits = taken
        self.memory.name(held, names)
        self.memory.give_back(held)
        return hits


def prompt(number: int, length: int = 10) -> range:
    return range(1000 * number, 1000 * number + length)


@pytest.mark.parametrize("count", [50, 400])
def test_cache_reach_is_learned_from_a_few_evictions(count: int) -> None:
    blocks, rng = RankBlocks(), random.Random(1)
    engine = Engine(count, blocks)
    number = 0
    while not blocks.cache_count.has_evicted:
        number += 1
        engine.serve(*prompt(number, rng.randrange(2, 12)))
    assert blocks.cache_count.reach_tokens == pytest.approx(count * SIZE, rel=0.15)
    assert blocks.stored_tokens <= (count + 25) * SIZE


def test_reused_blocks_shorten_the_cache_reach() -> None:
    """A prompt that is used again and again keeps half of the memory, so new blocks have the other half."""
    blocks = RankBlocks()
    engine = Engine(100, blocks)
    engine.serve(*prompt(1, 50))
    for number in range(2, 60):
        engine.serve(*prompt(1, 50))
        engine.serve(*prompt(number))
    assert blocks.cache_count.reach_tokens == pytest.approx(50 * SIZE, rel=0.2)


def test_cache_reach_is_unlimited_before_the_first_eviction() -> None:
    blocks = RankBlocks()
    blocks.apply_events([stored(1, 2, 3)])
    assert (blocks.cache_count.reach_tokens, blocks.cache_count.has_evicted) == (3 * SIZE, False)
    blocks.apply_events([removed(99), stored(4)])  # an unknown block
    assert (blocks.cache_count.reach_tokens, blocks.cache_count.has_evicted) == (3 * SIZE, False)


def test_late_subscriber_learns_from_new_blocks() -> None:
    engine = Engine(100, RankBlocks())
    for number in range(30):
        engine.serve(*prompt(number))
    blocks = engine._blocks = RankBlocks()
    engine.serve(*prompt(29), *prompt(50))  # after an unknown block
    assert blocks.stored_tokens == 10 * SIZE
    assert not len(blocks)
    for number in range(60, 75):
        engine.serve(*prompt(number))
    assert blocks.cache_count.has_evicted
    assert blocks.cache_count.reach_tokens == pytest.approx(100 * SIZE, rel=0.15)


@pytest.mark.parametrize("how", [AllBlocksCleared(), "forget_after_lost_events", "forget_after_restart"])
def test_old_evictions_no_longer_count(how: object) -> None:
    blocks = RankBlocks()
    engine = Engine(20, blocks)
    for number in range(9):
        engine.serve(*prompt(number))
    assert blocks.cache_count.has_evicted
    if isinstance(how, AllBlocksCleared):
        blocks.apply_events([how])
    else:
        getattr(blocks, str(how))()
    assert blocks.cache_count == CacheCount(90 * SIZE, 0, False, int(how != "forget_after_lost_events"))
    assert not len(blocks)
    blocks.apply_events([removed(*prompt(8))])
    assert not blocks.cache_count.has_evicted


def test_blocks_of_other_layer_groups_are_not_counted_again() -> None:
    blocks = RankBlocks()
    window = BlocksStored([5, 6], None, SIZE, "GPU", 0, has_full_attention=False)
    blocks.apply_events(
        [window, stored(1, 2, group=1), stored(1, 2, group=2), removed(1, 2, group=2), removed(5, 6, group=0)]
    )
    assert blocks.stored_tokens == 2 * SIZE
    assert len(blocks) == 2
    blocks.apply_events([removed(1)])  # older engines do not name the group
    assert len(blocks) == 1


def test_device_evictions_do_not_count_with_lower_tiers() -> None:
    blocks = RankBlocks()
    engine = Engine(20, blocks)
    for number in range(9):
        engine.serve(*prompt(number))
    blocks.apply_events([stored(3, medium="CPU"), removed(3, medium="CPU"), UnreadableEvent("")])
    assert blocks.cache_count[:4] == (90 * SIZE, 0, False, 0)
    assert blocks.cache_count.device_reach_tokens == pytest.approx(20 * SIZE, rel=0.25)


def test_number_of_remembered_blocks_is_limited() -> None:
    blocks = RankBlocks(max_blocks=100)
    engine = Engine(400, blocks)
    for number in range(200):
        engine.serve(*prompt(number))
        assert len(blocks) <= 100
    assert blocks.cache_count.reach_tokens == pytest.approx(400 * SIZE, rel=0.15)


@pytest.mark.parametrize("lost", [52, 60])
def test_blocks_with_a_lost_removal_are_eventually_dropped(lost: int) -> None:
    blocks = RankBlocks(max_blocks=60)
    blocks.apply_events([stored(*prompt(900, lost), group=0)])
    engine = Engine(20, blocks)
    for number in range(100):
        engine.serve(*prompt(number, 4))
    assert blocks.cache_count.reach_tokens == pytest.approx(20 * SIZE, rel=0.25)


def test_full_table_is_scanned_once_per_turnover_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaches: list[float] = []

    def counted(ages: Iterable[int]) -> float:
        reaches.append(median(ages))
        return reaches[-1]

    monkeypatch.setattr(module, "median", counted)
    blocks = RankBlocks(max_blocks=30)
    engine = Engine(40, blocks)
    scanned = set[int]()
    kept = []  # keeps their ids different
    for number in range(100):
        engine.serve(*prompt(number, 4))
        if id(blocks._depth_by_block) not in scanned:
            scanned.add(id(blocks._depth_by_block))
            kept.append(blocks._depth_by_block)
    assert 1 < len(kept) <= 1 + 100 * 4 / 30
    assert len(reaches) == len(kept) - 1
    assert blocks.cache_count.has_evicted


def test_dropped_blocks_leave_room_for_later_ones() -> None:
    blocks = RankBlocks(max_blocks=10)
    blocks.apply_events([stored(*prompt(1)), stored(*prompt(2))])
    blocks.forget_after_lost_events()
    blocks.apply_events([stored(*prompt(3, 100), parent=99), stored(*prompt(4)), stored(5)])
    assert len(blocks) == 10


def test_ranks_count_together_and_are_empty_only_together() -> None:
    one, other = RankBlocks(), RankBlocks()
    for blocks in (one, other):
        engine = Engine(20, blocks)
        for number in range(60):
            engine.serve(*prompt(number, 3))
    both = sum_of_ranks([one, other])
    assert both.stored_tokens == 360 * SIZE
    assert both.has_evicted
    assert both.reach_tokens == pytest.approx(40 * SIZE, rel=0.2)
    one.apply_events([AllBlocksCleared()])
    assert (sum_of_ranks([one, other]).cleared_at_tokens, sum_of_ranks([one, other]).has_evicted) == (0, False)
    other.apply_events([AllBlocksCleared()])
    assert sum_of_ranks([one, other]).cleared_at_tokens == 1


def test_reach_is_that_of_the_tier_that_keeps_blocks_longest() -> None:
    """A block is copied to the host when it is stored, and 20 blocks fit there. The device keeps 5."""
    blocks = RankBlocks()
    for number in range(60):
        blocks.apply_events([stored(number), copied(number)])
        if number >= 4:
            blocks.apply_events([removed(number - 4)])
        if number >= 20:
            blocks.apply_events([removed(number - 20, medium="CPU")])
    count = blocks.cache_count
    assert (count.reach_tokens, count.has_evicted, count.device_reach_tokens) == (20 * SIZE, True, 5 * SIZE)
    assert sum_of_ranks([blocks, blocks]).device_reach_tokens == 10 * SIZE
    assert sum_of_ranks([blocks, RankBlocks()]).device_reach_tokens == 0


def test_reach_is_not_known_before_a_lower_tier_has_evicted_blocks() -> None:
    blocks = RankBlocks()
    for number in range(30):
        blocks.apply_events([stored(number), copied(number)])
        if number >= 4:
            blocks.apply_events([removed(number - 4)])
    assert (blocks.cache_count.reach_tokens, blocks.cache_count.has_evicted) == (0, False)


def test_lower_tier_is_forgotten_when_events_are_lost() -> None:
    blocks = RankBlocks()
    for number in range(30):
        blocks.apply_events([stored(number), copied(number)])
        blocks.apply_events([removed(number - 20, medium="CPU")] if number >= 20 else [])
    assert blocks.cache_count.has_evicted
    blocks.forget_after_lost_events()
    assert not blocks.cache_count.has_evicted


def test_names_of_tiers_are_bounded() -> None:
    blocks = RankBlocks()
    for number in range(1000):
        blocks.apply_events([stored(1, medium=f"tier {number}")])
    assert len(blocks._tiers_by_name) == 4


def copied(number: int) -> BlocksStored:
    """Return the event of vLLM's OffloadingConnector, which names no size."""
    return BlocksStored([number], None, 0, "CPU", None, has_full_attention=True)
