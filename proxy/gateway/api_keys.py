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

    def __init__(self, cells: memoryview[int]) -> None:
        self._usage_cells = cells

    def add_in_flight(self, slot: int, in_flight: int) -> None:
        """Change a client key's number of requests in flight."""
        self._usage_cells[_CELLS_PER_SLOT * slot + _IN_FLIGHT] += in_flight

    def count_request(self, slot: int, minute_number: int) -> None:
        """Count a request of the key with this slot. `minute_number`: the number of the present minute."""
        self._add_to_minute(_CELLS_PER_SLOT * slot + _REQUESTS + minute_number % 2, minute_number, 1)

    def count_tokens(self, slot: int, minute: int, tokens: int) -> None:
        """Count tokens of the key with this slot. `minute`: the number of the present minute."""
        self._add_to_minute(_CELLS_PER_SLOT * slot + _TOKENS + minute % 2, minute, tokens)

    def return_tokens(self, slot: int, minute: int, tokens: int) -> None:
        """Take back tokens that this row has counted in a minute. Does nothing if that minute no longer counts."""
        index = _CELLS_PER_SLOT * slot + _TOKENS + minute % 2
        if self._usage_cells[index] >> _COUNT_BITS == minute:
            self._usage_cells[index] -= tokens

    def _add_to_minute(self, index: int, minute: int, amount: int) -> None:
        cell = self._usage_cells[index]
        count = cell - (minute << _COUNT_BITS) if cell >> _COUNT_BITS == minute else 0
        self._usage_cells[index] = (minute << _COUNT_BITS) + min(count + amount, _MAX_COUNT)

    def replace_counts(self, slot: int, in_flight: int, minute: int, counts: tuple[int, int]) -> None:
        """Replace the counts of a slot. Only for rows of other gateways.

        Args:
            slot: The slot of the key.
            in_flight: Requests in flight.
            minute: The number of the present minute.
            counts: Requests and tokens in the 60 s that end now.
        """
        first = _CELLS_PER_SLOT * slot
        cells = self._usage_cells
        cells[first + _IN_FLIGHT] = in_flight
        for kind, count in zip((_REQUESTS, _TOKENS), counts, strict=True):
            cells[first + kind + minute % 2] = (minute << _COUNT_BITS) + min(count, _MAX_COUNT)
            cells[first + kind + (minute + 1) % 2] = 0


