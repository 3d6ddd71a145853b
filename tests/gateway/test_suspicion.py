"""Suspicion: which units on a crashed engine are charged with the crash, cleared or stopped."""

from __future__ import annotations

import pytest

from proxy.common.backend import Backend, Role
from proxy.gateway.suspicion import (
    Casualty,
    EngineCrash,
    Suspicion,
    is_acquitted,
    is_charged,
    is_poison,
    suspicion_rank_of,
)

E1, E2, E3, E4 = (Backend(Role.DECODE, "e", port) for port in (1, 2, 3, 4))
NOW = 1000.0


def suspicion(*lost: Backend, earlier: int = 0) -> Suspicion:
    """Return the suspicion of a request with one unit that crashed these engines before its first token."""
    made = Suspicion(earlier)
    made.add_unit().lost_engines.update(dict.fromkeys(lost, 0.0))
    return made


def casualties(*ranks_and_seconds: tuple[int, float]) -> list[Casualty]:
    return [Casualty(suspicion(), rank, seconds) for rank, seconds in ranks_and_seconds]


@pytest.mark.parametrize(
    ("lost_after", "served_for", "is_cleared"),
    [
        (0.0, None, False),  # no token yet
        (0.0, 0.9, False),
        (0.0, 1.1, True),
        (3.0, 6.9, False),  # twice as long and a second
        (3.0, 7.1, True),
        (600.0, 29.9, False),  # but no longer than half a minute
        (600.0, 30.1, True),
    ],
)
def test_suspect_is_cleared_after_it_was_served_for_long_enough(
    lost_after: float, served_for: float | None, is_cleared: bool
) -> None:
    case = Suspicion()
    history = case.add_unit()
    history.lost_engines[E1] = lost_after
    history.attempt_began_at = None if served_for is None else NOW - served_for
    assert history.has_run_long_enough(NOW) is is_cleared
    assert case.count_crashed_engines(NOW) == (0 if is_cleared else 1)


def test_units_and_repeats_of_a_request_count_together() -> None:
    case = Suspicion(earlier_crashes=1)
    for backend in (E1, E2, E2):
        case.add_unit().lost_engines[backend] = 0.0
    assert case.crashed_engines(NOW) == {E1, E2}
    assert case.count_crashed_engines(NOW) == 3


def test_served_unit_is_cleared_but_not_the_other_units() -> None:
    case = Suspicion(is_split=True)
    one, other = case.add_unit(), case.add_unit()
    one.lost_engines[E1] = other.lost_engines[E2] = 0.0
    case.clear_served_unit(one)
    assert case.crashed_engines(NOW) == {E2}
    assert not case.are_units_confined


@pytest.mark.parametrize(
    ("lost", "reserved", "rank"), [((), (), 0), ((E1,), (), 1), ((E1,), (E2,), 2), ((E1,), (E3,), 1), ((), (E2,), 0)]
)
def test_only_suspect_on_an_engine_is_the_most_suspicious(
    lost: tuple[Backend, ...], reserved: tuple[Backend, ...], rank: int
) -> None:
    case = suspicion(*lost)
    case.unit_histories[0].reserved_backends.extend(reserved)
    assert suspicion_rank_of(case, case.unit_histories[0], E2, NOW) == rank


@pytest.mark.parametrize(
    ("told", "charged"),
    [
        ([(0, 5.0)], [True]),
        ([(0, 5.0), (0, 0.0), (0, 60.0)], [True, True, False]),  # the two that came last
        ([(0, 1.0), (0, 1.0), (0, 1.0)], [True, True, True]),  # they cannot be distinguished
        ([(0, 0.0), (1, 60.0), (0, 0.0)], [False, True, False]),  # there is one who was suspicious before
        ([(2, 1.0), (1, 0.0)], [True, False]),
    ],
)
def test_crash_is_charged_to_the_most_suspicious_and_latest_units(
    told: list[tuple[int, float]], charged: list[bool]
) -> None:
    all_of_them = casualties(*told)
    assert [is_charged(casualty, all_of_them, max_charged=2) for casualty in all_of_them] == charged


