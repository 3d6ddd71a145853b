"""Admission: which units are admitted, wait or are rejected, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.balancer.pick import PickRequest
from proxy.balancer.shared.memory import NO_HEAD, QueueHeads, WorkerQueueHead
from proxy.common.backend import Role
from proxy.common.errors import NoBackendAvailable, Overloaded
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.engine_room import EngineRoom
from proxy.observe.metrics import Metrics
from proxy.settings.model import Admission as Limits
from tests.clock import Clock


class Unit:
    """A unit of work in a task: it takes a place when it is admitted, and leaves on request."""

    def __init__(self, gate: Gate, key: str, patient: bool) -> None:
        self.key = key
        self.is_in = False
        self._gate = gate
        self._patient = patient
        self._end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        gate = self._gate
        async with gate.admission.make_entry(self.key, is_patient=self._patient):
            assert gate.taken < gate.places, "the room that was seen is gone"
            gate.taken += 1
            gate.admitted.append(self)
            self.is_in = True
            try:
                await self._end.wait()
            finally:
                self.is_in = False
                gate.notify()
                gate.taken -= 1

    async def leave(self) -> None:
        self._end.set()
        await self.task

    async def cancelled(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        assert self.task.cancelled()

    async def refusal(self) -> Overloaded:
        with pytest.raises(Overloaded) as refused:
            await self.task
        return refused.value


class Gate(EngineRoom):
    """An AdmissionQueue in front of a number of places."""

    def __init__(self, clock: Clock, front: WorkerQueueHead | None = None) -> None:
        self.clock = clock
        self.metrics = Metrics()
        self.places = self.taken = self.asked = 0
        self.absent: Role | None = None
        self.refusing: tuple[Role, float] | None = None
        self.listens = False
        parts = AdmissionParts(
            engine_room=self,
            metrics=self.metrics,
            clock=clock,
            queue_head=front,
        )
        self.admission = AdmissionQueue(parts, Limits())
        self.units: list[Unit] = []
        self.admitted: list[Unit] = []

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        self.asked += 1
        return self.taken < self.places

    def find_absent_role(self) -> Role | None:
        return self.absent

    def find_refusing_role(self) -> tuple[Role, float] | None:
        return self.refusing

    def announce_room_to(self, on_room: Callable[[], None] | None) -> None:
        is_waiting = on_room is not None
        assert is_waiting is not self.listens
        self.listens = is_waiting

    def notify(self) -> None:
        """Announce room if the queue wants announcements."""
        if self.listens:
            self.admission.check_soon()

    def limit(self, **limits: float) -> None:
        self.admission.set_limits(Limits.model_validate(limits))

    def unit(self, key: str = "-", *, patient: bool = False) -> Unit:
        self.units.append(Unit(self, key, patient))
        return self.units[-1]

    async def arrive(self, *keys: str, patient: bool = False) -> list[Unit]:
        units = [self.unit(key, patient=patient) for key in keys]
        await settled()
        return units

    async def open(self, places: int = 1) -> None:
        """Add room, and announce it."""
        self.places += places
        self.notify()
        await settled(2 * places)

    def is_waking(self) -> bool:
        """Return whether a unit has its turn and has not run yet."""
        return any(entry.turn_future.done() for entry in self.admission._rejectable_units)

    def served(self) -> str:
        """Return the keys in the order of their service."""
        return " ".join(unit.key for unit in self.admitted)

    def queued_requests(self) -> float:
        (family,) = self.metrics.queued_requests.collect()
        return family.samples[0].value

    def queue_seconds(self) -> tuple[float, float]:
        """Return the number of units that have waited, and the sum of their waits."""
        (family,) = self.metrics.queue_seconds.collect()
        found = {sample.name: sample.value for sample in family.samples}
        return found["pdproxy_queue_seconds_count"], found["pdproxy_queue_seconds_sum"]

    def assert_nothing_is_left(self) -> None:
        admission = self.admission
        assert (admission.waiting_count, admission.running_count, admission.buffers.held_bytes, self.taken) == (
            0,
            0,
            0,
            0,
        )
        assert (admission._lines_by_key, admission._rejectable_units, admission._running) == ({}, {}, {})
        assert admission._timer is None
        assert not self.listens
        assert self.queued_requests() == 0


@contextmanager
def no_callback_fails(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Fail if a callback raises, which the loop only logs."""
    problems: list[object] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    yield
    assert not problems


