"""Which backends have stopped sending while others go on."""

from __future__ import annotations

import pytest

from proxy.balancer.stalls import StallDetector
from proxy.common.backend import Backend, Role

A, B, C = (Backend(Role.DECODE, "127.0.0.1", port) for port in (1, 2, 3))
PREFILLER = Backend(Role.PREFILL, "127.0.0.1", 4)
STALL = 30.0


class Watch:
    """Looks once a second, and notes who is found stalled."""

    def __init__(self, stall_seconds: float = STALL) -> None:
        self.detector = StallDetector(stall_seconds)
        self.now = 0.0
        self.found: list[Backend] = []

    def looks(self, seconds: int, *moving: Backend, silent: tuple[Backend, ...] = ()) -> list[Backend]:
        """So many looks at the same picture; who was found in them. Who is neither moving nor silent has no streams."""
        found = []
        for _ in range(seconds):
            self.now += 1
            picture = dict.fromkeys(silent, False) | dict.fromkeys(moving, True)
            found += self.detector.observe(self.now, picture)
        return found


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_backend_that_is_silent_while_another_one_sends_is_stalled(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(30, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_a_backend_is_found_once_per_silence(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(300, B, silent=(A,)) == [A]
    watch.looks(602, A, B)  # until the long silence it came back from is forgotten
    assert watch.looks(300, B, silent=(A,)) == [A]


def test_a_backend_without_streams_is_not_silent(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(300, B) == []
    assert watch.looks(30, B, silent=(A,)) == []  # its first stream has been silent for less than that
    assert watch.looks(2, B, silent=(A,)) == [A]


def test_streams_that_end_end_the_silence(watch: Watch) -> None:
    assert watch.looks(20, B, silent=(A,)) == []
    watch.looks(1, B)
    assert watch.looks(30, B, silent=(A,)) == []


def test_the_only_backend_is_never_stalled(watch: Watch) -> None:
    watch.looks(1, A)
    assert watch.looks(3600, silent=(A,)) == []


def test_peers_with_nothing_to_do_prove_nothing(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(3600, silent=(A,)) == []


def test_when_all_are_silent_none_is_stalled(watch: Watch) -> None:
    watch.looks(1, A, B, C)
    watch.looks(1, B, C, silent=(A,))  # a network does not fail for all of them in the same second
    watch.looks(1, C, silent=(A, B))
    assert watch.looks(3600, silent=(A, B, C)) == []
    assert watch.looks(1, B, silent=(A, C)) == [A, C]  # until one of them goes on


def test_a_backend_of_another_role_is_no_peer(watch: Watch) -> None:
    watch.looks(1, A, PREFILLER)
    assert watch.looks(3600, PREFILLER, silent=(A,)) == []


def test_who_has_been_silent_before_is_given_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(19, B, silent=(A,))
    watch.looks(1, A, B)  # 20 s it was
    assert watch.looks(60, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_the_silences_of_others_give_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B, C)
    watch.looks(19, A, B, silent=(C,))
    watch.looks(1, A, B, C)
    assert watch.looks(31, B, C, silent=(A,)) == [A]


def test_old_silences_are_forgotten(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(19, B, silent=(A,))
    watch.looks(601, A, B)
    assert watch.looks(31, B, silent=(A,)) == [A]


def test_a_silence_that_nothing_came_after_gives_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(29, B, silent=(A,))
    watch.looks(1, B)  # its clients have left
    assert watch.looks(32, B, silent=(A,)) == [A]


def test_time_in_which_nobody_looked_does_not_count(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(20, B, silent=(A,))
    watch.now += 500
    assert watch.detector.observe(watch.now, {A: False, B: False}, lost_seconds=500) == []
    assert watch.looks(10, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_a_silence_in_which_nobody_looked_gives_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.now += 500
    watch.detector.observe(watch.now, {A: True, B: True}, lost_seconds=499)
    assert watch.looks(31, B, silent=(A,)) == [A]


def test_the_time_can_be_changed(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.detector.stall_seconds = 10.0
    assert watch.looks(11, B, silent=(A,)) == [A]


def test_backends_that_have_left_are_forgotten(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(602, B)
    assert list(watch.detector._watched) == [B]
