"""Load per backend, and orphaned KV that stays pinned on it, shared by all workers.

Each worker writes one row, and only its own, so there are no locks. The load of a backend is the sum of its column over
the rows. Cells are aligned 64-bit integers, so a reader sees the old or the new number and never a mixture. The
supervisor erases the row of a worker that died. Create the scoreboard before forking: the memory is anonymous and
inherited.

Load of other gateways, such as one on another host, has guest rows after those of the workers. Each guest row also
has one writer, which charges `running`, `compute` and `kv`, and erases the row when it no longer knows the load. It
leaves `requests` at zero, because a removed instance leaves when the requests of this gateway have ended.

Pinned KV is a KV cache that a prefiller keeps although no decoder will fetch it, until it is released or expires. It is
no load: no request holds it and nothing waits for its end. But it fills the prefiller's memory, so its tokens count in
the choice of a prefiller. Each worker keeps its own pins and publishes their sums in its row.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import time
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from proxy.common.backend import Backend


CELLS_PER_SLOT: Final = 8
REQUESTS: Final = 0
RUNNING: Final = 1
COMPUTE: Final = 2
KV: Final = 3
_CHARGES: Final = Struct("4q")  # the four cells above
_PINNED_COUNT: Final = 4
_PINNED_TOKENS: Final = 5
_PINNED_SINCE: Final = 6
_PINNED_EVER: Final = 7
_CELL_BYTES = 8
_SLOT_BYTES = CELLS_PER_SLOT * _CELL_BYTES
# Cells of one slot, up to its pinned tokens.
_LOADS: Final = Struct("6q")
# Number of the last changes of a row that readers find by their slots.
_CHANGES: Final = 128
# A reader of several rows reads all its slots again after this number of calls. A processor may show another core the
# note of a change before the change.
_MAX_STALE_CALLS: Final = 1024
FEW: Final = 8
"""Up to this number of candidates are scored one by one, whatever their load."""
# Number of readers that are kept.
_READERS: Final = 16
LANES: Final = 64
"""Counters of handoffs per decoder. Prefillers whose slots are `LANES` apart share one.

A lane for each possible prefiller would take 16 MB in each worker."""
_TICKS_PER_SECOND: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PinnedTotals:
    """KV caches that a backend keeps although no decoder will fetch them; see PinnedKv."""

    cache_count: int = 0
    pinned_tokens: int = 0
    oldest_pinned_at: float | None = None
    """When the oldest was left behind, in seconds of the monotonic clock that all workers share. None: there is
    none."""


@dataclass(frozen=True, slots=True)
class HandoffCount:
    """Handoffs that a decoder has answered since the workers started."""

    handoff_count: int = 0
    handoff_tokens: int = 0
    """Estimated tokens of their prompts."""


class LoadRow:
    """The part of the scoreboard that one worker or guest writes."""

    def __init__(self, cells: memoryview[int], lanes: memoryview[int], changes: memoryview[int]) -> None:
        self._load_cells = cells
        self._lane_cells = lanes
        self._change_cells = changes

    def add_load(self, slot: int, requests: int = 0, running: int = 0, compute: int = 0, kv: int = 0) -> None:
        """Charge a slot. Negative numbers release load."""
        cells, place = self._load_cells, _SLOT_BYTES * slot
        had_requests, had_running, had_compute, had_kv = _CHARGES.unpack_from(cells, place)
        _CHARGES.pack_into(
            cells, place, had_requests + requests, had_running + running, had_compute + compute, had_kv + kv
        )
        changes = self._change_cells
        number = changes[0]
        changes[1 + number % _CHANGES] = slot
        changes[0] = number + 1

    def release_compute(self, slot: int, compute: int) -> None:
        """Release the compute of one request whose work is done, and its `running`."""
        cells, first = self._load_cells, CELLS_PER_SLOT * slot
        cells[first + RUNNING] -= 1
        cells[first + COMPUTE] -= compute
        changes = self._change_cells
        number = changes[0]
        changes[1 + number % _CHANGES] = slot
        changes[0] = number + 1

    def release_kv(self, slot: int, requests: int, kv: int) -> None:
        """Release a KV cache, and the requests that have finished with the backend."""
        cells, first = self._load_cells, CELLS_PER_SLOT * slot
        cells[first + KV] -= kv
        if requests:
            cells[first + REQUESTS] -= requests
        changes = self._change_cells
        number = changes[0]
        changes[1 + number % _CHANGES] = slot
        changes[0] = number + 1

    def replace_load(self, slot: int, running: int, compute: int, kv: int) -> None:
        """Replace the load in this row. Only for guests, whose requests are not known one by one."""
        first = CELLS_PER_SLOT * slot
        cells = self._load_cells
        cells[first + RUNNING], cells[first + COMPUTE], cells[first + KV] = running, compute, kv
        self._note_change(slot)

    def count_handoff(self, prefiller: int, decoder: int, tokens: int) -> None:
        """Count a handoff from a prefiller's slot to a decoder's slot. The count never decreases."""
        lanes = self._lane_cells
        index = 2 * (LANES * decoder + prefiller % LANES)
        lanes[index] += 1
        lanes[index + 1] += tokens

    def count_orphaned_kv(self, slot: int) -> None:
        """Count a KV cache that is left behind. The count never decreases."""
        self._load_cells[CELLS_PER_SLOT * slot + _PINNED_EVER] += 1

    def set_pinned_totals(self, slot: int, pinned: PinnedTotals) -> None:
        """Replace the sums of this worker's pinned KV."""
        cells = self._load_cells
        first = CELLS_PER_SLOT * slot
        cells[first + _PINNED_COUNT] = pinned.cache_count
        cells[first + _PINNED_TOKENS] = pinned.pinned_tokens
        cells[first + _PINNED_SINCE] = (
            0 if pinned.oldest_pinned_at is None else max(1, round(pinned.oldest_pinned_at * _TICKS_PER_SECOND))
        )
        self._note_change(slot)

    def _note_change(self, slot: int) -> None:
        """Note that the load of a slot has changed, for SlotReader.

        The methods that each request calls have these lines themselves, which saves calls.
        """
        changes = self._change_cells
        number = changes[0]
        changes[1 + number % _CHANGES] = slot
        changes[0] = number + 1


