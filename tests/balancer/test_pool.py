"""Pool: eligible backends, leases, room for requests, and changes of roster and health."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.blame import PairQuarantine
from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import ProbeFailure
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import PoolLimits, Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.back_offs import LONGEST_SECONDS, BackOffs
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.settings import POLICIES, HealthChecks
from tests.balancer.conftest import Balancer
from tests.pools import make_pool


def down(balancer: Balancer, *backends: Backend) -> None:
    for backend in backends * 3:
        balancer.health.on_probe(backend, False, "timeout")


def up(balancer: Balancer, *backends: Backend) -> None:
    for backend in backends * 2:
        balancer.health.on_probe(backend, True, "200")


def test_pool_has_the_backends_of_its_role(balancer: Balancer) -> None:
    assert [backend.name for backend in balancer.prefillers.all_backends()] == ["p:1", "p:2"]
    assert [backend.name for backend in balancer.decoders.eligible_backends()] == ["d:1", "d:2"]


def test_down_backend_gets_no_requests_until_it_is_up_again(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    down(balancer, one)
    assert {balancer.decoders.pick_backend() for _ in range(10)} == {two}
    up(balancer, one)
    balancer.clock.now += balancer.checks.slow_start_seconds
    assert {balancer.decoders.pick_backend() for _ in range(10)} == {one, two}


@pytest.mark.parametrize("how", ["drains", "is down", "is ejected", "is disabled"])
def test_backend_without_new_requests_stays_in_the_pool(balancer: Balancer, how: str) -> None:
    one, two = balancer.decoders.all_backends()
    match how:
        case "drains":
            balancer.roster.remove_backend(Role.DECODE, "d", 1)
        case "is down":
            down(balancer, one)
        case "is ejected":
            balancer.eject(one)
        case _:
            balancer.roster.disable_backend(Role.DECODE, "d", 1)
    assert {balancer.decoders.pick_backend() for _ in range(10)} == {two}
    assert balancer.decoders.all_backends() == (one, two)


def test_avoided_backend_is_not_picked(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    assert {balancer.decoders.pick_backend(avoided_backends=[two]) for _ in range(10)} == {one}


def test_lease_fails_when_no_backend_is_healthy(balancer: Balancer) -> None:
    down(balancer, *balancer.prefillers.all_backends())
    with pytest.raises(NoBackendAvailable, match="no healthy prefill instance") as raised:
        balancer.prefillers.pick_backend()
    assert (raised.value.status, raised.value.role) == (503, Role.PREFILL)
    assert balancer.decoders.pick_backend() in balancer.decoders.all_backends()


def test_pool_is_ready_when_one_eligible_backend_is_confirmed(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    assert not balancer.decoders.is_ready_to_serve()
    balancer.health.on_probe(one, True, "200")
    assert balancer.decoders.is_ready_to_serve()
    balancer.roster.remove_backend(Role.DECODE, "d", 1)
    assert not balancer.decoders.is_ready_to_serve()
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1))):
        pass
    assert balancer.decoders.is_ready_to_serve()
    down(balancer, two)
    assert not balancer.decoders.is_ready_to_serve()


def test_health_of_a_removed_backend_is_dropped(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    down(balancer, one)
    balancer.roster.remove_backend(Role.DECODE, "d", 1)
    assert balancer.roster.drop_drained_backends() == [one]
    balancer.decoders.all_backends()
    assert balancer.health.health_of(one).health_state is HealthState.UNKNOWN
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 1))
    assert one in balancer.decoders.all_backends()
    assert balancer.health.health_of(one).health_state is HealthState.UNKNOWN


def test_each_transition_is_reported_once(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    for _ in range(4):
        balancer.decoders.report_outcome(one, UpstreamError(Failure.CONNECT, one, "connection refused"))
    balancer.clock.now += 36.0
    for _ in range(2):
        balancer.prefillers.all_backends()
        balancer.decoders.all_backends()
    told = [(t.backend, t.new_state, t.ejection_cause) for t in balancer.transitions]
    assert told == [(one, HealthState.EJECTED, "connect"), (one, HealthState.PROBATION, None)]


@pytest.mark.parametrize("policy", ["least_tokens", "round_robin"])
def test_consecutive_short_requests_rotate_over_equal_backends(policy: str) -> None:
    scoreboard = Scoreboard(slots=8)
    roster = Roster([], [("d", port) for port in range(8)], scoreboard)
    pool = make_pool(Role.DECODE, roster, scoreboard, policy=policy)
    ports = []
    for _ in range(16):
        with pool.make_lease(PickRequest.make_for_load(Load(10, 10))) as lease:
            ports.append(lease.backend.port)
    assert ports == list(range(8)) * 2


def test_long_requests_are_distributed_by_load(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1000, 1000))) as heavy:
        assert heavy.backend == one
        with (
            balancer.decoders.make_lease(PickRequest.make_for_load(Load(10, 10))),
            balancer.decoders.make_lease(PickRequest.make_for_load(Load(10, 10))),
        ):
            assert (
                balancer.decoders.scoreboard.open_leases(one.slot),
                balancer.decoders.scoreboard.open_leases(two.slot),
            ) == (1, 2)


def test_prefiller_that_only_holds_kv_is_preferred_to_one_that_computes(balancer: Balancer) -> None:
    with (
        balancer.prefillers.make_lease(PickRequest.make_for_load(Load(100, 100))) as waiting,
        balancer.prefillers.make_lease(PickRequest.make_for_load(Load(100, 100))) as computing,
    ):
        assert waiting.backend != computing.backend
        waiting.release_compute()
        assert {balancer.prefillers.pick_backend() for _ in range(4)} == {waiting.backend}


def test_load_of_other_workers_counts_in_a_pick(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.scoreboard.load_row(1).add_load(one.slot, requests=1, compute=500, kv=500)
    assert {balancer.decoders.pick_backend() for _ in range(4)} == {two}


# A preferred backend


def test_preferred_backend_is_taken_under_any_load(balancer: Balancer) -> None:
    one, two = balancer.prefillers.all_backends()
    with balancer.prefillers.make_lease(PickRequest.make_for_load(Load(1000, 1000), preferred_backend=two)) as lease:
        assert lease.backend is two
        with balancer.prefillers.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=two)) as another:
            assert another.backend is two
        assert balancer.prefillers.pick_backend() == one


def test_preferred_backend_is_not_taken_if_it_is_avoided_down_or_removed(balancer: Balancer) -> None:
    one, two = balancer.prefillers.all_backends()
    assert balancer.prefillers.pick_backend(avoided_backends=[two], preferred_backend=two) == one
    down(balancer, two)
    assert balancer.prefillers.pick_backend(preferred_backend=two) == one
    balancer.roster.remove_backend(Role.PREFILL, "p", 2)
    balancer.roster.drop_drained_backends()
    assert balancer.prefillers.pick_backend(preferred_backend=two) == one


def test_lease_that_moves_drops_its_preference(balancer: Balancer) -> None:
    one, two = balancer.prefillers.all_backends()
    with balancer.prefillers.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=two)) as lease:
        assert lease.move_to_other_backend([], UpstreamError(Failure.RESET, two, "gone")) == one


# Short of KV memory


class Pressed:
    """Pool of three decoders, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        scoreboard = Scoreboard(slots=3)
        self.roster = Roster([], [("d", port) for port in range(3)], scoreboard)
        limits = PoolLimits(kv_pressure_seconds=5.0)
        self.pool = make_pool(Role.DECODE, self.roster, scoreboard, clock=lambda: self.now, pool_limits=limits)

    def recomputed(self, decoder: Backend) -> None:
        self.pool.report_outcome(decoder, UpstreamError(Failure.RECOMPUTED, decoder, "no memory"))

    def picked(self, avoid: tuple[Backend, ...] = ()) -> set[int]:
        return {self.pool.pick_backend(avoid).port for _ in range(6)}


