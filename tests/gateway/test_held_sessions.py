"""Turns of sessions that wait for room in a working set: when they go, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lab.replay.fleet import Subject
from lab.replay.trace import Request
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.working_sets import CachedSession, WorkingSets
from proxy.common.backend import Load
from proxy.common.errors import GatewayError
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.engine_room import EngineRoom
from proxy.gateway.queue_order import ArrivalOrdering
from proxy.observe.metrics import Metrics
from proxy.settings.model import Admission as Limits
from tests.clock import Clock

pytestmark = pytest.mark.interpreted  # a fake cache derives from a class that is compiled


class Sets(WorkingSets):
    """Working sets whose limit is active, and in which no session has room until the test makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.are_limits_active = True
        self.sessions: dict[int, CachedSession] = {}
        self.roomy: set[CachedSession] = set()

    def find_session(self, prefix_keys: Sequence[int], session_id: str | None, now: float) -> CachedSession | None:
        return self.sessions.get(prefix_keys[0])

    def new(self, key: int) -> CachedSession:
        session = self.sessions[key] = CachedSession(0)
        return session

    def _place_session(self, session: CachedSession, now: float) -> bool:
        return False

    def next_sessions(self, waiting_sessions: object, max_wait_seconds: float, now: float) -> list[CachedSession]:
        return [*self.roomy] if self.are_limits_active else [*self.sessions.values()]


class Gate:
    """A queue with room at all instances, in front of which sessions wait."""

    def __init__(self, limits: Limits) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.made = Sets()
        self.local: set[int] = set()
        """First keys of the prompts that a decoder computes alone."""
        self.line_up = ArrivalOrdering()
        self.line_up.working_sets = self.made
        parts = AdmissionParts(
            engine_room=EngineRoom(),
            skips_queue=lambda request: request.prefix_keys.keys[0] in self.local,
            metrics=self.metrics,
            clock=self.clock,
            queue_order=self.line_up,
        )
        self.admission = AdmissionQueue(parts, limits)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.began: list[int] = []

    def send(self, key: int, *, deadline: float | None = None) -> None:
        subject = Subject(Request(0.0, 5000, 10, (key, key + 1)), first_token_seconds=deadline)
        pick = PickRequest(Load(), Load(), subject)

        async def unit() -> None:
            async with self.admission.make_entry("-", request=lambda: pick):
                self.began.append(key)

        self.tasks[key] = asyncio.ensure_future(unit())

    async def settle(self) -> None:
        """Let the timer of the queue run once, and the tasks after it."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.clock.now += 0.2
        if self.admission._timer is not None:
            self.admission._timer.cancel()
            self.admission._on_timer()
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def is_empty(self) -> bool:
        admission = self.admission
        return not (
            admission.waiting_count
            or admission.running_count
            or admission._rejectable_units
            or admission._timer
            or self.made.waiting_turn_count
        )


@pytest.fixture
def gate() -> Gate:
    return Gate(Limits(session_wait_seconds=180.0, max_waiting=2))


async def test_turn_that_a_decoder_computes_does_not_wait(gate: Gate) -> None:
    gate.made.new(1)
    gate.local = {1}
    gate.send(1)
    await gate.settle()
    assert gate.began == [1]
    assert gate.is_empty


async def test_turn_that_a_decoder_computes_is_rejected_when_memory_is_short(gate: Gate) -> None:
    pick = PickRequest(Load(), Load(), Subject(Request(0.0, 5000, 10, (1, 2))))
    gate.made.new(1)
    gate.local = {1}
    assert gate.admission.admits_at_once("-", lambda: pick)
    gate.admission.is_short_of_memory = True
    assert not gate.admission.admits_at_once("-", lambda: pick)


async def test_turn_waits_until_its_session_has_room(gate: Gate) -> None:
    session = gate.made.new(1)
    gate.send(1)
    await gate.settle()
    assert (gate.began, gate.made.waiting_turn_count, gate.admission.waiting_count) == ([], 1, 1)
    assert gate.admission.summarize_queue() == (0, 0.0, "")
    assert gate.admission.summarize_turns()[0] == 1
    gate.made.roomy.add(session)
    await gate.settle()
    assert gate.began == [1]
    assert gate.metrics.queue_waits_total.labels("working_set")._value.get() == 1
    assert gate.is_empty


async def test_other_requests_pass_turns_that_wait_for_their_session(gate: Gate) -> None:
    gate.made.new(1)
    gate.send(1)
    gate.send(2)
    await gate.settle()
    assert gate.began == [2]
    gate.tasks[1].cancel()
    await gate.settle()
    assert gate.is_empty


async def test_no_turn_is_rejected_because_of_a_working_set(gate: Gate) -> None:
    """It waits longer than admission.wait_seconds, and goes after admission.session_wait_seconds."""
    gate.made.new(1)
    gate.send(1)
    await gate.settle()
    gate.clock.now += 170
    await gate.settle()
    assert gate.began == []
    gate.clock.now += 15
    await gate.settle()
    await gate.settle()
    assert gate.began == [1]
    assert gate.metrics.session_waits_overdue_total._value.get() == 1
    assert gate.is_empty


async def test_turn_with_a_deadline_waits_for_half_of_the_time(gate: Gate) -> None:
    gate.made.new(1)
    gate.send(1, deadline=20.0)
    await gate.settle()
    gate.clock.now += 11
    await gate.settle()
    await gate.settle()
    assert gate.began == [1]
    assert gate.is_empty


async def test_turns_beyond_the_length_of_the_queue_do_not_wait_for_their_session(gate: Gate) -> None:
    for key in (1, 3, 5):
        gate.made.new(key)
        gate.send(key)
    await gate.settle()
    assert gate.began == [5]
    for task in gate.tasks.values():
        task.cancel()
    await gate.settle()
    assert gate.is_empty


async def test_client_that_leaves_gives_its_place_back(gate: Gate) -> None:
    session = gate.made.new(1)
    gate.send(1)
    await gate.settle()
    gate.tasks[1].cancel()
    await gate.settle()
    assert gate.is_empty
    assert session.idle_since <= gate.clock()


async def test_turns_go_when_another_policy_takes_over(gate: Gate) -> None:
    gate.made.new(1)
    gate.send(1)
    await gate.settle()
    gate.line_up.working_sets = None
    await gate.settle()
    await gate.settle()
    assert gate.began == [1]
    assert gate.is_empty


async def test_turn_whose_deadline_has_passed_is_rejected_at_once(gate: Gate) -> None:
    session = gate.made.new(1)
    gate.send(1, deadline=0.0)
    await gate.settle()
    with pytest.raises(GatewayError, match="x-ttft-deadline-ms"):
        await gate.tasks[1]
    assert gate.is_empty
    assert session.idle_since <= gate.clock()


async def test_session_is_idle_after_the_deadline_of_its_turn(gate: Gate) -> None:
    session = gate.made.new(1)
    gate.send(1, deadline=20.0)
    await gate.settle()
    gate.clock.now += 30
    gate.admission._wake_next_unit()
    with pytest.raises(GatewayError, match="x-ttft-deadline-ms"):
        await gate.tasks[1]
    assert session.idle_since <= gate.clock()