class Scoreboard:
    """Rows of all workers and guests. Every worker may read all rows and writes its own one."""

    def __init__(self, workers: int = 1, slots: int = 1024, guests: int = 0) -> None:
        """Create an empty scoreboard.

        Args:
            workers: Number of this gateway's workers.
            slots: Maximum number of backends.
            guests: Number of rows for load that does not come from this gateway's workers.
        """
        self.worker_count = workers
        self.slot_count = slots
        self.row_count = workers + guests
        self._row_width = CELLS_PER_SLOT * slots
        self._load_cells = memoryview(mmap.mmap(-1, self.row_count * self._row_width * _CELL_BYTES)).cast("q")
        self._lanes_width = 2 * LANES * slots
        self._lane_cells = memoryview(mmap.mmap(-1, self.row_count * self._lanes_width * _CELL_BYTES)).cast("q")
        self._change_cells = memoryview(mmap.mmap(-1, self.row_count * (1 + _CHANGES) * _CELL_BYTES)).cast("q")
        self._readers_by_slots: dict[
            tuple[tuple[int, ...], int, int], SlotReader
        ] = {}  # the least recently requested first

    def load_row(self, row_number: int) -> LoadRow:
        """Return the row of a worker, or of a guest, whose numbers follow those of the workers."""
        return LoadRow(
            self._load_cells_of(row_number), self._lane_cells_of(row_number), self._change_cells_of(row_number)
        )

    def load_of(self, slot: int) -> Load:
        """Return the load of a backend."""
        return Load(compute_tokens=self._sum(slot, COMPUTE), kv_tokens=self._sum(slot, KV))

    def own_load(self, slot: int) -> tuple[int, Load]:
        """Return the running requests and the load that this gateway's workers have charged."""
        return self._own_sum(slot, RUNNING), Load(self._own_sum(slot, COMPUTE), self._own_sum(slot, KV))

    def copy_own_cells(self) -> bytes:
        """Return a copy of all cells of this gateway's workers, for `changed_slots`."""
        return self._load_cells[: self.worker_count * self._row_width].tobytes()

    def changed_slots(self, slots: Iterable[int], before: bytes, after: bytes) -> Set[int]:
        """Return the slots that differ between two results of `copy_own_cells`.

        An empty `before` stands for no load.
        """
        before, row_bytes = before or bytes(len(after)), self._row_width * _CELL_BYTES

        def differs(at: int) -> bool:
            return before[at : at + _SLOT_BYTES] != after[at : at + _SLOT_BYTES]

        return {slot for slot in slots if any(map(differs, range(slot * _SLOT_BYTES, len(after), row_bytes)))}

    def others_running_requests(self, row: LoadRow) -> Callable[[Backend], int] | None:
        """Return a function for the running requests of a backend in all other rows, or None if there is no other."""
        if self.row_count == 1:
            return None
        running, cells = self.running_requests, row._load_cells
        return lambda backend: running(backend.slot) - cells[CELLS_PER_SLOT * backend.slot + RUNNING]

    def open_leases(self, slot: int) -> int:
        """Return the open leases on a backend."""
        return self._sum(slot, REQUESTS)

    def running_requests(self, slot: int) -> int:
        """Return the requests that a backend works on. For other requests it only holds the KV cache."""
        if self.row_count == 1:
            return self._load_cells[CELLS_PER_SLOT * slot + RUNNING]
        return self._sum(slot, RUNNING)

    def reader_of(self, slots: Iterable[int], per_compute: int, per_kv: int) -> SlotReader:
        """Return the reader of some slots, in ascending order, with their present loads.

        Equal calls return the same reader.

        `per_compute` and `per_kv`: see `SlotReader.weights_by_place`.
        """
        key = tuple(slots), per_compute, per_kv
        reader = self._readers_by_slots.pop(key, None) or SlotReader(self, *key)
        self._readers_by_slots[key] = reader
        reader.update_loads()
        if len(self._readers_by_slots) > _READERS:
            del self._readers_by_slots[next(iter(self._readers_by_slots))]
        return reader

    def pinned_kv(self, slot: int) -> PinnedTotals:
        """Return the pinned KV of all workers on a backend."""
        since = min((ticks for ticks in self._column_cells(slot, _PINNED_SINCE) if ticks), default=None)
        return PinnedTotals(
            cache_count=self._sum(slot, _PINNED_COUNT),
            pinned_tokens=self._sum(slot, _PINNED_TOKENS),
            oldest_pinned_at=None if since is None else since / _TICKS_PER_SECOND,
        )

    def count_pinned_ever(self, slot: int) -> int:
        """Return the number of KV caches left behind on a backend, including those that are gone."""
        return self._sum(slot, _PINNED_EVER)

    def count_handoffs(self, slot: int) -> HandoffCount:
        """Return the handoffs to a decoder, summed over all workers.

        The part of a worker that died is lost. A slot keeps its count when another backend gets it.
        """
        firsts = self._first_lane_indexes(slot)
        end = 2 * LANES
        return HandoffCount(
            sum(sum(self._lane_cells[first : first + end : 2]) for first in firsts),
            sum(sum(self._lane_cells[first + 1 : first + end : 2]) for first in firsts),
        )

    def count_handoffs_by_lane(self, slot: int) -> dict[int, HandoffCount]:
        """Return the handoffs to a decoder by lane, without the lanes that have none."""
        firsts, by_lane = self._first_lane_indexes(slot), {}
        for lane in range(LANES):
            if count := sum(self._lane_cells[first + 2 * lane] for first in firsts):
                by_lane[lane] = HandoffCount(count, sum(self._lane_cells[first + 2 * lane + 1] for first in firsts))
        return by_lane

    def erase_row(self, row_number: int) -> None:
        """Set a row to zero. Only for the row of a dead worker, or by the guest that writes it."""
        for cells in (self._load_cells_of(row_number), self._lane_cells_of(row_number)):
            cells[:] = memoryview(bytes(cells.nbytes)).cast("q")
        # More than readers can follow, so that they read all slots.
        self._change_cells_of(row_number)[0] += _CHANGES + 1

    def _load_cells_of(self, number: int) -> memoryview[int]:
        if not 0 <= number < self.row_count:
            raise IndexError(f"row {number} of {self.row_count}")
        return self._load_cells[number * self._row_width : (number + 1) * self._row_width]

    def _lane_cells_of(self, number: int) -> memoryview[int]:
        return self._lane_cells[number * self._lanes_width : (number + 1) * self._lanes_width]

    def _change_cells_of(self, number: int) -> memoryview[int]:
        return self._change_cells[number * (1 + _CHANGES) : (number + 1) * (1 + _CHANGES)]

    def _first_lane_indexes(self, slot: int) -> range:
        """Return the indexes of a decoder's first lane in all rows."""
        return range(2 * LANES * slot, len(self._lane_cells), self._lanes_width)

    def _column_cells(self, slot: int, kind: int) -> memoryview[int]:
        return self._load_cells[CELLS_PER_SLOT * slot + kind :: self._row_width]

    def _own_sum(self, slot: int, kind: int) -> int:
        return sum(
            self._load_cells[CELLS_PER_SLOT * slot + kind : self.worker_count * self._row_width : self._row_width]
        )

    def _sum(self, slot: int, kind: int) -> int:
        return sum(self._column_cells(slot, kind))


