"""The usage of each client key: requests, tokens, seconds of engines, and times to the first token.

All workers count in shared memory, in one row for each, so that any of them can report the sums. Each slot of a key has
three accounts: since the start of the gateway, and for the present and the last hour.
"""

from __future__ import annotations

import mmap
import time
import zlib
from bisect import bisect_left
from collections import defaultdict
from operator import add
from typing import TYPE_CHECKING, Final

from proxy.common.errors import LimitExceeded
from proxy.observe.observers import RequestListener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.observe.record import RequestRecord

ANONYMOUS_KEY: Final = "-"
"""Name of the key of clients that show none, or none that is known."""
RESULTS: Final = ("ok", "failed", "limited", "rejected", "left")
"""Results of requests.

`failed`: an engine or the gateway ended the answer; `limited`: beyond a limit of the key; `rejected`: not served for
another reason; `left`: the client disconnected or did not read.
"""
TOKEN_KINDS: Final = ("prompt", "cached", "completion")
ROLES: Final = ("prefill", "decode")
FIRST_TOKEN_BUCKETS: Final[tuple[float, ...]] = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Fewer than the buckets of all keys together, because each key has its own series."""
HOUR_SECONDS: Final = 3600

# Fields of an account. Times are microseconds. The last fields count first tokens by bucket, the last of them without
# bound.
TOKEN_FIELD: Final = len(RESULTS)
ENGINE_FIELD: Final = TOKEN_FIELD + len(TOKEN_KINDS)
FIRST_TOKEN_FIELD: Final = ENGINE_FIELD + len(ROLES)
KEPT_FIELDS: Final = FIRST_TOKEN_FIELD
"""Number of the first fields, which usage reports have."""
BUCKET_FIELD: Final = FIRST_TOKEN_FIELD + 1
_FIELDS: Final = BUCKET_FIELD + len(FIRST_TOKEN_BUCKETS) + 1
_WIDTH: Final = 1 + _FIELDS  # the first cell says whose account it is, or of which hour
_SLOT_CELLS: Final = 3 * _WIDTH
_CELL_BYTES: Final = 8

_RESULT_OF: Final = {"-": 0, "S": 1, "s": 1, "K": 1, "P": 3, "C": 4, "c": 4}
"""The result by the first letter of `term`."""
_LIMITED: Final = 2
_PREFILL_STAGES: Final = "EF"
_QUEUE_STAGE: Final = "Q"


class KeyAccounts:
    """The accounts of all keys, by slot. Must be created before forking.

    The slot of a key is that of its limits, see `gateway.api_keys`. One more slot has requests without a key.
    """

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self._row_count = workers
        self.slot_count = slots
        """Number of keys, and the slot of requests without a key."""
        self._cells_per_row = (slots + 1) * _SLOT_CELLS
        self._account_cells = memoryview(mmap.mmap(-1, workers * self._cells_per_row * _CELL_BYTES)).cast("q")
        self.reported_hour_cell = memoryview(mmap.mmap(-1, _CELL_BYTES)).cast("q")
        """One cell: number of the last hour that the log has reported."""

    def add_values(self, worker: int, slot: int, name: str, hour: int, values: Sequence[int]) -> None:
        """Add values to the accounts of a key, in the row of a worker.

        Args:
            worker: Number of the worker that calls.
            slot: Slot of the key.
            name: Name of the key. The accounts of another name in this slot are erased.
            hour: Number of the present hour.
            values: One for each field.
        """
        cells = self._account_cells
        first = worker * self._cells_per_row + slot * _SLOT_CELLS
        if cells[first] != _name_checksum(name):
            for index in range(first, first + _SLOT_CELLS):
                cells[index] = 0
            cells[first] = _name_checksum(name)
        of_hour = first + (1 + hour % 2) * _WIDTH
        if cells[of_hour] != hour:
            for index in range(of_hour, of_hour + _WIDTH):
                cells[index] = 0
            cells[of_hour] = hour
        for field, value in enumerate(values, 1):
            if value:
                cells[first + field] += value
                cells[of_hour + field] += value

    def total_account(self, slot: int, name: str) -> list[int]:
        """Return the account of a key since the start, over all workers."""
        return self._sum_accounts(slot, name, None)

    def account_of_hour(self, slot: int, name: str, hour: int) -> list[int]:
        """Return the account of a key in the present or the last hour, over all workers."""
        return self._sum_accounts(slot, name, hour)

    def _sum_accounts(self, slot: int, name: str, hour: int | None) -> list[int]:
        cells, tag = self._account_cells, _name_checksum(name)
        values = [0] * _FIELDS
        for row in range(self._row_count):
            first = row * self._cells_per_row + slot * _SLOT_CELLS
            if cells[first] != tag:
                continue
            if hour is not None:
                first += (1 + hour % 2) * _WIDTH
                if cells[first] != hour:
                    continue
            values = [*map(add, values, cells[first + 1 : first + _WIDTH].tolist())]
        return values


def _name_checksum(key_name: str) -> int:
    return zlib.crc32(key_name.encode()) + 1


class KeyUsageListener(RequestListener):
    """Counts the finished requests of one worker in the accounts of their keys."""

    def __init__(
        self,
        accounts: KeyAccounts,
        worker: int,
        slots: Callable[[], Mapping[str, int]],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create the key usage listener.

        Args:
            accounts: The accounts of all workers.
            worker: Number of this worker.
            slots: Returns the slots of the present client keys by name.
            now: Returns seconds since the Unix epoch.
        """
        self._key_accounts = accounts
        self._worker = worker
        self._get_slots = slots
        self._get_wall_seconds = now
        self._former_slots: dict[str, int] = {}
        """The last slots of all keys, because a removed key may have running requests."""

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        """Take the requests of a batch, each list in the order of the events.

        The requests of a key are added together.
        """
        sums: defaultdict[str, list[int]] = defaultdict(no_values)
        for record in ended:
            _add_request(sums[record.key], record)
        hour = int(self._get_wall_seconds()) // HOUR_SECONDS
        for name, values in sums.items():
            self._key_accounts.add_values(self._worker, self._slot_of_key(name), name, hour, values)

    def _slot_of_key(self, name: str) -> int:
        if name == ANONYMOUS_KEY:
            return self._key_accounts.slot_count
        slots = self._get_slots()
        slot = slots.get(name)
        if slot is None:
            slot = self._former_slots.get(name, self._key_accounts.slot_count)
            return self._key_accounts.slot_count if slot in slots.values() else slot
        self._former_slots[name] = slot
        return slot


