"""The keys that clients show, and what each has used over all workers.

A key's requests in flight and its requests per minute may be limited. Both are counted in shared memory, in rows
that only their own worker writes, as on the scoreboard. Without keys everybody is the same anonymous key, which
nothing limits and for whom nothing is counted.

What other gateways have let in has a row of its own behind those of the workers, with one writer: see `fleet.replicas`.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.errors import LimitExceeded, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from proxy.settings import ClientKey

MAX_KEYS: Final = 1024
"""Client keys there can be at a time, unless the KeyUsage was made for more."""

_CELLS_PER_SLOT = 3
_IN_FLIGHT, _MINUTES = 0, 1  # the second of two cells, for even and for odd minutes
_CELL_BYTES = 8
_COUNT_BITS: Final = 32
_MINUTE_MS: Final = 60_000
_BUSY_RETRY_SECONDS: Final = 1.0


class UsageRow:
    """The part of the KeyUsage that one worker writes."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[int]) -> None:
        self._cells = cells

    def add(self, slot: int, in_flight: int) -> None:
        """Change the number of requests in flight."""
        self._cells[_CELLS_PER_SLOT * slot + _IN_FLIGHT] += in_flight

    def count(self, slot: int, minute: int) -> None:
        """Count one more request of the key with this slot. `minute`: the whole minutes of the clock of the ApiKeys."""
        index = _CELLS_PER_SLOT * slot + _MINUTES + minute % 2
        cell = self._cells[index]
        self._cells[index] = cell + 1 if cell >> _COUNT_BITS == minute else (minute << _COUNT_BITS) + 1

    def charge(self, slot: int, in_flight: int, minute: int, count: int) -> None:
        """Replace what this row has. Only for guests: `count` requests in a window that ends now, in this minute."""
        first = _CELLS_PER_SLOT * slot
        cells = self._cells
        cells[first + _IN_FLIGHT] = in_flight
        cells[first + _MINUTES + minute % 2] = (minute << _COUNT_BITS) + count
        cells[first + _MINUTES + (minute + 1) % 2] = 0


