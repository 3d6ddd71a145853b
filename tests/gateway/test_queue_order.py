"""The order of the queue when the pool predicts the work of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.engine_room import EngineRoom
from proxy.observe.metrics import Metrics
from proxy.settings.model import Admission as Limits
from proxy.wire.prefix import NO_PREFIX_KEYS
from tests.clock import Clock


class Wishes:
    """The priority and deadline that a client sets for a request."""

    prompt_tokens = output_tokens = 1
    prefix_keys = NO_PREFIX_KEYS
    session_id = None

    def __init__(self, priority: int | None, first_token_seconds: float | None) -> None:
        self._priority = priority
        self.first_token_seconds = first_token_seconds

    def request_texts(self) -> None:
        return None

    def requested_priority(self, *, is_lower_first: bool) -> int | None:
        assert is_lower_first
        return self._priority


class Counter(EngineRoom):
    """One place at a time, at one of two windows; a request's seconds are its tokens, its window its KV."""

    holds_queue = True
    working_sets = None

    def __init__(self) -> None:
        self.clock = Clock()
        self.open: set[int] = set()
        self.served: list[str] = []
        self.left: list[PickRequest] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.seconds_of_answers: dict[int, float] = {}
        """Seconds of the decoder, by the request's seconds."""
        parts = AdmissionParts(engine_room=self, metrics=Metrics(), clock=self.clock, queue_order=self)
        self.admission = AdmissionQueue(parts, Limits())

    def predict_work_seconds(self, request: PickRequest) -> float:
        return float(request.prefill_load.compute_tokens)

    def answer_seconds(self, request: PickRequest) -> float:
        return self.seconds_of_answers.get(request.prefill_load.compute_tokens, 0.0)

    def on_left_queue(self, request: PickRequest) -> None:
        self.left.append(request)

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return bool(self.open) and (request is None or self.index_to_admit([request()]) is not None)

    def index_to_admit(self, waiting_requests: Sequence[PickRequest]) -> int | None:
        return next(
            (place for place, request in enumerate(waiting_requests) if request.prefill_load.kv_tokens in self.open),
            None,
        )

    async def arrive(
        self,
        name: str,
        seconds: int = 0,
        window: int = 1,
        key: str = "-",
        *,
        known: bool = True,
        priority: int | None = None,
        wanted: float | None = None,
    ) -> None:
        load = Load(seconds, window)
        request = PickRequest(load, load, Wishes(priority, wanted))

        async def serve() -> None:
            async with self.admission.make_entry(key, request=(lambda: request) if known else None):
                self.open.discard(window if known else next(iter(self.open)))
                self.served.append(name)

        self.tasks.append(asyncio.create_task(serve()))
        await self.settle()

    async def opens(self, *windows: int) -> None:
        self.open.update(windows)
        self.admission.check_soon()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)


@pytest.fixture
async def counter() -> Counter:
    return Counter()


async def drained(counter: Counter) -> list[str]:
    while counter.admission.waiting_count:
        await counter.opens(1, 2)
    await asyncio.gather(*counter.tasks)
    assert not counter.admission.running_count
    return counter.served


async def test_shorter_request_goes_first(counter: Counter) -> None:
    for name, seconds in (("long", 20), ("short", 1), ("middle", 5)):
        await counter.arrive(name, seconds)
    assert await drained(counter) == ["short", "middle", "long"]


async def test_request_that_waited_three_times_its_work_goes_before_new_ones(counter: Counter) -> None:
    await counter.arrive("long", 20)
    counter.clock.now += 58
    await counter.arrive("just in time", 0)
    counter.clock.now += 3
    await counter.arrive("too late", 0)
    assert await drained(counter) == ["just in time", "long", "too late"]


async def test_equal_requests_go_in_turn(counter: Counter) -> None:
    for name in "abc":
        await counter.arrive(name, 7)
    assert await drained(counter) == ["a", "b", "c"]


async def test_free_instance_goes_to_the_first_request_that_it_suits_best(counter: Counter) -> None:
    await counter.arrive("wants the other", 1, window=2)
    await counter.arrive("wants this", 9, window=1)
    await counter.opens(1)
    assert counter.served == ["wants this"]
    await counter.opens(2)
    assert await drained(counter) == ["wants this", "wants the other"]


async def test_new_request_skips_queue_when_queued_requests_prefer_other_instances(
    counter: Counter,
) -> None:
    counter.open = {1}
    await counter.arrive("wants the other", 1, window=2)
    await counter.arrive("wants this", 9, window=1)
    assert counter.served == ["wants this"]
    assert await drained(counter) == ["wants this", "wants the other"]