async def settled(turns: int = 0) -> None:
    """Everything that can happen now has happened."""
    for _ in range(6 + turns):
        await asyncio.sleep(0)


@pytest.fixture
async def gate(clock: Clock) -> AsyncIterator[Gate]:
    gate = Gate(clock)
    with no_callback_fails(asyncio.get_running_loop()):
        yield gate
        for unit in gate.units:
            unit.task.cancel()
        await asyncio.gather(*(unit.task for unit in gate.units), return_exceptions=True)
        await settled()
    gate.assert_nothing_is_left()


# Letting in


async def test_unit_does_not_wait_when_there_is_room(gate: Gate) -> None:
    gate.places = 1
    coroutine = gate.admission.make_entry("-").__aenter__()
    with pytest.raises(StopIteration):
        coroutine.send(None)  # it ends without having waited for anything
    assert (gate.admission.running_count, gate.admission.waiting_count, gate.asked) == (1, 0, 1)
    gate.admission._running.clear()


async def test_unit_waits_until_there_is_room(gate: Gate) -> None:
    gate.places = 1
    first, second = await gate.arrive("-", "-")
    assert (first.is_in, second.is_in, gate.admission.waiting_count) == (True, False, 1)
    await first.leave()
    await settled()
    assert (second.is_in, gate.admission.waiting_count) == (True, 0)


async def test_new_unit_does_not_overtake_queued_units(gate: Gate) -> None:
    (first,) = await gate.arrive("-")
    gate.places = 1
    second = gate.unit()  # finds room, but another unit is before it
    gate.admission.check_soon()
    await settled()
    assert (first.is_in, second.is_in) == (True, False)


@pytest.mark.fault(54)
async def test_free_place_wakes_one_unit(gate: Gate) -> None:
    await gate.arrive(*["-"] * 100)
    before = gate.asked
    for _ in range(10):
        gate.admission.check_soon()
    await gate.open()
    assert len(gate.admitted) == 1
    # Before the wake-up, in the woken unit, and after it for another unit.
    assert gate.asked - before == 3


async def test_several_free_places_go_to_several_units(gate: Gate) -> None:
    units = await gate.arrive(*["-"] * 5)
    await gate.open(3)
    assert gate.admitted == units[:3]


async def test_room_without_notification_is_found(gate: Gate) -> None:
    (unit,) = await gate.arrive("-")
    gate.places = 1  # in another worker
    while not unit.is_in:  # noqa: ASYNC110 - being let in has no event
        await asyncio.sleep(0)


async def test_woken_unit_that_finds_no_room_keeps_its_place(gate: Gate) -> None:
    first, _ = await gate.arrive("-", "-")
    gate.places = 1
    gate.admission.check_soon()
    await asyncio.sleep(0)
    assert gate.is_waking()
    gate.places = 0  # taken by a unit of another queue before the woken one ran
    await settled()
    assert (gate.admitted, gate.admission.waiting_count, gate.is_waking()) == ([], 2, False)
    await gate.open()
    assert gate.admitted == [first]


# Leaving the queue


async def test_cancelled_unit_passes_its_turn_on(gate: Gate) -> None:
    first, second = await gate.arrive("-", "-")
    gate.places = 1
    gate.admission.check_soon()
    await asyncio.sleep(0)
    assert gate.is_waking()
    first.task.cancel()  # together with its wake-up
    await settled()
    assert (first.task.cancelled(), second.is_in) == (True, True)


async def test_unit_cancelled_at_its_turn_passes_it_on(gate: Gate) -> None:
    first, second = await gate.arrive("-", "-")
    gate.places = 1
    gate.admission.check_soon()
    first.task.cancel()  # before the wake-up, but it has not run yet
    await settled()
    assert (first.task.cancelled(), second.is_in) == (True, True)


