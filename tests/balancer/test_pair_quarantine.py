"""The quarantine of pairs: who is kept apart from whom, for how long, and what ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.blame import PairQuarantine
from proxy.common.backend import Backend, Role
from proxy.settings import HealthChecks

if TYPE_CHECKING:
    from tests.clock import Clock

P1, P2 = (Backend(Role.PREFILL, "p", port) for port in (1, 2))
D1, D2 = (Backend(Role.DECODE, "d", port) for port in (1, 2))
NOBODY: frozenset[Backend] = frozenset()


@pytest.fixture
def quarantine(clock: Clock) -> PairQuarantine:
    return PairQuarantine(clock=clock)


def test_two_consecutive_failed_handoffs_quarantine_only_their_pair(quarantine: PairQuarantine) -> None:
    assert not quarantine.failed(P1, D1)
    assert quarantine.partners_to_avoid(P1) == NOBODY
    assert quarantine.failed(P1, D1)
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D1)) == ({D1}, {P1})
    assert (quarantine.partners_to_avoid(P2), quarantine.partners_to_avoid(D2)) == (NOBODY, NOBODY)


def test_failed_handoffs_of_different_pairs_do_not_add_up(quarantine: PairQuarantine) -> None:
    assert not any(quarantine.failed(*pair) for pair in ((P1, D1), (P1, D2), (P2, D1), (P2, D2)))


def test_successful_handoff_resets_the_failures_of_its_pair(quarantine: PairQuarantine) -> None:
    quarantine.failed(P1, D1)
    quarantine.succeeded(P1, D1)
    quarantine.succeeded(P1, D1)
    assert not quarantine.failed(P1, D1)
    quarantine.succeeded(P2, D1)
    assert quarantine.failed(P1, D1)


def test_bad_prefiller_is_quarantined_from_every_decoder(quarantine: PairQuarantine) -> None:
    for decoder in (D1, D2, D1, D2):
        quarantine.failed(P1, decoder)
        quarantine.succeeded(P2, decoder)
    assert quarantine.partners_to_avoid(P1) == {D1, D2}
    assert quarantine.partners_to_avoid(D1) == quarantine.partners_to_avoid(D2) == {P1}


def test_each_consecutive_quarantine_is_longer_up_to_the_maximum(quarantine: PairQuarantine, clock: Clock) -> None:
    quarantine.failed(P1, D1)
    lengths = []
    for _ in range(12):
        assert quarantine.failed(P1, D1)
        began = clock.now
        assert not quarantine.failed(P1, D1)
        while quarantine.partners_to_avoid(P1):
            clock.now += 30.0
        lengths.append(clock.now - began)
    assert lengths == [60.0 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10)]


def test_successful_handoff_ends_a_quarantine_and_resets_its_length(quarantine: PairQuarantine, clock: Clock) -> None:
    for _ in range(2):
        quarantine.failed(P1, D1)
    clock.now += 60.0
    assert quarantine.failed(P1, D1)
    quarantine.succeeded(P1, D1)
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D1)) == (NOBODY, NOBODY)
    assert [quarantine.failed(P1, D1), quarantine.failed(P1, D1)] == [False, True]
    clock.now += 60.0
    assert quarantine.partners_to_avoid(P1) == NOBODY


def test_quarantine_drops_a_backend_that_has_left(quarantine: PairQuarantine) -> None:
    for pair in ((P1, D1), (P1, D2), (P2, D1)):
        quarantine.failed(*pair)
        quarantine.failed(*pair)
    quarantine.failed(P2, D2)
    quarantine.forget(P1)
    assert quarantine.partners_to_avoid(D1) == {P2}
    assert (quarantine.partners_to_avoid(P1), quarantine.partners_to_avoid(D2)) == (NOBODY, NOBODY)
    assert not quarantine.failed(P1, D1)
    assert quarantine.failed(P2, D2)


def test_changed_settings_apply_to_later_quarantines(clock: Clock) -> None:
    checks = HealthChecks()
    quarantine = PairQuarantine(lambda: checks, clock)
    assert not quarantine.failed(P1, D1)
    checks = HealthChecks(quarantine_after=1, quarantine_seconds=5.0)
    assert quarantine.failed(P1, D1)
    clock.now += 5.0
    assert quarantine.partners_to_avoid(P1) == NOBODY
