"""Tests that the shortened path of plain requests has the same results as the general path."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import Health, Transition
from proxy.balancer.pick import PickRequest, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolLimits
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import LoadRow, PinnedKv, Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.settings import POLICIES, HealthChecks
from tests.clock import Clock
from tests.pools import make_pool

BACKENDS = 3
ELSEWHERE = Backend(Role.PREFILL, "p", 1)

places = st.integers(0, BACKENDS - 1)
tokens = st.integers(0, 3)  # few values, so that loads are often equal


class Side:
    """A pool of decoders, as one of several workers sees it."""

    def __init__(self, policy: str, workers: int, worker: int, max_running: int | None) -> None:
        self.clock = Clock()
        self.board = Scoreboard(workers, slots=8)
        self.rows: list[LoadRow] = [self.board.load_row(number) for number in range(workers)]
        self.roster = Roster([], [("d", port) for port in range(BACKENDS)], self.board)
        self.health = Health(lambda: HealthChecks(eject_after=3, slow_start_seconds=30.0), self.clock, random.Random(1))
        self.pinned_kv = PinnedKv(self.rows[0], self.clock)
        self.transitions: list[Transition] = []
        self.pool = make_pool(
            Role.DECODE,
            self.roster,
            self.board,
            policy=make_policy(policy, PolicyContext(worker, random.Random(1), self.clock)),
            load_row=self.rows[worker],
            health=self.health,
            pool_limits=PoolLimits(max_running=max_running),
            on_transition=self.transitions.append,
            pinned_kv=self.pinned_kv,
            clock=self.clock,
            random_source=random.Random(1),
        )
        self.backends = self.pool.all_backends()

    def backend(self, place: int) -> Backend:
        return self.backends[place]

    # Steps before a request, each with two numbers

    def charge(self, place: int, amount: int) -> None:
        slot = self.backend(place).slot
        self.rows[amount % len(self.rows)].add_load(slot, requests=1, running=1, compute=amount, kv=amount // 2)

    def pin(self, place: int, amount: int) -> None:
        self.pinned_kv.add_pin(self.backend(place), amount, 15.0)

    def press(self, place: int, amount: int) -> None:
        self.fail(place, Failure.RECOMPUTED)

    def refuse(self, place: int, amount: int) -> None:
        self.fail(place, Failure.CONNECT)

    def break_down(self, place: int, amount: int) -> None:
        self.fail(place, Failure.BROKEN)

    def fail(self, place: int, failure: Failure) -> None:
        backend = self.backend(place)
        self.pool.report_outcome(backend, UpstreamError(failure, backend, "it failed"))

    def probe(self, place: int, amount: int) -> None:
        self.health.on_probe(self.backend(place), amount > 0, "probed")

    def tell(self, place: int, amount: int) -> None:
        self.health.set_engine_facts(self.backend(place), EngineFacts((0, 20), max_num_seqs=amount or None))

    def drain(self, place: int, amount: int) -> None:
        self.roster.remove_backend(Role.DECODE, "d", place)

    def come_back(self, place: int, amount: int) -> None:
        self.roster.add_for_administrator(Backend(Role.DECODE, "d", place))

    def replace(self, place: int, amount: int) -> None:
        """Replace a backend without requests by another one in its slot."""
        self.roster.remove_backend(Role.DECODE, "d", place)
        self.roster.drop_drained_backends()
        self.roster.add_for_administrator(Backend(Role.DECODE, "e", place))

    def wait(self, place: int, amount: int) -> None:
        self.clock.now += 10.0 * amount


Step = Callable[[Side, int, int], None]
Steps = list[tuple[Step, int, int]]
STEPS: list[Step] = [
    *(Side.charge, Side.pin, Side.press, Side.refuse, Side.break_down),
    *(Side.probe, Side.tell, Side.drain, Side.come_back, Side.replace, Side.wait),
]
steps = st.lists(st.tuples(st.sampled_from(STEPS), places, tokens), min_size=1, max_size=12)
sides = st.tuples(st.sampled_from(list(POLICIES)), st.integers(1, 2), st.sampled_from([None, 1]))


def taken(pool: Pool, request: PickRequest) -> tuple[str, int] | None:
    """Return the backend of a pick and the number of its trial, or None if no backend is eligible."""
    try:
        (backend, _), trial = pool.take_pick(request)
    except NoBackendAvailable:
        return None
    return backend.name, trial


@given(sides, steps)
def test_plain_request_gets_the_same_backend_as_on_the_general_path(
    side: tuple[str, int, int | None], happened: Steps
) -> None:
    policy, workers, max_running = side
    short, general = (Side(policy, workers, workers - 1, max_running) for _ in range(2))
    for step, place, amount in [*happened, (Side.wait, 0, 3)]:
        step(short, place, amount)
        step(general, place, amount)
        for compute in range(BACKENDS):
            load = Load(compute_tokens=compute, kv_tokens=1)
            general.pool.eligible_backends()  # updates everything that may have changed
            chosen = taken(general.pool, PickRequest.make_for_load(load, avoided_backends=[ELSEWHERE]))
            assert taken(short.pool, PickRequest.make_for_load(load)) == chosen


@given(st.lists(st.tuples(steps, places), max_size=6))
def test_success_of_a_plain_request_has_the_same_effect_on_health(happened: list[tuple[Steps, int]]) -> None:
    short, general = (Side("least_tokens", 1, 0, None) for _ in range(2))
    for some, place in happened:
        for side in (short, general):
            for step, at, amount in some:
                step(side, at, amount)
        short.pool.record_success(short.backend(place))
        if transition := general.health.on_outcome(general.backend(place), None):
            general.transitions.append(transition)
        assert short.transitions == general.transitions
        assert short.health.version_number == general.health.version_number
        for one, other in zip(short.backends, general.backends, strict=True):
            assert short.health.health_of(one) == general.health.health_of(other)
        assert short.pool.eligible_backends() == general.pool.eligible_backends()


def test_plain_request_sees_changes_by_time() -> None:
    side = Side("least_tokens", 1, 0, None)
    plain = PickRequest.make_for_load(Load(compute_tokens=1))
    side.pinned_kv.add_pin(side.backend(0), 100, 15.0)
    assert [taken(side.pool, plain) for _ in range(3)] == [("d:1", 0), ("d:2", 0), ("d:1", 0)]
    side.clock.now += 20.0
    assert taken(side.pool, plain) == ("d:2", 0)
    assert taken(side.pool, plain) == ("d:0", 0)
    assert side.pool.report_stall(side.backend(1))
    assert {taken(side.pool, plain) for _ in range(3)} == {("d:0", 0), ("d:2", 0)}
    side.clock.now += 3600.0
    assert taken(side.pool, plain) == ("d:1", 1)


def test_success_of_a_plain_request_on_an_ejected_backend_is_reported() -> None:
    side = Side("least_tokens", 1, 0, None)
    for place in range(BACKENDS):
        side.probe(place, 1)
    side.pool.eligible_backends()
    for _ in range(2):
        side.refuse(0, 0)
    assert side.transitions[-1].ejection_cause == "connect"
    side.pool.record_success(side.backend(0))
    assert side.transitions[-1].new_state is HealthState.UP


def test_success_of_a_plain_request_is_not_credited_to_the_next_slot_owner() -> None:
    side = Side("least_tokens", 1, 0, None)
    old = side.backend(0)
    side.replace(0, 0)
    new = next(backend for backend in side.pool.all_backends() if backend.host == "e")
    assert new.slot == old.slot
    side.health.on_probe(new, True, "200")
    side.pool.eligible_backends()
    side.pool.record_success(old)
    assert side.health.health_of(old).last_served_event
    assert not side.health.health_of(new).last_served_event
