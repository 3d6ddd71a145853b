"""A shared value: whole or not at all, whoever reads, whoever dies."""

from __future__ import annotations

import os

import pytest

from proxy.balancer.shared.memory import SharedValue
from tests.forking import in_child


@pytest.fixture
def shared() -> SharedValue:
    value = SharedValue("list", 100)
    value.write(["first"])
    return value


def test_shared_value_is_visible_to_another_process(shared: SharedValue) -> None:
    def write() -> None:
        with shared.exclusive():
            shared.write(["second"])

    assert shared.read() == (1, ["first"])
    in_child(write)
    assert shared.version == 2
    assert shared.read() == (2, ["second"])


def test_prepared_value_is_invisible_before_its_commit(shared: SharedValue) -> None:
    with shared.exclusive():
        commit = shared.prepare(["second"])
        assert shared.read() == (1, ["first"])
        commit()
    assert shared.read() == (2, ["second"])


def test_prepared_value_may_be_dropped(shared: SharedValue) -> None:
    with shared.exclusive():
        shared.prepare(["given up"])
    with shared.exclusive():
        shared.write(["second"])
    assert shared.read() == (2, ["second"])


def test_value_that_does_not_fit_is_rejected(shared: SharedValue) -> None:
    with shared.exclusive(), pytest.raises(ValueError, match=r"^the list is too long$"):
        shared.write(["x" * 100])
    assert shared.read() == (1, ["first"])


def test_writer_that_dies_half_way_does_no_harm(shared: SharedValue) -> None:
    def die() -> None:
        with shared.exclusive():
            start = shared._start((shared.version + 1) % 2)
            shared._memory[start : start + 20] = b"x" * 20
            os._exit(0)

    in_child(die)
    assert shared.read() == (1, ["first"])
    with shared.exclusive():  # which the dead one held
        shared.write(["second"])
    in_child(lambda: shared.read())
    assert shared.read() == (2, ["second"])
