"""Whatever happens in whatever order: the books are right at every step and zero at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.balancer.backend import Backend, Load, Role
from proxy.balancer.health import Health
from proxy.balancer.policies import POLICIES
from proxy.balancer.pool import Pool
from proxy.balancer.roster import Roster
from proxy.balancer.scoreboard import Scoreboard
from proxy.errors import Failure, NoBackendAvailable, UpstreamError

if TYPE_CHECKING:
    from proxy.balancer.lease import Lease

SLOTS = 6
ENDPOINTS = {Role.PREFILL: [("p", port) for port in range(4)], Role.DECODE: [("d", port) for port in range(4)]}

roles = st.sampled_from(Role)
ports = st.integers(0, 3)
loads = st.builds(Load, compute=st.integers(0, 1000), kv=st.integers(0, 1000))
which = st.integers(0, 1000)
failures = st.sampled_from(Failure)
avoided = st.sets(st.tuples(roles, ports), max_size=3)


class AnySequence(RuleBasedStateMachine):
    """Two workers' pools over one roster and one scoreboard; `open` says what each open lease must hold."""

    @initialize(policy=st.sampled_from(list(POLICIES)))
    def build(self, policy: str) -> None:
        self.scoreboard = Scoreboard(workers=2, slots=SLOTS)
        self.roster = Roster(ENDPOINTS[Role.PREFILL][:2], ENDPOINTS[Role.DECODE][:2], self.scoreboard)
        self.healths = [Health(), Health()]
        self.pools = {
            (role, worker): Pool(
                role,
                POLICIES[policy](),
                self.scoreboard,
                self.scoreboard.row(worker),
                self.roster,
                self.healths[worker],
            )
            for role in Role
            for worker in range(2)
        }
        self.open: dict[Lease, tuple[Pool, Load]] = {}

    def backend(self, role: Role, port: int) -> Backend:
        return Backend(role, *ENDPOINTS[role][port])

    def some_lease(self, number: int) -> tuple[Lease, Pool, Load]:
        lease = list(self.open)[number % len(self.open)]
        return lease, *self.open[lease]

    def may_be_picked(self, pool: Pool, avoid: set[Backend]) -> set[Backend]:
        """Who may be picked, worked out without the pool's own cache."""
        enabled = {member.backend for member in self.roster.members(pool.role) if not member.draining}
        return {backend for backend in enabled - avoid if pool._health.is_healthy(backend)}

    @rule(role=roles, worker=st.integers(0, 1), load=loads, avoid=avoided)
    def enter(self, role: Role, worker: int, load: Load, avoid: set[tuple[Role, int]]) -> None:
        pool = self.pools[role, worker]
        backends = {self.backend(*each) for each in avoid}
        allowed = self.may_be_picked(pool, backends)
        lease = pool.lease(load, backends)
        try:
            lease.__enter__()
        except NoBackendAvailable:
            assert not allowed
        else:
            assert lease.backend in allowed
            self.open[lease] = (pool, load)

    @precondition(lambda self: self.open)
    @rule(number=which)
    def free_compute(self, number: int) -> None:
        lease, pool, load = self.some_lease(number)
        lease.free_compute()
        self.open[lease] = (pool, Load(compute=0, kv=load.kv))

    @precondition(lambda self: self.open)
    @rule(number=which)
    def free_kv(self, number: int) -> None:
        lease, pool, load = self.some_lease(number)
        lease.free_kv()
        self.open[lease] = (pool, Load(compute=load.compute, kv=0))

    @precondition(lambda self: self.open)
    @rule(number=which, avoid=avoided, failure=failures)
    def move(self, number: int, avoid: set[tuple[Role, int]], failure: Failure) -> None:
        lease, pool, _ = self.some_lease(number)
        old = lease.backend
        backends = {self.backend(*each) for each in avoid}
        allowed = self.may_be_picked(pool, {*backends, old})
        try:
            new = lease.move(backends, UpstreamError(failure, old, "failed"))
        except NoBackendAvailable:
            assert not allowed
            assert lease.backend is old
        else:
            assert lease.backend == new
            assert new in allowed

    @precondition(lambda self: self.open)
    @rule(number=which)
    def end_well(self, number: int) -> None:
        self.leave(self.some_lease(number)[0], None)

    @precondition(lambda self: self.open)
    @rule(number=which, failure=failures)
    def end_with_the_backend_failing(self, number: int, failure: Failure) -> None:
        lease = self.some_lease(number)[0]
        self.leave(lease, UpstreamError(failure, lease.backend, "failed"))

    @precondition(lambda self: self.open)
    @rule(number=which)
    def end_with_the_client_leaving(self, number: int) -> None:
        self.leave(self.some_lease(number)[0], asyncio.CancelledError())

    def leave(self, lease: Lease, error: BaseException | None) -> None:
        lease.__exit__(None if error is None else type(error), error, None)
        del self.open[lease]

    @rule(role=roles, port=ports, worker=st.integers(0, 1), answers=st.lists(st.booleans(), min_size=1, max_size=3))
    def probe(self, role: Role, port: int, worker: int, answers: list[bool]) -> None:
        for ok in answers:
            self.healths[worker].on_probe(self.backend(role, port), ok, "probe")

    @rule(role=roles, port=ports)
    def add(self, role: Role, port: int) -> None:
        backend = self.backend(role, port)
        before = {member.backend: member for each in Role for member in self.roster.members(each)}
        try:
            changed = self.roster.add(role, backend.host, backend.port)
        except ValueError:
            columns = Counter(lease.backend.slot for lease in self.open)
            assert backend not in before
            assert len({*columns, *(known.slot for known in before)}) == SLOTS
            return
        assert changed == (backend not in before or before[backend].draining)
        member = next(member for member in self.roster.members(role) if member.backend == backend)
        assert not member.draining
        if backend in before:
            assert member.backend.slot == before[backend].backend.slot
        else:
            assert self.scoreboard.requests(member.backend.slot) == 0

    @rule(role=roles, port=ports)
    def remove(self, role: Role, port: int) -> None:
        backend = self.backend(role, port)
        known = {member.backend for member in self.roster.members(role)}
        assert self.roster.remove(role, backend.host, backend.port) == (backend in known)

    @rule()
    def finalize(self) -> None:
        draining = {member.backend for role in Role for member in self.roster.members(role) if member.draining}
        busy = {lease.backend for lease in self.open}
        assert set(self.roster.finalize()) == draining - busy

    @invariant()
    def every_open_lease_and_nothing_else_is_on_the_books(self) -> None:
        requests: Counter[int] = Counter()
        compute: Counter[int] = Counter()
        kv: Counter[int] = Counter()
        for lease, (_, load) in self.open.items():
            slot = lease.backend.slot
            requests[slot] += 1
            compute[slot] += load.compute
            kv[slot] += load.kv
        for slot in range(SLOTS):
            assert self.scoreboard.requests(slot) == requests[slot]
            assert self.scoreboard.load(slot) == Load(compute[slot], kv[slot])

    @invariant()
    def slots_are_not_shared(self) -> None:
        slots = [member.backend.slot for role in Role for member in self.roster.members(role)]
        assert len(set(slots)) == len(slots)

    def teardown(self) -> None:
        for lease in list(getattr(self, "open", ())):
            self.leave(lease, None)
        if hasattr(self, "scoreboard"):
            assert not any(self.scoreboard._cells)


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_sequence_of_events_keeps_the_books_right = AnySequence.TestCase