async def test_cancelled_unit_leaves_the_queue(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.gateway.admission._CHECK_SECONDS", 3600.0)  # the timer is not replaced meanwhile
    (first,) = await gate.arrive("-")
    timer = gate.admission._timer
    assert timer is not None
    (second,) = await gate.arrive("-")
    assert gate.admission._timer is timer
    await first.cancelled()
    assert (gate.admission.waiting_count, gate.queued_requests(), timer.cancelled()) == (1, 1, False)
    await second.cancelled()
    gate.assert_nothing_is_left()
    assert timer.cancelled()


async def test_unit_that_waited_too_long_is_rejected_with_retry_after(gate: Gate) -> None:
    gate.limit(wait_seconds=10)
    (early,) = await gate.arrive("-")
    gate.clock.now += 6
    (late,) = await gate.arrive("-")
    gate.clock.now += 4
    error = await early.refusal()
    assert (error.status, error.code) == (503, "queue_timeout")
    assert error.retry_after_seconds is not None
    assert 1 <= error.retry_after_seconds <= 2
    assert "10 s" in error.message
    assert gate.admission.waiting_count == 1
    await gate.open()
    assert late.is_in


async def test_unit_that_waited_for_a_restart_gets_no_backend_available(gate: Gate) -> None:
    gate.absent = Role.DECODE
    (unit,) = await gate.arrive("-")
    gate.clock.now += 60
    with pytest.raises(NoBackendAvailable) as refused:
        await unit.task
    assert (refused.value.code, refused.value.status) == ("no_healthy_decode", 503)
    assert refused.value.message == "no healthy decode instance became available within 60 s"
    assert refused.value.retry_after_seconds is not None
    assert 1 <= refused.value.retry_after_seconds <= 2


async def test_unit_is_rejected_when_instances_reject_for_longer_than_it_may_wait(gate: Gate) -> None:
    gate.limit(wait_seconds=10)
    start = gate.clock.now
    (early,) = await gate.arrive("-")
    gate.clock.now += 5
    (late,) = await gate.arrive("-")
    (patient,) = await gate.arrive("-", patient=True)
    gate.refusing = (Role.DECODE, start + 12)  # the first of these would have to wait for 12 s
    error = await early.refusal()
    assert (error.status, error.code) == (503, "all_refuse")
    assert error.message == "all decode instances reject requests; retry in 7 s"
    assert error.retry_after_seconds is not None
    assert 7 <= error.retry_after_seconds <= 7 * 1.2
    assert gate.admission.waiting_count == 2
    gate.refusing = (Role.DECODE, start + 16)
    assert (await late.refusal()).code == "all_refuse"
    assert not patient.task.done()
    gate.refusing = (Role.DECODE, gate.clock.now + 10.1)
    assert (await gate.unit("-").refusal()).code == "all_refuse"
    gate.refusing = (Role.DECODE, gate.clock.now + 10)
    (newcomer,) = await gate.arrive("-")
    gate.refusing = None
    await gate.open(2)
    assert patient.is_in
    assert newcomer.is_in


async def test_shorter_wait_applies_to_queued_units(gate: Gate) -> None:
    (unit,) = await gate.arrive("-")
    gate.clock.now += 5
    gate.limit(wait_seconds=1)
    assert (await unit.refusal()).code == "queue_timeout"


async def test_further_units_of_a_request_wait_without_limit(gate: Gate) -> None:
    gate.limit(wait_seconds=1, max_waiting=1)
    (request,) = await gate.arrive("-")
    further = await gate.arrive("-", "-", patient=True)
    assert (gate.admission.waiting_count, gate.queued_requests()) == (3, 1)
    gate.clock.now += 3600
    await request.refusal()
    await gate.open(2)
    assert gate.admitted == further


@pytest.mark.parametrize("how", ["end", "cancel", "fail"])
async def test_unit_is_not_counted_after_any_end(gate: Gate, how: str) -> None:
    gate.places = 1

    async def work() -> None:
        async with gate.admission.make_entry("-"):
            assert gate.admission.running_count == 1
            if how == "fail":
                raise ZeroDivisionError
            await asyncio.sleep(0 if how == "end" else 3600)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    if how == "cancel":
        task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled() == (how == "cancel")
    assert isinstance(not task.cancelled() and task.exception(), ZeroDivisionError) == (how == "fail")
    assert gate.admission.running_count == 0


# A full queue


async def test_full_queue_rejects_before_the_body_is_read(gate: Gate) -> None:
    gate.limit(max_waiting=2)
    await gate.arrive("-")
    gate.admission.check_queue_room("-")
    await gate.arrive("-")
    with pytest.raises(Overloaded) as refused:
        gate.admission.check_queue_room("-")
    assert (refused.value.status, refused.value.code) == (503, "queue_full")
    (unit,) = await gate.arrive("-")
    assert (await unit.refusal()).code == "queue_full"
    gate.places = 1  # for one of those who wait
    with pytest.raises(Overloaded):
        gate.admission.check_queue_room("-")
    gate.limit(max_waiting=3)
    gate.admission.check_queue_room("-")


async def test_unit_without_room_is_rejected_when_there_is_no_queue(gate: Gate) -> None:
    gate.limit(max_waiting=0)
    gate.places = 1
    gate.admission.check_queue_room("-")
    await gate.arrive("-")
    with pytest.raises(Overloaded):
        gate.admission.check_queue_room("-")
    (unit,) = await gate.arrive("-")
    await unit.refusal()
    (further,) = await gate.arrive("-", patient=True)
    assert (further.task.done(), gate.admission.waiting_count) == (False, 1)


@pytest.mark.fault(54)
async def test_retry_after_differs_between_rejected_units(gate: Gate) -> None:
    gate.limit(max_waiting=0)
    waits = {(await unit.refusal()).retry_after_seconds for unit in await gate.arrive(*["-"] * 20)}
    assert len(waits) > 1


async def test_full_queue_rejects_the_last_unit_of_the_key_with_most(gate: Gate) -> None:
    gate.limit(max_waiting=4)
    greedy = await gate.arrive("greedy", "greedy", "greedy")
    further = await gate.arrive("greedy", patient=True)
    await gate.arrive("modest")
    gate.admission.check_queue_room("newcomer")
    (newcomer,) = await gate.arrive("newcomer")
    assert (await greedy[2].refusal()).code == "queue_full"
    assert not newcomer.task.done()
    assert not further[0].task.done()
    with pytest.raises(Overloaded):
        gate.admission.check_queue_room("greedy")
    await gate.arrive("modest")  # now it has as many as the greedy one had
    assert greedy[1].task.done()
    with pytest.raises(Overloaded):
        gate.admission.check_queue_room("modest")


async def test_unit_rejected_at_its_turn_passes_it_on(gate: Gate) -> None:
    gate.limit(max_waiting=1)
    (greedy,) = await gate.arrive("greedy")
    gate.places = 1
    gate.admission.check_soon()
    modest = gate.unit("modest")
    await settled()
    await greedy.refusal()
    assert modest.is_in


# Turns


async def test_key_with_1000_queued_units_delays_another_by_one_service(gate: Gate) -> None:
    gate.places = 2
    await gate.arrive(*["greedy"] * 1002)
    (single,) = await gate.arrive("single")
    assert gate.admission.waiting_count == 1001
    await gate.admitted[0].leave()
    await settled()
    assert single in gate.admitted[2:4]


async def test_turns_go_to_the_key_with_least_running_then_longest_wait(gate: Gate) -> None:
    gate.places = 2
    await gate.arrive("a", "a")  # these run
    await gate.arrive("a", "b", "b", "c", "b", "c", "d")
    gate.admitted.clear()
    await gate.open(7)
    # b, c and d have none running, then one each, and only then a has as few as the others.
    assert gate.served() == "b c d b c a b"


async def test_units_of_a_key_go_in_the_order_of_arrival(gate: Gate) -> None:
    units = await gate.arrive(*"aabab")
    await gate.open(5)
    assert [unit for unit in gate.admitted if unit.key == "a"] == [unit for unit in units if unit.key == "a"]
    assert gate.served() == "a b a b a"


async def test_key_with_short_visits_does_not_overtake_waiting_keys(gate: Gate) -> None:
    await gate.arrive("stays", "stays")
    for _ in range(3):
        (unit,) = await gate.arrive("comes")
        await unit.cancelled()
    await gate.arrive("comes")
    await gate.open()
    assert gate.served() == "stays"


# Metrics


async def test_histogram_has_only_units_that_waited(gate: Gate) -> None:
    gate.places = 1
    (first,) = await gate.arrive("-")
    assert gate.queue_seconds() == (0, 0)
    await gate.arrive("-")
    assert gate.queued_requests() == 1
    gate.clock.now += 2
    await first.leave()
    await settled()
    assert gate.queue_seconds() == (1, 2)
    assert gate.queued_requests() == 0


# Bodies


async def test_bodies_are_held_while_all_of_them_fit(gate: Gate) -> None:
    gate.limit(max_buffered_bytes=100)
    with gate.admission.buffers.hold_body(60):
        with gate.admission.buffers.hold_body(40):
            assert gate.admission.buffers.held_bytes == 100
            with pytest.raises(Overloaded) as refused, gate.admission.buffers.hold_body(1):
                pass
        assert (refused.value.status, refused.value.code) == (503, "buffers_full")
        assert gate.admission.buffers.held_bytes == 60
    assert gate.admission.buffers.held_bytes == 0


async def test_single_body_of_any_length_fits(gate: Gate) -> None:
    gate.limit(max_buffered_bytes=100)
    with gate.admission.buffers.hold_body(1000) as held:
        held.set_body_size(2000)
        with pytest.raises(Overloaded), gate.admission.buffers.hold_body(1):
            pass
        assert gate.admission.buffers.held_bytes == 2000


async def test_body_of_unknown_length_is_counted_as_it_arrives(gate: Gate) -> None:
    gate.limit(max_buffered_bytes=100)
    with gate.admission.buffers.hold_body(50), gate.admission.buffers.hold_body(0) as held:
        held.set_body_size(50)
        with pytest.raises(Overloaded):
            held.set_body_size(51)
        assert gate.admission.buffers.held_bytes == 100
        with pytest.raises(Overloaded):
            held.add_bytes(1)
        held.set_body_size(4)
        held.add_bytes(6)
        held.add_bytes(0)
        assert gate.admission.buffers.held_bytes == 60
        gate.limit(max_buffered_bytes=1)
        held.set_body_size(5)  # becoming smaller is never refused
    assert gate.admission.buffers.held_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80)), max_size=30))