class TwoWorkers:
    """Pools of two workers with shared back-offs, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        scoreboard, back_offs = Scoreboard(workers=2, slots=3), BackOffs(slots=3)
        roster = Roster([], [("d", port) for port in range(3)], scoreboard)
        self.pools = [
            make_pool(
                Role.DECODE,
                roster,
                scoreboard,
                load_row=scoreboard.load_row(worker),
                clock=lambda: self.now,
                back_offs=back_offs,
            )
            for worker in range(2)
        ]

    def refused(self, worker: int, decoder: Backend) -> None:
        with (
            suppress(UpstreamError),
            self.pools[worker].make_lease(PickRequest.make_for_load(Load(), preferred_backend=decoder)) as lease,
        ):
            assert lease.backend == decoder
            raise UpstreamError(Failure.STATUS, decoder, "busy", engine_status=503)

    def picked(self, worker: int) -> set[int]:
        return {self.pools[worker].pick_backend().port for _ in range(6)}


def test_refusal_is_known_to_all_workers() -> None:
    workers = TwoWorkers()
    zero, one, two = workers.pools[0].all_backends()
    workers.refused(0, zero)
    assert workers.picked(0) == workers.picked(1) == {1, 2}
    workers.now += 1.0
    # Only one worker takes the turn that is due.
    with workers.pools[1].make_lease(PickRequest.make_for_load(Load(), preferred_backend=zero)) as lease:
        assert lease.backend == zero
        assert workers.picked(0) == workers.picked(1) == {1, 2}
    assert workers.picked(0) == workers.picked(1) == {0, 1, 2}
    assert not any(pool.do_all_refuse() for pool in workers.pools)
    for decoder in (zero, one, two):
        workers.refused(1, decoder)
    assert all(pool.do_all_refuse() and not pool.has_room() for pool in workers.pools)
    workers.now += 1.0
    assert all(not pool.do_all_refuse() and pool.has_room() for pool in workers.pools)


def test_pool_refuses_until_the_first_retry_after_of_its_backends() -> None:
    (pool, _), now = (workers := TwoWorkers()).pools, workers.now
    for decoder, seconds, until in zip(
        pool.all_backends(), (600.0, 700.0, 500.0), (0.0, 0.0, now + 500.0), strict=True
    ):
        error = UpstreamError(Failure.STATUS, decoder, "busy", engine_status=429)
        error.retry_after_seconds = seconds
        pool.report_outcome(decoder, error)
        assert workers.pools[1].refused_until() == until
    workers.now += LONGEST_SECONDS
    assert pool.refused_until() == 0.0, "one of them is tried"


def test_requests_do_not_wait_for_the_last_backend_if_refusals_are_not_queued() -> None:
    """The last backend was ejected because it refused, and the others went down later."""
    workers = TwoWorkers()
    pool, (last, *others) = workers.pools[0], workers.pools[0].all_backends()
    health = pool.health
    refusal = UpstreamError(Failure.STATUS, last, "busy", engine_status=503)
    for refusals in (1, 2, 3):
        health.on_outcome(last, refusal, pool.all_backends(), refusal_count=refusals)
        health.on_outcome(others[0], None, pool.all_backends())
    health.on_outcome(last, refusal, pool.all_backends(), refusal_count=4)
    for other in others * HealthChecks().fall:
        health.on_probe(other, False, "gone")
    health.release_last_ejected(pool.all_backends())
    pool.report_outcome(last, refusal)
    assert health.health_of(last).awaits_trial_request
    assert not pool.has_room()
    pool.set_limits(PoolLimits(queues_refused_requests=False))
    assert pool.has_room()
    with pool.make_lease(PickRequest.make_for_load(Load())) as lease:
        assert lease.backend == last


def test_decoder_without_kv_memory_is_passed_over_for_pressure_seconds() -> None:
    pressed = Pressed()
    zero, one, _ = pressed.pool.all_backends()
    pressed.recomputed(zero)
    pressed.now = 3.0
    pressed.recomputed(one)
    assert pressed.picked() == {2}
    pressed.now = 5.0
    assert pressed.picked() == {0, 2}
    pressed.now = 8.0
    assert pressed.picked() == {0, 1, 2}


def test_second_recomputation_extends_the_time_of_passing_over() -> None:
    pressed = Pressed()
    zero, _, _ = pressed.pool.all_backends()
    for pressed.now in (0.0, 3.0):
        pressed.recomputed(zero)
    pressed.now = 7.9
    assert pressed.picked() == {1, 2}


def test_decoder_without_kv_memory_is_taken_if_there_is_no_other() -> None:
    pressed = Pressed()
    zero, one, two = pressed.pool.all_backends()
    pressed.recomputed(zero)
    assert pressed.picked(avoid=(one, two)) == {0}
    assert pressed.pool.pick_backend(avoided_backends=(one,), preferred_backend=zero) == two
    for decoder in (one, two):
        pressed.recomputed(decoder)
    assert pressed.picked() == {0, 1, 2}
    assert pressed.picked(avoid=(zero,)) == {1, 2}


def test_only_recomputation_counts_as_lack_of_kv_memory() -> None:
    pressed = Pressed()
    zero, one, _ = pressed.pool.all_backends()
    for failure in set(Failure) - {Failure.RECOMPUTED}:
        pressed.pool.report_outcome(zero, UpstreamError(failure, zero, "failed"))
        pressed.pool.report_outcome(zero, None)
    pressed.pool.report_outcome(one, None)
    assert pressed.picked() == {0, 1, 2}


# Ejected, and on probation


def test_stall_of_the_last_backend_changes_nothing(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.eject(one)
    assert not balancer.decoders.report_stall(two)
    assert balancer.decoders.eligible_backends() == (two,)
    assert len(balancer.transitions) == 1


def test_stall_of_a_backend_that_is_already_out_ends_its_answers(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.eject(one)
    assert balancer.decoders.report_stall(one)
    down(balancer, two)
    assert balancer.decoders.report_stall(two)
    for prefiller in balancer.prefillers.all_backends():
        balancer.roster.remove_backend(Role.PREFILL, prefiller.host, prefiller.port)
        assert balancer.prefillers.report_stall(prefiller)
    assert [t.ejection_cause for t in balancer.transitions if t.ejection_cause] == ["stall"]


def test_failures_eject_a_backend_only_while_it_has_enabled_peers(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.roster.remove_backend(Role.DECODE, "d", 2)
    for _ in range(10):
        balancer.decoders.report_outcome(one, UpstreamError(Failure.RESET, one, "gone"))
    assert balancer.decoders.eligible_backends() == (one,)
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 2))
    balancer.decoders.report_outcome(one, UpstreamError(Failure.RESET, one, "gone"))
    assert balancer.decoders.eligible_backends() == (two,)


def test_pick_without_a_lease_is_no_trial(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    assert {balancer.decoders.pick_backend() for _ in range(10)} == {two}
    with pytest.raises(NoBackendAvailable):
        balancer.decoders.pick_backend(avoided_backends=[two])
    assert balancer.health.health_of(one).awaits_trial_request


def test_pool_is_ready_when_all_backends_are_on_probation(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.health.on_probe(one, True, "200")
    balancer.eject(one)
    down(balancer, two)
    assert balancer.decoders.eligible_backends() == ()
    assert balancer.transitions[-1].reason == "no other backend is left"
    assert balancer.decoders.is_ready_to_serve()
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1))) as lease:
        assert lease.backend == one
        assert balancer.decoders.is_ready_to_serve()
        with pytest.raises(NoBackendAvailable):
            balancer.decoders.pick_backend()
    assert balancer.decoders.eligible_backends() == (one,)
    down(balancer, one)
    assert not balancer.decoders.is_ready_to_serve()


def test_ejected_backend_goes_on_probation_when_the_other_one_is_removed(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    balancer.eject(one)
    balancer.roster.remove_backend(Role.DECODE, "d", 2)
    balancer.decoders.all_backends()
    assert balancer.health.health_of(one).awaits_trial_request


# Added later


def test_added_backend_gets_no_requests_until_it_has_answered(balancer: Balancer) -> None:
    balancer.decoders.all_backends()
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 3))
    three = balancer.decoders.all_backends()[-1]
    assert three not in balancer.decoders.eligible_backends()
    balancer.health.on_probe(three, True, "200")
    assert three in balancer.decoders.eligible_backends()


def test_backends_of_the_first_look_are_eligible_at_once(balancer: Balancer) -> None:
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 3))
    assert len(balancer.decoders.eligible_backends()) == 3


def test_draining_backend_that_is_added_again_keeps_its_requests(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1))) as lease:
        balancer.roster.remove_backend(Role.DECODE, lease.backend.host, lease.backend.port)
        assert lease.backend not in balancer.decoders.eligible_backends()
        balancer.roster.add_for_administrator(Backend(Role.DECODE, lease.backend.host, lease.backend.port))
        assert lease.backend in balancer.decoders.eligible_backends()
        assert balancer.decoders.scoreboard.open_leases(lease.backend.slot) == 1


def test_pool_drops_a_removed_backend_from_the_quarantine(balancer: Balancer) -> None:
    quarantine = PairQuarantine(lambda: HealthChecks(quarantine_after=1))
    pool = make_pool(
        Role.PREFILL, balancer.roster, balancer.scoreboard, health=balancer.health, pair_quarantine=quarantine
    )
    prefiller, decoder = pool.all_backends()[0], balancer.decoders.all_backends()[0]
    quarantine.record_failed_handoff(prefiller, decoder)
    balancer.roster.remove_backend(Role.PREFILL, prefiller.host, prefiller.port)
    balancer.roster.drop_drained_backends()
    assert quarantine.partners_to_avoid(decoder) == {prefiller}
    pool.all_backends()
    assert quarantine.partners_to_avoid(decoder) == frozenset()


# Slow start


def came_back(balancer: Balancer, backend: Backend) -> None:
    """Take a backend down and up again."""
    down(balancer, backend)
    up(balancer, backend)


def shares(balancer: Balancer, policy: str) -> dict[str, int]:
    """Return the number of open requests on each backend after 400 picks."""
    pool = balancer.pool(Role.DECODE, policy)
    leases = [pool.make_lease(PickRequest.make_for_load(Load(100, 100))) for _ in range(400)]
    for lease in leases:
        lease.__enter__()
    count = Counter(lease.backend.name for lease in leases)
    for lease in leases:
        lease.__exit__(None, None, None)
    return count


@pytest.mark.parametrize(
    ("policy", "at_once", "later"),
    [
        # The loads of the two are 10 % to 100 %, and later 55 % to 100 %.
        ("least_tokens", (36, 37), (141, 143)),
        ("power_of_two", (30, 45), (135, 150)),
        # It is left out 9 times of 10, and otherwise chosen every second time; later it is left out 45 times of 100.
        ("round_robin", (20, 60), (90, 155)),
        ("random", (10, 30), (90, 130)),
    ],
)
def test_share_of_a_backend_that_came_back_grows(
    balancer: Balancer, policy: str, at_once: tuple[int, int], later: tuple[int, int]
) -> None:
    one, two = balancer.decoders.all_backends()
    came_back(balancer, one)
    if balancer.pool(Role.DECODE, policy).policy.uses_load_weights:
        assert {balancer.pool(Role.DECODE, policy).pick_backend() for _ in range(20)} == {two}
    assert at_once[0] <= shares(balancer, policy)[one.name] <= at_once[1]
    balancer.clock.now += 15.0
    assert later[0] <= shares(balancer, policy)[one.name] <= later[1]
    balancer.clock.now += 15.0
    assert 160 <= shares(balancer, policy)[two.name] <= 240


def test_backend_in_slow_start_is_taken_if_there_is_no_other(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    came_back(balancer, one)
    for policy in POLICIES:
        assert balancer.pool(Role.DECODE, policy).pick_backend(avoided_backends=[two]) == one


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("least_tokens", (79, 81)),  # 25 of 125
        ("power_of_two", (70, 90)),
        ("round_robin", (30, 80)),  # it takes part every fourth time, and is then chosen every second time
        ("random", (30, 75)),
    ],
)
def test_weight_is_the_share_of_requests(balancer: Balancer, policy: str, expected: tuple[int, int]) -> None:
    one, two = balancer.decoders.all_backends()
    assert balancer.roster.set_backend_weight(Role.DECODE, one.host, one.port, 25)
    assert expected[0] <= shares(balancer, policy)[one.name] <= expected[1]
    assert balancer.roster.set_backend_weight(Role.DECODE, one.host, one.port, 100)
    assert 160 <= shares(balancer, policy)[two.name] <= 240


def test_backend_with_the_lowest_weight_in_slow_start_is_still_taken(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.roster.set_backend_weight(Role.DECODE, one.host, one.port, 1)
    came_back(balancer, one)
    for policy in POLICIES:
        assert balancer.pool(Role.DECODE, policy).pick_backend(avoided_backends=[two]) == one


# Disabled


def test_disabled_backend_stays_without_new_requests(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=one)):
        balancer.roster.disable_backend(Role.DECODE, one.host, one.port)
        assert balancer.decoders.eligible_backends() == (two,)
        assert balancer.decoders.scoreboard.open_leases(one.slot) == 1
    assert balancer.roster.drop_drained_backends() == []
    assert balancer.decoders.all_backends() == (one, two)
    balancer.roster.disable_backend(Role.DECODE, two.host, two.port)
    with pytest.raises(NoBackendAvailable):
        balancer.decoders.pick_backend()


def test_enabled_backend_is_probed_first_and_starts_slowly(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.eject(one)
    balancer.roster.disable_backend(Role.DECODE, one.host, one.port)
    assert balancer.decoders.eligible_backends() == (two,)
    balancer.roster.enable_backend(Role.DECODE, one.host, one.port)
    assert balancer.decoders.eligible_backends() == (two,)
    told = balancer.transitions[-1]
    assert (told.new_state, told.reason) == (HealthState.UNKNOWN, "enabled again")
    balancer.health.on_probe(one, False, "refused", failure=ProbeFailure.REFUSED)
    assert balancer.decoders.eligible_backends() == (two,)
    up(balancer, one)
    assert balancer.decoders.eligible_backends() == (one, two)
    assert balancer.health.request_share_percent(one) == 10


def test_health_of_a_disabled_backend_is_kept_while_it_drains(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    balancer.health.on_probe(one, True, "200")
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=one)):
        balancer.roster.disable_backend(Role.DECODE, one.host, one.port)
        balancer.decoders.eligible_backends()
        balancer.roster.remove_backend(Role.DECODE, one.host, one.port)
        balancer.decoders.eligible_backends()
        assert balancer.health.health_of(one).is_confirmed_healthy


# Limits


def test_pool_without_limits_always_has_room(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    assert balancer.decoders.running_limit(one) is None
    leases = [balancer.decoders.make_lease(PickRequest.make_for_load(Load(1, 1))) for _ in range(100)]
    for lease in leases:
        lease.__enter__()
    assert balancer.decoders.has_room()
    for lease in leases:
        lease.__exit__(None, None, None)


def test_backend_with_room_is_preferred_and_a_full_pool_still_picks(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, max_running=2)
    one, two = pool.all_backends()
    assert pool.running_limit(one) == 2
    with (
        pool.make_lease(PickRequest.make_for_load(Load(1, 1))),
        pool.make_lease(PickRequest.make_for_load(Load(1000, 1000), avoided_backends=[one])),
        pool.make_lease(PickRequest.make_for_load(Load(1, 1))),
    ):
        assert (pool.scoreboard.open_leases(one.slot), pool.scoreboard.open_leases(two.slot)) == (2, 1)
        assert pool.pick_backend() == pool.pick_backend(preferred_backend=one) == two
        assert pool.pick_backend(avoided_backends=[two]) == one
        assert pool.has_room()
        with pool.make_lease(PickRequest.make_for_load(Load(1, 1))) as last:
            assert last.backend == two
            assert not pool.has_room()
            assert pool.pick_backend() == one
        assert pool.has_room()


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two"])
def test_every_policy_prefers_a_backend_with_room(balancer: Balancer, policy: str) -> None:
    pool = balancer.pool(Role.DECODE, policy, max_running=1)
    one, two = pool.all_backends()
    with pool.make_lease(PickRequest.make_for_load(Load(), preferred_backend=one)):
        assert {pool.pick_backend() for _ in range(10)} == {two}


def test_limit_is_that_of_the_engine_unless_configured(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.health.on_probe(one, True, "200")
    assert balancer.decoders.eligible_backends() == (one, two)
    balancer.health.set_engine_facts(one, EngineFacts(max_num_seqs=1))
    assert (balancer.decoders.running_limit(one), balancer.decoders.running_limit(two)) == (1, None)
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load(), preferred_backend=one)):
        assert {balancer.decoders.pick_backend() for _ in range(10)} == {two}
        assert balancer.decoders.has_room()
        down(balancer, two)
        assert not balancer.decoders.has_room()
        balancer.decoders.use_policy(make_policy("least_tokens"))
        balancer.decoders.set_limits(PoolLimits(max_running=5))
        assert balancer.decoders.running_limit(one) == 5
        assert balancer.decoders.has_room()


def test_requests_of_other_workers_take_room(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, max_running=1)
    for backend in pool.all_backends():
        assert pool.has_room()
        balancer.scoreboard.load_row(1).add_load(backend.slot, requests=1, running=1)
    assert not pool.has_room()


def test_reservation_is_charged_without_an_outcome(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, max_running=1)
    one, two = pool.all_backends()
    looked: list[bool] = []
    with pool.make_reservation(PickRequest.make_for_load(Load(compute_tokens=5, kv_tokens=7), avoided_backends=[two])):
        assert balancer.books(one) == (1, Load(compute_tokens=5, kv_tokens=7))
        with pool.make_reservation(PickRequest.make_for_load(Load())):
            assert not pool.has_room()
        pool.on_release = lambda: looked.append(pool.has_room())
    assert looked == [True]
    assert balancer.all_books() == {(0, Load())}
    assert balancer.ends == []


def test_failed_reservation_releases_its_load_without_an_outcome(balancer: Balancer) -> None:
    with (
        pytest.raises(UpstreamError),
        balancer.decoders.make_reservation(PickRequest.make_for_load(Load(compute_tokens=1))) as held,
    ):
        raise UpstreamError(Failure.RESET, held.backend, "gone")
    down(balancer, *balancer.decoders.all_backends())
    with (
        pytest.raises(NoBackendAvailable),
        balancer.decoders.make_reservation(PickRequest.make_for_load(Load(compute_tokens=1))),
    ):
        pytest.fail("no backend is healthy")
    assert balancer.all_books() == {(0, Load())}
    assert balancer.ends == []


def test_reservation_is_no_trial(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    with balancer.decoders.make_reservation(PickRequest.make_for_load(Load())) as held:
        assert held.backend == two
    with balancer.decoders.make_lease(PickRequest.make_for_load(Load())) as trial:
        assert trial.backend == one


def test_backend_that_only_holds_kv_has_room(balancer: Balancer) -> None:
    pool = balancer.pool(Role.PREFILL, max_running=1)
    looked: list[bool] = []
    with ExitStack() as stack:
        leases = [
            stack.enter_context(pool.make_lease(PickRequest.make_for_load(Load(compute_tokens=5, kv_tokens=5))))
            for _ in pool.all_backends()
        ]
        assert not pool.has_room()
        pool.on_release = lambda: looked.append(pool.has_room())
        leases[0].release_compute()
        assert looked == [True]
        assert pool.pick_backend() == leases[0].backend
        assert pool.scoreboard.open_leases(leases[0].backend.slot) == 1


def test_pool_has_room_if_a_lease_would_fail_at_once_or_be_a_trial(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, max_running=1)
    one, two = pool.all_backends()
    balancer.put_on_probation(one)
    with pool.make_lease(PickRequest.make_for_load(Load(), preferred_backend=two)):
        assert pool.has_room()
        with pool.make_lease(PickRequest.make_for_load(Load())) as trial:
            assert trial.backend == one
            assert not pool.has_room()
            down(balancer, two)
            assert pool.has_room()
            with pytest.raises(NoBackendAvailable):
                pool.pick_backend()


def test_pool_calls_on_release_when_there_may_be_room(balancer: Balancer) -> None:
    told: list[bool] = []
    pool = balancer.pool(Role.DECODE, max_running=1)
    one, two = pool.all_backends()
    pool.on_release = lambda: told.append(pool.has_room())
    with pool.make_lease(PickRequest.make_for_load(Load(), avoided_backends=[two])):
        assert told == []
    assert told == [True]
    with pool.make_lease(PickRequest.make_for_load(Load(), avoided_backends=[two])) as lease:
        lease.move_to_other_backend([], UpstreamError(Failure.RESET, one, "gone"))
    assert told == [True] * 3
    down(balancer, one)
    assert pool.all_backends()
    assert len(told) == 4


# Settings that change


def test_changed_policy_and_limits_apply_to_the_next_lease() -> None:
    pressed = Pressed()
    zero, one, two = pressed.pool.all_backends()
    pressed.pool.use_policy(make_policy("round_robin"))
    pressed.pool.set_limits(PoolLimits(kv_pressure_seconds=2.0))
    pressed.recomputed(zero)
    with pressed.pool.make_lease(PickRequest.make_for_load(Load(100, 100))) as lease:
        assert lease.backend == one
        assert [pressed.pool.pick_backend() for _ in range(2)] == [two, one]
    pressed.now = 2.0
    assert pressed.picked() == {0, 1, 2}


def test_unprobed_backends_are_eligible_when_all_are_new(balancer: Balancer) -> None:
    pool = balancer.decoders
    for backend in pool.all_backends():
        balancer.roster.remove_backend(Role.DECODE, backend.host, backend.port)
    balancer.roster.drop_drained_backends()
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 8))
    balancer.roster.add_for_administrator(Backend(Role.DECODE, "d", 9))
    assert [backend.port for backend in pool.eligible_backends()] == [8, 9]
    balancer.health.on_probe(pool.all_backends()[0], True, "200")
    assert [backend.port for backend in pool.eligible_backends()] == [8]


# Restarts


@pytest.fixture
def restarting(balancer: Balancer) -> Balancer:
    """Balancer whose decoders are waited for during 60 s of a restart."""
    balancer.decoders.use_policy(make_policy("round_robin"))
    balancer.decoders.set_limits(PoolLimits(max_restart_seconds=60.0))
    return balancer


def restart(balancer: Balancer) -> tuple[bool, bool]:
    """Return whether the decoders are restarting, and whether there is room."""
    return balancer.decoders.are_all_restarting(), balancer.decoders.has_room()


def refuse(balancer: Balancer, *backends: Backend, by_probes: bool = True) -> None:
    """Let decoders refuse three connections."""
    for backend in backends * 3:
        if by_probes:
            balancer.health.on_probe(backend, False, "refused", failure=ProbeFailure.REFUSED)
        else:
            balancer.decoders.report_outcome(backend, UpstreamError(Failure.CONNECT, backend, "refused"))


@pytest.mark.parametrize("by_probes", [True, False], ids=["probes", "requests"])
def test_pool_is_restarting_when_all_backends_refuse_connections(restarting: Balancer, by_probes: bool) -> None:
    pool, clock = restarting.decoders, restarting.clock
    one, two = pool.all_backends()
    up(restarting, one, two)
    refuse(restarting, one, by_probes=by_probes)
    assert restart(restarting) == (False, True)  # the other one is left
    clock.now += 30
    refuse(restarting, two, by_probes=by_probes)
    assert restart(restarting) == (True, False)
    clock.now += 59
    assert restart(restarting) == (True, False)
    clock.now += 1
    assert restart(restarting) == (False, True)  # a lease fails or succeeds at once
    up(restarting, two)
    assert (pool.are_all_restarting(), pool.pick_backend()) == (False, two)
    refuse(restarting, two, by_probes=by_probes)
    assert pool.are_all_restarting()  # this is another restart


def test_pool_is_not_restarting_when_its_backends_never_were_up(restarting: Balancer) -> None:
    refuse(restarting, *restarting.decoders.all_backends())
    assert restart(restarting) == (False, True)


def test_pool_is_not_restarting_when_its_backends_still_accept_connections(restarting: Balancer) -> None:
    backends = restarting.decoders.all_backends()
    up(restarting, *backends)
    down(restarting, *backends)
    assert restart(restarting) == (False, True)
    refuse(restarting, *backends)  # they were unhealthy before they stopped, as vLLM reports
    assert restart(restarting) == (True, False)


def test_answer_to_a_request_ends_the_restart(restarting: Balancer) -> None:
    one, two = restarting.decoders.all_backends()
    up(restarting, one, two)
    for backend in (one, two):
        restarting.decoders.report_outcome(backend, UpstreamError(Failure.CONNECT, backend, "refused"))
    assert restarting.decoders.are_all_restarting()
    restarting.decoders.report_outcome(two, None)
    assert restart(restarting) == (False, True)


# Pools of all roles


def test_pools_return_the_pool_of_each_role(balancer: Balancer) -> None:
    prefillers, decoders, encoders = balancer.prefillers, balancer.decoders, balancer.pool(Role.ENCODE)
    for pools in (Pools(prefillers, decoders), Pools(prefillers, decoders, encode=encoders)):
        assert pools.pool_of(Role.PREFILL) is prefillers
        assert pools.pool_of(Role.DECODE) is decoders
    assert Pools(prefillers, decoders, encode=encoders).pool_of(Role.ENCODE) is encoders
