"""Pinned KV ends exactly once; prefixes are cached by whole blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.sim.kv.cache import PinTable, PrefixCache


def table() -> PinTable:
    return PinTable(lease_seconds=30.0, num_blocks=100)


def test_pin_is_pulled_once() -> None:
    pins = table()
    pins.pin("a", prompt_tokens=10, prompt_digest=1, block_size=4, now=0.0)
    assert pins.blocks_held == 3
    assert pins.pull("a", now=1.0) is not None
    assert pins.pull("a", now=1.0) is None
    assert pins.blocks_held == 0


def test_pin_expires_when_its_lease_ends() -> None:
    pins = table()
    pins.pin("a", prompt_tokens=10, prompt_digest=1, block_size=4, now=0.0)
    assert pins.next_expiry() == 30.0
    assert pins.pull("a", now=30.0) is None
    assert pins.expired == 1
    assert pins.next_expiry() is None


@given(steps=st.lists(st.tuples(st.sampled_from(["pin", "pull", "release", "wait"]), st.integers(0, 5))))
def test_every_pin_is_counted_under_the_way_it_ended(steps: list[tuple[str, int]]) -> None:
    pins = table()
    now = 0.0
    for number, (step, which) in enumerate(steps):
        match step:
            case "pin":
                pins.pin(str(number), prompt_tokens=which + 1, prompt_digest=0, block_size=2, now=now)
            case "pull":
                pins.pull(str(which), now)
            case "release":
                pins.release(str(which), now)
            case _:
                now += which * 10
                pins.expire(now)
    assert pins.pinned == pins.pulled + pins.released + pins.expired + len(pins.pins)
    assert pins.blocks_held == sum(len(pin.blocks) for pin in pins.pins.values())


def test_only_whole_blocks_of_a_common_prefix_are_cached() -> None:
    cache = PrefixCache(block_size=4, num_blocks=10)
    assert cache.add([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert cache.add([1, 2, 3, 4, 5, 6, 7, 8, 10]) == 8
    assert cache.add([1, 2, 3, 4, 0, 6, 7, 8, 9]) == 4
    assert cache.add([1, 2, 3, 4, 5, 6, 7, 8]) == 4, "the last token is always computed"
    cache.clear()
    assert cache.add([1, 2, 3, 4, 5]) == 0
