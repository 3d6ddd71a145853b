"""Tests of several models behind one gateway: served names and the pools of one model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.balancer.engines import EngineFacts, EngineIdentity
from proxy.balancer.health import ProbeFailure
from proxy.balancer.models import ServedModels, minority_instances
from proxy.balancer.pick import PickRequest
from proxy.balancer.pool import Pool
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import NoBackendAvailable
from tests.balancer.conftest import Balancer

P, D1, D2 = Backend(Role.PREFILL, "p", 1), Backend(Role.DECODE, "d", 1), Backend(Role.DECODE, "d", 2)
BOTH = (Role.PREFILL, Role.DECODE)


class Fleet:
    """Two prefillers and two decoders that are up. `tell` sets their models, in the order of their addresses."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.models = ServedModels(balancer.roster, balancer.health, BOTH)
        self.prefillers, self.decoders = balancer.prefillers.all_backends(), balancer.decoders.all_backends()
        self.everybody = (*self.prefillers, *self.decoders)
        for backend in self.everybody:
            balancer.health.on_probe(backend, True, "up")

    def tell(self, *names: str, adapters: dict[int, str] | None = None) -> ServedModels:
        for place, (backend, its) in enumerate(zip(self.everybody, names, strict=True)):
            its_adapters = frozenset((adapters or {}).get(place, "").split())
            identity = EngineIdentity(models=frozenset(its.split()), adapters=its_adapters)
            self.balancer.health.set_engine_facts(backend, EngineFacts(identity=identity))
        self.models.update_names()
        return self.models

    def pool(self, role: Role, name: str) -> Pool:
        whole = self.balancer.prefillers if role is Role.PREFILL else self.balancer.decoders
        return self.balancer.pool(
            role, whole_pool=whole, select_serving=lambda backends: self.models.backends_serving(name, backends)
        )


@pytest.fixture
def fleet(balancer: Balancer) -> Fleet:
    return Fleet(balancer)


def test_models_are_not_mixed_when_all_serve_the_same(fleet: Fleet) -> None:
    models = fleet.tell("a", "a", "a", "a")
    assert (models.has_several_groups, models.are_all_names_known, models.model_groups()) == (False, False, [])


def test_unknown_models_do_not_make_a_mixture(fleet: Fleet) -> None:
    assert not fleet.tell("a", "", "a", "").has_several_groups


def test_models_without_a_common_name_are_not_mixed(fleet: Fleet) -> None:
    models = fleet.tell("/models/a", "/models/a", "/data/a", "/data/a")
    assert not models.has_several_groups
    assert models.fully_served_names == set()


def test_two_models_form_two_groups(fleet: Fleet) -> None:
    models = fleet.tell("a big", "b", "a big", "b")
    assert models.has_several_groups
    assert models.are_all_names_known
    assert models.model_groups() == [frozenset({"a", "big"}), frozenset("b")]
    assert models.backends_serving("b", fleet.decoders) == fleet.decoders[1:]
    assert models.served_names == {"a", "b", "big"}


def test_adapters_on_some_instances_leave_unknown_names_open(fleet: Fleet) -> None:
    models = fleet.tell("a", "a", "a", "a", adapters={0: "x y", 2: "x"})
    assert models.has_several_groups
    assert not models.are_all_names_known
    assert models.model_groups() == [frozenset("x"), frozenset("y")]  # names that all serve have no group
    assert models.fully_served_names == {"a", "x"}


def test_instance_with_unknown_models_serves_otherwise_unserved_names(fleet: Fleet) -> None:
    models = fleet.tell("a", "", "a", "b")
    assert models.backends_serving("a", fleet.prefillers) == fleet.prefillers[:1]
    assert models.backends_serving("b", fleet.prefillers) == fleet.prefillers[1:]
    assert models.fully_served_names == {"a", "b"}


def test_models_of_a_down_engine_are_kept_until_it_reports_others(fleet: Fleet) -> None:
    models = fleet.tell("a", "b", "a", "b")
    for _ in range(10):
        fleet.balancer.health.on_probe(fleet.decoders[1], False, "gone")
    models.update_names()
    assert models.names_of(fleet.decoders[1]) == frozenset("b")
    for _ in range(10):
        fleet.balancer.health.on_probe(fleet.decoders[1], True, "back")
    fleet.tell("a", "b", "a", "a")
    assert models.backends_serving("b", fleet.decoders) == ()


def test_configured_models_override_reported_ones(fleet: Fleet) -> None:
    said = [replace(backend, models=("b",), is_trusted=True) for backend in fleet.everybody]
    fleet.balancer.roster.sync_origin("config", said, restores_removed=True)
    models = fleet.tell("a", "a", "a", "a")
    assert [models.names_of(backend) for backend in fleet.everybody] == [frozenset("b")] * 4
    fleet.balancer.roster.sync_origin("config", fleet.everybody, restores_removed=True)
    models.update_names()
    assert [models.names_of(backend) for backend in fleet.everybody] == [frozenset("a")] * 4


