"""Incompatibilities: told once by whoever finds out first, known to all workers, forgotten with their instance."""

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


def test_only_what_changes_is_news(misfits: Incompatibilities) -> None:
    assert not misfits.remove(D, KIND)
    assert misfits.add(D, KIND, "serves another model")
    assert not misfits.add(D, KIND, "serves another model, once more")
    assert misfits.of(D) == (Incompatibility(KIND, "serves another model", 1234.5),)
    assert misfits.of(P) == ()
    assert misfits.remove(D, KIND)
    assert not misfits.remove(D, KIND)
    assert misfits.of(D) == ()


def test_an_instance_may_not_fit_in_several_ways(misfits: Incompatibilities) -> None:
    misfits.add(D, IncompatibilityKind.MODEL, "one")
    misfits.add(D, IncompatibilityKind.ROLE, "two")
    misfits.remove(D, IncompatibilityKind.MODEL)
    assert [misfit.kind for misfit in misfits.of(D)] == [IncompatibilityKind.ROLE]


def test_who_only_looks_sees_what_another_worker_has_found(misfits: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert misfits.add(D, KIND, "found by a fork")

    in_child(elsewhere)
    assert [misfit.hint for misfit in misfits.of(D)] == ["found by a fork"]


def test_what_one_worker_finds_is_no_news_to_another(misfits: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert misfits.add(D, KIND, "found by a fork")
        misfits.judge(D, HandoffVerdict.COMPUTED)

    in_child(elsewhere)
    assert not misfits.add(D, KIND, "found here")
    assert [misfit.hint for misfit in misfits.of(D)] == ["found by a fork"]
    assert misfits.verdict(D) is HandoffVerdict.COMPUTED


def test_an_instance_that_has_left_leaves_nothing(misfits: Incompatibilities) -> None:
    misfits.add(D, KIND, "x")
    misfits.judge(D, HandoffVerdict.TRANSFERRED)
    misfits.forget(D)
    misfits.forget(P)
    assert (misfits.of(D), misfits.verdict(D)) == ((), HandoffVerdict.UNKNOWN)


def test_a_pair_may_be_judged_otherwise_than_its_decoder_and_is_forgotten_with_either(
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


def test_pairs_that_are_too_many_are_known_by_their_decoder_only(misfits: Incompatibilities) -> None:
    crowd = {f"10.0.{i // 250}.{i % 250}:7100": HandoffVerdict.TRANSFERRED for i in range(5000)}
    misfits.judge(D, HandoffVerdict.COMPUTED, crowd)
    assert (misfits.verdict(D, P), misfits.pairs(D)) == (HandoffVerdict.COMPUTED, {})


def test_there_is_room_for_all_of_them() -> None:
    slots = 64  # what is kept is written anew with each change, so that thousands of them would take long
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


def test_a_prefiller_is_told_of_when_it_has_answered_without_parameters_three_times_in_a_row(
    misfits: Incompatibilities,
) -> None:
    told = Told(misfits)
    for has_params in (False, False, True, False, False):
        told.fitness.prefilled(P, has_params)
    assert told.changes == []
    for has_params in (False, False, True, True):
        told.fitness.prefilled(P, has_params)
    assert told.changes == [(P, IncompatibilityKind.NO_KV_PARAMS, True), (P, IncompatibilityKind.NO_KV_PARAMS, False)]


def test_prompts_that_are_too_short_to_say_anything_are_not_counted(misfits: Incompatibilities) -> None:
    told = Told(misfits)
    assert told.fitness.note_handoff(P, D, 31, 32) is HandoffVerdict.UNKNOWN
    misfits.judge(D, HandoffVerdict.TRANSFERRED)
    assert told.fitness.note_handoff(P, D, 32, 32) is HandoffVerdict.TRANSFERRED
    assert told.scoreboard.handoffs(D.slot) == HandoffCount(1, 32)