class KeyUsage:
    """The usage of all keys by slot: requests in flight, and requests and tokens of the present and the last minute.

    Each worker writes its own row of int64. A cell has both the count and the number of a minute, so that readers in
    other workers cannot mix up two minutes. Create it before forking.
    """

    def __init__(self, workers: int = 1, slots: int = MAX_KEYS, guest_rows: int = 0) -> None:
        """`guest_rows`: the number of rows for other gateways."""
        self.worker_count = workers
        self.slot_count = slots
        self.row_count = workers + guest_rows
        """The number of rows of workers and guests."""
        self._row_width = _CELLS_PER_SLOT * slots
        self._usage_cells = memoryview(mmap.mmap(-1, self.row_count * self._row_width * _CELL_BYTES)).cast("q")

    def usage_row(self, row_number: int) -> UsageRow:
        """Return a row. The rows of workers are first, then those of guests."""
        return UsageRow(self._usage_cells_of(row_number))

    def own_usage(self, slot: int, now: float) -> tuple[int, int, int]:
        """Return the requests in flight of this gateway's workers, and their requests and tokens in the last 60 s.

        `now`: seconds of the clock of the ApiKeys.
        """
        minute, elapsed_ms = minute_and_milliseconds(now)
        requests, tokens = (
            self._sum_recent(slot, minute, kind, self.worker_count)
            - (-self._sum_recent(slot, minute - 1, kind, self.worker_count) * (_MINUTE_MS - elapsed_ms) // _MINUTE_MS)
            for kind in (_REQUESTS, _TOKENS)
        )
        return self._sum_in_flight(slot, self.worker_count), requests, tokens

    def count_own_in_flight(self, slot: int) -> int:
        """Return the requests in flight of this gateway's workers."""
        return self._sum_in_flight(slot, self.worker_count)

    def count_in_flight(self, slot: int) -> int:
        """Return the requests in flight of a client key, over all workers."""
        return self._sum_in_flight(slot, self.row_count)

    def recent_requests(self, slot: int, minute: int) -> int:
        """Return the requests of the present or the last minute over all rows."""
        return self._sum_recent(slot, minute, _REQUESTS, self.row_count)

    def recent_tokens(self, slot: int, minute: int) -> int:
        """Return the tokens of the present or the last minute over all rows."""
        return self._sum_recent(slot, minute, _TOKENS, self.row_count)

    # The sums are loops over indices, because each request needs them and a slice takes as long as ten cells.

    def _sum_in_flight(self, slot: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + _IN_FLIGHT
        in_flight = 0
        for index in range(first, rows * self._row_width, self._row_width):
            in_flight += self._usage_cells[index]
        return in_flight

    def _sum_recent(self, slot: int, minute: int, kind: int, rows: int) -> int:
        first = _CELLS_PER_SLOT * slot + kind + minute % 2
        counted = 0
        for index in range(first, rows * self._row_width, self._row_width):
            cell = self._usage_cells[index]
            if cell >> _COUNT_BITS == minute:
                counted += cell - (minute << _COUNT_BITS)
        return counted

    def erase_row(self, row_number: int) -> None:
        """Set the requests in flight of a row to 0 after its writer has died. The counts of minutes stay."""
        cells = self._usage_cells_of(row_number)
        for index in range(_IN_FLIGHT, self._row_width, _CELLS_PER_SLOT):
            cells[index] = 0

    def _usage_cells_of(self, number: int) -> memoryview[int]:
        if not 0 <= number < self.row_count:
            raise IndexError(f"row {number} of {self.row_count}")
        return self._usage_cells[number * self._row_width : (number + 1) * self._row_width]


def minute_and_milliseconds(clock_seconds: float) -> tuple[int, int]:
    """Return the number of the minute, and its milliseconds that have passed."""
    return divmod(round(clock_seconds * 1000), _MINUTE_MS)


def assign_slots(
    key_names: Iterable[str], previous_slots: Mapping[str, int], capacity: int = MAX_KEYS
) -> dict[str, int]:
    """Return the slot of each key: the one before, or the lowest free one. Raises ValueError for too many keys.

    Slots that have just become free are used last, because requests of their former keys may still run.
    """
    key_names = tuple(key_names)
    if len(key_names) > capacity:
        raise ValueError(f"there are {len(key_names)} client keys, but {capacity} is the limit")
    slots = {name: previous_slots[name] for name in key_names if name in previous_slots}
    kept, had = set(slots.values()), set(previous_slots.values())
    free = sorted(set(range(capacity)) - kept, key=lambda slot: (slot in had, slot))
    slots.update(zip((name for name in key_names if name not in slots), free, strict=False))
    return slots


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client key. The limits hold for all workers together."""

    key_name: str
    """The name of the key."""
    usage_slot: int | None = None
    """The slot in the KeyUsage. None: the key is not counted."""
    max_concurrent: int | None = None
    """Limit of requests in flight. None: no limit."""
    requests_per_minute: int | None = None
    """Limit of requests per minute. None: no limit."""
    default_priority: int = 0
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
        self.usage_slot = slot
        self._usage_row = keys.usage_row
        self._clock = keys.clock

    def reserve_tokens(self, tokens: int) -> TokenReservation:
        """Count the tokens that a request may take against the limit of its key."""
        minute = minute_and_milliseconds(self._clock())[0]
        self._usage_row.count_tokens(self.usage_slot, minute, tokens)
        return TokenReservation(self, minute, tokens)

    def settle_reservation(self, minute: int, reserved_tokens: int, used_tokens: int) -> None:
        """Replace a reservation by the tokens that a request has used.

        More tokens count in the present minute. Fewer are taken back where they were counted.
        """
        if used_tokens > reserved_tokens:
            self._usage_row.count_tokens(
                self.usage_slot, minute_and_milliseconds(self._clock())[0], used_tokens - reserved_tokens
            )
        else:
            self._usage_row.return_tokens(self.usage_slot, minute, reserved_tokens - used_tokens)


class TokenReservation(NamedTuple):
    """The tokens that one request has reserved of its key's limit."""

    token_limit: TokenLimit
    minute_number: int
    """Number of the minute in which they count."""
    reserved_tokens: int

    def settle_reservation(self, used_tokens: int) -> None:
        """Replace a reservation by the tokens that a request has used.

        `used_tokens`: tokens of the prompt and of the answer.
        """
        self.token_limit.settle_reservation(self.minute_number, self.reserved_tokens, used_tokens)


ANONYMOUS: Final = ApiKey("-")
"""The key of all clients while no keys are configured."""

_NOT_COUNTED: Final[AbstractContextManager[None]] = nullcontext()


class ApiKeys:
    """The client keys as one worker sees them."""

    def __init__(self, usage: KeyUsage, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds of the system's monotonic clock, which all workers of a host share."""
        self._key_usage = usage
        self.usage_row = usage.usage_row(worker)
        """The row of this worker."""
        self.clock = clock
        self._keys_by_digest: Mapping[str, ApiKey] = {}
        self._keys_by_headers: dict[tuple[str | None, str | None], ApiKey] = {}
        """The keys by the headers of recent requests. A digest would cost a tenth of all other work for a request."""
        self.are_keys_required = False
        """Whether clients must show a key."""

    def replace_keys(self, keys: Sequence[ClientKey], slots: Mapping[str, int]) -> None:
        """Replace all keys. Running requests are not affected.

        Args:
            keys: The keys. If there are none, clients need no key.
            slots: The slots by name, equal in all workers. See `assign_slots`.
        """
        self._keys_by_digest = {
            key.key_sha256: ApiKey(
                key_name=key.name,
                usage_slot=slots[key.name],
                max_concurrent=key.max_concurrent,
                requests_per_minute=key.requests_per_minute,
                default_priority=key.priority,
                gathers_tokens=key.gather_tokens,
                token_limit=None
                if key.tokens_per_minute is None
                else TokenLimit(key.tokens_per_minute, slots[key.name], self),
            )
            for key in keys
        }
        self._keys_by_headers.clear()
        self.are_keys_required = bool(keys)

    def find_key(self, authorization: str | None, x_api_key: str | None) -> ApiKey:
        """Return the key in these headers: a bearer token, or else X-Api-Key. Raises Unauthorized."""
        if not self._keys_by_digest:
            return ANONYMOUS
        headers = authorization, x_api_key
        cached = self._keys_by_headers.get(headers)
        if cached is not None:
            return cached
        scheme, _, token = (authorization or "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else x_api_key
        if not key:
            raise Unauthorized("this gateway needs an API key: send it as `Authorization: Bearer KEY`")
        # The time of a look-up shows at most how much of a digest was right, and the digest of a key cannot be chosen.
        # The look-up above compares only headers of the same hash, and Python's hash of text has a secret.
        found = self._keys_by_digest.get(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest())
        if found is None:
            raise Unauthorized("the API key is not known to this gateway")
        if len(self._keys_by_headers) >= MAX_KEYS:
            self._keys_by_headers.clear()
        self._keys_by_headers[headers] = found
        return found

    def count_in_flight(self, key: ApiKey) -> AbstractContextManager[None]:
        """Return a context manager that counts a request. Entering it raises LimitExceeded.

        Workers do not wait for each other. So each of them may admit the last request at the same time.
        """
        return _NOT_COUNTED if key.usage_slot is None else _QuotaHold(self, key.usage_slot, key)

    def _begin_request(self, slot: int, key: ApiKey) -> None:
        usage = self._key_usage
        limit = key.max_concurrent
        if limit is not None and usage.count_in_flight(slot) >= limit:
            raise LimitExceeded(
                f"this key may have {limit} requests in flight at a time",
                code="key_concurrency",
                retry_after_seconds=_BUSY_RETRY_SECONDS,
            )
        minute, elapsed_ms = minute_and_milliseconds(self.clock())
        limit = key.requests_per_minute
        if limit is not None:
            wait_ms = _compute_wait_ms(
                limit, usage.recent_requests(slot, minute - 1), usage.recent_requests(slot, minute), elapsed_ms
            )
            if wait_ms:
                raise LimitExceeded(
                    f"this key may send {limit} requests per minute",
                    code="key_rate",
                    retry_after_seconds=wait_ms / 1000,
                )
        tokens = key.token_limit
        if tokens is not None:
            limit = tokens.tokens_per_minute
            counts = usage.recent_tokens(slot, minute - 1), usage.recent_tokens(slot, minute)
            wait_ms = _compute_wait_ms(limit, *counts, elapsed_ms)
            if wait_ms:
                raise LimitExceeded(
                    f"this key may use {limit} tokens per minute",
                    code="key_tokens",
                    retry_after_seconds=wait_ms / 1000,
                )
        self.usage_row.count_request(slot, minute)
        self.usage_row.add_in_flight(slot, 1)

    def _end_request(self, slot: int) -> None:
        self.usage_row.add_in_flight(slot, -1)


class _QuotaHold:
    """Counts one request against the limits of its client key."""

    def __init__(self, keys: ApiKeys, slot: int, key: ApiKey) -> None:
        self._api_keys = keys
        self._usage_slot = slot
        self._api_key = key

    def __enter__(self) -> None:
        self._api_keys._begin_request(self._usage_slot, self._api_key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._api_keys._end_request(self._usage_slot)


def _compute_wait_ms(
    requests_per_minute: int, previous_minute_count: int, current_minute_count: int, elapsed_ms: int
) -> int:
    """Return the milliseconds until there is room for a further request, or 0 if there is room now.

    The sliding window assumes that the counts of the last minute came evenly: used = previous × (1 - elapsed) +
    current. There is room while less than the limit is used.

    Args:
        requests_per_minute: The limit of requests or tokens per minute.
        previous_minute_count: The count of the last minute.
        current_minute_count: The count of the present minute.
        elapsed_ms: Milliseconds of the present minute that have passed.
    """
    if current_minute_count >= requests_per_minute:  # only the next minute can have room
        return _MINUTE_MS - elapsed_ms + _compute_wait_ms(requests_per_minute, current_minute_count, 0, 0)
    if not previous_minute_count:
        return 0
    # previous × left < (limit - current) × minute, where left is the rest of this minute in whole milliseconds
    most_left_ms = ((requests_per_minute - current_minute_count) * _MINUTE_MS - 1) // previous_minute_count
    return max(0, _MINUTE_MS - elapsed_ms - most_left_ms)


def credential_for_engines(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the Authorization header for engines, or None if the client sends no credential.

    Anthropic's clients send `X-Api-Key`, which no engine reads.
    """
    return authorization or (None if x_api_key is None else f"Bearer {x_api_key}")
