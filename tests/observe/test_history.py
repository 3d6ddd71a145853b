"""The history of the traffic: samples over all workers, and what happens if a worker or a sample is missing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from proxy.observe.history import NAMES, SAMPLES, STEP_SECONDS, HistoryBoard, TrafficHistory, WorkerTraffic

BOUNDS = (0.1, 1.0, math.inf)


def report(tokens: float = 0.0, first_tokens: tuple[float, ...] = (0, 0, 0), **changes: Any) -> WorkerTraffic:
    values = {"in_flight": 2, "queued": 1, "streamed": {}, **changes}
    return WorkerTraffic(tokens=tokens, first_tokens=first_tokens, **values)


def added(history: TrafficHistory, now: float, *reports: WorkerTraffic) -> dict[str, Any]:
    found = history.add_sample(dict(enumerate(reports)), now, now)
    assert found is not None
    return dict(found)


def test_sample_has_the_growth_of_all_workers() -> None:
    history = TrafficHistory(BOUNDS)
    assert history.is_due(0.0)
    assert history.add_sample({0: report(100.0), 1: report(7.0)}, 0.0, 0.0) is None
    assert not history.is_due(4.9)
    found = added(history, 5.0, report(150.0, (4, 0, 0), streamed={"d:1": 20}), report(57.0, streamed={"d:1": 30}))
    assert found["samples"] == [(20.0, 4, 2, pytest.approx(0.095))]
    assert found["instances"] == {"d:1": 10.0}
    assert found["names"] == NAMES


def test_counts_of_a_replaced_worker_begin_at_zero() -> None:
    history = TrafficHistory(BOUNDS)
    history.add_sample({0: report(100.0)}, 0.0, 0.0)
    assert added(history, 5.0, report(30.0))["samples"][-1][0] == 6.0


def test_history_has_a_bounded_number_of_samples() -> None:
    history = TrafficHistory(BOUNDS)
    history.add_sample({0: report()}, 0.0, 0.0)
    for step in range(1, SAMPLES + 10):
        found = added(history, step * STEP_SECONDS, report(float(step)))
    assert len(found["samples"]) == SAMPLES


def test_worker_that_replaces_another_continues_the_history() -> None:
    before, board = TrafficHistory(BOUNDS), HistoryBoard()
    before.add_sample({0: report()}, 0.0, 0.0)
    board.publish_history(added(before, 5.0, report(50.0)))
    after = TrafficHistory(BOUNDS, board.published_history())
    assert after.add_sample({0: report()}, 12.0, 12.0) is None
    samples = added(after, 17.0, report(10.0))["samples"]
    assert [sample[0] for sample in samples] == [10.0, None, 2.0]


def test_board_shows_no_clock_of_the_host_and_is_empty_at_first() -> None:
    board = HistoryBoard()
    assert board.history_for_clients()["samples"] == []
    assert board.rates_by_instance() == {}
    history = TrafficHistory(BOUNDS)
    history.add_sample({0: report()}, 0.0, 0.0)
    board.publish_history(added(history, 5.0, report(streamed={"d:1": 5})))
    assert set(board.history_for_clients()) == {"at", "step_seconds", "names", "samples", "instances"}
    assert board.rates_by_instance() == {"d:1": 1.0}