class KeyUsage:
    """What is used of each key, by slot: requests in flight, and requests counted in this minute and the one before.

    A row of int64 per worker, written by that worker alone. A minute's count and the minute's own number share a cell,
    so a reader in another worker cannot take the count of one minute for that of another. Create it before forking.
    """

    def __init__(self, workers: int = 1, slots: int = MAX_KEYS, guests: int = 0) -> None:
        """`guests`: rows for what other gateways have let in."""
        self.workers = workers
        self.slots = slots
        self.rows = workers + guests
        """Of workers and guests."""
        self._width = _CELLS_PER_SLOT * slots
        self._cells = memoryview(mmap.mmap(-1, self.rows * self._width * _CELL_BYTES)).cast("q")

    def row(self, number: int) -> UsageRow:
        """The workers come first, then the guests."""
        return UsageRow(self._cells_of(number))

    def own(self, slot: int, now: float) -> tuple[int, int]:
        """What this gateway's workers have let in: requests in flight, and those in the minute that ends now, as the
        sliding window counts them. `now`: seconds of the clock of the ApiKeys.
        """
        minute, elapsed_ms = minute_of(now)
        previous, current = (self._counted(slot, each, self.workers) for each in (minute - 1, minute))
        return self._in_flight(slot, self.workers), current + -(-previous * (_MINUTE_MS - elapsed_ms) // _MINUTE_MS)

    def in_flight(self, slot: int) -> int:
        """Requests in flight, over all workers."""
        return self._in_flight(slot, self.rows)

    def counted(self, slot: int, minute: int) -> int:
        """Requests counted in a minute, which is the latest one or the one before, over all workers."""
        return self._counted(slot, minute, self.rows)

    # Of the first so many rows. Each request asks, and a slice of cells takes as long as ten of them.

    def _in_flight(self, slot: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + _IN_FLIGHT
        in_flight = 0
        for index in range(first, rows * self._width, self._width):
            in_flight += self._cells[index]
        return in_flight

    def _counted(self, slot: int, minute: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + _MINUTES + minute % 2
        counted = 0
        for index in range(first, rows * self._width, self._width):
            cell = self._cells[index]
            if cell >> _COUNT_BITS == minute:
                counted += cell - (minute << _COUNT_BITS)
        return counted

    def erase(self, number: int) -> None:
        """The writer of a row is dead, and nothing of it is in flight any more. What it has counted was used all the
        same.
        """
        cells = self._cells_of(number)
        for index in range(_IN_FLIGHT, self._width, _CELLS_PER_SLOT):
            cells[index] = 0

    def _cells_of(self, number: int) -> memoryview[int]:
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of {self.rows}")
        return self._cells[number * self._width : (number + 1) * self._width]


def minute_of(now: float) -> tuple[int, int]:
    """The number of the minute, and how many milliseconds of it are over."""
    return divmod(round(now * 1000), _MINUTE_MS)


def assign_slots(names: Iterable[str], before: Mapping[str, int], capacity: int = MAX_KEYS) -> dict[str, int]:
    """The slot of each key: the one it had, or the lowest free one. Raises ValueError when there are too many keys.

    A slot that has just become free is the last to be taken, since requests of the key that had it may still run.
    """
    names = tuple(names)
    if len(names) > capacity:
        raise ValueError(f"there are {len(names)} client keys, but {capacity} is the limit")
    slots = {name: before[name] for name in names if name in before}
    kept, had = set(slots.values()), set(before.values())
    free = sorted(set(range(capacity)) - kept, key=lambda slot: (slot in had, slot))
    slots.update(zip((name for name in names if name not in slots), free, strict=False))
    return slots


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who sent a request: the holder of a client key, or anyone. `slot` None: nothing is counted.

    The limits are numbers over all workers; None means that there is no such limit.
    """

    name: str
    slot: int | None = None
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    priority: int = 0
    """Requests can go after it, and not before."""


ANONYMOUS: Final = ApiKey("-")
"""What every client shows while there are no keys."""

_NOT_COUNTED: Final[AbstractContextManager[None]] = nullcontext()


class ApiKeys:
    """One worker's view. `clock`: seconds of the system's monotonic clock, which all workers of a host share."""

    def __init__(self, usage: KeyUsage, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._usage = usage
        self._row = usage.row(worker)
        self._clock = clock
        self._by_digest: Mapping[str, ApiKey] = {}
        self._known: dict[tuple[str | None, str | None], ApiKey] = {}
        """By the headers that have shown it lately: a client shows the same each time, and a digest takes as long as a
        tenth of all else that is done for a request."""
        self.have_keys = False
        """Whether clients must show a key."""

    def configure(self, keys: Sequence[ClientKey], slots: Mapping[str, int]) -> None:
        """Replace all keys at once; none: everybody is let in. `slots` are the same in all workers: see `assign_slots`.

        Requests that run go on, whatever becomes of their key; it is looked at when the next one comes.
        """
        self._by_digest = {
            key.key_sha256: ApiKey(key.name, slots[key.name], key.max_concurrent, key.requests_per_minute, key.priority)
            for key in keys
        }
        self._known.clear()
        self.have_keys = bool(keys)

    def identify(self, authorization: str | None, x_api_key: str | None) -> ApiKey:
        """The key in these headers: a bearer token, or else X-Api-Key. Raises Unauthorized."""
        if not self._by_digest:
            return ANONYMOUS
        shown = authorization, x_api_key
        known = self._known.get(shown)
        if known is not None:
            return known
        scheme, _, token = (authorization or "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else x_api_key
        if not key:
            raise Unauthorized("this gateway needs an API key: send it as `Authorization: Bearer KEY`")
        # The time a look-up takes tells at most how far a digest was right, and a key cannot be chosen by its digest.
        # Nor can it by Python's hash of text, which has a secret: only what has the same is compared, above.
        found = self._by_digest.get(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest())
        if found is None:
            raise Unauthorized("the API key is not known to this gateway")
        if len(self._known) >= MAX_KEYS:
            self._known.clear()
        self._known[shown] = found
        return found

    def enter(self, key: ApiKey) -> AbstractContextManager[None]:
        """Count one request while the block lasts. Entering raises LimitExceeded, and then nothing was counted.

        Workers do not wait for each other, so at the same instant each may let in the request that is the last.
        """
        return _NOT_COUNTED if key.slot is None else _QuotaHold(self, key.slot, key)

    def _begin(self, slot: int, key: ApiKey) -> None:
        usage = self._usage
        limit = key.max_concurrent
        if limit is not None and usage.in_flight(slot) >= limit:
            raise LimitExceeded(
                f"this key may have {limit} requests in flight at a time",
                code="key_concurrency",
                retry_after_seconds=_BUSY_RETRY_SECONDS,
            )
        minute, elapsed_ms = minute_of(self._clock())
        limit = key.requests_per_minute
        if limit is not None:
            wait_ms = _until_room_ms(limit, usage.counted(slot, minute - 1), usage.counted(slot, minute), elapsed_ms)
            if wait_ms:
                raise LimitExceeded(
                    f"this key may send {limit} requests per minute",
                    code="key_rate",
                    retry_after_seconds=wait_ms / 1000,
                )
        self._row.count(slot, minute)
        self._row.add(slot, 1)

    def _end(self, slot: int) -> None:
        self._row.add(slot, -1)


class _QuotaHold:
    """One request under a key that is counted."""

    __slots__ = ("_keys", "_slot", "_key")

    def __init__(self, keys: ApiKeys, slot: int, key: ApiKey) -> None:
        self._keys = keys
        self._slot = slot
        self._key = key

    def __enter__(self) -> None:
        self._keys._begin(self._slot, self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keys._end(self._slot)


def _until_room_ms(limit: int, previous: int, current: int, elapsed_ms: int) -> int:
    """Milliseconds until one more request fits, if no other comes; 0 when it fits now.

    `previous` and `current`: requests of the last minute and of this one, of which `elapsed_ms` are over. The sliding
    window counts the last minute as if its requests had come evenly: used = previous × (1 - elapsed) + current. There
    is room while less than the limit is used.
    """
    if current >= limit:  # only the next minute can have room, for which this one is the last
        return _MINUTE_MS - elapsed_ms + _until_room_ms(limit, current, 0, 0)
    if not previous:
        return 0
    # previous × left < (limit - current) × minute, for whole milliseconds that are left of this minute
    most_left_ms = ((limit - current) * _MINUTE_MS - 1) // previous
    return max(0, _MINUTE_MS - elapsed_ms - most_left_ms)


def credential_for_engines(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the Authorization of engines for a client's headers; None: the client shows no credential."""
    # The second as Anthropic's clients show it, and no engine reads it.
    return authorization or (None if x_api_key is None else f"Bearer {x_api_key}")
