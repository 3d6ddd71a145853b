"""The usage of client keys by hour, kept for 31 days in an SQLite file, and logged once an hour.

The workers count in the KeyAccounts. A row of the file has the whole account of one key, hour and process, so that
writing it again changes nothing. Every process writes for all its workers, and several may use the same file, such as
a gateway and its successor.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import orjson

from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.common.errors import GatewayError
from proxy.observe.key_usage import ANONYMOUS_KEY, HOUR_SECONDS, KEPT_FIELDS, usage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from prometheus_client import Counter

    from proxy.observe.key_usage import KeyAccounts

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

KEPT_HOURS: Final = 31 * 24
_EVERY_SECONDS: Final = 10.0
_LOG_AFTER_SECONDS: Final = 30
"""Time after the end of an hour in which all processes have written their accounts of it."""
# The log leaves out lines of one kind beyond 20 at once and 5 per second.
_SECONDS_BETWEEN_LINES: Final = 0.25
_BUSY_SECONDS: Final = 5.0
_FILE: Final = "admin.usage_file"

_COLUMNS: Final = tuple(f"n{place}" for place in range(KEPT_FIELDS))
_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS usage (hour INTEGER, key TEXT, source TEXT, "
    f"{', '.join(f'{name} INTEGER' for name in _COLUMNS)}, PRIMARY KEY (hour, key, source)) WITHOUT ROWID"
)
# Accounts only grow, so an older value that another worker writes later is not taken. Without growth, SQLite writes
# nothing to the disk.
_WRITE: Final = (
    f"INSERT INTO usage VALUES (?, ?, ?, {', '.join('?' * KEPT_FIELDS)}) ON CONFLICT DO UPDATE SET "
    f"{', '.join(f'{name} = max({name}, excluded.{name})' for name in _COLUMNS)} "
    f"WHERE {' OR '.join(f'excluded.{name} > {name}' for name in _COLUMNS)}"
)
_READ: Final = (
    f"SELECT hour, key, {', '.join(f'sum({name})' for name in _COLUMNS)} FROM usage "
    "WHERE hour >= ? AND hour < ? GROUP BY hour, key ORDER BY hour, key"
)


class HourUsage(NamedTuple):
    """The usage of one client key in one hour."""

    hour: int
    """Number of the hour since the Unix epoch."""
    key: str
    account: Sequence[int]
    """See `key_usage.usage_of`."""

    def to_json(self) -> dict[str, object]:
        """Return the usage of the hour for reports."""
        begin = datetime.fromtimestamp(self.hour * HOUR_SECONDS, UTC)
        return {"hour": begin.strftime("%Y-%m-%dT%H:%M:%SZ"), "key": self.key, **usage_of(self.account)}


class UsageLedger:
    """Reads the accounts of all workers, and keeps them in the file. May be used in several threads."""

    def __init__(
        self,
        accounts: KeyAccounts,
        process: str,
        slots: Callable[[], Mapping[str, int]],
        path: Callable[[], Path | None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create the usage ledger.

        Args:
            accounts: The accounts of all workers.
            process: Unique name of this gateway process, the same in all workers.
            slots: Returns the slots of the present client keys by name.
            path: Returns the path of the file. None: only the present and the last hour are known.
            now: Returns seconds since the Unix epoch.
        """
        self._key_accounts = accounts
        self._process_id = process
        self._get_slots = slots
        self._path = path
        self._get_wall_seconds = now
        self._key_names_by_slot: dict[int, str] = {}
        """The last name of the key in each slot, because a removed key may have running requests."""
        self._thread_lock = threading.Lock()

    def report_usage(self, since_hour: int) -> list[HourUsage]:
        """Return the usage from an hour on. Raises sqlite3.Error."""
        with self._saved_file() as file:
            if file is None:
                return [usage for usage in self._current_usage() if usage.hour >= since_hour]
            return _read_usage(file, since_hour, 2**60)

    def save_accounts(self) -> None:
        """Write the accounts to the file, if there is one. Raises sqlite3.Error."""
        with self._saved_file():
            pass

    def save_and_take_ended_hours(self) -> list[HourUsage]:
        """Save, and return the usage in hours that have ended and were not returned before. Raises sqlite3.Error."""
        ended = int(self._get_wall_seconds() - _LOG_AFTER_SECONDS) // HOUR_SECONDS
        reported = self._key_accounts.reported_hour_cell
        with self._saved_file() as file:
            if reported[0] >= ended - 1:
                return []
            if file is None:
                rows = [usage for usage in self._current_usage() if reported[0] < usage.hour < ended]
            else:
                rows = _take_ended_hours(file, ended)
            reported[0] = ended - 1
        return rows

    @contextmanager
    def _saved_file(self) -> Iterator[sqlite3.Connection | None]:
        """Write the accounts, and yield the file, or None if there is none."""
        with self._thread_lock:
            # A relative path begins in the directory of the configuration file: the settings have made it absolute.
            path = self._path()
            if path is None:
                yield None
                return
            with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)) as file:
                file.execute(_CREATE)
                rows = [
                    (hour, key, f"{self._process_id}/{slot}", *account)
                    for slot, (hour, key, account) in self._usage_by_slot()
                ]
                if rows:
                    with file:
                        file.execute("BEGIN IMMEDIATE")
                        file.executemany(_WRITE, rows)
                yield file

    def _current_usage(self) -> list[HourUsage]:
        """Return the usage in the last and the present hour."""
        return sorted(usage for _, usage in self._usage_by_slot())

    def _usage_by_slot(self) -> Iterator[tuple[int, HourUsage]]:
        self._key_names_by_slot |= {slot: name for name, slot in self._get_slots().items()}
        present = int(self._get_wall_seconds()) // HOUR_SECONDS
        for slot, name in (*self._key_names_by_slot.items(), (self._key_accounts.slot_count, ANONYMOUS_KEY)):
            for hour in (present - 1, present):
                account = self._key_accounts.account_of_hour(slot, name, hour)[:KEPT_FIELDS]
                if any(account):
                    yield slot, HourUsage(hour, name, account)