def test_all_held_bytes_are_released(changes: list[tuple[int, int]]) -> None:
    gate = Gate(Clock())
    gate.limit(max_buffered_bytes=100)
    with ExitStack() as stack:
        holds = [stack.enter_context(gate.admission.buffers.hold_body(0)) for _ in range(4)]
        lengths = [0] * 4
        for number, body_bytes in changes:
            try:
                holds[number].set_body_size(body_bytes)
                lengths[number] = body_bytes
            except Overloaded:
                assert sum(lengths) - lengths[number] + body_bytes > 100
            assert gate.admission.buffers.held_bytes == sum(lengths) <= 100
    assert gate.admission.buffers.held_bytes == 0


# Any order


class AnyOrder(RuleBasedStateMachine):
    """Units come, are let in, leave, are cancelled and refused; other workers take room and free it.

    The model knows who stands in which line, and serves by the rule: least running, then longest unserved.
    """

    @initialize(places=st.integers(0, 3), max_waiting=st.integers(0, 6))
    def build(self, places: int, max_waiting: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = ExitStack()
        self.stack.enter_context(no_callback_fails(self.loop))
        self.clock = Clock()
        self.gate = Gate(self.clock)
        self.max_waiting = max_waiting
        self.gate.limit(max_waiting=max_waiting, wait_seconds=10)
        self.gate.places = places
        self.units: list[Unit] = []
        self.arrived: dict[Unit, float] = {}
        self.patient: set[Unit] = set()
        self.lines: dict[str, list[Unit]] = {}
        self.last_service: dict[str, int] = {}
        self.services = 0
        self.running: list[Unit] = []
        self.elsewhere = 0  # places that other workers took

    # The model

    def requests(self, key: str) -> list[Unit]:
        return [unit for unit in self.lines.get(key, ()) if unit not in self.patient]

    def next_service(self) -> int:
        self.services += 1
        return self.services

    def serve(self) -> None:
        while self.lines and len(self.running) < self.gate.places:
            key = min(self.lines, key=lambda name: (sum(u.key == name for u in self.running), self.last_service[name]))
            unit = self.lines[key][0]
            self.last_service[key] = self.next_service()
            self.part(unit)
            self.running.append(unit)

    def part(self, unit: Unit) -> None:
        self.lines[unit.key].remove(unit)
        if not self.lines[unit.key]:
            del self.lines[unit.key]

    def refuse(self, unit: Unit) -> None:
        self.part(unit)
        self.units.remove(unit)
        self.turn_loop()
        assert isinstance(unit.task.exception(), Overloaded)

    def turn_loop(self) -> None:
        self.loop.run_until_complete(settled(2 * self.gate.places))

    def tick(self) -> None:
        timer = self.gate.admission._timer
        if timer is not None:
            timer.cancel()
            self.loop.call_soon(self.gate.admission._on_timer)
        self.turn_loop()

    # What happens

    @rule(key=st.sampled_from("abc"), is_patient=st.booleans())
    def arrive(self, key: str, is_patient: bool) -> None:
        async def start() -> Unit:
            return self.gate.unit(key, patient=is_patient)

        unit = self.loop.run_until_complete(start())
        self.turn_loop()
        if is_patient:
            self.patient.add(unit)
        is_open = not self.lines and len(self.running) < self.gate.places
        if not is_open and not is_patient and sum(len(self.requests(c)) for c in self.lines) >= self.max_waiting:
            greediest = max(self.lines, key=lambda name: len(self.requests(name)), default=key)
            if len(self.requests(greediest)) <= len(self.requests(key)):
                assert isinstance(unit.task.exception(), Overloaded)
                return
            self.refuse(self.requests(greediest)[-1])
        self.units.append(unit)
        self.arrived[unit] = self.clock.now
        if is_open:
            self.running.append(unit)
            return
        if key not in self.lines:
            self.last_service[key] = self.next_service()
        self.lines.setdefault(key, []).append(unit)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 100))
    def leave(self, number: int) -> None:
        unit = self.running.pop(number % len(self.running))
        self.units.remove(unit)
        self.loop.run_until_complete(unit.leave())
        self.turn_loop()
        self.serve()

    @precondition(lambda self: self.units)
    @rule(number=st.integers(0, 100))
    def cancel(self, number: int) -> None:
        unit = self.units.pop(number % len(self.units))
        if unit in self.running:
            self.running.remove(unit)
        else:
            self.part(unit)
        self.loop.run_until_complete(unit.cancelled())
        self.turn_loop()
        self.serve()

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.tick()
        for unit in [unit for line in self.lines.values() for unit in line]:
            if unit not in self.patient and self.arrived[unit] <= self.clock.now - 10:
                self.refuse(unit)
        self.serve()

    @precondition(lambda self: self.gate.places > len(self.running))
    @rule()
    def another_worker_takes_room(self) -> None:
        self.gate.places -= 1
        self.elsewhere += 1

    @precondition(lambda self: self.elsewhere)
    @rule(is_told=st.booleans())
    def room_comes_back(self, is_told: bool) -> None:
        self.gate.places += 1
        self.elsewhere -= 1
        if is_told:

            async def tell() -> None:
                self.gate.admission.check_soon()

            self.loop.run_until_complete(tell())
            self.turn_loop()
        else:
            self.tick()
        self.serve()

    @invariant()
    def the_books_are_the_models(self) -> None:
        admission = self.gate.admission
        assert [unit for unit in self.units if unit.is_in] == [unit for unit in self.units if unit in self.running]
        assert admission.running_count == len(self.running)
        assert {name: len(line.queued_units) for name, line in admission._lines_by_key.items()} == {
            name: len(line) for name, line in self.lines.items()
        }
        assert len(admission._rejectable_units) == self.gate.queued_requests()
        assert (admission._timer is not None) == bool(self.lines)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        assert not self.gate.admission.waiting_count or len(self.running) >= self.gate.places

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.elsewhere:
            self.room_comes_back(True)
        if not self.gate.places:
            self.elsewhere = 1
            self.room_comes_back(False)
        while self.running:  # all queued units get their turn
            self.leave(0)
        assert not self.units
        self.gate.assert_nothing_is_left()
        assert not asyncio.all_tasks(self.loop)
        self.stack.close()
        self.loop.close()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events_is_fair_and_leaves_nothing = AnyOrder.TestCase

