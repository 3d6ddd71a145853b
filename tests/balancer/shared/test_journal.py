"""What workers tell each other: in order, whole, and without waiting for those who do not read."""

from __future__ import annotations

import os

import pytest

from proxy.balancer.shared.journal import Journal


def test_each_hears_all_others_and_not_itself() -> None:
    journal = Journal(workers=3)
    seats = [journal.writer(number) for number in range(3)]
    seats[0].write(b"a")
    seats[1].write(b"b")
    seats[0].write(b"")
    assert [list(seat.new_records()) for seat in seats] == [[b"b"], [b"a", b""], [b"a", b"", b"b"]]
    assert not any(seat.has_new_records for seat in seats)


def test_there_is_news_until_it_was_read() -> None:
    journal = Journal(workers=2)
    writer, reader = journal.writer(0), journal.writer(1)
    writer.write(b"a")
    assert (writer.has_new_records, reader.has_new_records) == (False, True)
    assert list(reader.new_records()) == [b"a"]
    assert not reader.has_new_records


def test_records_go_on_at_the_start_of_the_ring() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    writer, reader = journal.writer(0), journal.writer(1)
    for number in range(100):
        writer.write(bytes([number]) * (number % 40))
        assert list(reader.new_records()) == [bytes([number]) * (number % 40)]


def test_who_was_overtaken_goes_on_with_what_comes_then() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    writer, reader = journal.writer(0), journal.writer(1)
    for number in range(100):
        writer.write(bytes([number]) * 30)
    assert list(reader.new_records()) == []
    writer.write(b"new")
    assert list(reader.new_records()) == [b"new"]


def test_a_record_that_is_not_there_yet_is_read_later() -> None:
    journal = Journal(workers=2)
    writer, reader = journal.writer(0), journal.writer(1)
    writer.write(b"first")
    place = journal.written[0]
    writer.write(b"second")
    whole = journal.get(0, place + 24, 6)
    journal.put(0, place + 24, b"sec\0\0\0")
    assert list(reader.new_records()) == [b"first"]
    journal.put(0, place + 24, whole)
    assert list(reader.new_records()) == [b"second"]


def test_what_would_fill_the_ring_is_left_out() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    journal.writer(0).write(b"x" * 100)
    assert not journal.writer(1).has_new_records


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_a_forked_worker_is_heard() -> None:
    journal = Journal(workers=2)
    reader = journal.writer(0)
    child = os.fork()
    if not child:
        journal.writer(1).write(b"from the child")
        os._exit(0)
    os.waitpid(child, 0)
    assert list(reader.new_records()) == [b"from the child"]


def test_what_is_there_is_read_backwards_by_anybody() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    assert list(journal.latest(0)) == []
    writer = journal.writer(0)
    for number in range(20):
        writer.write(bytes([number]) * 8)
        latest = [record[0] for record in journal.latest(0)]
        assert latest == list(range(number, number - len(latest), -1))
    assert len(latest) == 8  # 32 bytes each
    assert list(journal.latest(1)) == []


def test_reading_backwards_ends_at_what_is_not_whole() -> None:
    journal = Journal(workers=1)
    writer = journal.writer(0)
    places = []
    for number in range(4):
        places.append(journal.written[0])
        writer.write(bytes([number]) * 8)
    journal.put(0, places[1] + 24, b"torn")
    assert [record[0] for record in journal.latest(0)] == [3, 2]


def test_a_teller_is_heard_by_all_workers_and_one_worker_alone_by_nobody() -> None:
    journal = Journal(workers=1, write_only=1)
    worker, teller = journal.writer(0), journal.writer(1)
    teller.write(b"counted")
    assert worker.has_new_records
    assert list(worker.new_records()) == [b"counted"]
    assert not worker.has_readers
    assert Journal(workers=2).writer(0).has_readers
