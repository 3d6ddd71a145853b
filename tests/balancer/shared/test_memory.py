"""Memory that forked processes share: values, logged states and queue heads."""

from __future__ import annotations

import os

import pytest

from proxy.balancer.shared.memory import (
    AGEING,
    NO_HEAD,
    LogOnce,
    QueueHeads,
    SharedValue,
    WorkerQueueHead,
    encode_head,
    shift_head,
)
from tests.forking import in_child


@pytest.fixture
def shared() -> SharedValue:
    value = SharedValue("list", 100)
    value.write_value(["first"])
    return value


def test_shared_value_is_visible_to_another_process(shared: SharedValue) -> None:
    def write() -> None:
        with shared.hold_writer_lock():
            shared.write_value(["second"])

    assert shared.read_version_and_value() == (1, ["first"])
    in_child(write)
    assert shared.current_version == 2
    assert shared.read_version_and_value() == (2, ["second"])


def test_prepared_value_is_invisible_before_its_commit(shared: SharedValue) -> None:
    with shared.hold_writer_lock():
        commit = shared.prepare_value(["second"])
        assert shared.read_version_and_value() == (1, ["first"])
        commit()
    assert shared.read_version_and_value() == (2, ["second"])


def test_prepared_value_may_be_dropped(shared: SharedValue) -> None:
    with shared.hold_writer_lock():
        shared.prepare_value(["given up"])
    with shared.hold_writer_lock():
        shared.write_value(["second"])
    assert shared.read_version_and_value() == (2, ["second"])


def test_value_that_does_not_fit_is_rejected(shared: SharedValue) -> None:
    with shared.hold_writer_lock(), pytest.raises(ValueError, match=r"^the list is too long$"):
        shared.write_value(["x" * 100])
    assert shared.read_version_and_value() == (1, ["first"])


def test_writer_that_dies_half_way_does_no_harm(shared: SharedValue) -> None:
    def die() -> None:
        with shared.hold_writer_lock():
            start = shared._place_start((shared.current_version + 1) % 2)
            shared._shared_memory[start : start + 20] = b"x" * 20
            os._exit(0)

    in_child(die)
    assert shared.read_version_and_value() == (1, ["first"])
    with shared.hold_writer_lock():  # which the dead one held
        shared.write_value(["second"])
    in_child(lambda: shared.read_version_and_value())
    assert shared.read_version_and_value() == (2, ["second"])


# Logged states


def test_same_state_of_a_subject_is_news_once() -> None:
    log_once = LogOnce()
    told = [("a", "up"), ("b", "up"), ("a", "up"), ("a", "down"), ("b", "up"), ("a", "up")]
    assert [log_once.is_news(subject, word) for subject, word in told] == [True, True, False, True, False, True]


def test_state_of_a_forgotten_subject_is_news_again() -> None:
    log_once = LogOnce()
    log_once.is_news("a", "up")
    log_once.is_news("b", "up")
    log_once.forget_subject("a")
    log_once.forget_subject("never told")
    assert (log_once.is_news("a", "up"), log_once.is_news("b", "up")) == (True, False)


def test_state_logged_by_another_process_is_no_news() -> None:
    log_once = LogOnce()
    in_child(lambda: log_once.is_news("a", "up"))
    assert not log_once.is_news("a", "up")


def test_one_of_many_simultaneous_processes_logs_a_change() -> None:
    log_once = LogOnce()
    begin, go = os.pipe()
    pids = []
    for _ in range(8):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.read(begin, 1)  # ends when the last one is there
            os._exit(sum(log_once.is_news(str(subject), "up") for subject in range(20)))
        pids.append(pid)
    os.close(go)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids) == 20
    os.close(begin)


def test_full_record_logs_a_change_again() -> None:
    log_once = LogOnce(100)
    assert all(log_once.is_news(f"decode 10.0.0.1:{port}", "up") for port in range(7100, 7110))
    assert not log_once.is_news("decode 10.0.0.1:7109", "up")
    assert log_once.is_news("decode 10.0.0.1:7100", "up")


# Queue heads


def _worker_fronts(workers: int = 2, guests: int = 0) -> tuple[QueueHeads, list[WorkerQueueHead]]:
    fronts = QueueHeads(workers, guests)
    return fronts, [front for number in range(workers) if (front := fronts.view_of_worker(number)) is not None]


def test_queue_heads_are_ordered_by_priority_then_work_and_arrival() -> None:
    in_order = [(-2000, 900.0), (-1, 50.0), (0, 10.0), (0, 10.5), (3, 0.0), (9999, 1.0)]
    fronts = [encode_head(*rank) for rank in in_order]
    assert fronts == sorted(fronts)
    assert NO_HEAD not in fronts


@pytest.mark.parametrize("priority", [-3, 0, 7])
def test_queue_head_is_shifted_to_the_clock_of_another_host(priority: int) -> None:
    came, offset = 1000.0, -250.0
    there = encode_head(priority, 2.0 + AGEING * (came + offset))
    assert shift_head(there, -offset) == encode_head(priority, 2.0 + AGEING * came)
    assert shift_head(there, -1e9) == encode_head(priority, 0.0)  # nonsense is no other priority


def test_single_queue_has_no_queue_head() -> None:
    assert QueueHeads().view_of_worker(0) is None


def test_room_is_left_to_an_earlier_queue_head_once_and_briefly() -> None:
    fronts, (one, other) = _worker_fronts()
    assert not one.should_yield_to_earlier(0, 5.0, 100.0)
    other.publish_head(0, 5.0)
    assert not one.should_yield_to_earlier(0, 5.0, 100.0)  # nor to an equal, or both would
    other.publish_head(0, 4.0)
    assert one.should_yield_to_earlier(0, 5.0, 100.0)
    assert one.should_yield_to_earlier(0, 5.0, 100.04)
    assert not one.should_yield_to_earlier(0, 5.0, 100.06)
    assert not one.should_yield_to_earlier(0, 5.0, 100.07)  # it does not want this room
    other.publish_head(0, 3.0)
    assert one.should_yield_to_earlier(0, 5.0, 100.08)
    assert not one.should_yield_to_earlier(-1, 5.0, 100.08)
    other.publish_empty()
    assert not one.should_yield_to_earlier(0, 5.0, 100.09)
    assert fronts.first_head_of_workers() == NO_HEAD


def test_other_gateways_count_as_one_more_queue() -> None:
    fronts, (one, other) = _worker_fronts(guests=1)
    fronts.write_guest_head(encode_head(0, 2.0))
    in_child(lambda: one.publish_head(0, 3.0))
    assert fronts.first_head_of_workers() == encode_head(0, 3.0)
    assert other.should_yield_to_earlier(0, 2.5, 1.0)
    fronts.write_guest_head(NO_HEAD)
    assert not other.should_yield_to_earlier(0, 2.5, 2.0)
    fronts.write_head(0, NO_HEAD)
    assert not other.should_yield_to_earlier(0, 9.0, 3.0)