def no_values() -> list[int]:
    """Return an empty account of a client key's usage."""
    return [0] * _FIELDS


def _add_request(account_values: list[int], record: RequestRecord) -> None:
    facts, samples = record.facts, record.samples_per_prompt
    result = _RESULT_OF[facts.term[0]]
    if isinstance(record.error, LimitExceeded):
        result = _LIMITED
    account_values[result] += 1
    account_values[TOKEN_FIELD] += facts.prompt_tokens // samples
    account_values[TOKEN_FIELD + 1] += facts.cached_tokens // samples
    account_values[TOKEN_FIELD + 2] += facts.completion_tokens
    for timeline in record.timelines:
        for stage, seconds in zip(timeline.course, timeline.spent_seconds_by_stage, strict=False):
            if stage != _QUEUE_STAGE:
                account_values[ENGINE_FIELD if stage in _PREFILL_STAGES else ENGINE_FIELD + 1] += int(seconds * 1e6)
    first_token_seconds = record.first_token_seconds
    if first_token_seconds is not None:
        account_values[FIRST_TOKEN_FIELD] += int(first_token_seconds * 1e6)
        account_values[BUCKET_FIELD + bisect_left(FIRST_TOKEN_BUCKETS, first_token_seconds)] += 1


def usage_of(account_values: Sequence[int]) -> dict[str, int | float]:
    """Return an account by the names that usage reports have. Times are in seconds."""
    return {
        "requests": sum(account_values[: len(RESULTS)]),
        **dict(zip(RESULTS, account_values, strict=False)),
        **{f"{kind}_tokens": account_values[TOKEN_FIELD + place] for place, kind in enumerate(TOKEN_KINDS)},
        **{f"{role}_seconds": account_values[ENGINE_FIELD + place] / 1e6 for place, role in enumerate(ROLES)},
    }
