"""How each worker sees each backend, for those who look."""

from __future__ import annotations

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import HealthBoard
from proxy.common.backend import Backend, Role
from tests.forking import in_child

BACKEND = Backend(Role.DECODE, "10.0.0.3", 7100, slot=5)
UNKNOWN, UP, DOWN, EJECTED, PROBATION = HealthState


def test_health_board_shows_the_state_in_each_worker() -> None:
    board = HealthBoard(workers=3, slots=8)
    board.set_state(0, BACKEND, UP)
    in_child(lambda: board.set_state(2, BACKEND, EJECTED))
    assert board.states(BACKEND) == [UP, UNKNOWN, EJECTED]
    board.set_state(0, BACKEND, PROBATION)
    assert board.states(BACKEND) == [PROBATION, UNKNOWN, EJECTED]


def test_health_board_erases_only_the_row_of_a_dead_worker() -> None:
    board = HealthBoard(workers=3, slots=8)
    for worker in range(3):
        board.set_state(worker, BACKEND, DOWN)
    board.erase(1)
    assert board.states(BACKEND) == [DOWN, UNKNOWN, DOWN]


def test_health_board_reports_unknown_for_the_next_backend_in_a_slot() -> None:
    board = HealthBoard(slots=8)
    board.set_state(0, BACKEND, EJECTED)
    assert board.states(Backend(Role.DECODE, "10.0.0.4", 7100, slot=5)) == [UNKNOWN]
    assert board.states(Backend(Role.PREFILL, "10.0.0.3", 7100, slot=5)) == [UNKNOWN]


def test_health_board_separates_the_slots_of_backends() -> None:
    board = HealthBoard(workers=2, slots=8)
    board.set_state(0, Backend(Role.DECODE, "10.0.0.3", 7100, slot=7), DOWN)
    board.set_state(1, Backend(Role.DECODE, "10.0.0.3", 7100, slot=0), UP)
    assert board.states(BACKEND) == [UNKNOWN, UNKNOWN]
