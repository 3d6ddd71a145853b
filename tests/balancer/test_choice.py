"""Tests of the reason and the figures of a choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.balancer.pick import REASONS, PickRequest, pick_figures, pick_reason
from proxy.balancer.pool import Pool
from proxy.common.backend import Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings.kinds import POLICIES
from tests.balancer.conftest import Balancer
from tests.balancer.policies.test_least_seconds import Prefillers, one_at_a_time, prompt

LOAD = PickRequest.make_for_load(Load(100, 100))


def why(pool: Pool, request: PickRequest) -> str:
    with pool.make_lease(request) as lease:
        return pick_reason(lease.backend_pick)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_a_reason(balancer: Balancer, policy: str, role: Role) -> None:
    pool = balancer.pool(role, policy)
    with pool.make_lease(LOAD) as lease:
        assert pick_reason(lease.backend_pick) == ("equal" if policy == "least_load" else policy)
        known = pick_figures(lease.backend_pick)
        assert known is not None
        label, candidates, columns, order, left_out = known
        assert left_out == 0
        assert label == policy
        assert [candidate.backend.port for candidate in candidates] == [1, 2]
        assert all(len(column) == 2 for column in (order, *columns.values()))
        assert pick_reason(lease.backend_pick) in REASONS


def test_figures_of_a_choice_do_not_change_later(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, "least_load")
    with pool.make_lease(LOAD) as first, pool.make_lease(LOAD) as second, pool.make_lease(LOAD) as third:
        seen = [pick_figures(lease.backend_pick) for lease in (first, second, third)]
        assert [sorted(columns["running"]) for _, _, columns, _, _ in filter(None, seen)] == [[0, 0], [0, 1], [1, 1]]


def test_reason_is_cached_prefix_when_the_cache_decided(balancer: Balancer) -> None:
    prefillers = Prefillers(balancer)
    assert why(prefillers.pool, prompt(1, 2, 3, 4)) == "equal"
    prefillers.serve(prompt(1, 2, 3, 4))
    with prefillers.pool.make_lease(prompt(1, 2, 3, 4, 5)) as lease:
        assert pick_reason(lease.backend_pick) == "cached_prefix"
        known = pick_figures(lease.backend_pick)
        assert known is not None
        _, candidates, columns, _, _ = known
        place = [candidate.backend for candidate in candidates].index(lease.backend)
        assert columns["cached_tokens"][place] == pytest.approx(4 * 512)
        assert columns["work_seconds"][place] == min(columns["work_seconds"])
        assert why(prefillers.pool, prompt(*range(100, 120))) == "least_seconds"  # it has to wait where the other is


def test_figures_of_a_queued_request_have_all_candidates(balancer: Balancer) -> None:
    prefillers = Prefillers(balancer)
    prefillers.teach()
    one_at_a_time(prefillers)
    prefillers.begin(prompt(*range(1, 30)))
    waiting = prompt(*range(500, 504))
    assert prefillers.pool.index_to_admit([waiting]) == 0
    lease = prefillers.begin(waiting)
    assert pick_reason(lease.backend_pick) == "least_seconds"
    known = pick_figures(lease.backend_pick)
    assert known is not None
    _, candidates, columns, order, _ = known
    place = [candidate.backend for candidate in candidates].index(lease.backend)
    assert columns["wait_seconds"][place] == 0.0
    assert columns["wait_seconds"][1 - place] > 0.0
    assert all(len(column) == 2 for column in (order, *columns.values()))


def test_choice_without_policy_has_no_figures(balancer: Balancer) -> None:
    pool = balancer.prefillers
    one, other = pool.all_backends()
    assert why(pool, replace(LOAD, avoided_backends=[one])) == "only_candidate"
    assert why(pool, PickRequest.make_for_load(Load(), preferred_backend=other)) == "preferred"
    balancer.put_on_probation(balancer.decoders.all_backends()[0])
    with balancer.decoders.make_lease(LOAD) as lease:
        assert pick_reason(lease.backend_pick) == "trial"
        assert pick_figures(lease.backend_pick) is None


def test_moved_lease_has_a_new_reason(balancer: Balancer) -> None:
    pool = balancer.prefillers
    with pool.make_lease(LOAD) as lease:
        assert pick_reason(lease.backend_pick) == "least_tokens"
        lease.move_to_other_backend([], UpstreamError(Failure.CONNECT, lease.backend, "refused"))
        assert pick_reason(lease.backend_pick) == "only_candidate"