_EVENTS = st.sampled_from(["arrive", "further", "leave", "cancel", "notify", "shrink", "grow", "late"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_EVENTS, st.integers(0, 100), st.integers(0, 3)), max_size=60))
def test_no_turn_is_lost_by_events_between_wake_up_and_run(events: list[tuple[str, int, int]]) -> None:
    """`turns` of the loop pass after each event: with none or one, the woken unit has not run when the next comes."""

    async def play() -> None:
        gate = Gate(Clock())
        gate.limit(max_waiting=4, wait_seconds=10)
        gate.places = 1
        for event, number, turns in events:
            unit = gate.units[number % len(gate.units)] if gate.units else None
            if event in ("arrive", "further"):
                gate.unit("abc"[number % 3], patient=event == "further")
            elif event == "leave" and unit is not None and unit.is_in:
                unit._end.set()
            elif event == "cancel" and unit is not None:
                unit.task.cancel()
            elif event == "notify":
                gate.admission.check_soon()
            elif event == "shrink":
                gate.places = max(0, gate.places - 1)
            elif event == "grow":
                gate.places = min(3, gate.places + 1)
                gate.admission.check_soon()
            elif event == "late":
                gate.clock.now += 4
            for _ in range(turns):
                await asyncio.sleep(0)
        gate.places = 1
        gate.admission.check_soon()
        await settled(20)
        while running := [unit for unit in gate.units if unit.is_in]:
            assert gate.taken == gate.admission.running_count == len(running)
            for unit in running:
                await unit.leave()
            await settled(20)
        assert all(unit.task.done() for unit in gate.units)
        for unit in gate.units:
            assert unit.task.cancelled() or isinstance(unit.task.exception(), Overloaded | None)
        gate.assert_nothing_is_left()

    with asyncio.Runner() as runner, no_callback_fails(runner.get_loop()):
        runner.run(play())


# Several queues


async def test_queue_with_the_earlier_unit_is_served_first() -> None:
    fronts, clock = QueueHeads(2), Clock()
    one, other = (Gate(clock, fronts.view_of_worker(number)) for number in range(2))
    (first,) = await one.arrive("-")
    clock.now += 1
    (second,) = await other.arrive("-")
    other.places = 1
    other.admission.check_soon()
    await settled()
    assert not second.is_in
    one.places = 1
    one.admission.check_soon()
    await settled()
    assert first.is_in
    other.admission.check_soon()
    await settled()
    assert second.is_in
    for unit in (first, second):
        await unit.leave()


async def test_room_unused_by_another_queue_is_taken_after_a_moment() -> None:
    fronts, clock = QueueHeads(2), Clock()
    one, other = (Gate(clock, fronts.view_of_worker(number)) for number in range(2))
    (first,) = await one.arrive("-")
    clock.now += 1
    (second,) = await other.arrive("-")
    other.places = 1
    for _ in range(2):
        other.admission.check_soon()
        await settled()
        assert not second.is_in
    clock.now += 0.1
    other.admission.check_soon()
    await settled()
    assert second.is_in
    await second.leave()
    await first.cancelled()
    assert fronts.first_head_of_workers() == NO_HEAD
