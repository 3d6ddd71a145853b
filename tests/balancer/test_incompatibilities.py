"""Incompatibilities: found once, shared by all workers, and dropped with their instance."""

from __future__ import annotations

import pytest

from proxy.balancer.engines import EngineKeys
from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.incompatibilities import (
    CompatibilityMonitor,
    Incompatibilities,
    Incompatibility,
    IncompatibilityKind,
)
from proxy.balancer.shared.scoreboard import HandoffCount, Scoreboard
from proxy.common.backend import Backend, Role
from tests.forking import in_child

P, D = Backend(Role.PREFILL, "10.0.0.1", 7100), Backend(Role.DECODE, "10.0.0.2", 7100)
KIND = IncompatibilityKind.MODEL


@pytest.fixture
def misfits() -> Incompatibilities:
    return Incompatibilities(clock=lambda: 1234.5)


def test_finding_is_new_once_until_it_is_removed(misfits: Incompatibilities) -> None:
    assert not misfits.remove(D, KIND)
    assert misfits.add(D, KIND, "serves another model")
    assert not misfits.add(D, KIND, "serves another model, again")
    assert misfits.of(D) == (Incompatibility(KIND, "serves another model", 1234.5),)
    assert misfits.of(P) == ()
    assert misfits.remove(D, KIND)
    assert not misfits.remove(D, KIND)
    assert misfits.of(D) == ()


def test_instance_may_have_several_findings(misfits: Incompatibilities) -> None:
    misfits.add(D, IncompatibilityKind.MODEL, "one")
    misfits.add(D, IncompatibilityKind.ROLE, "two")
    misfits.remove(D, IncompatibilityKind.MODEL)
    assert [misfit.kind for misfit in misfits.of(D)] == [IncompatibilityKind.ROLE]


def test_finding_of_another_worker_is_visible(misfits: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert misfits.add(D, KIND, "found by a fork")

    in_child(elsewhere)
    assert [misfit.hint for misfit in misfits.of(D)] == ["found by a fork"]


def test_finding_of_another_worker_is_not_new(misfits: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert misfits.add(D, KIND, "found by a fork")
        misfits.judge(D, HandoffVerdict.COMPUTED)

    in_child(elsewhere)
    assert not misfits.add(D, KIND, "found here")
    assert [misfit.hint for misfit in misfits.of(D)] == ["found by a fork"]
    assert misfits.verdict(D) is HandoffVerdict.COMPUTED


def test_findings_of_an_instance_that_has_left_are_dropped(misfits: Incompatibilities) -> None:
    misfits.add(D, KIND, "x")
    misfits.judge(D, HandoffVerdict.TRANSFERRED)
    misfits.forget(D)
    misfits.forget(P)
    assert (misfits.of(D), misfits.verdict(D)) == ((), HandoffVerdict.UNKNOWN)


def test_verdict_on_a_pair_may_differ_from_that_on_its_decoder(
    misfits: Incompatibilities,
) -> None:
    other = Backend(Role.PREFILL, "10.0.0.3", 7100)
    misfits.judge(D, HandoffVerdict.TRANSFERRED, {P.name: HandoffVerdict.COMPUTED})
    assert misfits.verdict(D, P) is HandoffVerdict.COMPUTED
    assert misfits.verdict(D, other) is misfits.verdict(D) is HandoffVerdict.TRANSFERRED
    assert misfits.pairs(D) == {P.name: HandoffVerdict.COMPUTED}
    misfits.forget(P)
    assert (misfits.verdict(D, P), misfits.pairs(D)) == (HandoffVerdict.TRANSFERRED, {})
    misfits.judge(D, HandoffVerdict.UNKNOWN, {P.name: HandoffVerdict.COMPUTED})
    misfits.forget(D)
    assert (misfits.verdict(D, P), misfits.pairs(D)) == (HandoffVerdict.UNKNOWN, {})


def test_too_many_pairs_fall_back_to_the_verdict_on_the_decoder(misfits: Incompatibilities) -> None:
    crowd = {f"10.0.{i // 250}.{i % 250}:7100": HandoffVerdict.TRANSFERRED for i in range(5000)}
    misfits.judge(D, HandoffVerdict.COMPUTED, crowd)
    assert (misfits.verdict(D, P), misfits.pairs(D)) == (HandoffVerdict.COMPUTED, {})


def test_table_of_incompatibilities_has_room_for_the_longest_entries() -> None:
    slots = 64  # the whole table is written with each change, so thousands of entries would take long
    misfits = Incompatibilities(slots=slots, max_misfits=slots // 2)
    for port in range(1, slots + 1):
        backend = Backend(Role.DECODE, "h" * 253, port)
        assert misfits.add(backend, KIND, "\u00fc" * 1000)
        misfits.judge(backend, HandoffVerdict.TRANSFERRED)
    assert misfits.verdict(backend) is HandoffVerdict.TRANSFERRED


class Told:
    def __init__(self, misfits: Incompatibilities) -> None:
        self.changes: list[tuple[Backend, IncompatibilityKind, bool]] = []
        self.scoreboard = Scoreboard(slots=4)
        self.fitness = CompatibilityMonitor(misfits, self.scoreboard.row(0), EngineKeys(None), self.heard)

    def heard(self, backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
        self.changes.append((backend, kind, hint is not None))


def test_prefiller_is_reported_after_three_answers_without_kv_parameters(
    misfits: Incompatibilities,
) -> None:
    told = Told(misfits)
    for has_params in (False, False, True, False, False):
        told.fitness.prefilled(P, has_params)
    assert told.changes == []
    for has_params in (False, False, True, True):
        told.fitness.prefilled(P, has_params)
    assert told.changes == [(P, IncompatibilityKind.NO_KV_PARAMS, True), (P, IncompatibilityKind.NO_KV_PARAMS, False)]


def test_handoffs_of_short_prompts_are_not_counted(misfits: Incompatibilities) -> None:
    told = Told(misfits)
    assert told.fitness.note_handoff(P, D, 31, 32) is HandoffVerdict.UNKNOWN
    misfits.judge(D, HandoffVerdict.TRANSFERRED)
    assert told.fitness.note_handoff(P, D, 32, 32) is HandoffVerdict.TRANSFERRED
    assert told.scoreboard.handoffs(D.slot) == HandoffCount(1, 32)