class SlotReader:
    """Loads of some slots.

    `update_loads` reads only the slots that have changed. Get a reader from `Scoreboard.reader_of`.

    The lists have one number for each slot, in the order of the slots, and are changed in place.
    """

    def __init__(self, scoreboard: Scoreboard, slots: tuple[int, ...], per_compute: int, per_kv: int) -> None:
        count = len(slots)
        self.slots = slots
        self.running_by_place: list[int] = [0] * count
        """Running requests."""
        self.compute_by_place: list[int] = [0] * count
        """Compute load."""
        self.held_kv_by_place: list[int] = [0] * count
        """KV tokens, with those that are pinned."""
        self.weights_by_place: list[int] = [0] * count
        """`per_compute * compute + per_kv * held`."""
        self.busy_places: set[int] = set()
        """Places of the slots that have any load, in the order of the slots."""
        self.all_places = list(range(count))
        """All places."""
        self.are_slots_few = count <= FEW
        """Whether all places are scored one by one, whatever their load."""
        self.computing_count = 0
        """Number of slots with compute load."""
        self.total_running = self.total_weight = 0
        """Sums of the lists."""
        self._scoreboard = scoreboard
        self._place_of = [-1] * scoreboard.slot_count  # by slot; -1: not one of these slots
        for place, slot in enumerate(slots):
            self._place_of[slot] = place
        self._per_compute, self._per_kv = per_compute, per_kv
        self._seen = [-1 - _CHANGES] * scoreboard.row_count  # number of changes of each row up to the last call
        self._calls = 0

    def update_loads(self) -> None:
        """Read the slots that have changed in any row since the last call."""
        board, seen = self._scoreboard, self._seen
        changes = board._change_cells
        if board.row_count == 1:
            if changes[0] == seen[0]:
                return
        else:
            self._calls += 1
            if self._calls >= _MAX_STALE_CALLS:
                self._calls = 0
                seen[0] = -1 - _CHANGES
        reads_all = False
        places = self._place_of
        for row in range(board.row_count):
            first = row * (1 + _CHANGES)
            number, before = changes[first], seen[row]
            if number == before:
                continue
            seen[row] = number
            if number - before > _CHANGES:
                reads_all = True
                continue
            last = -1
            for each in range(before, number):
                slot = changes[first + 1 + each % _CHANGES]
                place = places[slot]
                if place >= 0 and place != last:
                    last = place
                    self._read_slot(place, slot)
            # The writer of another row may have gone on, and replaced slots that were not read yet.
            reads_all = reads_all or changes[first] - before > _CHANGES
        if reads_all:
            for place, slot in enumerate(self.slots):
                self._read_slot(place, slot)

    def places_to_score(self) -> list[int]:
        """Return the places with load, in ascending order, or all places if these are few or most have load."""
        if self.are_slots_few or 2 * len(self.busy_places) >= len(self.all_places):
            return self.all_places
        return sorted(self.busy_places)

    def _read_slot(self, place: int, slot: int) -> None:
        board, at = self._scoreboard, _SLOT_BYTES * slot
        _, running, compute, kv, _, pinned = _LOADS.unpack_from(board._load_cells, at)
        for row in range(1, board.row_count):
            _, its_running, its_compute, its_kv, _, its_pinned = _LOADS.unpack_from(
                board._load_cells, at + row * board._row_width * _CELL_BYTES
            )
            running += its_running
            compute += its_compute
            kv += its_kv
            pinned += its_pinned
        held = kv + pinned
        weight = self._per_compute * compute + self._per_kv * held
        self.total_running += running - self.running_by_place[place]
        self.total_weight += weight - self.weights_by_place[place]
        self.computing_count += (compute != 0) - (self.compute_by_place[place] != 0)
        self.running_by_place[place], self.compute_by_place[place] = running, compute
        self.held_kv_by_place[place], self.weights_by_place[place] = held, weight
        has_load = running != 0 or compute != 0 or held != 0
        if has_load != (place in self.busy_places):
            if has_load:
                self.busy_places.add(place)
            else:
                self.busy_places.remove(place)


