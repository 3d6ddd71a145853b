"""How late the event loop was, between two times."""

from __future__ import annotations

from proxy.process.loop_lag import LoopLag


def noted(*delays: tuple[float, float]) -> LoopLag:
    lag = LoopLag()
    for delay in delays:
        lag.add_lag(*delay)
    return lag


def test_lag_within_two_times_is_the_longest_that_was_noted_between_them() -> None:
    lag = noted((1.0, 0.5), (2.0, 0.1), (3.0, 0.2), (4.0, 0.0), (5.0, 0.9))
    assert lag.longest_lag_within(0.5, 3.5) == 0.5
    assert lag.longest_lag_within(1.5, 3.5) == 0.2
    assert lag.longest_lag_within(3.5, 4.0) == 0.0


def test_lag_that_was_noted_first_after_the_second_time_counts() -> None:
    lag = noted((1.0, 0.0), (2.0, 0.4), (3.0, 0.7))
    assert lag.longest_lag_within(0.5, 1.9) == 0.4
    assert lag.longest_lag_within(0.5, 2.0) == 0.4
    assert lag.longest_lag_within(0.5, 2.1) == 0.7


def test_lag_is_not_known_before_it_was_measured_after_the_second_time() -> None:
    lag = LoopLag()
    assert lag.longest_lag_within(0.5, 1.0) is None
    lag.add_lag(2.0, 0.0)
    assert lag.longest_lag_within(1.0, 2.5) is None
    lag.add_lag(3.0, 0.7)
    assert lag.longest_lag_within(1.0, 2.5) == 0.7


def test_old_lags_are_forgotten() -> None:
    lag = noted((1.0, 0.5), (1000.0, 0.1))
    assert lag.longest_lag_since(0.0) == 0.1
