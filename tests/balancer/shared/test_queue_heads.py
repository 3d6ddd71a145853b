"""Who is the next of several queues."""

from __future__ import annotations

import pytest

from proxy.balancer.shared.memory import AGEING, NO_HEAD, QueueHeads, WorkerQueueHead, encode_head, shift_head
from tests.forking import in_child


def _worker_fronts(workers: int = 2, guests: int = 0) -> tuple[QueueHeads, list[WorkerQueueHead]]:
    fronts = QueueHeads(workers, guests)
    return fronts, [front for number in range(workers) if (front := fronts.of_worker(number)) is not None]


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
    assert QueueHeads().of_worker(0) is None


def test_room_is_left_to_an_earlier_queue_head_once_and_briefly() -> None:
    fronts, (one, other) = _worker_fronts()
    assert not one.leaves_room(0, 5.0, 100.0)
    other.publish(0, 5.0)
    assert not one.leaves_room(0, 5.0, 100.0)  # nor to an equal, or both would
    other.publish(0, 4.0)
    assert one.leaves_room(0, 5.0, 100.0)
    assert one.leaves_room(0, 5.0, 100.04)
    assert not one.leaves_room(0, 5.0, 100.06)
    assert not one.leaves_room(0, 5.0, 100.07)  # it does not want this room
    other.publish(0, 3.0)
    assert one.leaves_room(0, 5.0, 100.08)
    assert not one.leaves_room(-1, 5.0, 100.08)
    other.publish_empty()
    assert not one.leaves_room(0, 5.0, 100.09)
    assert fronts.first_of_workers() == NO_HEAD


def test_other_gateways_count_as_one_more_queue() -> None:
    fronts, (one, other) = _worker_fronts(guests=1)
    fronts.put_guests(encode_head(0, 2.0))
    in_child(lambda: one.publish(0, 3.0))
    assert fronts.first_of_workers() == encode_head(0, 3.0)
    assert other.leaves_room(0, 2.5, 1.0)
    fronts.put_guests(NO_HEAD)
    assert not other.leaves_room(0, 2.5, 2.0)
    fronts.put(0, NO_HEAD)
    assert not other.leaves_room(0, 9.0, 3.0)
