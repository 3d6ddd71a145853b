"""Learned limits: requests wait for them for a limited time, and are never rejected because of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lab.replay import virtual_time
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load
from proxy.common.errors import GatewayError, Overloaded
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.engine_room import EngineRoom
from proxy.observe.metrics import Metrics
from proxy.settings.model import Admission as Limits

ANSWER_SECONDS = 1000.0


class Engines(EngineRoom):
    """Engines that would take `engine_places` requests at a time, and should have no more than `places`."""

    def __init__(self, places: int, engine_places: int, hold_seconds: float = math.inf, **limits: float) -> None:
        self.places = places
        self.engine_places = engine_places
        self.taken = 0
        self.waits: list[float] = []
        """Seconds that each request waited, in the order in which they were let in."""
        self.rejected: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._hold_seconds = hold_seconds
        parts = AdmissionParts(engine_room=self, metrics=Metrics(), clock=self._loop.time)
        self.admission = AdmissionQueue(parts, Limits.model_validate(limits))

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return self.taken < self.places

    def would_take_now(self) -> bool:
        return self.taken < self.engine_places

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        return self._hold_seconds

    async def ask(self, at: float) -> None:
        """Send a request at a time, whose answer takes very long."""
        await asyncio.sleep(at - self._loop.time())
        try:
            self.admission.check_queue_room("-")
            async with self.admission.make_entry("-", request=lambda: PickRequest.make_for_load(Load())):
                assert self.taken < self.engine_places
                self.waits.append(self._loop.time() - at)
                self.taken += 1
                await asyncio.sleep(ANSWER_SECONDS)
                self.taken -= 1
                self.admission.check_soon()
        except GatewayError as error:
            self.rejected.append(error.code)

    async def serve(self, *arrivals: float) -> None:
        """Send requests at these times."""
        async with asyncio.TaskGroup() as group:
            for at in arrivals:
                group.create_task(self.ask(at))


def in_virtual_time(course: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_time.run(course(), virtual_time.VirtualLoop())


def test_learned_limit_does_not_reject_a_request_that_has_waited_for_wait_seconds() -> None:
    async def course() -> None:
        engines = Engines(1, 100, wait_seconds=60.0)
        await engines.serve(0.0, 1.0, 2.0, 3.0)
        assert not engines.rejected
        assert engines.waits == pytest.approx([0.0, 60.0, 60.0, 60.0], abs=0.1)

    in_virtual_time(course)


def test_engines_own_limit_still_rejects_a_request_that_has_waited_for_wait_seconds() -> None:
    async def course() -> None:
        engines = Engines(1, 2, wait_seconds=60.0)
        await engines.serve(0.0, 1.0, 2.0)
        assert engines.rejected == ["queue_timeout"]
        assert len(engines.waits) == 2

    in_virtual_time(course)


@pytest.mark.parametrize("max_waiting", [0, 1, 3])
def test_learned_limit_does_not_reject_a_request_because_the_queue_is_full(max_waiting: int) -> None:
    async def course() -> None:
        engines = Engines(1, 100, max_waiting=max_waiting, wait_seconds=600.0)
        await engines.serve(*map(float, range(10)))
        assert not engines.rejected
        # Each arrival lets the oldest go as soon as more would wait than may.
        assert engines.waits[: 10 - max_waiting] == pytest.approx([0.0] + [max_waiting] * (9 - max_waiting), abs=0.1)

    in_virtual_time(course)


def test_engines_own_limit_still_rejects_a_request_because_the_queue_is_full() -> None:
    async def course() -> None:
        engines = Engines(1, 3, max_waiting=1, wait_seconds=6000.0)
        await engines.serve(*map(float, range(6)))
        assert engines.rejected == ["queue_full"] * 2

    in_virtual_time(course)


def test_request_waits_for_a_learned_limit_for_no_longer_than_it_gains() -> None:
    async def course() -> None:
        engines = Engines(2, 100, hold_seconds=5.0, wait_seconds=60.0)
        await engines.serve(0.0, 0.0, *(1.0 + number / 10 for number in range(20)))
        assert not engines.rejected
        assert engines.waits[:2] == [0.0, 0.0]
        assert engines.waits[2:] == pytest.approx([5.0] * 20, abs=0.3)

    in_virtual_time(course)


def test_request_with_a_deadline_does_not_miss_it_for_a_learned_limit() -> None:
    class Urgent:
        prompt_tokens = output_tokens = 0
        session_id = None
        first_token_seconds = 10.0

        def requested_priority(self, *, is_lower_first: bool) -> None:
            return None

    async def course() -> None:
        engines = Engines(0, 100, wait_seconds=60.0)
        loop = asyncio.get_running_loop()
        urgent: Any = Urgent()
        async with engines.admission.make_entry("-", request=lambda: PickRequest(Load(), Load(), urgent)):
            assert loop.time() == pytest.approx(5.0, abs=0.3)

    in_virtual_time(course)


def test_learned_limit_does_not_reject_a_request_for_the_wait_that_is_predicted() -> None:
    async def course() -> None:
        engines = Engines(1, 100, hold_seconds=2.0, wait_seconds=60.0, max_predicted_wait_seconds=1.0)
        await engines.serve(*(number / 2 for number in range(40)))
        assert not engines.rejected

    in_virtual_time(course)


def test_full_queue_rejects_early_only_when_no_engine_would_take_the_request() -> None:
    async def course() -> None:
        engines = Engines(0, 1, max_waiting=0)
        engines.admission.check_queue_room("-")
        engines.engine_places = 0
        with pytest.raises(Overloaded):
            engines.admission.check_queue_room("-")

    in_virtual_time(course)
