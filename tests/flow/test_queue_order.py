"""In which order the queue is served where the pool knows what requests take, and who lets whom go first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from proxy.backend import Load
from proxy.balancer.pick import PickRequest
from proxy.flow.admission import Admission
from proxy.observe.metrics import Metrics
from proxy.settings.model import Admission as Limits
from tests.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Counter:
    """One place at a time, at one of two windows; a request's seconds are its tokens, its window its KV."""

    holds_queue = True

    def __init__(self) -> None:
        self.clock = Clock()
        self.open: set[int] = set()
        self.served: list[str] = []
        self.left: list[PickRequest] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.admission = Admission(Limits(), lambda: bool(self.open), Metrics(), self.clock, line_up=self)

    def work_seconds(self, request: PickRequest) -> float:
        return float(request.prefill.compute)

    def waits_no_more(self, request: PickRequest) -> None:
        self.left.append(request)

    def lets_go(self, request: Callable[[], PickRequest]) -> bool:
        return self.first_to_go([request()]) is not None

    def first_to_go(self, waiting: Sequence[PickRequest]) -> int | None:
        return next((place for place, request in enumerate(waiting) if request.prefill.kv in self.open), None)

    async def arrive(self, name: str, seconds: int = 0, window: int = 1, key: str = "-", *, known: bool = True) -> None:
        request = PickRequest.of(Load(seconds, window))

        async def serve() -> None:
            async with self.admission.admit(key, request=(lambda: request) if known else None):
                self.open.discard(window if known else next(iter(self.open)))
                self.served.append(name)

        self.tasks.append(asyncio.create_task(serve()))
        await self.settle()

    async def opens(self, *windows: int) -> None:
        self.open.update(windows)
        self.admission.notify()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)


@pytest.fixture
async def counter() -> Counter:
    return Counter()


async def drained(counter: Counter) -> list[str]:
    while counter.admission.waiting:
        await counter.opens(1, 2)
    await asyncio.gather(*counter.tasks)
    assert not counter.admission.running
    return counter.served


async def test_the_shorter_goes_first(counter: Counter) -> None:
    for name, seconds in (("long", 20), ("short", 1), ("middle", 5)):
        await counter.arrive(name, seconds)
    assert await drained(counter) == ["short", "middle", "long"]


async def test_who_has_waited_for_twice_its_work_goes_before_any_newcomer(counter: Counter) -> None:
    await counter.arrive("long", 20)
    counter.clock.now += 38
    await counter.arrive("just in time", 0)
    counter.clock.now += 3
    await counter.arrive("too late", 0)
    assert await drained(counter) == ["just in time", "long", "too late"]


async def test_equals_go_in_turn(counter: Counter) -> None:
    for name in "abc":
        await counter.arrive(name, 7)
    assert await drained(counter) == ["a", "b", "c"]


async def test_what_is_free_goes_to_the_first_to_whom_it_is_best(counter: Counter) -> None:
    await counter.arrive("wants the other", 1, window=2)
    await counter.arrive("wants this", 9, window=1)
    await counter.opens(1)
    assert counter.served == ["wants this"]
    await counter.opens(2)
    assert await drained(counter) == ["wants this", "wants the other"]


async def test_a_newcomer_to_whom_what_is_free_is_best_does_not_wait_for_those_who_want_something_else(
    counter: Counter,
) -> None:
    counter.open = {1}
    await counter.arrive("wants the other", 1, window=2)
    await counter.arrive("wants this", 9, window=1)
    assert counter.served == ["wants this"]
    assert await drained(counter) == ["wants this", "wants the other"]


async def test_who_comes_alone_and_had_better_wait_waits(counter: Counter) -> None:
    counter.open = {1}
    await counter.arrive("wants the other", window=2)
    assert counter.admission.waiting == 1
    await counter.opens(2)
    assert await drained(counter) == ["wants the other"]


async def test_keys_take_turns_whatever_their_work(counter: Counter) -> None:
    for number in range(3):
        await counter.arrive(f"greedy {number}", 1, key="greedy")
    await counter.arrive("modest", 50, key="modest")
    await counter.opens(1)
    await counter.opens(1)
    assert "modest" in counter.served
    await drained(counter)


async def test_what_is_only_passed_on_goes_in_turn(counter: Counter) -> None:
    await counter.arrive("first", 1, known=False)
    await counter.arrive("second", 1)
    assert await drained(counter) == ["first", "second"]


async def test_who_leaves_the_queue_leaves_nothing_behind(counter: Counter) -> None:
    for name in "abc":
        await counter.arrive(name, 3)
    counter.tasks[1].cancel()
    await asyncio.wait([counter.tasks[1]])
    del counter.tasks[1]
    assert await drained(counter) == ["a", "c"]
    assert not counter.admission._lines
