"""Attribution of failures: to engines, to pairs of engines, and to requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.blame import FailureBlame, PairQuarantine, SuspectMemory
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.settings import HealthChecks
from tests.forking import in_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.blame import FailedEngines
    from tests.clock import Clock


P1, P2, P3 = (Backend(Role.PREFILL, "p", port) for port in (1, 2, 3))
D1, D2 = (Backend(Role.DECODE, "d", port) for port in (1, 2))
KINDS = {
    "500": (Failure.STATUS, 500),
    "502": (Failure.STATUS, 502),
    "reset": (Failure.RESET, None),
    "broken": (Failure.BROKEN, None),
    "garbage": (Failure.BAD_ANSWER, None),
    "busy": (Failure.STATUS, 503),
    "bad": (Failure.STATUS, 400),
    "refused": (Failure.CONNECT, None),
    "late": (Failure.TIMEOUT, None),
    "stalled": (Failure.STALLED, None),
    "no-kv": (Failure.MISSING_KV, None),
    "no-memory": (Failure.RECOMPUTED, None),
}


class Request:
    """Request that records the engines that are blamed for its failures."""

    def __init__(self) -> None:
        self.blamed: list[Backend] = []

    def fails(self, blame: FailureBlame, *failures: tuple[Backend, str]) -> None:
        for backend, word in failures:
            failure, status = KINDS[word]
            error = UpstreamError(failure, backend, word, engine_status=status)
            error.blame = lambda backend=backend: self.blamed.append(backend)
            blame.record_failure(error)


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([(P1, "500")], [P1]),
        ([(P1, "500"), (P2, "500")], []),
        ([(P1, "500"), (P2, "502")], []),
        ([(P1, "reset"), (P2, "broken")], []),
        ([(P1, "500"), (P2, "500"), (P3, "500")], []),
        ([(P1, "500"), (P1, "500")], [P1, P1]),
        ([(P1, "500"), (P2, "reset")], [P1, P2]),
        ([(P1, "500"), (P2, "busy")], [P1]),
        ([(P1, "500"), (P2, "refused")], [P1]),
        ([(P1, "500"), (D1, "500")], [P1, D1]),
    ],
)
def test_engines_are_not_blamed_for_the_same_breakdown_on_two_of_them(
    failures: Sequence[tuple[Backend, str]], blamed: Sequence[Backend]
) -> None:
    request = Request()
    with FailureBlame() as blame:
        request.fails(blame, *failures)
        assert request.blamed == []
    assert request.blamed == blamed


@pytest.mark.parametrize("word", ["busy", "bad", "refused", "late", "stalled", "no-kv", "no-memory"])
def test_blame_ignores_failures_that_are_no_breakdown(word: str) -> None:
    request = Request()
    with FailureBlame() as blame:
        request.fails(blame, (P1, word))
        assert not blame.has_unsettled_failures
    assert request.blamed == []


def test_engine_is_blamed_once_per_failure() -> None:
    request = Request()
    with FailureBlame() as blame:
        request.fails(blame, (P1, "500"))
        blame.settle_failures()
        blame.settle_failures()
    assert request.blamed == [P1]


def test_breakdowns_of_two_units_of_a_request_count_together() -> None:
    request = Request()
    ways: FailedEngines = {}
    with FailureBlame(ways) as one, FailureBlame(ways) as other:
        request.fails(one, (P1, "500"))
        request.fails(other, (P2, "500"))
    assert request.blamed == []


def test_settled_failure_still_counts_for_a_later_breakdown() -> None:
    request = Request()
    with FailureBlame() as blame:
        request.fails(blame, (P1, "broken"))
        blame.settle_failures()
        request.fails(blame, (P2, "broken"))
    assert request.blamed == [P1]


# Quarantine of pairs


NOBODY: frozenset[Backend] = frozenset()


@pytest.fixture
def quarantine(clock: Clock) -> PairQuarantine:
    return PairQuarantine(clock=clock)


def test_two_consecutive_failed_handoffs_quarantine_only_their_pair(quarantine: PairQuarantine) -> None:
    assert not quarantine.record_failed_handoff(P1, D1)
    assert quarantine.partners_to_avoid(P1) == NOBODY
    assert quarantine.record_failed_handoff(P1, D1)
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D1)) == ({D1}, {P1})
    assert (quarantine.partners_to_avoid(P2), quarantine.partners_to_avoid(D2)) == (NOBODY, NOBODY)


def test_failed_handoffs_of_different_pairs_do_not_add_up(quarantine: PairQuarantine) -> None:
    assert not any(quarantine.record_failed_handoff(*pair) for pair in ((P1, D1), (P1, D2), (P2, D1), (P2, D2)))


def test_successful_handoff_resets_the_failures_of_its_pair(quarantine: PairQuarantine) -> None:
    quarantine.record_failed_handoff(P1, D1)
    quarantine.record_successful_handoff(P1, D1)
    quarantine.record_successful_handoff(P1, D1)
    assert not quarantine.record_failed_handoff(P1, D1)
    quarantine.record_successful_handoff(P2, D1)
    assert quarantine.record_failed_handoff(P1, D1)


def test_bad_prefiller_is_quarantined_from_every_decoder(quarantine: PairQuarantine) -> None:
    for decoder in (D1, D2, D1, D2):
        quarantine.record_failed_handoff(P1, decoder)
        quarantine.record_successful_handoff(P2, decoder)
    assert quarantine.partners_to_avoid(P1) == {D1, D2}
    assert quarantine.partners_to_avoid(D1) == quarantine.partners_to_avoid(D2) == {P1}


def test_each_consecutive_quarantine_is_longer_up_to_the_maximum(quarantine: PairQuarantine, clock: Clock) -> None:
    quarantine.record_failed_handoff(P1, D1)
    lengths = []
    for _ in range(12):
        assert quarantine.record_failed_handoff(P1, D1)
        began = clock.now
        assert not quarantine.record_failed_handoff(P1, D1)
        while quarantine.partners_to_avoid(P1):
            clock.now += 30.0
        lengths.append(clock.now - began)
    assert lengths == [60.0 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10)]


def test_successful_handoff_ends_a_quarantine_and_resets_its_length(quarantine: PairQuarantine, clock: Clock) -> None:
    for _ in range(2):
        quarantine.record_failed_handoff(P1, D1)
    clock.now += 60.0
    assert quarantine.record_failed_handoff(P1, D1)
    quarantine.record_successful_handoff(P1, D1)
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D1)) == (NOBODY, NOBODY)
    assert [quarantine.record_failed_handoff(P1, D1), quarantine.record_failed_handoff(P1, D1)] == [False, True]
    clock.now += 60.0
    assert quarantine.partners_to_avoid(P1) == NOBODY


def test_quarantine_drops_a_backend_that_has_left(quarantine: PairQuarantine) -> None:
    for pair in ((P1, D1), (P1, D2), (P2, D1)):
        quarantine.record_failed_handoff(*pair)
        quarantine.record_failed_handoff(*pair)
    quarantine.record_failed_handoff(P2, D2)
    quarantine.forget_backend(P1)
    assert quarantine.partners_to_avoid(D1) == {P2}
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D2)) == (NOBODY, NOBODY)
    assert not quarantine.record_failed_handoff(P1, D1)
    assert quarantine.record_failed_handoff(P2, D2)


def test_changed_settings_apply_to_later_quarantines(clock: Clock) -> None:
    checks = HealthChecks()
    quarantine = PairQuarantine(lambda: checks, clock)
    assert not quarantine.record_failed_handoff(P1, D1)
    checks = HealthChecks(quarantine_after=1, quarantine_seconds=5.0)
    assert quarantine.record_failed_handoff(P1, D1)
    clock.now += 5.0
    assert quarantine.partners_to_avoid(P1) == NOBODY


# Memory of suspects


BODY = b'{"prompt": "Sesame"}'


@pytest.fixture
def memory(clock: Clock) -> SuspectMemory:
    return SuspectMemory(seconds=300.0, clock=clock)


def test_suspect_is_remembered_for_a_limited_time(memory: SuspectMemory, clock: Clock) -> None:
    assert memory.is_empty
    memory.remember_request(BODY, 1)
    assert not memory.is_empty
    assert [memory.count_crashed_engines(BODY), memory.count_crashed_engines(BODY.lower())] == [1, 0]
    memory.remember_request(BODY, 2)
    clock.now += 299.0
    assert memory.count_crashed_engines(BODY) == 2
    clock.now += 1.0
    assert memory.count_crashed_engines(BODY) == 0


def test_suspect_that_was_served_is_forgotten(memory: SuspectMemory) -> None:
    memory.remember_request(BODY, 1)
    memory.forget_request(b"another")
    assert memory.count_crashed_engines(BODY) == 1
    memory.forget_request(BODY)
    assert memory.is_empty


def test_suspects_are_shared_by_all_workers(memory: SuspectMemory) -> None:
    in_child(lambda: memory.remember_request(BODY, 2))
    assert memory.count_crashed_engines(BODY) == 2
    in_child(lambda: memory.forget_request(BODY))
    assert memory.is_empty


def test_oldest_suspects_are_dropped_for_new_ones(memory: SuspectMemory) -> None:
    for number in range(1000):
        memory.remember_request(b"%d" % number, 2)
    kept = [number for number in range(1000) if memory.count_crashed_engines(b"%d" % number)]
    assert kept == list(range(744, 1000))


def test_suspect_memory_keeps_no_text_of_a_request(memory: SuspectMemory) -> None:
    memory.remember_request(BODY, 2)
    assert b"Sesame" not in memory._shared_value._shared_memory[:]


def test_digests_of_suspects_depend_on_a_secret_key(memory: SuspectMemory, clock: Clock) -> None:
    assert memory._digest_of_body(BODY) != SuspectMemory(clock=clock)._digest_of_body(BODY)