@dataclass(slots=True, eq=False)
class KvPin:
    """One KV cache that a backend keeps although no decoder will fetch it. Times are clock seconds."""

    backend: Backend
    """The backend as it is now, also after its move to another role."""
    pinned_tokens: int
    pinned_at: float
    expires_at: float
    """When the engine frees it."""
    is_suspected: bool
    """Whether its existence is only suspected, because the prefiller's answer was lost."""


@dataclass(slots=True)
class _PinnedSlot:
    pins: dict[KvPin, None] = field(default_factory=dict)  # oldest first
    pinned_tokens: int = 0


class PinnedKv:
    """The pins of one worker.

    Args:
        row: The worker's row of the scoreboard.
        clock: The monotonic clock of the system, which all workers share, except in tests.
    """

    def __init__(self, row: LoadRow, clock: Callable[[], float] = time.monotonic) -> None:
        self._load_row = row
        self._clock = clock
        # By slot and not by backend, because a backend that was removed and added again is equal but has another slot.
        self.pins_by_slot: dict[int, _PinnedSlot] = {}
        # The number keeps pins from being compared.
        self.expiries: list[tuple[float, int, KvPin]] = []
        """Heap of pins by end. Empty while nothing is pinned."""
        self._pin_numbers = itertools.count()

    def add_pin(self, backend: Backend, tokens: int, seconds: float, *, is_suspected: bool = False) -> KvPin:
        """Record KV that the engine keeps for `seconds` more."""
        now = self._clock()
        pin = KvPin(backend, tokens, now, now + seconds, is_suspected)
        slot = self.pins_by_slot.setdefault(backend.slot, _PinnedSlot())
        slot.pins[pin] = None
        self._load_row.count_orphaned_kv(backend.slot)
        slot.pinned_tokens += tokens
        heapq.heappush(self.expiries, (pin.expires_at, next(self._pin_numbers), pin))
        self._publish_totals(backend.slot, slot)
        return pin

    def remove_pin(self, pin: KvPin) -> None:
        """Remove a pin that the engine has released. May be called again, also for an expired pin."""
        slot = self.pins_by_slot.get(pin.backend.slot)
        if slot is not None and pin in slot.pins:
            del slot.pins[pin]
            slot.pinned_tokens -= pin.pinned_tokens
            self._publish_totals(pin.backend.slot, slot)

    def remove_expired_pins(self) -> None:
        """Remove the pins that the engines have freed by now. Call it before the scoreboard's sums are read."""
        if not self.expiries:
            return
        now = self._clock()
        while self.expiries and self.expiries[0][0] <= now:
            self.remove_pin(heapq.heappop(self.expiries)[2])

    def follow_move(self, before: Backend, after: Backend) -> None:
        """Count the pins of a backend that has moved to another role in its new slot. Its engine keeps the KV."""
        slot = self.pins_by_slot.get(before.slot, _PinnedSlot())
        moved = [pin for pin in slot.pins if pin.backend.place == before.place]
        if not moved:
            return
        target = self.pins_by_slot.setdefault(after.slot, _PinnedSlot())
        for pin in moved:
            self.remove_pin(pin)
            pin.backend = after
            target.pinned_tokens += pin.pinned_tokens
        oldest_first = sorted((*target.pins, *moved), key=lambda pin: pin.pinned_at)
        target.pins = dict.fromkeys(oldest_first)
        self._publish_totals(after.slot, target)

    def forget_backend(self, backend: Backend) -> None:
        """Remove all pins on a backend that has left."""
        slot = self.pins_by_slot.pop(backend.slot, None)
        if slot is not None:
            self._publish_totals(backend.slot, _PinnedSlot())

    def current_pins(self) -> list[KvPin]:
        """Return the pins of this worker that have not expired."""
        self.remove_expired_pins()
        return [pin for slot in self.pins_by_slot.values() for pin in slot.pins]

    def _publish_totals(self, number: int, slot: _PinnedSlot) -> None:
        oldest = next(iter(slot.pins), None)
        since = None if oldest is None else oldest.pinned_at
        self._load_row.set_pinned_totals(number, PinnedTotals(len(slot.pins), slot.pinned_tokens, since))
