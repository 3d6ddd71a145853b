"""The instances that are waited for: all workers see them, and any may take one off the list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.roster import WaitingList
from proxy.common.backend import Backend, Role
from tests.forking import in_child

if TYPE_CHECKING:
    from tests.clock import Clock

A, B = Backend(Role.DECODE, "a", 1), Backend(Role.PREFILL, "b", 2, bootstrap_port=8998, models=("x",))


@pytest.fixture
def waiting(clock: Clock) -> WaitingList:
    return WaitingList(4, lambda: clock.now)


def test_each_is_on_it_once(waiting: WaitingList) -> None:
    assert waiting.enter(A, 10.0) is not None
    assert waiting.enter(B, 10.0) is not None
    assert waiting.enter(A, 10.0) is None
    assert waiting.backends() == [A, B]
    assert [backend.bootstrap_port for backend in waiting.backends()] == [None, 8998]
    assert [backend.models for backend in waiting.backends()] == [(), ("x",)]


def test_one_that_was_put_on_it_again_is_another_ones(waiting: WaitingList) -> None:
    first = waiting.enter(A, 10.0)
    assert first is not None
    assert waiting.leave(A)
    second = waiting.enter(A, 10.0)
    assert second is not None
    assert (waiting.holds(A, first), waiting.holds(A, second)) == (False, True)
    assert not waiting.leave(A, first)
    assert waiting.leave(A, second)
    assert not waiting.leave(A)
    assert waiting.backends() == []


def test_nobody_is_on_it_for_ever(waiting: WaitingList, clock: Clock) -> None:
    ticket = waiting.enter(A, 10.0)
    assert ticket is not None
    clock.now += 10.0
    assert (waiting.backends(), waiting.holds(A, ticket), waiting.leave(A, ticket)) == ([], False, False)
    assert waiting.enter(A, 10.0) is not None


def test_all_workers_see_it(waiting: WaitingList) -> None:
    ticket = waiting.enter(A, 10.0)
    assert ticket is not None

    def child() -> None:
        assert waiting.backends() == [A]
        assert waiting.enter(A, 10.0) is None
        assert waiting.leave(A)
        assert waiting.enter(B, 10.0) is not None

    in_child(child)
    assert not waiting.holds(A, ticket)
    assert waiting.backends() == [B]
