"""The usage of client keys by hour: in the file, in the log, and after restarts."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from proxy.balancer.shared.memory import LogOnce
from proxy.common.errors import GatewayError
from proxy.observe.key_usage import HOUR_SECONDS, KeyAccounts
from proxy.observe.metrics import Metrics
from proxy.observe.usage_ledger import KEPT_HOURS, HourUsage, UsageKeeper, UsageLedger
from tests.asking import until

HOUR = 400_000


class Process:
    """A gateway process with two workers."""

    def __init__(self, name: str, path: Path | None, hour: float = HOUR) -> None:
        self.now = (hour + 0.5) * HOUR_SECONDS
        self.slots = {"a": 0, "b": 1}
        self.path = path
        self.accounts = KeyAccounts(workers=2, slots=4)
        self.ledgers = [
            UsageLedger(self.accounts, name, lambda: self.slots, lambda: self.path, lambda: self.now) for _ in range(2)
        ]

    def serve(self, key: str, requests: int = 1, tokens: int = 10, worker: int = 0) -> None:
        values = [requests, 0, 0, 0, 0, tokens, 0, 0, 0, 0]
        self.accounts.add_values(worker, self.slots.get(key, 4), key, int(self.now) // HOUR_SECONDS, values)

    def report(self, since: int = 0, worker: int = 0) -> list[tuple[int, str, int, int]]:
        """Return hour, key, requests and prompt tokens of each row."""
        return _short(self.ledgers[worker].report_usage(since))

    def ended(self, worker: int = 0) -> list[tuple[int, str, int, int]]:
        return _short(self.ledgers[worker].save_and_take_ended_hours())


def _short(rows: Sequence[object]) -> list[tuple[int, str, int, int]]:
    return [(row.hour - HOUR, row.key, row.account[0], row.account[5]) for row in rows]  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def test_usage_of_all_workers_is_reported_by_any(path: Path) -> None:
    process = Process("one", path)
    process.serve("a", tokens=10, worker=0)
    process.serve("a", tokens=5, worker=1)
    process.serve("-", worker=1)
    expected = [(0, "-", 1, 10), (0, "a", 2, 15)]
    assert process.report(worker=0) == process.report(worker=1) == process.report(worker=0) == expected
    process.serve("a", tokens=1)
    assert process.report(worker=1) == [(0, "-", 1, 10), (0, "a", 3, 16)]


def test_usage_survives_a_restart_and_adds_up(path: Path) -> None:
    before = Process("one", path)
    before.serve("a", tokens=10)
    before.ledgers[0].save_accounts()
    after = Process("two", path)
    assert after.report() == [(0, "a", 1, 10)]
    after.serve("a", tokens=3)
    assert after.report() == [(0, "a", 2, 13)]


def test_older_account_of_another_worker_does_not_replace_a_newer_one(path: Path) -> None:
    process = Process("one", path)
    process.serve("a", tokens=10)
    slow = UsageLedger(process.accounts, "one", lambda: process.slots, lambda: path, lambda: process.now)
    accounts = list(slow._usage_by_slot())
    process.serve("a", tokens=10)
    process.ledgers[0].save_accounts()
    slow._usage_by_slot = lambda: iter(accounts)  # type: ignore[method-assign]
    slow.save_accounts()
    assert process.report() == [(0, "a", 2, 20)]


def test_file_is_not_written_without_new_requests(path: Path) -> None:
    process = Process("one", path)
    process.serve("a")
    process.ledgers[0].save_accounts()
    before = path.read_bytes()  # has a counter of changes
    process.ledgers[0].save_accounts()
    process.ledgers[1].save_accounts()
    assert path.read_bytes() == before
    process.serve("a")
    process.ledgers[0].save_accounts()
    assert path.read_bytes() != before


def test_new_file_after_a_reload_has_the_present_hour(path: Path) -> None:
    process = Process("one", path)
    process.serve("a")
    process.ledgers[0].save_accounts()
    process.path = path.with_name("other.db")
    assert process.report() == [(0, "a", 1, 10)]


def test_processes_write_the_same_file_at_the_same_time(path: Path) -> None:
    processes = [Process(str(number), path) for number in range(4)]

    def work(process: Process) -> None:
        for _ in range(20):
            process.serve("a", tokens=1)
            process.ledgers[0].save_accounts()

    threads = [threading.Thread(target=work, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert processes[0].report() == [(0, "a", 80, 80)]


def test_report_begins_with_the_hour_of_since(path: Path) -> None:
    process = Process("one", path)
    for _ in range(3):
        process.serve("a")
        process.ledgers[0].save_accounts()
        process.now += HOUR_SECONDS
    assert process.report(HOUR + 1) == [(1, "a", 1, 10), (2, "a", 1, 10)]


def test_usage_is_kept_for_31_days(path: Path) -> None:
    process = Process("one", path)
    process.serve("a")
    process.ended()
    process.now += (KEPT_HOURS - 1) * HOUR_SECONDS
    process.ended()
    assert process.report() == [(0, "a", 1, 10)]
    process.now += 2 * HOUR_SECONDS
    process.ended()
    assert process.report() == []


def test_each_hour_is_logged_once_with_the_usage_of_all_processes(path: Path) -> None:
    one, two = Process("one", path), Process("two", path)
    one.serve("a", tokens=10)
    two.serve("a", tokens=20)
    two.ledgers[1].save_accounts()
    assert one.ended() == two.ended() == []
    for process in (one, two):
        process.now += 0.5 * HOUR_SECONDS + 10
        assert process.ended() == []  # the other one may not have written yet
        process.now += 30
    assert one.ended() == [(0, "a", 2, 30)]
    assert two.ended() == one.ended() == []
    later = Process("three", path, hour=HOUR + 1)
    assert later.ended() == []


def test_hour_that_ended_while_no_process_ran_is_logged(path: Path) -> None:
    before = Process("one", path)
    assert before.ended() == []
    before.serve("a")
    before.ledgers[0].save_accounts()
    assert Process("two", path, hour=HOUR + 5).ended() == [(0, "a", 1, 10)]


def test_two_hours_are_known_without_a_file() -> None:
    process = Process("one", None)
    process.serve("a", tokens=1)
    process.now += HOUR_SECONDS
    process.serve("b", tokens=2)
    assert process.report() == [(0, "a", 1, 1), (1, "b", 1, 2)]
    assert process.ended() == [(0, "a", 1, 1)]
    assert process.ended(worker=1) == []
    process.now += HOUR_SECONDS
    assert process.report() == [(1, "b", 1, 2)]


def test_key_that_is_removed_keeps_its_usage(path: Path) -> None:
    process = Process("one", path)
    process.serve("b")
    process.ledgers[0].save_accounts()
    process.slots = {"a": 0}
    process.accounts.add_values(0, 1, "b", HOUR, [1, 0, 0, 0, 0, 7, 0, 0, 0, 0])
    assert process.report() == [(0, "b", 2, 17)]
    process.slots = {"a": 0, "c": 1}
    process.serve("c")
    process.slots = {"a": 0, "c": 1, "b": 2}
    process.serve("b")
    assert process.report() == [(0, "b", 3, 27), (0, "c", 1, 10)]


def test_row_has_the_hour_as_a_time(path: Path) -> None:
    process = Process("one", path, hour=0)
    process.accounts.add_values(0, 0, "a", 0, [3, 1, 0, 0, 1, 10, 4, 5, 1_500_000, 250_000])
    (row,) = process.ledgers[0].report_usage(0)
    assert row.to_json() == {
        "hour": "1970-01-01T00:00:00Z",
        "key": "a",
        "requests": 5,
        "ok": 3,
        "failed": 1,
        "limited": 0,
        "rejected": 0,
        "left": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "prefill_seconds": 1.5,
        "decode_seconds": 0.25,
    }


# The keeper


@pytest.mark.parametrize("is_logging", [True, False])
async def test_keeper_saves_at_its_end(path: Path, is_logging: bool) -> None:
    process = Process("one", path)
    async with UsageKeeper(
        process.ledgers[0], Metrics().background_restarts_total, LogOnce().is_news, is_logging=is_logging
    ):
        process.serve("a")
    assert Process("two", path).report() == [(0, "a", 1, 10)]


async def test_keeper_logs_one_line_per_key_and_hour(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = Process("one", path)
    for key in ("-", "a", "b"):  # requests without a key are in the report only
        before.serve(key)
    before.ledgers[0].save_accounts()
    after = Process("two", path, hour=HOUR + 1)
    async with UsageKeeper(after.ledgers[0], Metrics().background_restarts_total, LogOnce().is_news, is_logging=True):
        await until(lambda: len(caplog.records) == 2, "two lines")
    assert {record.getMessage() for record in caplog.records} == {"key usage: hour ended"}
    assert [record.fields["key"] for record in caplog.records] == ["a", "b"]  # type: ignore[attr-defined]


async def test_report_does_not_delay_the_event_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A month of a hundred keys takes 0.4 s."""
    process = Process("one", path)
    process.serve("a")
    process.serve("b")
    threads: list[threading.Thread] = []
    to_json = HourUsage.to_json

    def watched(usage: HourUsage) -> dict[str, object]:
        threads.append(threading.current_thread())
        return to_json(usage)

    monkeypatch.setattr(HourUsage, "to_json", watched)
    async with UsageKeeper(
        process.ledgers[0], Metrics().background_restarts_total, LogOnce().is_news, is_logging=False
    ) as keeper:
        assert [row["key"] for row in orjson.loads(await keeper.report_as_json(0, "a"))] == ["a"]
        assert len(orjson.loads(await keeper.report_as_json(0, None))) == 2
    assert threading.main_thread() not in threads