@pytest.mark.parametrize(
    ("lost", "earlier", "rank", "others", "expected"),
    [
        # One engine is an accident.
        ((E1,), 0, 0, (), False),
        ((E1,), 0, 2, (), False),
        # The only one that was on both.
        ((E1, E2), 0, 2, (), True),
        ((E1, E2), 0, 1, (0, 0, 0), True),
        ((E1, E2), 0, 2, (1, 1, 0), True),
        # Several were on both: it may be any of them, or none.
        ((E1, E2), 0, 1, (1, 0), False),
        ((E1, E2), 0, 1, (2,), False),
        # It has cost one when it was sent before.
        ((E1,), 1, 2, (), True),
        ((E1,), 1, 1, (1,), False),
        # Several units on two engines that went down at the same moment.
        ((E1, E2), 0, 0, (0, 0), True),
    ],
)
def test_request_that_alone_crashed_two_engines_is_poison(
    lost: tuple[Backend, ...], earlier: int, rank: int, others: tuple[int, ...], expected: bool
) -> None:
    mine = Casualty(suspicion(*lost, earlier=earlier), rank, 0.0)
    told = [mine, Casualty(mine.suspicion, rank, 0.0), *casualties(*((other, 0.0) for other in others))]
    assert is_poison(mine, told, NOW) is expected


def test_subset_keeps_eligible_and_failed_engines() -> None:
    case = Suspicion(is_split=True)
    history = case.add_unit()
    case.engines_for_units(Role.DECODE, [E1, E2, E3]).extend([E1, E2])
    assert case.engines_for_units(Role.DECODE, [E1, E2, E3]) == [E1, E2]
    history.doubtful_engines[E1] = 0.0
    assert case.engines_for_units(Role.DECODE, [E2, E3]) == [E1, E2]
    history.doubtful_engines.clear()
    assert case.engines_for_units(Role.DECODE, [E2, E3]) == [E2]


def test_suspect_is_apart_for_about_the_time_of_its_last_engine() -> None:
    history = Suspicion().add_unit()
    assert history.isolation_seconds == 0.0
    history.lost_engines[E1] = 0.0
    assert history.isolation_seconds == 0.0  # it never had a token there: its first one clears the place
    history.lost_engines[E1] = 0.1
    assert history.isolation_seconds == pytest.approx(0.45)
    history.lost_engines[E1] = 60.0
    assert history.isolation_seconds == 1.0


# What acquits a suspect that has cost as many engines as it may


def death(backend: Backend, *suspicions: Suspicion) -> EngineCrash:
    return EngineCrash(backend, [Casualty(each, 1, 0.0) for each in suspicions])


@pytest.mark.fault(116)
def test_crashes_without_a_suspect_acquit_it() -> None:
    suspect = suspicion(E1, E2)
    own = [death(E1, suspect, suspicion()), death(E2, suspect)]
    assert not is_acquitted(suspect, own, NOW)
    assert is_acquitted(suspect, [*own, death(E3, suspicion(E3))], NOW)


@pytest.mark.fault(116)
def test_crashes_by_another_poison_request_do_not_acquit() -> None:
    suspect, other = suspicion(E1, E2), suspicion(E3, E4)
    deaths = [death(E1, suspect), death(E2, suspect), death(E3, other), death(E4, other)]
    assert not is_acquitted(suspect, deaths, NOW)
    assert not is_acquitted(other, deaths, NOW)


@pytest.mark.fault(116)
def test_suspects_that_share_an_engine_do_not_explain_more_than_one() -> None:
    """Three engines went down, and each of two requests was on two of them: neither is the reason."""
    suspect, other = suspicion(E1, E2), suspicion(E1, E3)
    deaths = [death(E1, suspect, other), death(E2, suspect), death(E3, other)]
    assert is_acquitted(suspect, deaths, NOW)
    assert is_acquitted(other, deaths, NOW)


@pytest.mark.fault(116)
def test_earlier_crash_by_the_request_does_not_acquit_it() -> None:
    again = suspicion(E2, earlier=1)
    before = death(E1, suspicion(E1))
    assert not is_acquitted(again, [before, death(E2, again)], NOW)
    assert is_acquitted(again, [before, death(E2, again), death(E3)], NOW)


def test_acquitted_request_has_crashed_no_engine() -> None:
    suspect = suspicion(E1, E2, earlier=1)
    suspect.clear_of_crashes()
    assert suspect.count_crashed_engines(NOW) == 0
