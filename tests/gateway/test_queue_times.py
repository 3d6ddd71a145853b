"""The prediction of waiting times from the drain rate, and the rejection of requests that would wait too long."""

from __future__ import annotations

import asyncio

import pytest

from proxy.common.errors import GatewayError
from proxy.gateway.queue_order import DrainRate
from proxy.settings.model import Admission as Limits
from tests.gateway.test_queue_order import Counter, counter, drained

__all__ = ["counter"]


def served(rate: DrainRate, amount: float, seconds: float, count: int, now: float) -> float:
    """Serve `count` units while others wait, and return the time after them."""
    for _ in range(count):
        now += seconds
        rate.record_service(amount, now)
    return now


def test_waits_are_not_predicted_before_enough_services() -> None:
    rate = DrainRate()
    now = served(rate, 1.0, 1.0, 8, 0.0)
    assert rate.predict_seconds(5.0, now) is None
    now = served(rate, 1.0, 1.0, 1, now)
    assert rate.predict_seconds(5.0, now) == pytest.approx(5.0)


def test_prediction_follows_the_drain_rate() -> None:
    rate = DrainRate()
    now = served(rate, 2.0, 1.0, 60, 0.0)
    assert rate.predict_seconds(10.0, now) == pytest.approx(5.0, rel=0.05)
    now = served(rate, 2.0, 4.0, 60, now)
    assert rate.predict_seconds(10.0, now) == pytest.approx(20.0, rel=0.05)


def test_time_with_an_empty_queue_does_not_count() -> None:
    rate = DrainRate()
    now = served(rate, 1.0, 1.0, 9, 0.0)
    rate.record_service(1.0, now + 1)
    rate.stop_measuring()
    rate.record_service(1.0, now + 500)
    assert rate.predict_seconds(5.0, now + 500) == pytest.approx(5.0)
    rate.stop_measuring()
    rate.record_service(1.0, now + 900)
    assert rate.predict_seconds(5.0, now + 900) == pytest.approx(5.0)


def test_prediction_grows_while_the_queue_stands_still() -> None:
    rate = DrainRate()
    now = served(rate, 1.0, 1.0, 9, 0.0)
    assert (rate.predict_seconds(1.0, now + 10) or 0) > 2 * (rate.predict_seconds(1.0, now) or 0)


async def seen(counter: Counter, seconds: float = 2.0) -> None:
    """Serve requests of 1 s each in `seconds` each, and leave others in the queue."""
    for number in range(12):
        await counter.arrive(f"seen {number}", 1, key="-")
    for _ in range(10):
        counter.clock.now += seconds
        await counter.opens(1)


async def refusal(counter: Counter) -> GatewayError:
    """Return the error of the last request."""
    with pytest.raises(GatewayError) as refused:
        await counter.tasks.pop()
    return refused.value


async def test_request_with_a_long_predicted_wait_is_rejected_with_retry_after(counter: Counter) -> None:
    counter.admission.set_limits(Limits(max_predicted_wait_seconds=10.0, wait_seconds=600.0))
    await seen(counter)
    await counter.arrive("third", 2)  # behind two of 1 s, which take 2 s each
    assert counter.admission.waiting_count == 3
    await counter.arrive("fourth", 2)  # behind 4 s of work, so for 8 s
    await counter.arrive("fifth", 5)  # for 12 s
    error = await refusal(counter)
    assert (error.status, error.code) == (429, "queue_predicted")
    assert error.retry_after_seconds is not None
    assert 2.0 <= error.retry_after_seconds <= 2.4
    await counter.arrive("short", 0)  # goes first
    await counter.arrive("of another key", 1, key="other")  # shares with the first
    assert (counter.admission.waiting_count, len(counter.left)) == (6, 11)
    await drained(counter)


async def test_no_request_is_rejected_early_by_default(counter: Counter) -> None:
    counter.admission.set_limits(Limits(wait_seconds=600.0))
    await seen(counter)
    for number in range(50):
        await counter.arrive(f"more {number}", 9)
    assert counter.admission.waiting_count == 52
    await drained(counter)


async def test_predicted_wait_of_a_small_key_ignores_the_queue_of_a_large_one(counter: Counter) -> None:
    counter.admission.set_limits(Limits(max_predicted_wait_seconds=31.0, wait_seconds=600.0))
    await seen(counter)
    for _ in range(14):
        await counter.arrive("much", 1)
    await counter.arrive("too much", 1)
    assert (await refusal(counter)).code == "queue_predicted"
    await counter.arrive("little", 1, key="other")
    counter.admission.priorities = {"urgent": -1}
    await counter.arrive("urgent", 20, key="urgent")
    assert counter.admission.waiting_count == 18
    await drained(counter)


async def test_request_is_rejected_at_once_when_its_deadline_passes_in_the_queue(counter: Counter) -> None:
    await counter.arrive("early", 1, wanted=20.0)
    await counter.arrive("late", 3, wanted=10.0)
    await counter.arrive("any time", 1)
    counter.clock.now += 6.5
    counter.admission.check_soon()
    await counter.settle()
    assert counter.admission.waiting_count == 3
    counter.clock.now += 0.5  # it takes 3 s, and 3 s are left
    counter.open = {1}
    counter.admission.check_soon()
    await counter.settle()
    assert counter.served == ["early"]
    late = counter.tasks.pop(1)
    with pytest.raises(GatewayError) as refused:
        await late
    assert (refused.value.status, refused.value.retry_after_seconds) == (504, None)
    assert await drained(counter) == ["early", "any time"]
    assert not counter.admission._deadlines._deadline_by_unit
    assert not counter.admission._deadlines._sorted_deadlines


async def test_request_with_an_impossible_deadline_does_not_wait(counter: Counter) -> None:
    await counter.arrive("first")
    await counter.arrive("impossible", 3, wanted=2.5)
    assert (await refusal(counter)).code == "queue_deadline"
    assert len(counter.left) == 1
    await drained(counter)


async def test_deadline_is_removed_with_its_request(counter: Counter) -> None:
    await counter.arrive("leaves", 1, wanted=5.0)
    counter.tasks[0].cancel()
    await asyncio.wait([counter.tasks.pop()])
    assert not counter.admission._deadlines._sorted_deadlines
