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
def incompatibilities() -> Incompatibilities:
    return Incompatibilities(clock=lambda: 1234.5)


def test_finding_is_new_once_until_it_is_removed(incompatibilities: Incompatibilities) -> None:
    assert not incompatibilities.remove(D, KIND)
    assert incompatibilities.add(D, KIND, "serves another model")
    assert not incompatibilities.add(D, KIND, "serves another model, again")
    assert incompatibilities.of(D) == (Incompatibility(KIND, "serves another model", 1234.5),)
    assert incompatibilities.of(P) == ()
    assert incompatibilities.remove(D, KIND)
    assert not incompatibilities.remove(D, KIND)
    assert incompatibilities.of(D) == ()


def test_instance_may_have_several_findings(incompatibilities: Incompatibilities) -> None:
    incompatibilities.add(D, IncompatibilityKind.MODEL, "one")
    incompatibilities.add(D, IncompatibilityKind.ROLE, "two")
    incompatibilities.remove(D, IncompatibilityKind.MODEL)
    assert [finding.kind for finding in incompatibilities.of(D)] == [IncompatibilityKind.ROLE]


def test_finding_of_another_worker_is_visible(incompatibilities: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert incompatibilities.add(D, KIND, "found by a fork")

    in_child(elsewhere)
    assert [finding.hint for finding in incompatibilities.of(D)] == ["found by a fork"]


def test_finding_of_another_worker_is_not_new(incompatibilities: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert incompatibilities.add(D, KIND, "found by a fork")
        incompatibilities.judge(D, HandoffVerdict.COMPUTED)

    in_child(elsewhere)
    assert not incompatibilities.add(D, KIND, "found here")
    assert [finding.hint for finding in incompatibilities.of(D)] == ["found by a fork"]
    assert incompatibilities.verdict(D) is HandoffVerdict.COMPUTED


def test_findings_of_an_instance_that_has_left_are_dropped(incompatibilities: Incompatibilities) -> None:
    incompatibilities.add(D, KIND, "x")
    incompatibilities.judge(D, HandoffVerdict.TRANSFERRED)
    incompatibilities.forget(D)
    incompatibilities.forget(P)
    assert (incompatibilities.of(D), incompatibilities.verdict(D)) == ((), HandoffVerdict.UNKNOWN)


def test_verdict_on_a_pair_may_differ_from_that_on_its_decoder(incompatibilities: Incompatibilities) -> None:
    other = Backend(Role.PREFILL, "10.0.0.3", 7100)
    incompatibilities.judge(D, HandoffVerdict.TRANSFERRED, {P.name: HandoffVerdict.COMPUTED})
    assert incompatibilities.verdict(D, P) is HandoffVerdict.COMPUTED
    assert incompatibilities.verdict(D, other) is incompatibilities.verdict(D) is HandoffVerdict.TRANSFERRED
    assert incompatibilities.pairs(D) == {P.name: HandoffVerdict.COMPUTED}
    incompatibilities.forget(P)
    assert (incompatibilities.verdict(D, P), incompatibilities.pairs(D)) == (HandoffVerdict.TRANSFERRED, {})
    incompatibilities.judge(D, HandoffVerdict.UNKNOWN, {P.name: HandoffVerdict.COMPUTED})
    incompatibilities.forget(D)
    assert (incompatibilities.verdict(D, P), incompatibilities.pairs(D)) == (HandoffVerdict.UNKNOWN, {})


def test_too_many_pairs_fall_back_to_the_verdict_on_the_decoder(incompatibilities: Incompatibilities) -> None:
    crowd = {f"10.0.{i // 250}.{i % 250}:7100": HandoffVerdict.TRANSFERRED for i in range(5000)}
    incompatibilities.judge(D, HandoffVerdict.COMPUTED, crowd)
    assert (incompatibilities.verdict(D, P), incompatibilities.pairs(D)) == (HandoffVerdict.COMPUTED, {})


def test_table_of_incompatibilities_has_room_for_the_longest_entries() -> None:
    slots = 64  # the whole table is written with each change, so thousands of entries would take long
    incompatibilities = Incompatibilities(slots=slots, max_findings=slots // 2)
    for port in range(1, slots + 1):
        backend = Backend(Role.DECODE, "h" * 253, port)
        assert incompatibilities.add(backend, KIND, "\u00fc" * 1000)
        incompatibilities.judge(backend, HandoffVerdict.TRANSFERRED)
    assert incompatibilities.verdict(backend) is HandoffVerdict.TRANSFERRED


class Monitored:
    def __init__(self, incompatibilities: Incompatibilities) -> None:
        self.changes: list[tuple[Backend, IncompatibilityKind, bool]] = []
        self.without_reports: list[Backend] = []
        self.scoreboard = Scoreboard(slots=4)
        self.compatibility = CompatibilityMonitor(
            incompatibilities, self.scoreboard.row(0), EngineKeys(None), self.note, self.without_reports.append
        )

    def note(self, backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
        self.changes.append((backend, kind, hint is not None))


def test_prefiller_is_reported_after_three_answers_without_kv_parameters(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    for has_params in (False, False, True, False, False):
        monitored.compatibility.note_prefill(P, has_params)
    assert monitored.changes == []
    for has_params in (False, False, True, True):
        monitored.compatibility.note_prefill(P, has_params)
    assert monitored.changes == [
        (P, IncompatibilityKind.NO_KV_PARAMS, True),
        (P, IncompatibilityKind.NO_KV_PARAMS, False),
    ]


def test_prefiller_without_cache_reports_is_noted_once(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    note = monitored.compatibility.note_cache_report
    for predicted, cached in ((900, None), (900, None), (900, 0), (900, None), (900, None), (255, None)):
        note(P, predicted, cached)
    assert monitored.without_reports == []
    for _ in range(5):
        note(P, 256, None)
    assert monitored.without_reports == [P]
    monitored.compatibility.forget(P)
    assert monitored.compatibility.missing_reports == {}


def test_handoffs_of_short_prompts_are_not_counted(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    assert monitored.compatibility.note_handoff(P, D, 31, 32) is HandoffVerdict.UNKNOWN
    incompatibilities.judge(D, HandoffVerdict.TRANSFERRED)
    assert monitored.compatibility.note_handoff(P, D, 32, 32) is HandoffVerdict.TRANSFERRED
    assert monitored.scoreboard.handoffs(D.slot) == HandoffCount(1, 32)
