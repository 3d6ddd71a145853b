"""The retry budget: which requests get a permit, which wait, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.gateway.retry import RetryBudget, RetryPermit
from proxy.settings import Retry

LONG = 3600.0


def budget_of(share: float = 0.2, least: int = 3) -> RetryBudget:
    options = Retry.model_construct(budget_share=share, budget_least=least)  # unchecked: `least` may be 0
    return RetryBudget(lambda: options)


class Requests:
    """Requests in flight, as many as the test has; leaving the block ends those that have not ended."""

    def __init__(self, budget: RetryBudget) -> None:
        self.budget = budget
        self._stack = ExitStack()

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        books = (self.budget.in_flight_count, self.budget.held_permits, self.budget.waiting_count)
        assert books == (0, 0, 0)

    def arrive(self, count: int) -> list[RetryPermit]:
        return [self._stack.enter_context(RetryPermit(self.budget)) for _ in range(count)]


async def waiting(permit: RetryPermit, budget: RetryBudget, timeout_seconds: float = LONG) -> asyncio.Task[bool]:
    """Return a task that waits for a permit."""
    before = budget.waiting_count
    task = asyncio.create_task(permit.acquire_permit(timeout_seconds))
    await asyncio.sleep(0)  # it runs until it waits
    assert budget.waiting_count == before + 1
    return task


@pytest.mark.parametrize(
    ("in_flight", "capacity"), [(0, 3), (1, 3), (15, 3), (19, 3), (20, 4), (24, 4), (25, 5), (1000, 200)]
)
def test_fifth_of_the_requests_and_at_least_three_may_be_retried(in_flight: int, capacity: int) -> None:
    with Requests(budget_of()) as requests:
        permits = requests.arrive(in_flight)
        assert requests.budget.permit_capacity == capacity
        assert sum(permit.try_acquire_permit() for permit in permits) == min(in_flight, capacity)


def test_budget_without_share_and_minimum_retries_nothing() -> None:
    with Requests(budget_of(share=0.0, least=0)) as requests:
        assert not requests.arrive(10)[0].try_acquire_permit()


def test_retry_needs_a_free_permit() -> None:
    with Requests(budget_of(least=1)) as requests:
        first, second = requests.arrive(2)
        assert first.try_acquire_permit()
        assert not second.try_acquire_permit()
        first.release_permit()
        assert second.try_acquire_permit()
        assert not first.try_acquire_permit()


def test_request_has_one_permit_at_most() -> None:
    with Requests(budget_of(least=2)) as requests:
        first, second, third = requests.arrive(3)
        assert [first.try_acquire_permit(), first.try_acquire_permit(), second.try_acquire_permit()] == [True] * 3
        first.release_permit()
        first.release_permit()
        assert third.try_acquire_permit()
        assert requests.budget.held_permits == 2


def test_permit_is_released_after_any_end() -> None:
    budget = budget_of(least=1)

    def fail() -> None:
        with RetryPermit(budget) as permit:
            assert permit.try_acquire_permit()
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        fail()
    assert (budget.in_flight_count, budget.held_permits) == (0, 0)


def test_held_permits_stay_valid_when_the_budget_shrinks() -> None:
    with Requests(budget_of(share=0.5, least=0)) as requests, ExitStack() as leaving:
        first, second = requests.arrive(2)
        others = [leaving.enter_context(RetryPermit(requests.budget)) for _ in range(2)]
        assert first.try_acquire_permit()
        assert others[0].try_acquire_permit()
        leaving.close()
        assert (requests.budget.permit_capacity, first.is_held) == (1, True)
        assert not second.try_acquire_permit()


async def test_resume_does_not_wait_when_a_permit_is_free() -> None:
    with Requests(budget_of()) as requests:
        (permit,) = requests.arrive(1)
        assert await permit.acquire_permit(0)
        assert await permit.acquire_permit(0)  # has its place already
        assert requests.budget.held_permits == 1


async def test_waiting_resumes_go_in_turn_and_before_later_retries() -> None:
    with Requests(budget_of(least=1)) as requests:
        holder, first, second, late = requests.arrive(4)
        assert holder.try_acquire_permit()
        tasks = [await waiting(permit, requests.budget) for permit in (first, second)]
        holder.release_permit()
        assert not late.try_acquire_permit()
        assert await tasks[0]
        assert not tasks[1].done()
        first.release_permit()
        assert await tasks[1]


async def test_further_requests_free_permits_for_waiting_resumes() -> None:
    with Requests(budget_of(share=0.2, least=1)) as requests:
        holder, first = requests.arrive(2)
        assert holder.try_acquire_permit()
        task = await waiting(first, requests.budget)
        requests.arrive(7)
        assert not first.is_held
        requests.arrive(1)  # the tenth
        assert await task


async def test_budget_shrinks_when_a_request_ends() -> None:
    budget = budget_of(share=0.5, least=0)
    with Requests(budget) as requests:
        second, waiter, _ = requests.arrive(3)
        with RetryPermit(budget) as first:
            assert first.try_acquire_permit()
            assert second.try_acquire_permit()
            task = await waiting(waiter, budget)
        assert (budget.permit_capacity, budget.held_permits, waiter.is_held) == (1, 1, False)
        second.release_permit()
        assert await task


async def test_resume_that_waited_too_long_gets_no_permit_and_blocks_none() -> None:
    with Requests(budget_of(least=1)) as requests:
        holder, first, second = requests.arrive(3)
        assert holder.try_acquire_permit()
        hasty = await waiting(first, requests.budget, timeout_seconds=0.001)
        patient = await waiting(second, requests.budget)
        assert not await hasty
        assert not first.is_held
        assert requests.budget.waiting_count == 1
        holder.release_permit()
        assert await patient


async def test_cancelled_resume_does_not_block_others() -> None:
    with Requests(budget_of(least=1)) as requests:
        holder, first, second = requests.arrive(3)
        assert holder.try_acquire_permit()
        tasks = [await waiting(permit, requests.budget) for permit in (first, second)]
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert requests.budget.waiting_count == 1
        holder.release_permit()
        assert await tasks[1]


async def test_resume_cancelled_at_its_turn_passes_the_permit_on() -> None:
    with Requests(budget_of(least=1)) as requests:
        holder, first, second = requests.arrive(3)
        assert holder.try_acquire_permit()
        tasks = [await waiting(permit, requests.budget) for permit in (first, second)]
        holder.release_permit()
        assert first.is_held
        tasks[0].cancel()  # it could not notice yet
        assert await tasks[1]
        assert tasks[0].cancelled()
        assert not first.is_held


async def test_permit_granted_at_the_deadline_is_taken() -> None:
    with Requests(budget_of(least=1)) as requests:
        holder, first = requests.arrive(2)
        assert holder.try_acquire_permit()
        task = await waiting(first, requests.budget, timeout_seconds=0)
        asyncio.get_running_loop().call_later(
            0, holder.release_permit
        )  # next to the timer, before the task hears of it
        assert await task
        assert first.is_held


class AnyOrder(RuleBasedStateMachine):
    """Requests come, are repeated, wait, are cancelled and go. The model is a set of places and a queue."""

    @initialize(share=st.sampled_from([0.0, 0.2, 0.5, 1.0]), least=st.integers(0, 3))
    def build(self, share: float, least: int) -> None:
        self.share, self.least = share, least
        self.loop = asyncio.new_event_loop()
        self.budget = budget_of(share, least)
        self.requests: list[RetryPermit] = []
        self.holders: set[RetryPermit] = set()
        self.queue: list[RetryPermit] = []
        self.tasks: dict[RetryPermit, asyncio.Task[bool]] = {}

    def capacity(self) -> int:
        return max(self.least, int(self.share * len(self.requests)))

    def admit(self) -> None:
        while self.queue and len(self.holders) < self.capacity():
            self.holders.add(self.queue.pop(0))

    def some(self, number: int) -> RetryPermit:
        return self.requests[number % len(self.requests)]

    def turn_loop(self, until: asyncio.Task[bool] | None = None) -> None:
        if until is None:
            self.loop.run_until_complete(asyncio.sleep(0))
        else:
            self.loop.run_until_complete(asyncio.wait((until,)))

    def give_up(self, permit: RetryPermit) -> None:
        """End a request's task before the request, as leaving a handler does."""
        task = self.tasks.pop(permit, None)
        if task is None:
            return
        if not task.done():
            self.holders.discard(permit)
            if permit in self.queue:
                self.queue.remove(permit)
            task.cancel()
            self.turn_loop(task)
            self.admit()
        if not task.cancelled():
            assert task.result() is True

    @rule(count=st.integers(1, 8))
    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.requests.append(RetryPermit(self.budget).__enter__())
            self.admit()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 1000))
    def leave(self, number: int) -> None:
        permit = self.some(number)
        self.give_up(permit)
        self.requests.remove(permit)
        self.holders.discard(permit)
        permit.__exit__(None, None, None)
        self.admit()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 1000))
    def retry(self, number: int) -> None:
        permit = self.some(number)
        if permit in self.queue:
            return  # a request does one thing at a time
        if permit not in self.holders and len(self.holders) < self.capacity():
            self.holders.add(permit)
        assert permit.try_acquire_permit() is (permit in self.holders)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 1000))
    def resume(self, number: int) -> None:
        permit = self.some(number)
        if (task := self.tasks.get(permit)) is not None and not task.done():
            return
        self.tasks[permit] = self.loop.create_task(permit.acquire_permit(LONG))
        self.turn_loop()
        if permit not in self.holders:
            self.queue.append(permit)
            self.admit()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 1000))
    def has_token(self, number: int) -> None:
        permit = self.some(number)
        if (task := self.tasks.get(permit)) is not None and not task.done():
            return  # it is still waiting for its turn, or does not know yet that it came
        self.holders.discard(permit)
        permit.release_permit()
        self.admit()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 1000))
    def cancel(self, number: int) -> None:
        self.give_up(self.some(number))

    @rule()
    def time_passes(self) -> None:
        self.turn_loop()

    @invariant()
    def the_books_are_the_models(self) -> None:
        budget = self.budget
        assert {permit for permit in self.requests if permit.is_held} == self.holders
        assert (budget.in_flight_count, budget.held_permits) == (len(self.requests), len(self.holders))
        assert budget.permit_capacity == self.capacity()
        assert list(budget._waiting_permits) == self.queue

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        assert not self.queue or len(self.holders) >= self.capacity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.requests:
            self.leave(0)
        assert (self.budget.in_flight_count, self.budget.held_permits, self.budget.waiting_count) == (0, 0, 0)
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events_keeps_the_budget = AnyOrder.TestCase
