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
    assert not incompatibilities.remove_finding(D, KIND)
    assert incompatibilities.add_finding(D, KIND, "serves another model")
    assert not incompatibilities.add_finding(D, KIND, "serves another model, again")
    assert incompatibilities.incompatibilities_of(D) == (Incompatibility(KIND, "serves another model", 1234.5),)
    assert incompatibilities.incompatibilities_of(P) == ()
    assert incompatibilities.remove_finding(D, KIND)
    assert not incompatibilities.remove_finding(D, KIND)
    assert incompatibilities.incompatibilities_of(D) == ()


def test_instance_may_have_several_findings(incompatibilities: Incompatibilities) -> None:
    incompatibilities.add_finding(D, IncompatibilityKind.MODEL, "one")
    incompatibilities.add_finding(D, IncompatibilityKind.ROLE, "two")
    incompatibilities.remove_finding(D, IncompatibilityKind.MODEL)
    assert [finding.kind for finding in incompatibilities.incompatibilities_of(D)] == [IncompatibilityKind.ROLE]


def test_finding_of_another_worker_is_visible(incompatibilities: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert incompatibilities.add_finding(D, KIND, "found by a fork")

    in_child(elsewhere)
    assert [finding.problem_text for finding in incompatibilities.incompatibilities_of(D)] == ["found by a fork"]


def test_finding_of_another_worker_is_not_new(incompatibilities: Incompatibilities) -> None:
    def elsewhere() -> None:
        assert incompatibilities.add_finding(D, KIND, "found by a fork")
        incompatibilities.record_handoff_verdict(D, HandoffVerdict.COMPUTED)

    in_child(elsewhere)
    assert not incompatibilities.add_finding(D, KIND, "found here")
    assert [finding.problem_text for finding in incompatibilities.incompatibilities_of(D)] == ["found by a fork"]
    assert incompatibilities.handoff_verdict(D) is HandoffVerdict.COMPUTED


def test_findings_of_an_instance_that_has_left_are_dropped(incompatibilities: Incompatibilities) -> None:
    incompatibilities.add_finding(D, KIND, "x")
    incompatibilities.record_handoff_verdict(D, HandoffVerdict.TRANSFERRED)
    incompatibilities.forget_backend(D)
    incompatibilities.forget_backend(P)
    assert (incompatibilities.incompatibilities_of(D), incompatibilities.handoff_verdict(D)) == (
        (),
        HandoffVerdict.UNKNOWN,
    )


def test_verdict_on_a_pair_may_differ_from_that_on_its_decoder(incompatibilities: Incompatibilities) -> None:
    other = Backend(Role.PREFILL, "10.0.0.3", 7100)
    incompatibilities.record_handoff_verdict(D, HandoffVerdict.TRANSFERRED, {P.name: HandoffVerdict.COMPUTED})
    assert incompatibilities.handoff_verdict(D, P) is HandoffVerdict.COMPUTED
    assert (
        incompatibilities.handoff_verdict(D, other)
        is incompatibilities.handoff_verdict(D)
        is HandoffVerdict.TRANSFERRED
    )
    assert incompatibilities.pair_verdicts(D) == {P.name: HandoffVerdict.COMPUTED}
    incompatibilities.forget_backend(P)
    assert (incompatibilities.handoff_verdict(D, P), incompatibilities.pair_verdicts(D)) == (
        HandoffVerdict.TRANSFERRED,
        {},
    )
    incompatibilities.record_handoff_verdict(D, HandoffVerdict.UNKNOWN, {P.name: HandoffVerdict.COMPUTED})
    incompatibilities.forget_backend(D)
    assert (incompatibilities.handoff_verdict(D, P), incompatibilities.pair_verdicts(D)) == (HandoffVerdict.UNKNOWN, {})


def test_too_many_pairs_fall_back_to_the_verdict_on_the_decoder(incompatibilities: Incompatibilities) -> None:
    crowd = {f"10.0.{i // 250}.{i % 250}:7100": HandoffVerdict.TRANSFERRED for i in range(5000)}
    incompatibilities.record_handoff_verdict(D, HandoffVerdict.COMPUTED, crowd)
    assert (incompatibilities.handoff_verdict(D, P), incompatibilities.pair_verdicts(D)) == (
        HandoffVerdict.COMPUTED,
        {},
    )


def test_table_of_incompatibilities_has_room_for_the_longest_entries() -> None:
    slots = 64  # the whole table is written with each change, so thousands of entries would take long
    incompatibilities = Incompatibilities(slots=slots, max_findings=slots // 2)
    for port in range(1, slots + 1):
        backend = Backend(Role.DECODE, "h" * 253, port)
        assert incompatibilities.add_finding(backend, KIND, "\u00fc" * 1000)
        incompatibilities.record_handoff_verdict(backend, HandoffVerdict.TRANSFERRED)
    assert incompatibilities.handoff_verdict(backend) is HandoffVerdict.TRANSFERRED


class Monitored:
    def __init__(self, incompatibilities: Incompatibilities) -> None:
        self.changes: list[tuple[Backend, IncompatibilityKind, bool]] = []
        self.without_reports: list[Backend] = []
        self.scoreboard = Scoreboard(slots=4)
        self.compatibility = CompatibilityMonitor(
            incompatibilities, self.scoreboard.load_row(0), EngineKeys(None), self.note, self.without_reports.append
        )

    def note(self, backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
        self.changes.append((backend, kind, hint is not None))


def test_prefiller_is_reported_after_three_answers_without_kv_parameters(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    for has_params in (False, False, True, False, False):
        monitored.compatibility.record_prefill(P, has_params)
    assert monitored.changes == []
    for has_params in (False, False, True, True):
        monitored.compatibility.record_prefill(P, has_params)
    assert monitored.changes == [
        (P, IncompatibilityKind.NO_KV_PARAMS, True),
        (P, IncompatibilityKind.NO_KV_PARAMS, False),
    ]


def test_prefiller_without_cache_reports_is_noted_once(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    note = monitored.compatibility.record_cache_report
    for predicted, cached in ((900, None), (900, None), (900, 0), (900, None), (900, None), (255, None)):
        note(P, predicted, cached)
    assert monitored.without_reports == []
    for _ in range(5):
        note(P, 256, None)
    assert monitored.without_reports == [P]
    monitored.compatibility.forget_backend(P)
    assert monitored.compatibility.missing_cache_reports == {}


def test_handoffs_of_short_prompts_are_not_counted(incompatibilities: Incompatibilities) -> None:
    monitored = Monitored(incompatibilities)
    assert monitored.compatibility.record_handoff(P, D, 31, 32) is HandoffVerdict.UNKNOWN
    incompatibilities.record_handoff_verdict(D, HandoffVerdict.TRANSFERRED)
    assert monitored.compatibility.record_handoff(P, D, 32, 32) is HandoffVerdict.TRANSFERRED
    assert monitored.scoreboard.count_handoffs(D.slot) == HandoffCount(1, 32)
