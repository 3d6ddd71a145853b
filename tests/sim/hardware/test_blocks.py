"""KV memory in blocks: what is shared, what stays cached, and what has to make room."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from proxy.sim.hardware.work import Held, KvBlocks


def taken(blocks: KvBlocks, names: str, count: int) -> Held:
    """So many blocks, of which those with names are computed at once."""
    found = blocks.take(names, count)
    assert found is not None
    held, _ = found
    blocks.name(held, names)
    return held


def test_prompt_finds_the_blocks_of_one_that_begins_alike() -> None:
    blocks = KvBlocks(10)
    taken(blocks, "abc", 4)
    assert (blocks.hit("abd"), blocks.hit("xbc"), blocks.hit("abcd")) == (2, 0, 3)


def test_blocks_in_use_are_shared_and_counted_once() -> None:
    blocks = KvBlocks(10)
    taken(blocks, "abc", 3)
    taken(blocks, "abd", 3)
    assert blocks.used == 4


def test_unused_blocks_stay_until_their_room_is_needed() -> None:
    blocks = KvBlocks(4)
    blocks.give_back(taken(blocks, "abc", 3))
    assert (blocks.free, blocks.cached, blocks.hit("abc")) == (4, 3, 3)
    taken(blocks, "xy", 2)
    assert (blocks.hit("abc"), blocks.evicted) == (2, 1), "the tail goes first"


def test_least_recently_used_goes_first() -> None:
    blocks = KvBlocks(4)
    first = taken(blocks, "ab", 2)
    blocks.give_back(first)
    blocks.give_back(taken(blocks, "xy", 2))
    blocks.give_back(taken(blocks, "ab", 2))
    taken(blocks, "uv", 2)
    assert (blocks.hit("ab"), blocks.hit("xy")) == (2, 0)


def test_oversized_request_takes_no_blocks() -> None:
    blocks = KvBlocks(4)
    held = taken(blocks, "ab", 3)
    assert blocks.take("abc", 5) is None
    assert (blocks.used, blocks.free) == (3, 1)
    blocks.give_back(held)
    assert blocks.take("ab", 5) is None
    assert (blocks.used, blocks.hit("ab")) == (0, 2)


def test_blocks_computed_twice_at_once_are_cached_once() -> None:
    blocks = KvBlocks(10)
    one, two = blocks.take("ab", 2), blocks.take("ab", 2)
    assert one is not None
    assert two is not None
    blocks.name(one[0], "ab")
    blocks.name(two[0], "ab")
    assert blocks.used == 4
    blocks.give_back(one[0])
    blocks.give_back(two[0])
    assert (blocks.used, blocks.cached) == (0, 2)


def test_blocks_are_freed_once() -> None:
    blocks = KvBlocks(10)
    held = taken(blocks, "abc", 5)
    other = taken(blocks, "abd", 5)
    blocks.give_back(held)
    blocks.give_back(held)
    assert blocks.used == 5
    blocks.give_back(other)
    assert blocks.used == 0


def test_cached_blocks_can_be_dropped() -> None:
    blocks = KvBlocks(10)
    blocks.give_back(taken(blocks, "ab", 2))
    held = taken(blocks, "xy", 2)
    blocks.forget()
    assert (blocks.hit("ab"), blocks.hit("xy"), held.blocks) == (0, 2, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("abc", max_size=4), st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_in_any_sequence_nothing_is_lost_and_memory_is_never_exceeded(steps: list[tuple[str, int, int]]) -> None:
    blocks = KvBlocks(8)
    holders: list[Held] = []
    for names, more, leaver in steps:
        prefixes = [names[: end + 1] for end in range(len(names))]
        found = blocks.take(prefixes, len(prefixes) + more)
        if found is not None:
            blocks.name(found[0], prefixes)
            holders.append(found[0])
        elif holders:
            blocks.give_back(holders.pop(leaver % len(holders)))
        assert blocks.used + blocks.cached <= blocks.count
        assert blocks.used >= max((held.blocks for held in holders), default=0)
    for held in holders:
        blocks.give_back(held)
    assert blocks.used == 0
