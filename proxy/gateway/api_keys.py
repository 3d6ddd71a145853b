"""The keys of clients, and their usage over all workers.

The requests in flight, and the requests and tokens per minute of a key may be limited. All are counted in shared
memory, in one row for each worker. Without keys, all clients have the same anonymous key, which has no limits and is
not counted.

Further rows count the requests that other gateways have admitted, see `fleet.replicas`.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.common.errors import LimitExceeded, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from proxy.settings import ClientKey

MAX_KEYS: Final = 1024
"""The largest number of client keys, unless the KeyUsage was made for more."""

_CELLS_PER_SLOT = 5
# Requests and tokens have two cells each: one for even and one for odd minutes.
_IN_FLIGHT, _REQUESTS, _TOKENS = 0, 1, 3
_CELL_BYTES = 8
_COUNT_BITS: Final = 32
_MAX_COUNT: Final = (1 << _COUNT_BITS) - 1
_MINUTE_MS: Final = 60_000
_BUSY_RETRY_SECONDS: Final = 1.0


class UsageRow:
    """The part of the KeyUsage that one worker writes."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[int]) -> None:
        self._cells = cells

    def add(self, slot: int, in_flight: int) -> None:
        """Change a client key's number of requests in flight."""
        self._cells[_CELLS_PER_SLOT * slot + _IN_FLIGHT] += in_flight

    def count(self, slot: int, minute: int) -> None:
        """Count a request of the key with this slot. `minute`: the number of the present minute."""
        self._count(_CELLS_PER_SLOT * slot + _REQUESTS + minute % 2, minute, 1)

    def count_tokens(self, slot: int, minute: int, tokens: int) -> None:
        """Count tokens of the key with this slot. `minute`: the number of the present minute."""
        self._count(_CELLS_PER_SLOT * slot + _TOKENS + minute % 2, minute, tokens)

    def return_tokens(self, slot: int, minute: int, tokens: int) -> None:
        """Take back tokens that this row has counted in a minute. Does nothing if that minute no longer counts."""
        index = _CELLS_PER_SLOT * slot + _TOKENS + minute % 2
        if self._cells[index] >> _COUNT_BITS == minute:
            self._cells[index] -= tokens

    def _count(self, index: int, minute: int, amount: int) -> None:
        cell = self._cells[index]
        count = cell - (minute << _COUNT_BITS) if cell >> _COUNT_BITS == minute else 0
        self._cells[index] = (minute << _COUNT_BITS) + min(count + amount, _MAX_COUNT)

    def charge(self, slot: int, in_flight: int, minute: int, counts: tuple[int, int]) -> None:
        """Replace the counts of a slot. Only for rows of other gateways.

        Args:
            slot: The slot of the key.
            in_flight: Requests in flight.
            minute: The number of the present minute.
            counts: Requests and tokens in the 60 s that end now.
        """
        first = _CELLS_PER_SLOT * slot
        cells = self._cells
        cells[first + _IN_FLIGHT] = in_flight
        for kind, count in zip((_REQUESTS, _TOKENS), counts, strict=True):
            cells[first + kind + minute % 2] = (minute << _COUNT_BITS) + min(count, _MAX_COUNT)
            cells[first + kind + (minute + 1) % 2] = 0


