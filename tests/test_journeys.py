"""How many functions of the gateway a reader has to know to follow a request."""

from __future__ import annotations

import pytest

from tests.journeys import travel

BOUNDS = {"chat": 327, "message": 368, "two-deaths": 565}
"""Bounds for the functions of each journey. If a change runs fewer, lower the bound.

A chat with two deaths runs 548 to 556 functions, because packets arrive together on a busy machine.
"""
_JOURNEYS = 5


@pytest.mark.interpreted
@pytest.mark.parametrize("name", BOUNDS)
async def test_journey_runs_no_more_functions_than_it_did(name: str) -> None:
    # A busy machine adds retries and timers to some journeys.
    for _ in range(_JOURNEYS):
        trace = await travel(name)
        if len(trace.calls) <= BOUNDS[name]:
            break
    assert len(trace.calls) <= BOUNDS[name], "\n".join(trace.lines())


@pytest.mark.interpreted
async def test_functions_of_a_journey_are_in_the_order_of_their_first_calls() -> None:
    names = [code.co_qualname for code in (await travel("chat")).calls]
    course = ["FastConnection.data_received", "Intake.begin_request", "Lease.__init__", "KvHandoff.__exit__"]
    assert [name for name in names if name in course] == course
