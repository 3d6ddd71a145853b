"""How each worker sees each backend, for those who look."""

from __future__ import annotations

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import HealthBoard
from proxy.common.backend import Backend, Role
from tests.forking import in_child

BACKEND = Backend(Role.DECODE, "10.0.0.3", 7100, slot=5)
UNKNOWN, UP, DOWN, EJECTED, PROBATION = HealthState


def test_each_worker_has_a_view_of_its_own_and_all_see_it() -> None:
    board = HealthBoard(workers=3, slots=8)
    board.set_state(0, BACKEND, UP)
    in_child(lambda: board.set_state(2, BACKEND, EJECTED))
    assert board.states(BACKEND) == [UP, UNKNOWN, EJECTED]
    board.set_state(0, BACKEND, PROBATION)
    assert board.states(BACKEND) == [PROBATION, UNKNOWN, EJECTED]


def test_what_a_dead_worker_saw_is_forgotten_and_nothing_else() -> None:
    board = HealthBoard(workers=3, slots=8)
    for worker in range(3):
        board.set_state(worker, BACKEND, DOWN)
    board.erase(1)
    assert board.states(BACKEND) == [DOWN, UNKNOWN, DOWN]


def test_who_takes_over_a_slot_is_unknown() -> None:
    board = HealthBoard(slots=8)
    board.set_state(0, BACKEND, EJECTED)
    assert board.states(Backend(Role.DECODE, "10.0.0.4", 7100, slot=5)) == [UNKNOWN]
    assert board.states(Backend(Role.PREFILL, "10.0.0.3", 7100, slot=5)) == [UNKNOWN]


def test_neighbours_do_not_disturb_each_other() -> None:
    board = HealthBoard(workers=2, slots=8)
    board.set_state(0, Backend(Role.DECODE, "10.0.0.3", 7100, slot=7), DOWN)
    board.set_state(1, Backend(Role.DECODE, "10.0.0.3", 7100, slot=0), UP)
    assert board.states(BACKEND) == [UNKNOWN, UNKNOWN]
