"""Test the deadlines of request headers."""

from __future__ import annotations

import asyncio

import pytest

from proxy.listener.header_deadlines import HeaderDeadlines
from tests.clock import Clock


@pytest.fixture
def heads(clock: Clock) -> HeaderDeadlines[str]:
    return HeaderDeadlines(clock)


def test_header_deadlines_return_connections_that_are_late(heads: HeaderDeadlines[str], clock: Clock) -> None:
    for name in "abc":
        heads.start_timing(name)
        clock.now += 1.0
    assert heads.add_header_bytes("b", 10) == 10
    assert heads.add_header_bytes("b", 5) == 15
    assert heads.overdue_connections(4.0) == []
    assert heads.overdue_connections(3.0) == [("a", False)]
    assert heads.overdue_connections(2.0) == [("a", False), ("b", True)]
    assert heads.overdue_connections(0.0) == [("a", False), ("b", True), ("c", False)]


def test_header_deadlines_forget_complete_headers(heads: HeaderDeadlines[str], clock: Clock) -> None:
    heads.start_timing("a")
    heads.start_timing("b")
    heads.stop_timing("a")
    heads.stop_timing("nobody")
    clock.now += 100.0
    assert heads.overdue_connections(1.0) == [("b", False)]
    assert ("a" in heads, "b" in heads) == (False, True)


def test_header_deadline_starts_again_for_a_further_request(heads: HeaderDeadlines[str], clock: Clock) -> None:
    heads.start_timing("a")
    heads.start_timing("b")
    heads.stop_timing("a")
    clock.now += 1.0
    heads.start_timing("a")
    assert heads.overdue_connections(1.0) == [("b", False)]


async def test_header_deadlines_can_be_awaited_until_none_is_left(heads: HeaderDeadlines[str]) -> None:
    await heads.wait_until_empty()
    heads.start_timing("a")
    heads.start_timing("b")
    waiting = asyncio.create_task(heads.wait_until_empty())
    await asyncio.sleep(0)
    heads.stop_timing("a")
    await asyncio.sleep(0)
    heads.stop_timing("b")
    heads.start_timing("c")  # before the one who waits has a turn
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    heads.stop_timing("c")
    await waiting
