"""The pool: who is eligible, what it answers when nobody is, and how it follows roster and health."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.backend import Load, Role
from proxy.balancer.health import Health, HealthState
from proxy.balancer.policies import POLICIES
from proxy.balancer.pool import Pool
from proxy.balancer.roster import Roster
from proxy.balancer.scoreboard import Scoreboard
from proxy.errors import Failure, NoBackendAvailable, UpstreamError

if TYPE_CHECKING:
    from conftest import Balancer

    from proxy.balancer.backend import Backend


def down(balancer: Balancer, *backends: Backend) -> None:
    for backend in backends:
        for _ in range(3):
            balancer.health.on_probe(backend, False, "timeout")


def test_a_pool_has_the_backends_of_its_role(balancer: Balancer) -> None:
    assert [backend.name for backend in balancer.prefillers.backends()] == ["p:1", "p:2"]
    assert [backend.name for backend in balancer.decoders.eligible()] == ["d:1", "d:2"]


def test_a_down_backend_gets_no_requests_until_it_is_up_again(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    down(balancer, one)
    assert {balancer.decoders.pick() for _ in range(10)} == {two}
    for _ in range(2):
        balancer.health.on_probe(one, True, "200")
    assert {balancer.decoders.pick() for _ in range(10)} == {one, two}


def test_a_draining_backend_gets_no_requests_but_is_still_there(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    balancer.roster.remove(Role.DECODE, "d", 1)
    assert {balancer.decoders.pick() for _ in range(10)} == {two}
    assert balancer.decoders.backends() == (one, two)


def test_an_avoided_backend_is_not_picked(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    assert {balancer.decoders.pick(avoid=[two]) for _ in range(10)} == {one}


def test_there_is_no_lease_when_nobody_is_healthy(balancer: Balancer) -> None:
    down(balancer, *balancer.prefillers.backends())
    with pytest.raises(NoBackendAvailable, match="no healthy prefill instance") as raised:
        balancer.prefillers.pick()
    assert (raised.value.status, raised.value.role) == (503, Role.PREFILL)
    assert balancer.decoders.pick() in balancer.decoders.backends()


def test_a_pool_is_ready_when_one_eligible_backend_has_proven_itself(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    assert not balancer.decoders.is_ready()
    balancer.health.on_probe(one, True, "200")
    assert balancer.decoders.is_ready()
    balancer.roster.remove(Role.DECODE, "d", 1)
    assert not balancer.decoders.is_ready()
    with balancer.decoders.lease(Load(1, 1)):
        pass
    assert balancer.decoders.is_ready()
    down(balancer, two)
    assert not balancer.decoders.is_ready()


def test_a_removed_backend_is_forgotten(balancer: Balancer) -> None:
    one, _ = balancer.decoders.backends()
    down(balancer, one)
    balancer.roster.remove(Role.DECODE, "d", 1)
    assert balancer.roster.finalize() == [one]
    balancer.decoders.backends()
    assert balancer.health.state(one) is HealthState.UNKNOWN
    balancer.roster.add(Role.DECODE, "d", 1)
    assert one in balancer.decoders.eligible()


def test_the_observer_hears_of_every_change_once(balancer: Balancer) -> None:
    one, _ = balancer.decoders.backends()
    for _ in range(4):
        balancer.decoders.report(one, UpstreamError(Failure.CONNECT, one, "connection refused"))
    assert [(t.backend, t.new, t.reason) for t in balancer.transitions] == [
        (one, HealthState.DOWN, "connection refused")
    ]


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_short_requests_one_after_the_other_reach_all_of_eight_equal_backends(policy: str) -> None:
    scoreboard = Scoreboard(slots=8)
    roster = Roster([], [("d", port) for port in range(8)], scoreboard)
    pool = Pool(Role.DECODE, POLICIES[policy](), scoreboard, scoreboard.row(0), roster, Health())
    ports = []
    for _ in range(16):
        with pool.lease(Load(10, 10)) as lease:
            ports.append(lease.backend.port)
    assert ports == list(range(8)) * 2


def test_long_requests_spread_by_their_load(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    with balancer.decoders.lease(Load(1000, 1000)) as heavy:
        assert heavy.backend == one
        with balancer.decoders.lease(Load(10, 10)), balancer.decoders.lease(Load(10, 10)):
            assert (balancer.decoders.in_flight(one), balancer.decoders.in_flight(two)) == (1, 2)


def test_a_prefiller_whose_kv_waits_is_freer_than_one_that_computes(balancer: Balancer) -> None:
    with balancer.prefillers.lease(Load(100, 100)) as waiting, balancer.prefillers.lease(Load(100, 100)) as computing:
        assert waiting.backend != computing.backend
        waiting.free_compute()
        assert {balancer.prefillers.pick() for _ in range(4)} == {waiting.backend}


def test_the_load_of_other_workers_counts(balancer: Balancer) -> None:
    one, two = balancer.decoders.backends()
    balancer.scoreboard.row(1).add(one.slot, requests=1, compute=500, kv=500)
    assert {balancer.decoders.pick() for _ in range(4)} == {two}
