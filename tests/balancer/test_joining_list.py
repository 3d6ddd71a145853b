"""The instances that are waited for: all workers see them, and any may take one off the list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.roster import JoiningList
from proxy.common.backend import Backend, Role
from tests.forking import in_child

if TYPE_CHECKING:
    from tests.clock import Clock

A, B = Backend(Role.DECODE, "a", 1), Backend(Role.PREFILL, "b", 2, bootstrap_port=8998, models=("x",))


@pytest.fixture
def joining(clock: Clock) -> JoiningList:
    return JoiningList(4, lambda: clock.now)


def test_joining_list_has_each_instance_once(joining: JoiningList) -> None:
    assert joining.add(A, 10.0) is not None
    assert joining.add(B, 10.0) is not None
    assert joining.add(A, 10.0) is None
    assert joining.backends() == [A, B]
    assert [backend.bootstrap_port for backend in joining.backends()] == [None, 8998]
    assert [backend.models for backend in joining.backends()] == [(), ("x",)]


def test_joining_list_gives_a_new_ticket_to_an_instance_added_again(joining: JoiningList) -> None:
    first = joining.add(A, 10.0)
    assert first is not None
    assert joining.remove(A)
    second = joining.add(A, 10.0)
    assert second is not None
    assert (joining.has(A, first), joining.has(A, second)) == (False, True)
    assert not joining.remove(A, first)
    assert joining.remove(A, second)
    assert not joining.remove(A)
    assert joining.backends() == []


def test_joining_list_entries_expire(joining: JoiningList, clock: Clock) -> None:
    ticket = joining.add(A, 10.0)
    assert ticket is not None
    clock.now += 10.0
    assert (joining.backends(), joining.has(A, ticket), joining.remove(A, ticket)) == ([], False, False)
    assert joining.add(A, 10.0) is not None


def test_joining_list_is_shared_by_all_workers(joining: JoiningList) -> None:
    ticket = joining.add(A, 10.0)
    assert ticket is not None

    def child() -> None:
        assert joining.backends() == [A]
        assert joining.add(A, 10.0) is None
        assert joining.remove(A)
        assert joining.add(B, 10.0) is not None

    in_child(child)
    assert not joining.has(A, ticket)
    assert joining.backends() == [B]
