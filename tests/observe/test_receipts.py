"""Receipts of finished requests: the latest of all workers, and failed ones for longer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.observe.logs import Redaction
from proxy.observe.observers import RequestObservers
from proxy.observe.receipts import Receipts
from proxy.observe.record import RequestRecord
from tests.clock import Clock

MIB = 1024 * 1024


def anything(receipt: Mapping[str, Any]) -> bool:
    return True


def ids(receipts: Receipts, limit: int = 1000) -> list[str]:
    return [receipt["id"] for receipt in receipts.latest_receipts(anything, limit)]


def worker(receipts: Receipts, number: int = 0) -> RequestObservers:
    return RequestObservers((receipts.writer_for(number, Redaction(["a-secret-key"])),))


def serve(
    observers: RequestObservers, name: str, clock: Clock | None = None, error: BaseException | None = None
) -> None:
    record = observers.begin_record("chat", name)
    if clock is not None:
        record.clock = clock
    record.error = error
    end(observers, record)


def end(observers: RequestObservers, record: RequestRecord) -> None:
    timeline = record.add_timeline()
    timeline.begin_attempt()
    timeline.enter_stage(Stage.PREFILL)
    timeline.end_attempt()
    observers.end_record(record)


def broken(message: str = "gone") -> UpstreamError:
    return UpstreamError(Failure.BROKEN, Backend(Role.DECODE, "10.0.0.1", 80), message)


def test_receipts_of_all_workers_are_sorted_by_their_end(clock: Clock) -> None:
    receipts = Receipts(3, MIB)
    for number in range(30):
        clock.now += 1
        serve(worker(receipts, number % 3), f"r{number}", clock, broken() if number % 5 == 0 else None)
    assert ids(receipts) == [f"r{number}" for number in reversed(range(30))]
    assert ids(receipts, 4) == ["r29", "r28", "r27", "r26"]
    assert [receipt["worker"] for receipt in receipts.latest_receipts(anything, 3)] == [2, 1, 0]


def test_receipts_of_failed_requests_are_kept_longer(clock: Clock) -> None:
    receipts = Receipts(1, 64 * 1024)
    observers = worker(receipts)
    serve(observers, "broken", clock, broken())
    for number in range(1000):
        clock.now += 1
        serve(observers, f"r{number}", clock)
    kept_ids = ids(receipts)
    assert kept_ids[0] == "r999"
    assert kept_ids[-1] == "broken"
    assert 20 < len(kept_ids) < 500


def test_receipts_of_a_dead_worker_stay_beside_its_successors() -> None:
    receipts = Receipts(2, MIB)
    child = os.fork()
    if not child:
        serve(worker(receipts, 1), "before")
        os._exit(0)
    os.waitpid(child, 0)
    serve(worker(receipts, 1), "after")
    assert ids(receipts) == ["after", "before"]


@pytest.mark.parametrize("size", [0, 100])
def test_no_receipt_is_kept_without_memory(size: int) -> None:
    receipts = Receipts(1, size)
    serve(worker(receipts), "r")
    assert ids(receipts) == []


def test_receipts_of_one_batch_are_all_kept() -> None:
    receipts = Receipts(1, MIB)
    observers = worker(receipts)
    with observers.collect_in_batches(lambda *_, **__: None):
        for number in range(100):
            end(observers, observers.begin_record("chat", f"r{number}"))
    assert ids(receipts) == [f"r{number}" for number in reversed(range(100))]


def test_texts_in_receipts_are_masked_cut_and_escaped() -> None:
    receipts = Receipts(1, MIB)
    observers = worker(receipts)
    record = observers.begin_record("chat", "r")
    record.model = "m\ud800" * 1000
    record.error = broken("a-secret-key \ud800" + "x" * 10_000)
    end(observers, record)
    [receipt] = receipts.latest_receipts(anything, 1)
    assert receipt["error"].startswith("*** \\ud800xx")
    assert receipt["model"].startswith("m\\ud800m")
    assert len(receipt["error"]) < 1000
    assert receipt["backend"] == "10.0.0.1:80"


def test_receipt_of_many_units_has_the_first_attempts() -> None:
    receipts = Receipts(1, MIB)
    observers = worker(receipts)
    record = observers.begin_record("chat", "r")
    for _ in range(40):
        timeline = record.add_timeline()
        timeline.begin_attempt()
        timeline.begin_attempt()
    observers.end_record(record)
    [receipt] = receipts.latest_receipts(anything, 1)
    assert (receipt["units"], receipt["attempts"]) == (40, 80)
    assert len(receipt["history"]) + receipt["attempts_left_out"] == 80
    assert [attempt["unit"] for attempt in receipt["history"][:4]] == [0, 0, 1, 1]