async def test_single_request_waits_for_a_better_instance(counter: Counter) -> None:
    counter.open = {1}
    await counter.arrive("wants the other", window=2)
    assert counter.admission.waiting_count == 1
    await counter.opens(2)
    assert await drained(counter) == ["wants the other"]


async def test_keys_get_equal_seconds_and_not_equal_numbers(counter: Counter) -> None:
    for number in range(4):
        await counter.arrive(f"long {number}", 20, key="long")
    for number in range(9):
        await counter.arrive(f"short {number}", 5, key="short")
    keys = [name.split()[0] for name in await drained(counter)]
    # Whenever a long one is served, the other key is owed 20 s: four short ones.
    assert keys == ["short", *["long", *["short"] * 4] * 2, "long", "long"]


async def test_keys_with_nearly_equal_service_compete_by_their_work(counter: Counter) -> None:
    for number in range(4):
        await counter.arrive(f"greedy {number}", 1, key="greedy")
    await counter.arrive("modest", 50, key="modest")
    # Two seconds are about the same, three are not.
    assert await drained(counter) == ["greedy 0", "greedy 1", "greedy 2", "modest", "greedy 3"]


async def test_key_keeps_its_service_during_a_short_absence(counter: Counter) -> None:
    await counter.arrive("a", 20, key="comes and goes")
    for number in range(4):
        await counter.arrive(f"b {number}", 5, key="stays")
    for _ in range(2):
        await counter.opens(1)
    assert counter.served == ["b 0", "a"]
    await counter.arrive("again", 0, key="comes and goes")
    assert await drained(counter) == ["b 0", "a", "b 1", "b 2", "b 3", "again"]
    assert not counter.admission._fair_queue._served_seconds_by_key


async def test_absent_key_does_not_save_service(counter: Counter) -> None:
    for number in range(9):
        await counter.arrive(f"b {number}", 5, key="stays")
    for _ in range(4):
        await counter.opens(1)
    for number in range(4):
        await counter.arrive(f"new {number}", 5, key="new")
    served = (await drained(counter))[4:]
    assert [name.split()[0] for name in served] == ["b", "new"] * 4 + ["b"]


async def test_decoder_time_is_charged_to_the_key(counter: Counter) -> None:
    counter.seconds_of_answers[3] = 10.0
    for number in range(4):
        await counter.arrive(f"long answer {number}", 3, key="long answers")
    for number in range(4):
        await counter.arrive(f"short {number}", 4, key="short answers")
    served = await drained(counter)
    # 13 s for one, which is about three times 4 s.
    assert [name.rsplit(" ", 1)[0] for name in served] == [
        "long answer",
        *["short"] * 3,
        "long answer",
        "short",
        *["long answer"] * 2,
    ]


async def test_more_urgent_requests_go_first_whatever_their_key_and_work(counter: Counter) -> None:
    await counter.arrive("usual", 1, key="a")
    await counter.arrive("later", 1, key="a", priority=5)
    await counter.arrive("urgent", 50, key="a", priority=-1)
    await counter.arrive("as urgent", 2, key="b", priority=-1)
    await counter.arrive("usual, too", 3, key="b")
    assert await drained(counter) == ["as urgent", "urgent", "usual, too", "usual", "later"]


async def test_urgent_request_goes_before_those_of_a_key_served_less(counter: Counter) -> None:
    for name in ("first", "second"):
        await counter.arrive(name, 30, key="a", priority=-1)
    await counter.arrive("usual", 1, key="b")
    assert await drained(counter) == ["first", "second", "usual"]


async def test_request_can_only_lower_the_priority_of_its_key(counter: Counter) -> None:
    counter.admission.priorities = {"batch": 3, "chat": 0}
    await counter.arrive("forward", 1, key="batch", priority=-9)
    await counter.arrive("batch", 1, key="batch")
    await counter.arrive("stands back", 1, key="chat", priority=4)
    await counter.arrive("chat", 50, key="chat")
    assert await drained(counter) == ["chat", "forward", "batch", "stands back"]


async def test_passed_through_requests_go_in_turn(counter: Counter) -> None:
    await counter.arrive("first", 1, known=False)
    await counter.arrive("second", 1)
    assert await drained(counter) == ["first", "second"]


async def test_request_that_leaves_the_queue_leaves_nothing_behind(counter: Counter) -> None:
    for name in "abc":
        await counter.arrive(name, 3)
    counter.tasks[1].cancel()
    await asyncio.wait([counter.tasks[1]])
    del counter.tasks[1]
    assert await drained(counter) == ["a", "c"]
    assert not counter.admission._lines_by_key
