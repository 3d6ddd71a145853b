"""Which workers stand still, told from how often their event loops have turned."""

from __future__ import annotations

from proxy.process.shared import Heartbeats
from proxy.process.supervisor.supervisor import Watchdog
from tests.forking import in_child


class Workers:
    """A watchdog that looks once a second, as long as it runs itself, and workers that turn between two looks."""

    def __init__(self, *workers: int, timeout_seconds: float = 30.0) -> None:
        self.now = 1000.0
        self.counts = dict.fromkeys(workers, 0)
        self._watchdog = Watchdog(timeout_seconds, self.now)

    def passes(self, seconds: float, *turning: int) -> list[int]:
        """Let time pass; who is found frozen."""
        found = []
        until = self.now + seconds
        while self._watchdog.next_check_at <= until:
            self.now = self._watchdog.next_check_at
            for worker in turning:
                self.counts[worker] += 1
            found += self._watchdog.find_frozen_workers(self.now, self.counts)
        self.now = until
        return found

    def nothing_runs(self, seconds: float) -> list[int]:
        """Neither workers nor the watchdog do; who is found frozen at the first look."""
        self.now += seconds
        return self._watchdog.find_frozen_workers(self.now, self.counts)


def test_worker_with_a_running_loop_is_not_frozen() -> None:
    assert Workers(0, 1).passes(1000, 0, 1) == []


def test_only_the_worker_without_progress_is_frozen() -> None:
    workers = Workers(0, 1)
    assert workers.passes(5, 0, 1) == []
    assert workers.passes(29, 0) == []
    assert workers.passes(3, 0) == [1]


def test_turn_in_time_is_enough() -> None:
    workers = Workers(0)
    for _ in range(10):
        assert workers.passes(29) == []
        assert workers.passes(1, 0) == []


def test_worker_that_stays_frozen_is_reported_again_after_the_same_time() -> None:
    assert Workers(0).passes(95) == [0, 0, 0]


def test_new_worker_has_its_time() -> None:
    workers = Workers(0, 1)
    workers.passes(31, 0)
    del workers.counts[1]
    workers.passes(5, 0)
    workers.counts[1] = 0
    assert workers.passes(29, 0) == []
    assert workers.passes(3, 0) == [1]


def test_time_in_which_nothing_ran_says_nothing() -> None:
    """A container that was stopped, say."""
    workers = Workers(0, 1)
    workers.passes(20, 0)
    assert workers.nothing_runs(10_000) == []
    assert workers.passes(8, 0) == []
    assert workers.passes(4, 0) == [1]


def test_short_timeout_is_looked_at_often_enough() -> None:
    assert Workers(0, timeout_seconds=0.2).passes(0.3) == [0]


def test_heartbeats_are_shared_with_forked_workers() -> None:
    heartbeats = Heartbeats(3)
    in_child(lambda: heartbeats.record_beat(1))
    heartbeats.record_beat(1)
    assert heartbeats.counts_by_worker() == {0: 0, 1: 2, 2: 0}


def test_replacements_are_counted_by_reason() -> None:
    heartbeats = Heartbeats(2)
    for reason in ("died", "frozen", "died"):
        heartbeats.record_replacement(reason)
    assert heartbeats.replacements_by_reason() == {"died": 2, "frozen": 1}
    assert heartbeats.counts_by_worker() == {0: 0, 1: 0}