def _read_usage(usage_file: sqlite3.Connection, since_hour: int, until_hour: int) -> list[HourUsage]:
    return [HourUsage(hour, key, values) for hour, key, *values in usage_file.execute(_READ, (since_hour, until_hour))]


def _take_ended_hours(usage_file: sqlite3.Connection, ended_hour: int) -> list[HourUsage]:
    """Return the hours before `ended_hour` that no process has taken, and delete old ones."""
    with usage_file:
        usage_file.execute("BEGIN IMMEDIATE")
        # `user_version` is the last hour that a process has taken, 0 in a new file.
        (taken,) = usage_file.execute("PRAGMA user_version").fetchone()
        usage_file.execute(f"PRAGMA user_version = {max(taken, ended_hour - 1)}")
        found = _read_usage(usage_file, taken + 1, ended_hour)
        usage_file.execute("DELETE FROM usage WHERE hour <= ?", (ended_hour - KEPT_HOURS,))
    return found


class UsageKeeper(BackgroundOwner):
    """Saves the ledger and logs ended hours, inside `async with`. Leaving saves it a last time."""

    def __init__(
        self, ledger: UsageLedger, restarts: Counter, is_news: Callable[[str, str], bool], *, is_logging: bool
    ) -> None:
        """Create the usage keeper.

        Args:
            ledger: The ledger.
            restarts: Counts restarts of the background loop.
            is_news: Returns whether no worker has logged this state of a subject yet; see LogOnce.
            is_logging: Whether this worker saves regularly and logs. Other workers save only at their end.
        """
        self._usage_ledger = ledger
        self._restarts = restarts
        self._is_news = is_news
        self._is_logging = is_logging
        self._has_failed = False
        self._background = BackgroundTasks(logger, "the usage of client keys")

    def _begin(self) -> None:
        if self._is_logging:
            self._background.keep_running(self._keep_saving, "key_usage", self._restarts)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._call_ledger(self._usage_ledger.save_accounts)

    async def report_as_json(self, since_hour: int, key: str | None) -> bytes:
        """Return the usage from an hour on as a JSON array. `key` None: of all keys. Raises GatewayError."""

        def make() -> bytes:
            rows = (
                usage.to_json() for usage in self._usage_ledger.report_usage(since_hour) if key in (None, usage.key)
            )
            return b"[%b]" % b",".join(map(orjson.dumps, rows))

        try:
            # In a thread, because a month of many keys takes long. orjson keeps the interpreter, so it gets row by row.
            return await asyncio.to_thread(make)
        except sqlite3.Error as error:
            message = f"the file of admin.usage_file cannot be used: {error}; check its path, permissions and disk"
            raise GatewayError(message, code="usage_unavailable", status=503) from None

    async def _keep_saving(self) -> None:
        while True:
            for usage in await self._call_ledger(self._usage_ledger.save_and_take_ended_hours) or ():
                if usage.key != ANONYMOUS_KEY:
                    logger.info("key usage: hour ended", extra={"fields": usage.to_json()})
                    await asyncio.sleep(_SECONDS_BETWEEN_LINES)
            await asyncio.sleep(_EVERY_SECONDS)

    async def _call_ledger(self, call: Callable[[], _Result]) -> _Result | None:
        """Call a method of the ledger in a thread. Return None after an error; one worker logs it once."""
        try:
            result = await asyncio.to_thread(call)
        except sqlite3.Error as error:
            if self._is_news(_FILE, "failed"):
                logger.error("key usage: the file of admin.usage_file cannot be written: %s", error)
            self._has_failed = True
            return None
        if self._has_failed and self._is_news(_FILE, "usable"):
            logger.info("key usage: the file of admin.usage_file can be written again")
        self._has_failed = False
        return result