async def test_unusable_file_is_logged_once_until_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.observe.usage_ledger._EVERY_SECONDS", 0.001)
    caplog.set_level(logging.INFO)
    directory = tmp_path / "missing"
    process = Process("one", directory / "usage.db")
    calls = 0

    def save() -> list[object]:
        nonlocal calls
        calls += 1
        return process.ledgers[0].__class__.save_and_take_ended_hours(process.ledgers[0])  # type: ignore[return-value]

    process.ledgers[0].save_and_take_ended_hours = save  # type: ignore[assignment,method-assign]
    keeper = UsageKeeper(process.ledgers[0], Metrics().background_restarts_total, LogOnce().is_news, is_logging=True)
    async with keeper:
        await until(lambda: calls > 3, "several attempts")
        with pytest.raises(GatewayError) as refused:
            await keeper.report_as_json(0, None)
        assert (refused.value.status, refused.value.code) == (503, "usage_unavailable")
        directory.mkdir()
        process.serve("a")
        await until(lambda: len(caplog.records) == 2, "the line that it works again")
    failed, recovered = (record.getMessage() for record in caplog.records)
    assert failed.startswith("key usage: the file of admin.usage_file cannot be written: unable to open")
    assert recovered == "key usage: the file of admin.usage_file can be written again"
    assert process.report() == [(0, "a", 1, 10)]


async def test_unusable_file_is_one_line_of_all_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = Process("one", tmp_path / "missing" / "usage.db")
    is_news = LogOnce().is_news
    for ledger in process.ledgers:
        async with UsageKeeper(ledger, Metrics().background_restarts_total, is_news, is_logging=False):
            pass
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_file_that_is_no_database_is_an_error(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)
    process = Process("one", path)
    process.serve("a")
    with pytest.raises(sqlite3.DatabaseError):
        process.report()
    assert path.read_bytes().startswith(b"not a database")
