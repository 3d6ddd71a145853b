"""What workers tell each other: in order, whole, and without waiting for those who do not read."""

from __future__ import annotations

import os

import pytest

from proxy.balancer.shared.journal import Journal


def test_writer_reads_the_records_of_all_others() -> None:
    journal = Journal(workers=3)
    writers = [journal.writer_for(number) for number in range(3)]
    writers[0].write_record(b"a")
    writers[1].write_record(b"b")
    writers[0].write_record(b"")
    assert [list(writer.new_records()) for writer in writers] == [[b"b"], [b"a", b""], [b"a", b"", b"b"]]
    assert not any(writer.has_new_records for writer in writers)


def test_journal_has_new_records_until_they_are_read() -> None:
    journal = Journal(workers=2)
    writer, reader = journal.writer_for(0), journal.writer_for(1)
    writer.write_record(b"a")
    assert (writer.has_new_records, reader.has_new_records) == (False, True)
    assert list(reader.new_records()) == [b"a"]
    assert not reader.has_new_records


def test_records_wrap_around_at_the_end_of_the_ring() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    writer, reader = journal.writer_for(0), journal.writer_for(1)
    for number in range(100):
        writer.write_record(bytes([number]) * (number % 40))
        assert list(reader.new_records()) == [bytes([number]) * (number % 40)]


def test_overtaken_reader_continues_with_later_records() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    writer, reader = journal.writer_for(0), journal.writer_for(1)
    for number in range(100):
        writer.write_record(bytes([number]) * 30)
    assert list(reader.new_records()) == []
    writer.write_record(b"new")
    assert list(reader.new_records()) == [b"new"]


def test_record_that_is_not_complete_is_read_later() -> None:
    journal = Journal(workers=2)
    writer, reader = journal.writer_for(0), journal.writer_for(1)
    writer.write_record(b"first")
    place = journal.written_bytes_by_ring[0]
    writer.write_record(b"second")
    whole = journal.read_bytes(0, place + 24, 6)
    journal.write_bytes(0, place + 24, b"sec\0\0\0")
    assert list(reader.new_records()) == [b"first"]
    journal.write_bytes(0, place + 24, whole)
    assert list(reader.new_records()) == [b"second"]


def test_record_that_would_fill_the_ring_is_left_out() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    journal.writer_for(0).write_record(b"x" * 100)
    assert not journal.writer_for(1).has_new_records


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_records_of_a_forked_worker_are_read() -> None:
    journal = Journal(workers=2)
    reader = journal.writer_for(0)
    child = os.fork()
    if not child:
        journal.writer_for(1).write_record(b"from the child")
        os._exit(0)
    os.waitpid(child, 0)
    assert list(reader.new_records()) == [b"from the child"]


def test_latest_records_are_read_newest_first() -> None:
    journal = Journal(workers=2, ring_bytes=256)
    assert list(journal.latest_records(0)) == []
    writer = journal.writer_for(0)
    for number in range(20):
        writer.write_record(bytes([number]) * 8)
        latest = [record[0] for record in journal.latest_records(0)]
        assert latest == list(range(number, number - len(latest), -1))
    assert len(latest) == 8  # 32 bytes each
    assert list(journal.latest_records(1)) == []


def test_latest_records_end_at_a_torn_record() -> None:
    journal = Journal(workers=1)
    writer = journal.writer_for(0)
    places = []
    for number in range(4):
        places.append(journal.written_bytes_by_ring[0])
        writer.write_record(bytes([number]) * 8)
    journal.write_bytes(0, places[1] + 24, b"torn")
    assert [record[0] for record in journal.latest_records(0)] == [3, 2]


def test_worker_reads_a_write_only_ring_and_has_no_readers_alone() -> None:
    journal = Journal(workers=1, write_only_rings=1)
    worker, teller = journal.writer_for(0), journal.writer_for(1)
    teller.write_record(b"counted")
    assert worker.has_new_records
    assert list(worker.new_records()) == [b"counted"]
    assert not worker.has_readers
    assert Journal(workers=2).writer_for(0).has_readers