class KeyUsage:
    """The usage of all keys by slot: requests in flight, and requests and tokens of the present and the last minute.

    Each worker writes its own row of int64. A cell has both the count and the number of a minute, so that readers in
    other workers cannot mix up two minutes. Create it before forking.
    """

    def __init__(self, workers: int = 1, slots: int = MAX_KEYS, guests: int = 0) -> None:
        """`guests`: the number of rows for other gateways."""
        self.workers = workers
        self.slots = slots
        self.rows = workers + guests
        """The number of rows of workers and guests."""
        self._width = _CELLS_PER_SLOT * slots
        self._cells = memoryview(mmap.mmap(-1, self.rows * self._width * _CELL_BYTES)).cast("q")

    def row(self, number: int) -> UsageRow:
        """Return a row. The rows of workers are first, then those of guests."""
        return UsageRow(self._cells_of(number))

    def own(self, slot: int, now: float) -> tuple[int, int, int]:
        """Return the requests in flight of this gateway's workers, and their requests and tokens in the last 60 s.

        `now`: seconds of the clock of the ApiKeys.
        """
        minute, elapsed_ms = minute_of(now)
        requests, tokens = (
            self._counted(slot, minute, kind, self.workers)
            - (-self._counted(slot, minute - 1, kind, self.workers) * (_MINUTE_MS - elapsed_ms) // _MINUTE_MS)
            for kind in (_REQUESTS, _TOKENS)
        )
        return self._in_flight(slot, self.workers), requests, tokens

    def own_in_flight(self, slot: int) -> int:
        """Return the requests in flight of this gateway's workers."""
        return self._in_flight(slot, self.workers)

    def in_flight(self, slot: int) -> int:
        """Return the requests in flight of a client key, over all workers."""
        return self._in_flight(slot, self.rows)

    def counted(self, slot: int, minute: int) -> int:
        """Return the requests of the present or the last minute over all rows."""
        return self._counted(slot, minute, _REQUESTS, self.rows)

    def counted_tokens(self, slot: int, minute: int) -> int:
        """Return the tokens of the present or the last minute over all rows."""
        return self._counted(slot, minute, _TOKENS, self.rows)

    # The sums are loops over indices, because each request needs them and a slice takes as long as ten cells.

    def _in_flight(self, slot: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + _IN_FLIGHT
        in_flight = 0
        for index in range(first, rows * self._width, self._width):
            in_flight += self._cells[index]
        return in_flight

    def _counted(self, slot: int, minute: int, kind: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + kind + minute % 2
        counted = 0
        for index in range(first, rows * self._width, self._width):
            cell = self._cells[index]
            if cell >> _COUNT_BITS == minute:
                counted += cell - (minute << _COUNT_BITS)
        return counted

    def erase(self, number: int) -> None:
        """Set the requests in flight of a row to 0 after its writer has died. The counts of minutes stay."""
        cells = self._cells_of(number)
        for index in range(_IN_FLIGHT, self._width, _CELLS_PER_SLOT):
            cells[index] = 0

    def _cells_of(self, number: int) -> memoryview[int]:
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of {self.rows}")
        return self._cells[number * self._width : (number + 1) * self._width]


def minute_of(now: float) -> tuple[int, int]:
    """Return the number of the minute, and its milliseconds that have passed."""
    return divmod(round(now * 1000), _MINUTE_MS)


def assign_slots(names: Iterable[str], before: Mapping[str, int], capacity: int = MAX_KEYS) -> dict[str, int]:
    """Return the slot of each key: the one before, or the lowest free one. Raises ValueError for too many keys.

    Slots that have just become free are used last, because requests of their former keys may still run.
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
    """A client key. The limits hold for all workers together."""

    name: str
    """The name of the key."""
    slot: int | None = None
    """The slot in the KeyUsage. None: the key is not counted."""
    max_concurrent: int | None = None
    """Limit of requests in flight. None: no limit."""
    requests_per_minute: int | None = None
    """Limit of requests per minute. None: no limit."""
    priority: int = 0
    """The priority of the requests. Lower values go first. A request can only lower its urgency."""
    gathers_tokens: bool = True
    """Whether tokens of its streams may wait for further ones."""
    token_limit: TokenLimit | None = field(default=None, compare=False)
    """Limit of tokens per minute. None: no limit."""


class TokenLimit:
    """The limit of a key's tokens per minute, in one worker.

    A request reserves the tokens that it may take, and settles with its usage at its end.
    """

    def __init__(self, tokens_per_minute: int, slot: int, keys: ApiKeys) -> None:
        self.tokens_per_minute = tokens_per_minute
        self.slot = slot
        self._row = keys.row
        self._clock = keys.clock

    def reserve(self, tokens: int) -> TokenReservation:
        """Count the tokens that a request may take against the limit of its key."""
        minute = minute_of(self._clock())[0]
        self._row.count_tokens(self.slot, minute, tokens)
        return TokenReservation(self, minute, tokens)

    def settle(self, minute: int, reserved: int, used: int) -> None:
        """Replace a reservation by the tokens that a request has used.

        More tokens count in the present minute. Fewer are taken back where they were counted.
        """
        if used > reserved:
            self._row.count_tokens(self.slot, minute_of(self._clock())[0], used - reserved)
        else:
            self._row.return_tokens(self.slot, minute, reserved - used)


class TokenReservation(NamedTuple):
    """The tokens that one request has reserved of its key's limit."""

    limit: TokenLimit
    minute: int
    """Number of the minute in which they count."""
    tokens: int

    def settle(self, used: int) -> None:
        """Replace a reservation by the tokens that a request has used.

        `used`: tokens of the prompt and of the answer.
        """
        self.limit.settle(self.minute, self.tokens, used)


ANONYMOUS: Final = ApiKey("-")
"""The key of all clients while no keys are configured."""

_NOT_COUNTED: Final[AbstractContextManager[None]] = nullcontext()


class ApiKeys:
    """The client keys as one worker sees them."""

    def __init__(self, usage: KeyUsage, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds of the system's monotonic clock, which all workers of a host share."""
        self._usage = usage
        self.row = usage.row(worker)
        """The row of this worker."""
        self.clock = clock
        self._by_digest: Mapping[str, ApiKey] = {}
        self._by_headers: dict[tuple[str | None, str | None], ApiKey] = {}
        """The keys by the headers of recent requests. A digest would cost a tenth of all other work for a request."""
        self.have_keys = False
        """Whether clients must show a key."""

    def configure(self, keys: Sequence[ClientKey], slots: Mapping[str, int]) -> None:
        """Replace all keys. Running requests are not affected.

        Args:
            keys: The keys. If there are none, clients need no key.
            slots: The slots by name, equal in all workers. See `assign_slots`.
        """
        self._by_digest = {
            key.key_sha256: ApiKey(
                name=key.name,
                slot=slots[key.name],
                max_concurrent=key.max_concurrent,
                requests_per_minute=key.requests_per_minute,
                priority=key.priority,
                gathers_tokens=key.gather_tokens,
                token_limit=None
                if key.tokens_per_minute is None
                else TokenLimit(key.tokens_per_minute, slots[key.name], self),
            )
            for key in keys
        }
        self._by_headers.clear()
        self.have_keys = bool(keys)

    def identify(self, authorization: str | None, x_api_key: str | None) -> ApiKey:
        """Return the key in these headers: a bearer token, or else X-Api-Key. Raises Unauthorized."""
        if not self._by_digest:
            return ANONYMOUS
        headers = authorization, x_api_key
        cached = self._by_headers.get(headers)
        if cached is not None:
            return cached
        scheme, _, token = (authorization or "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else x_api_key
        if not key:
            raise Unauthorized("this gateway needs an API key: send it as `Authorization: Bearer KEY`")
        # The time of a look-up shows at most how much of a digest was right, and the digest of a key cannot be chosen.
        # The look-up above compares only headers of the same hash, and Python's hash of text has a secret.
        found = self._by_digest.get(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest())
        if found is None:
            raise Unauthorized("the API key is not known to this gateway")
        if len(self._by_headers) >= MAX_KEYS:
            self._by_headers.clear()
        self._by_headers[headers] = found
        return found

    def enter(self, key: ApiKey) -> AbstractContextManager[None]:
        """Return a context manager that counts a request. Entering it raises LimitExceeded.

        Workers do not wait for each other. So each of them may admit the last request at the same time.
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
        minute, elapsed_ms = minute_of(self.clock())
        limit = key.requests_per_minute
        if limit is not None:
            wait_ms = _compute_wait_ms(limit, usage.counted(slot, minute - 1), usage.counted(slot, minute), elapsed_ms)
            if wait_ms:
                raise LimitExceeded(
                    f"this key may send {limit} requests per minute",
                    code="key_rate",
                    retry_after_seconds=wait_ms / 1000,
                )
        tokens = key.token_limit
        if tokens is not None:
            limit = tokens.tokens_per_minute
            counts = usage.counted_tokens(slot, minute - 1), usage.counted_tokens(slot, minute)
            wait_ms = _compute_wait_ms(limit, *counts, elapsed_ms)
            if wait_ms:
                raise LimitExceeded(
                    f"this key may use {limit} tokens per minute",
                    code="key_tokens",
                    retry_after_seconds=wait_ms / 1000,
                )
        self.row.count(slot, minute)
        self.row.add(slot, 1)

    def _end(self, slot: int) -> None:
        self.row.add(slot, -1)


class _QuotaHold:
    """Counts one request against the limits of its client key."""

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


def _compute_wait_ms(limit: int, previous: int, current: int, elapsed_ms: int) -> int:
    """Return the milliseconds until there is room for a further request, or 0 if there is room now.

    The sliding window assumes that the counts of the last minute came evenly: used = previous × (1 - elapsed) +
    current. There is room while less than the limit is used.

    Args:
        limit: The limit of requests or tokens per minute.
        previous: The count of the last minute.
        current: The count of the present minute.
        elapsed_ms: Milliseconds of the present minute that have passed.
    """
    if current >= limit:  # only the next minute can have room
        return _MINUTE_MS - elapsed_ms + _compute_wait_ms(limit, current, 0, 0)
    if not previous:
        return 0
    # previous × left < (limit - current) × minute, where left is the rest of this minute in whole milliseconds
    most_left_ms = ((limit - current) * _MINUTE_MS - 1) // previous
    return max(0, _MINUTE_MS - elapsed_ms - most_left_ms)


def credential_for_engines(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the Authorization header for engines, or None if the client sends no credential.

    Anthropic's clients send `X-Api-Key`, which no engine reads.
    """
    return authorization or (None if x_api_key is None else f"Bearer {x_api_key}")
