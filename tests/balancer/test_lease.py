"""Leases: whatever happens inside the `with`, everything is given back and only the guilty are blamed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.lease import Lease
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load
from proxy.common.errors import BadRequest, Failure, NoBackendAvailable, UpstreamError
from tests.balancer.conftest import Balancer

UNKNOWN, UP, DOWN, EJECTED, PROBATION = HealthState
COST = Load(compute_tokens=100, kv_tokens=40)
NOTHING = (0, Load())


def refused(backend: Backend) -> UpstreamError:
    return UpstreamError(Failure.CONNECT, backend, "connection refused")


def test_lease_that_is_never_entered_charges_nothing(balancer: Balancer) -> None:
    lease = balancer.decoders.make_lease(PickRequest.make_for_load(COST))
    assert balancer.all_books() == {NOTHING}
    with pytest.raises(AttributeError, match="backend"):
        _ = lease.backend


def test_lease_charges_its_backend_until_it_is_left(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        assert balancer.books(lease.backend) == (1, COST)
        assert balancer.decoders.scoreboard.open_leases(lease.backend.slot) == 1
    assert balancer.all_books() == {NOTHING}


@pytest.mark.parametrize("error", [ValueError("bug"), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()])
def test_lease_releases_its_load_for_any_exception(balancer: Balancer, error: BaseException) -> None:
    with pytest.raises(type(error)), balancer.decoders.make_lease(PickRequest.make_for_load(COST)):
        raise error
    assert balancer.all_books() == {NOTHING}


def test_leases_of_both_roles_are_released_together(balancer: Balancer) -> None:
    with (
        pytest.raises(asyncio.CancelledError),
        balancer.decoders.make_lease(PickRequest.make_for_load(COST)),
        balancer.prefillers.make_lease(PickRequest.make_for_load(COST)),
    ):
        raise asyncio.CancelledError
    assert balancer.all_books() == {NOTHING}


def test_compute_and_kv_are_released_separately_and_once(balancer: Balancer) -> None:
    with balancer.prefillers.make_lease(PickRequest.make_for_load(COST)) as lease:
        for _ in range(2):
            lease.release_compute()
            assert balancer.books(lease.backend) == (1, Load(kv_tokens=40))
        for _ in range(2):
            lease.release_kv()
            assert balancer.books(lease.backend) == NOTHING  # it has nothing to do with the request any more
    lease.release_compute()
    lease.release_kv()
    assert balancer.all_books() == {NOTHING}


def test_deferred_kv_is_charged_later_and_released_once(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        charged = balancer.books(lease.backend)
        lease.defer_kv_charge()
        assert balancer.books(lease.backend)[1].kv_tokens == 0
        for _ in range(2):
            lease.charge_deferred_kv()
            assert balancer.books(lease.backend) == charged
    lease.charge_deferred_kv()
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        lease.defer_kv_charge()
    lease.charge_deferred_kv()
    assert balancer.all_books() == {NOTHING}


def test_lease_can_be_entered_once(balancer: Balancer) -> None:
    lease = balancer.decoders.make_lease(PickRequest.make_for_load(COST))
    with lease, pytest.raises(RuntimeError, match="entered only once"), lease:
        pass
    with pytest.raises(RuntimeError, match="entered only once"), lease:
        pass
    assert balancer.all_books() == {NOTHING}


def test_lease_on_an_empty_pool_charges_nothing(balancer: Balancer) -> None:
    with (
        pytest.raises(NoBackendAvailable, match="no healthy decode instance"),
        balancer.decoders.make_lease(
            PickRequest.make_for_load(COST, avoided_backends=balancer.decoders.all_backends())
        ),
    ):
        pass
    assert balancer.all_books() == {NOTHING}


def test_move_takes_the_remaining_load_to_the_new_backend(balancer: Balancer) -> None:
    with balancer.prefillers.make_lease(PickRequest.make_for_load(COST)) as lease:
        old = lease.backend
        lease.release_compute()
        new = lease.move_to_other_backend((), refused(old))
        assert new == lease.backend != old
        assert balancer.books(old) == NOTHING
        assert balancer.books(new) == (1, Load(kv_tokens=40))
        lease.release_compute()
        assert balancer.books(new) == (1, Load(kv_tokens=40))
    assert balancer.all_books() == {NOTHING}


def test_move_reports_the_failure_of_the_old_backend(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        old = lease.backend
        new = lease.move_to_other_backend((), refused(old))
    assert balancer.health.health_of(old).consecutive_failures == 1
    assert balancer.health.health_of(old).health_state is HealthState.UNKNOWN
    assert balancer.health.health_of(new).is_confirmed_healthy


def test_move_avoids_the_given_backends(balancer: Balancer) -> None:
    balancer.roster.add_for_administrator(Backend(balancer.decoders.role, "d", 3))
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        first = lease.backend
        second = lease.move_to_other_backend((), refused(first))
        third = lease.move_to_other_backend({first}, refused(second))
        assert len({first, second, third}) == 3


def test_lease_keeps_its_load_when_it_cannot_move(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        old = lease.backend
        lease.release_kv()
        with pytest.raises(NoBackendAvailable):
            lease.move_to_other_backend(balancer.decoders.all_backends(), refused(old))
        assert lease.backend == old
        assert balancer.books(old) == (1, Load(compute_tokens=100))
        assert balancer.health.health_of(old).consecutive_failures == 1
    assert balancer.all_books() == {NOTHING}


def test_failure_counts_once_when_a_move_fails_and_it_is_raised_again(balancer: Balancer) -> None:
    def attempt(lease: Lease) -> None:
        error = refused(lease.backend)
        try:
            lease.move_to_other_backend(balancer.decoders.all_backends(), error)
        except NoBackendAvailable:
            raise error from None

    with pytest.raises(UpstreamError), balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        attempt(lease)
    assert balancer.health.health_of(lease.backend).consecutive_failures == 1


def test_lease_cannot_move_after_it_was_left(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        pass
    with pytest.raises(RuntimeError, match="after it was left"):
        lease.move_to_other_backend((), refused(lease.backend))
    assert balancer.all_books() == {NOTHING}


def test_lease_that_ends_well_confirms_the_backend(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        pass
    assert balancer.health.health_of(lease.backend).is_confirmed_healthy


def test_success_counts_when_the_work_is_done_not_when_the_lease_ends(balancer: Balancer) -> None:
    pool = balancer.prefillers
    with pool.make_lease(PickRequest.make_for_load(COST)) as lease:
        lease.release_compute()
        for _ in range(2):
            pool.report_outcome(lease.backend, refused(lease.backend))
        assert lease.backend not in pool.eligible_backends()
    assert lease.backend not in pool.eligible_backends()


def test_failure_counts_only_for_the_backend_that_it_names(balancer: Balancer) -> None:
    with (
        pytest.raises(UpstreamError),
        balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as decoder,
        balancer.prefillers.make_lease(PickRequest.make_for_load(COST)) as prefiller,
    ):
        raise refused(prefiller.backend)
    assert balancer.health.health_of(prefiller.backend).consecutive_failures == 1
    assert balancer.health.health_of(decoder.backend).consecutive_failures == 0
    assert not balancer.health.health_of(decoder.backend).is_confirmed_healthy


@pytest.mark.parametrize("error", [asyncio.CancelledError(), BadRequest("no"), ValueError("bug")])
def test_exceptions_of_the_gateway_do_not_change_health(balancer: Balancer, error: BaseException) -> None:
    with pytest.raises(type(error)), balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        raise error
    assert balancer.health.health_of(lease.backend).consecutive_failures == 0
    assert balancer.health.health_of(lease.backend).health_state is HealthState.UNKNOWN


def test_load_is_released_even_if_reporting_fails(balancer: Balancer) -> None:
    def broken(transition: object) -> None:
        raise OSError("log disk is full")

    pool = balancer.pool(balancer.decoders.role)
    pool._on_transition = broken
    with pytest.raises(OSError, match="full"), pool.make_lease(PickRequest.make_for_load(COST)):
        pass
    assert balancer.all_books() == {NOTHING}


# On probation


def failed(backend: Backend, failure: Failure = Failure.RESET) -> UpstreamError:
    return UpstreamError(failure, backend, "it failed")


def ended(lease: Lease, error: BaseException | None) -> None:
    with lease:
        if error is not None:
            raise error


def test_only_one_lease_at_a_time_tries_a_backend_on_probation(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as trial:
        assert trial.backend == one
        for _ in range(5):
            with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as other:
                assert other.backend == two
        assert balancer.health.health_of(one).health_state is PROBATION
    assert balancer.health.health_of(one).health_state is UP
    assert balancer.health.request_share_percent(one) == 10
    assert balancer.all_books() == {NOTHING}


@pytest.mark.parametrize(
    ("failure", "cause"), [(Failure.RESET, "failures"), (Failure.TIMEOUT, "timeouts"), (Failure.CONNECT, "connect")]
)
def test_failed_trial_ejects_the_backend_again(balancer: Balancer, failure: Failure, cause: str) -> None:
    one, _ = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    with pytest.raises(UpstreamError), balancer.decoders.make_lease(PickRequest.make_for_load(COST)):
        raise failed(one, failure)
    assert balancer.health.health_of(one).health_state is EJECTED
    assert balancer.transitions[-1].ejection_cause == cause


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), BadRequest("no"), "busy", "of another"],
    ids=["left", "bad", "busy", "of another"],
)
def test_trial_without_an_outcome_is_followed_by_another(balancer: Balancer, error: BaseException | str) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    if error == "busy":
        error = UpstreamError(Failure.STATUS, one, "busy", engine_status=503)
    elif error == "of another":
        error = failed(balancer.prefillers.all_backends()[0])
    assert isinstance(error, BaseException)
    with pytest.raises(type(error)), balancer.decoders.make_lease(PickRequest.make_for_load(COST)):
        raise error
    assert balancer.health.health_of(one).health_state is PROBATION
    if isinstance(error, UpstreamError) and error.is_refusal:
        with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
            assert lease.backend == two
        balancer.clock.now += 1.0
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as next_trial:
        assert next_trial.backend == one
    assert balancer.health.health_of(one).health_state is UP
    assert balancer.decoders.scoreboard.open_leases(two.slot) == 0


def test_trial_succeeds_at_the_beginning_of_the_answer(balancer: Balancer) -> None:
    one, _ = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    lease = balancer.decoders.make_lease(PickRequest.make_for_load(COST))
    lease.__enter__()
    for _ in range(2):
        lease.confirm_beginning()
        assert balancer.health.health_of(one).health_state is UP
    balancer.eject(one)
    lease.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)
    assert balancer.health.health_of(one).health_state is EJECTED
    assert balancer.ends == [(one.name, "abandoned")]


def test_trial_of_a_prefiller_succeeds_when_its_work_is_done(balancer: Balancer) -> None:
    one, _ = balancer.prefillers.all_backends()
    assert balancer.prefillers.report_stall(one)
    balancer.clock.now += 36.0
    with balancer.prefillers.make_lease(PickRequest.make_for_load(COST)) as trial:
        assert trial.backend == one
        trial.release_compute()
        assert balancer.health.health_of(one).health_state is UP


def test_lease_that_is_no_trial_does_not_confirm_at_the_first_token(balancer: Balancer) -> None:
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as lease:
        lease.confirm_beginning()
        assert balancer.health.health_of(lease.backend).health_state is UNKNOWN


def test_lease_may_move_to_a_backend_on_probation(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST, avoided_backends=[one])) as lease:
        balancer.put_on_probation(one)
        assert lease.move_to_other_backend((), refused(two)) == one
        assert not balancer.health.health_of(one).awaits_trial_request
    assert balancer.health.health_of(one).health_state is UP


def test_trial_that_moves_away_has_failed(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST)) as trial:
        assert trial.move_to_other_backend((), failed(one)) == two
        assert balancer.health.health_of(one).health_state is EJECTED
    assert balancer.health.health_of(one).health_state is EJECTED
    assert balancer.health.health_of(two).health_state is UP


def test_lease_that_prefers_another_backend_is_no_trial(balancer: Balancer) -> None:
    one, two = balancer.prefillers.all_backends()
    assert balancer.prefillers.report_stall(one)
    balancer.clock.now += 36.0
    with balancer.prefillers.make_lease(PickRequest.make_for_load(COST, preferred_backend=two)) as lease:
        assert lease.backend == two
    with balancer.prefillers.make_lease(PickRequest.make_for_load(COST, preferred_backend=one)) as lease:
        assert lease.backend == one
    assert balancer.health.health_of(one).health_state is UP


# What proves little


@pytest.mark.parametrize("error", [None, Failure.RESET, Failure.TIMEOUT], ids=["served", "reset", "timeout"])
def test_lease_without_proof_changes_no_failure_count(balancer: Balancer, error: Failure | None) -> None:
    one, two = balancer.decoders.all_backends()
    for _ in range(4):
        balancer.decoders.report_outcome(one, failed(one))
    for _ in range(5):
        lease = balancer.decoders.make_lease(
            PickRequest.make_for_load(COST, avoided_backends=[two], proves_generation=False)
        )
        with contextlib.suppress(UpstreamError):
            ended(lease, failed(one, error) if error else None)
    assert balancer.health.health_of(one).consecutive_failures == 4
    assert balancer.ends[-1] == (one.name, error.value if error else "ok")


def test_lease_without_proof_tries_a_backend_only_without_another_one(balancer: Balancer) -> None:
    one, two = balancer.decoders.all_backends()
    balancer.put_on_probation(one)
    with balancer.decoders.make_lease(PickRequest.make_for_load(COST, proves_generation=False)) as lease:
        assert lease.backend == two
    with balancer.decoders.make_lease(
        PickRequest.make_for_load(COST, avoided_backends=[two], proves_generation=False)
    ) as lease:
        assert lease.backend == one
        assert not balancer.health.health_of(one).awaits_trial_request
        lease.confirm_beginning()
        lease.release_compute()
    assert balancer.health.health_of(one).awaits_trial_request
    balancer.roster.add_for_administrator(Backend(balancer.decoders.role, "d", 3))
    three = balancer.decoders.all_backends()[-1]
    balancer.health.on_probe(three, True, "200")
    with balancer.decoders.make_lease(
        PickRequest.make_for_load(COST, avoided_backends=[three], proves_generation=False)
    ) as lease:
        assert lease.move_to_other_backend((), failed(two)) == three
