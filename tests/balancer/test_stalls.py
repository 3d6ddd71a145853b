"""Detection of backends that have stopped sending while others go on."""

from __future__ import annotations

import pytest

from proxy.balancer.stalls import StallDetector
from proxy.common.backend import Backend, Role

A, B, C = (Backend(Role.DECODE, "127.0.0.1", port) for port in (1, 2, 3))
PREFILLER = Backend(Role.PREFILL, "127.0.0.1", 4)
STALL = 30.0


class Watch:
    """Stall detector with a clock."""

    def __init__(self, stall_seconds: float = STALL) -> None:
        self.detector = StallDetector(stall_seconds)
        self.now = 0.0
        self.found: list[Backend] = []

    def looks(self, seconds: int, *moving: Backend, silent: tuple[Backend, ...] = ()) -> list[Backend]:
        """Look once a second at the same streams, and return the stalled backends. Other backends have no streams."""
        found = []
        for _ in range(seconds):
            self.now += 1
            picture = dict.fromkeys(silent, False) | dict.fromkeys(moving, True)
            found += self.detector.observe(self.now, picture)
        return found


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_backend_is_stalled_when_it_is_silent_while_a_peer_sends(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(30, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_stall_is_reported_once_per_silence(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(300, B, silent=(A,)) == [A]
    watch.looks(602, A, B)  # until the long silence it came back from is forgotten
    assert watch.looks(300, B, silent=(A,)) == [A]


def test_backend_without_streams_is_not_silent(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(300, B) == []
    assert watch.looks(30, B, silent=(A,)) == []  # its first stream has been silent for less than that
    assert watch.looks(2, B, silent=(A,)) == [A]


def test_end_of_all_streams_ends_the_silence(watch: Watch) -> None:
    assert watch.looks(20, B, silent=(A,)) == []
    watch.looks(1, B)
    assert watch.looks(30, B, silent=(A,)) == []


def test_only_backend_is_never_stalled(watch: Watch) -> None:
    watch.looks(1, A)
    assert watch.looks(3600, silent=(A,)) == []


def test_backend_is_not_stalled_while_its_peers_have_no_streams(watch: Watch) -> None:
    watch.looks(1, A, B)
    assert watch.looks(3600, silent=(A,)) == []


def test_no_backend_is_stalled_while_all_are_silent(watch: Watch) -> None:
    watch.looks(1, A, B, C)
    watch.looks(1, B, C, silent=(A,))  # a network does not fail for all of them in the same second
    watch.looks(1, C, silent=(A, B))
    assert watch.looks(3600, silent=(A, B, C)) == []
    assert watch.looks(1, B, silent=(A, C)) == [A, C]  # until one of them goes on


def test_backend_of_another_role_is_no_peer(watch: Watch) -> None:
    watch.looks(1, A, PREFILLER)
    assert watch.looks(3600, PREFILLER, silent=(A,)) == []


def test_backend_that_recovered_from_a_silence_gets_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(19, B, silent=(A,))
    watch.looks(1, A, B)  # 20 s it was
    assert watch.looks(60, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_silences_of_other_backends_give_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B, C)
    watch.looks(19, A, B, silent=(C,))
    watch.looks(1, A, B, C)
    assert watch.looks(31, B, C, silent=(A,)) == [A]


def test_old_silences_give_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(19, B, silent=(A,))
    watch.looks(601, A, B)
    assert watch.looks(31, B, silent=(A,)) == [A]


def test_silence_without_recovery_gives_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(29, B, silent=(A,))
    watch.looks(1, B)  # its clients have left
    assert watch.looks(32, B, silent=(A,)) == [A]


def test_time_in_which_the_gateway_did_not_read_does_not_count(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(20, B, silent=(A,))
    watch.now += 500
    assert watch.detector.observe(watch.now, {A: False, B: False}, lost_seconds=500) == []
    assert watch.looks(10, B, silent=(A,)) == []
    assert watch.looks(1, B, silent=(A,)) == [A]


def test_silence_while_the_gateway_did_not_read_gives_no_more_time(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.now += 500
    watch.detector.observe(watch.now, {A: True, B: True}, lost_seconds=499)
    assert watch.looks(31, B, silent=(A,)) == [A]


def test_stall_seconds_can_be_changed(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.detector.stall_seconds = 10.0
    assert watch.looks(11, B, silent=(A,)) == [A]


def test_stall_detector_drops_backends_without_streams(watch: Watch) -> None:
    watch.looks(1, A, B)
    watch.looks(602, B)
    assert list(watch.detector._watched) == [B]
