"""The memory of suspects: short, bounded, shared, and without a word of what it remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.blame import SuspectMemory
from tests.forking import in_child

if TYPE_CHECKING:
    from tests.clock import Clock

BODY = b'{"prompt": "Sesame"}'


@pytest.fixture
def memory(clock: Clock) -> SuspectMemory:
    return SuspectMemory(seconds=300.0, clock=clock)


def test_suspect_is_remembered_for_a_limited_time(memory: SuspectMemory, clock: Clock) -> None:
    assert memory.is_empty
    memory.remember(BODY, 1)
    assert not memory.is_empty
    assert [memory.engines(BODY), memory.engines(BODY.lower())] == [1, 0]
    memory.remember(BODY, 2)
    clock.now += 299.0
    assert memory.engines(BODY) == 2
    clock.now += 1.0
    assert memory.engines(BODY) == 0


def test_suspect_that_was_served_is_forgotten(memory: SuspectMemory) -> None:
    memory.remember(BODY, 1)
    memory.forget(b"another")
    assert memory.engines(BODY) == 1
    memory.forget(BODY)
    assert memory.is_empty


def test_suspects_are_shared_by_all_workers(memory: SuspectMemory) -> None:
    in_child(lambda: memory.remember(BODY, 2))
    assert memory.engines(BODY) == 2
    in_child(lambda: memory.forget(BODY))
    assert memory.is_empty


def test_oldest_suspects_are_dropped_for_new_ones(memory: SuspectMemory) -> None:
    for number in range(1000):
        memory.remember(b"%d" % number, 2)
    kept = [number for number in range(1000) if memory.engines(b"%d" % number)]
    assert kept == list(range(744, 1000))


def test_suspect_memory_keeps_no_text_of_a_request(memory: SuspectMemory) -> None:
    memory.remember(BODY, 2)
    assert b"Sesame" not in memory._shared._memory[:]


def test_digests_of_suspects_depend_on_a_secret_key(memory: SuspectMemory, clock: Clock) -> None:
    assert memory._digest(BODY) != SuspectMemory(clock=clock)._digest(BODY)
