"""Random sequences of events on the pools of two workers.

Loads are right at every step and zero at the end. Only eligible backends and those due for a trial are picked.
Ejections leave enough backends of a role.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.balancer.backend_health import BreakerPhase, HealthState
from proxy.balancer.blame import PairQuarantine
from proxy.balancer.health import Health, Transition
from proxy.balancer.lease import Lease
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolLimits
from proxy.balancer.roster import ADMIN, CONFIG, Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.settings import POLICIES, HealthChecks
from tests.clock import Clock
from tests.pools import make_pool

SLOTS = 8
ENDPOINTS = {role: [(role.value[0], port) for port in range(4)] for role in Role}

roles = st.sampled_from(Role)
ports = st.integers(0, 3)
loads = st.builds(Load, compute_tokens=st.integers(0, 1000), kv_tokens=st.integers(0, 1000))
which = st.integers(0, 1000)
workers = st.integers(0, 1)
failures = st.sampled_from(Failure)
avoided = st.sets(st.tuples(roles, ports), max_size=3)


# Short times, so that much happens in few steps.
CHECKS = HealthChecks(
    quarantine_seconds=10.0,
    fall=2,
    rise=1,
    eject_after=2,
    eject_seconds=10.0,
    max_eject_seconds=25.0,
    max_ejected_share=0.5,
    slow_start_seconds=15.0,
)

DISCOVERY = "dns"


@dataclass
class Open:
    """Expected state of an open lease."""

    pool: Pool
    worker: int
    load: Load
    is_trial: bool
    is_running: bool = True
    """Whether its work is not done yet."""
    is_counted: bool = True
    """Whether the backend must not leave, because the work is not done or the KV not fetched."""


class AnySequence(RuleBasedStateMachine):
    """Pools of two workers over one roster and one scoreboard. `open` has the expected state of each open lease."""

    @initialize(policy=st.sampled_from(list(POLICIES)), max_running=st.sampled_from([None, 1, 2]))
    def build(self, policy: str, max_running: int | None) -> None:
        self.clock = Clock()
        self.scoreboard = Scoreboard(workers=2, slots=SLOTS)
        self.roster = Roster(
            ENDPOINTS[Role.PREFILL][:3], ENDPOINTS[Role.DECODE][:2], self.scoreboard, ENDPOINTS[Role.ENCODE][:2]
        )
        self.checks = CHECKS
        self.healths = [Health(lambda: self.checks, self.clock, random.Random(worker)) for worker in range(2)]
        self.quarantines = [PairQuarantine(lambda: self.checks, self.clock) for _ in range(2)]
        self.pools = {
            (role, worker): make_pool(
                role,
                self.roster,
                self.scoreboard,
                policy=policy,
                load_row=self.scoreboard.load_row(worker),
                health=self.healths[worker],
                on_transition=partial(self.check_transition, worker),
                pair_quarantine=self.quarantines[worker],
                clock=self.clock,
                random_source=random.Random(worker),
                pool_limits=PoolLimits(max_running=max_running),
            )
            for worker in range(2)
            for role in Role
        }
        configured = {member.backend for role in Role for member in self.roster.members_of_role(role)}
        self.wanted: dict[str, set[Backend]] = {CONFIG: configured, DISCOVERY: set()}
        self.origins = {backend: {CONFIG} for backend in configured}
        """Origins of the members that do not drain."""
        self.states: list[dict[Backend, HealthState]] = [{}, {}]
        self.open: dict[Lease, Open] = {}
        self.look()

    def look(self) -> None:
        """Let every pool see what has changed."""
        for pool in self.pools.values():
            pool.all_backends()

    def enabled(self, role: Role) -> set[Backend]:
        return {member.backend for member in self.roster.members_of_role(role) if not member.is_draining}

    def check_transition(self, worker: int, transition: Transition) -> None:
        """Check that a transition is returned once and that an ejection leaves enough backends."""
        health, backend = self.healths[worker], transition.backend
        assert transition.old_state is not transition.new_state is health.health_of(backend).health_state
        assert self.states[worker].get(backend, HealthState.UNKNOWN) is transition.old_state
        self.states[worker][backend] = transition.new_state
        assert (transition.ejection_cause is not None) <= (transition.new_state is HealthState.EJECTED)
        if transition.new_state is HealthState.EJECTED:  # the ejection ends the trial; a later lease begins another one
            for lease, each in self.open.items():
                each.is_trial &= lease.backend != backend or each.worker != worker
        if transition.ejection_cause is not None:
            peers = self.enabled(backend.role)
            out = [peer for peer in peers if health.health_by_backend[peer].breaker.phase is not BreakerPhase.CLOSED]
            assert len(out) <= max(1, len(peers) // 2)
            assert any(health.health_of(peer).is_eligible for peer in peers)

    def backend(self, role: Role, port: int) -> Backend:
        return Backend(role, *ENDPOINTS[role][port])

    def some_lease(self, number: int) -> tuple[Lease, Open]:
        lease = list(self.open)[number % len(self.open)]
        return lease, self.open[lease]

    def may_be_picked(self, pool: Pool, avoid: set[Backend]) -> dict[Backend, bool]:
        """Return the backends that may be picked, and whether as a trial, computed without the pool's cache."""
        self.look()
        health, enabled = pool.health, self.enabled(pool.role)
        unproven = {backend for backend in enabled if health.health_by_backend[backend].awaits_first_probe}
        tried = {lease.backend for lease, each in self.open.items() if each.is_trial and each.pool.health is health}
        free = {
            backend
            for backend in enabled
            if health.health_of(backend).health_state in (HealthState.UNKNOWN, HealthState.UP)
        }
        trials = {
            backend for backend in enabled - tried if health.health_of(backend).health_state is HealthState.PROBATION
        }
        if free - unproven or trials:  # otherwise unprobed backends are better than none
            free -= unproven
        return {backend: backend in trials for backend in (free | trials) - avoid}

    @rule(
        role=roles,
        worker=workers,
        load=loads,
        avoid=avoided,
        prefer=st.none() | ports,
        is_proof=st.sampled_from([True, True, False]),
    )
    def enter(
        self, role: Role, worker: int, load: Load, avoid: set[tuple[Role, int]], prefer: int | None, is_proof: bool
    ) -> None:
        pool = self.pools[role, worker]
        backends = {self.backend(*each) for each in avoid}
        allowed = self.may_be_picked(pool, backends)
        lease = pool.make_lease(
            PickRequest.make_for_load(
                load,
                avoided_backends=backends,
                preferred_backend=None if prefer is None else self.backend(role, prefer),
                proves_generation=is_proof,
            )
        )
        try:
            lease.__enter__()
        except NoBackendAvailable:
            assert not allowed
        else:
            assert lease.backend in allowed
            self.open[lease] = Open(pool, worker, load, allowed[lease.backend])

    @precondition(lambda self: self.open)
    @rule(number=which)
    def free_compute(self, number: int) -> None:
        lease, opened = self.some_lease(number)
        lease.release_compute()
        opened.load = Load(compute_tokens=0, kv_tokens=opened.load.kv_tokens)
        opened.is_running = False
        opened.is_trial &= not lease._pick_request.proves_generation

    @precondition(lambda self: self.open)
    @rule(number=which)
    def free_kv(self, number: int) -> None:
        lease, opened = self.some_lease(number)
        lease.release_kv()
        opened.load = Load(compute_tokens=opened.load.compute_tokens, kv_tokens=0)
        opened.is_counted &= opened.is_running

    @precondition(lambda self: self.open)
    @rule(number=which)
    def confirm(self, number: int) -> None:
        lease, opened = self.some_lease(number)
        lease.confirm_beginning()
        opened.is_trial &= not lease._pick_request.proves_generation

    @precondition(lambda self: self.open)
    @rule(number=which, avoid=avoided, failure=failures)
    def move(self, number: int, avoid: set[tuple[Role, int]], failure: Failure) -> None:
        lease, opened = self.some_lease(number)
        old = lease.backend
        if not opened.is_counted:
            return  # it has finished with the request
        backends = {self.backend(*each) for each in avoid}
        self.look()
        try:
            new = lease.move_to_other_backend(backends, UpstreamError(failure, old, "failed"))
        except NoBackendAvailable:
            opened.is_trial = False
            assert lease.backend is old
            assert not self.may_be_picked(opened.pool, {*backends, old})
        else:
            assert lease.backend == new
            assert new not in {*backends, old}
            assert new in self.enabled(opened.pool.role)
            state = opened.pool.health.health_of(new).health_state
            assert state in (HealthState.UNKNOWN, HealthState.UP, HealthState.PROBATION)
            opened.is_trial = state is HealthState.PROBATION

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

    @rule(role=roles, port=ports, worker=workers)
    def stall(self, role: Role, port: int, worker: int) -> None:
        self.pools[role, worker].report_stall(self.backend(role, port))

    @rule(seconds=st.sampled_from([1.0, 5.0, 12.0, 30.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(prefiller=ports, decoder=ports, worker=workers, ok=st.booleans())
    def count_handoff(self, prefiller: int, decoder: int, worker: int, ok: bool) -> None:
        pair = (self.backend(Role.PREFILL, prefiller), self.backend(Role.DECODE, decoder))
        known = {member.backend for role in Role for member in self.roster.members_of_role(role)}
        if known.issuperset(pair):
            self.quarantines[worker].record_successful_handoff(*pair) if ok else self.quarantines[
                worker
            ].record_failed_handoff(*pair)

    @rule(role=roles, port=ports, worker=workers, answers=st.lists(st.booleans(), min_size=1, max_size=3))
    def probe(self, role: Role, port: int, worker: int, answers: list[bool]) -> None:
        self.look()
        backend = self.backend(role, port)
        if backend in self.pools[role, worker].all_backends():
            for ok in answers:
                transition = self.healths[worker].on_probe(backend, ok, "probe")
                if transition is not None:
                    self.check_transition(worker, transition)

    @rule(role=roles, port=ports)
    def add(self, role: Role, port: int) -> None:
        backend = self.backend(role, port)
        before = {member.backend: member for each in Role for member in self.roster.members_of_role(each)}
        try:
            changed = self.roster.add_for_administrator(Backend(role, backend.host, backend.port))
        except ValueError:
            columns = Counter(lease.backend.slot for lease in self.open)
            assert backend not in before
            assert len({*columns, *(known.slot for known in before)}) == SLOTS
            return
        assert changed == (backend not in before or before[backend].is_draining)
        member = next(member for member in self.roster.members_of_role(role) if member.backend == backend)
        assert not member.is_draining
        self.origins.setdefault(backend, set()).add(ADMIN)
        if backend in before:
            assert member.backend.slot == before[backend].backend.slot
        else:
            assert self.scoreboard.open_leases(member.backend.slot) == 0

    @rule(role=roles, port=ports)
    def remove(self, role: Role, port: int) -> None:
        backend = self.backend(role, port)
        known = {member.backend for member in self.roster.members_of_role(role)}
        assert self.roster.remove_backend(role, backend.host, backend.port) == (backend in known)
        self.origins.pop(backend, None)

    @rule(
        chosen=avoided,
        eject_after=st.sampled_from([1, 3, 5]),
        slow_start_seconds=st.sampled_from([0.0, 15.0]),
        max_running=st.sampled_from([None, 1, 2]),
        policy=st.sampled_from(list(POLICIES)),
    )
    def reload(
        self,
        chosen: set[tuple[Role, int]],
        eject_after: int,
        slow_start_seconds: float,
        max_running: int | None,
        policy: str,
    ) -> None:
        """Apply another configuration: other instances in one step, and other settings."""
        if not self.sync(CONFIG, {self.backend(*each) for each in chosen}, restores=True):
            return
        changes = {"eject_after": eject_after, "slow_start_seconds": slow_start_seconds}
        self.checks = self.checks.model_copy(update=changes)
        for pool in self.pools.values():
            pool.use_policy(make_policy(policy))
            pool.set_limits(PoolLimits(max_running=max_running))

    @rule(chosen=avoided)
    def discover(self, chosen: set[tuple[Role, int]]) -> None:
        self.sync(DISCOVERY, {self.backend(*each) for each in chosen}, restores=False)

    def sync(self, origin: str, wanted: set[Backend], *, restores: bool) -> bool:
        """Set the backends of an origin, and return whether that was possible. Otherwise nothing has changed."""
        before = {member.backend: member.origins for role in Role for member in self.roster.members_of_role(role)}
        try:
            self.roster.sync_origin(origin, wanted, restores_removed=restores)
        except ValueError:
            after = {member.backend: member.origins for role in Role for member in self.roster.members_of_role(role)}
            assert after == before
            return False
        for backend in wanted if restores else wanted - self.wanted[origin]:
            self.origins.setdefault(backend, set()).add(origin)
        for backend in self.wanted[origin] - wanted:
            self.origins.get(backend, set()).discard(origin)
        self.wanted[origin] = wanted
        return True

    @invariant()
    def members_are_enabled_while_an_origin_wants_them(self) -> None:
        members = [member for role in Role for member in self.roster.members_of_role(role)]
        known = {member.backend: set(member.origins) for member in members if not member.is_draining}
        assert known == {backend: origins for backend, origins in self.origins.items() if origins}

    @rule()
    def finalize(self) -> None:
        draining = {
            member.backend for role in Role for member in self.roster.members_of_role(role) if member.is_draining
        }
        busy = {lease.backend for lease, each in self.open.items() if each.is_counted}
        gone = set(self.roster.drop_drained_backends())
        assert gone == draining - busy
        self.look()
        for backend in gone:
            for states in self.states:
                states.pop(backend, None)

    @invariant()
    def load_is_that_of_the_open_leases(self) -> None:
        requests: Counter[int] = Counter()
        running: Counter[int] = Counter()
        compute: Counter[int] = Counter()
        kv: Counter[int] = Counter()
        for lease, opened in self.open.items():
            slot = lease.backend.slot
            requests[slot] += opened.is_counted
            compute[slot] += opened.load.compute_tokens
            kv[slot] += opened.load.kv_tokens
            running[slot] += opened.is_running
        for slot in range(SLOTS):
            assert self.scoreboard.running_requests(slot) == running[slot]
            assert self.scoreboard.open_leases(slot) == requests[slot]
            assert self.scoreboard.load_of(slot) == Load(compute[slot], kv[slot])

    @invariant()
    def slots_are_not_shared(self) -> None:
        slots = [member.backend.slot for role in Role for member in self.roster.members_of_role(role)]
        assert len(set(slots)) == len(slots)

    @invariant()
    def a_pool_is_ready_while_a_backend_is_up(self) -> None:
        self.look()
        for (role, _), pool in self.pools.items():
            health = pool.health
            if any(health.health_of(backend).health_state is HealthState.UP for backend in self.enabled(role)):
                assert pool.is_ready_to_serve()
            if any(health.health_of(backend).health_state is HealthState.EJECTED for backend in self.enabled(role)):
                states = {health.health_of(backend).health_state for backend in self.enabled(role)}
                assert states & {HealthState.UNKNOWN, HealthState.UP, HealthState.PROBATION}

    @invariant()
    def each_trial_belongs_to_one_open_lease(self) -> None:
        for worker, health in enumerate(self.healths):
            under_way = [backend for backend, each in health.health_by_backend.items() if each.breaker.trial_number]
            tried = [lease.backend for lease, each in self.open.items() if each.worker == worker and each.is_trial]
            assert set(under_way) <= set(tried)

    @invariant()
    def quarantines_are_symmetric(self) -> None:
        self.look()
        known = {member.backend for role in Role for member in self.roster.members_of_role(role)}
        for quarantine in self.quarantines:
            assert {backend for pair in quarantine._pairs for backend in pair} <= known
            for backend in known:
                assert all(
                    backend in quarantine.partners_to_avoid(partner)
                    for partner in quarantine.partners_to_avoid(backend)
                )

    def teardown(self) -> None:
        for lease in list(getattr(self, "open", ())):
            self.leave(lease, None)
        if hasattr(self, "scoreboard"):
            assert not any(self.scoreboard._load_cells)


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
# The timeout of one test would apply to all of these steps together.
test_any_sequence_of_events_keeps_loads_right = pytest.mark.timeout(600)(AnySequence.TestCase)