def test_refresh_without_changes_does_nothing(fleet: Fleet) -> None:
    models = fleet.tell("a", "b", "a", "b")
    changes: list[int] = []
    models.on_change = lambda: changes.append(1)
    fleet.balancer.health.version_number += 1
    models.update_names()
    assert changes == []
    fleet.tell("a", "b", "a", "a")
    assert changes


# Pools of one model


def test_pool_of_a_model_has_only_its_backends(fleet: Fleet) -> None:
    fleet.tell("a", "b", "a", "b")
    pool = fleet.pool(Role.DECODE, "b")
    assert pool.all_backends() == pool.eligible_backends() == fleet.decoders[1:]
    with pool.make_lease(PickRequest.make_for_load(Load())) as lease:
        assert lease.backend == fleet.decoders[1]
    with pytest.raises(NoBackendAvailable):
        pool.pick_backend(avoided_backends=fleet.decoders[1:])


def test_engine_with_another_model_after_restart_changes_pools(fleet: Fleet) -> None:
    fleet.tell("a", "b", "a", "b")
    pools = {name: fleet.pool(Role.DECODE, name) for name in "ab"}
    assert pools["a"].eligible_backends() == fleet.decoders[:1]
    fleet.tell("a", "b", "a", "a")
    assert pools["a"].eligible_backends() == fleet.decoders
    assert pools["b"].eligible_backends() == ()
    assert not pools["b"].is_ready_to_serve()
    assert fleet.balancer.decoders.eligible_backends() == fleet.decoders  # its health is unchanged


def test_last_instance_of_a_model_is_not_ejected(fleet: Fleet) -> None:
    fleet.tell("a", "b", "a", "b")
    assert fleet.balancer.decoders.report_stall(fleet.decoders[0])
    fleet.balancer.health.forget_backend(fleet.decoders[0])
    fleet.balancer.health.on_probe(fleet.decoders[0], True, "up")
    assert not fleet.pool(Role.DECODE, "a").report_stall(fleet.decoders[0])


def test_models_are_ready_independently(fleet: Fleet) -> None:
    fleet.tell("a", "b", "a", "b")
    for _ in range(10):
        fleet.balancer.health.on_probe(fleet.decoders[1], False, "gone", failure=ProbeFailure.REFUSED)
    ready = {name: fleet.pool(Role.DECODE, name) for name in "ab"}
    assert ready["a"].is_ready_to_serve()
    assert not ready["b"].is_ready_to_serve()
    assert ready["b"].are_all_gone()
    assert not fleet.balancer.decoders.are_all_gone()


# Minority instances


def test_minority_is_a_model_of_only_one_role(fleet: Fleet) -> None:
    one, two = fleet.prefillers
    three, four = fleet.decoders
    a, b, c = (frozenset(name) for name in "abc")
    assert minority_instances({one: a, two: b, three: a, four: b}) == {}
    ((odd, hint),) = minority_instances({one: a, two: a, three: a, four: c}).items()
    assert odd == four
    assert hint == "serves 'c', and prefill instances 'a': it gets no requests"


def test_model_that_an_unknown_instance_may_serve_is_no_minority(fleet: Fleet) -> None:
    a, b, nothing = frozenset("a"), frozenset("b"), frozenset[str]()
    assert minority_instances(dict(zip(fleet.everybody, (a, b, a, nothing), strict=True))) == {}


def test_no_minority_when_all_serve_the_same() -> None:
    assert minority_instances({}) == {}
    assert minority_instances({P: frozenset("ab"), D1: frozenset("ab"), D2: frozenset("ba")}) == {}


def test_minority_is_the_smaller_group() -> None:
    assert set(minority_instances({P: frozenset("x"), D1: frozenset("a"), D2: frozenset("a")})) == {P}


def test_minority_of_two_is_the_second() -> None:
    ((odd, hint),) = minority_instances({P: frozenset(["kimi_k26"]), D1: frozenset(["other_name"])}).items()
    assert odd == D1
    assert hint == (
        "serves 'other_name', and prefill instance p:1 serves 'kimi_k26': requests for a model of only one of them fail"
    )


def test_long_and_many_names_are_shortened() -> None:
    many = frozenset({"a\nb", "x" * 1000, *"cdefgh"})
    ((_, hint),) = minority_instances({P: frozenset("a"), D1: many}).items()
    assert "\n" not in hint
    assert "and 5 others" in hint
    assert len(hint) < 400
