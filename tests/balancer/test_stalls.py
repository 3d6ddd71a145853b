"""Detection of backends that have stopped sending while others go on."""

from __future__ import annotations

import pytest

from proxy.balancer.stalls import StallDetector
from proxy.common.backend import Backend, Role

BACKENDS = {name: Backend(Role.DECODE, name, 1) for name in "ABC"} | {"P": Backend(Role.PREFILL, "P", 1)}
STALL_SECONDS = 30.0


class Watch:
    """Stall detector with a clock."""

    def __init__(self) -> None:
        self.detector = StallDetector(STALL_SECONDS)
        self.now = 0.0

    def look(self, words: str) -> str:
        """Look once a second at streams, and return the backends found stalled in each word, or `-`.

        A word has the number of seconds, the backends that send, and after `/` those that are silent. Other backends
        have no streams.
        """
        found = []
        for word in words.split():
            seconds, _, streams = word.partition(":")
            moving, _, silent = streams.partition("/")
            picture = {BACKENDS[name]: False for name in silent} | {BACKENDS[name]: True for name in moving}
            stalled: list[Backend] = []
            for _ in range(int(seconds)):
                self.now += 1
                stalled += self.detector.find_stalled_backends(self.now, picture)
            found.append("".join(backend.host for backend in stalled) or "-")
        return " ".join(found)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param("1:AB 30:B/A 1:B/A", "- - A", id="silent while a peer sends"),
        # The long silence from which A recovered is forgotten after 602 s.
        pytest.param("1:AB 300:B/A 602:AB 300:B/A", "- A - A", id="once per silence"),
        pytest.param("1:AB 300:B 30:B/A 2:B/A", "- - - A", id="silent only while there are streams"),
        pytest.param("20:B/A 1:B 30:B/A", "- - -", id="the end of all streams ends the silence"),
        pytest.param("1:A 3600:/A", "- -", id="no peer"),
        pytest.param("1:AB 3600:/A", "- -", id="a peer without streams"),
        pytest.param("1:AP 3600:P/A", "- -", id="a peer of another role"),
        # A network does not fail for all backends in the same second. They are stalled once one of them goes on.
        pytest.param("1:ABC 1:BC/A 1:C/AB 3600:/ABC 1:B/AC", "- - - - AC", id="all are silent"),
        pytest.param("1:AB 19:B/A 1:AB 60:B/A 1:B/A", "- - - - A", id="more time after a recovery from 20 s"),
        pytest.param("1:ABC 19:AB/C 1:ABC 31:BC/A", "- - - A", id="no more time after a recovery of another backend"),
        pytest.param("1:AB 19:B/A 601:AB 31:B/A", "- - - A", id="no more time after an old recovery"),
        pytest.param("1:AB 29:B/A 1:B 32:B/A", "- - - A", id="no more time when the clients left"),
    ],
)
def test_backend_is_stalled_when_it_is_silent_for_too_long(watch: Watch, words: str, found: str) -> None:
    assert watch.look(words) == found


def test_time_in_which_the_gateway_did_not_read_does_not_count(watch: Watch) -> None:
    watch.look("1:AB 20:B/A")
    watch.now += 500
    assert (
        watch.detector.find_stalled_backends(watch.now, {BACKENDS["A"]: False, BACKENDS["B"]: False}, lost_seconds=500)
        == []
    )
    assert watch.look("10:B/A 1:B/A") == "- A"


def test_silence_while_the_gateway_did_not_read_gives_no_more_time(watch: Watch) -> None:
    watch.look("1:AB")
    watch.now += 500
    watch.detector.find_stalled_backends(watch.now, {BACKENDS["A"]: True, BACKENDS["B"]: True}, lost_seconds=499)
    assert watch.look("31:B/A") == "A"


def test_stall_seconds_can_be_changed(watch: Watch) -> None:
    watch.look("1:AB")
    watch.detector.stall_seconds = 10.0
    assert watch.look("11:B/A") == "A"


def test_stall_detector_drops_backends_without_streams(watch: Watch) -> None:
    watch.look("1:AB 602:B")
    assert list(watch.detector._watched_backends) == [BACKENDS["B"]]
