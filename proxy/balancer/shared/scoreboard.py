"""Load per backend, and orphaned KV that stays pinned on it, shared by all workers.

Each worker writes one row, and only its own, so there are no locks. The load of a backend is the sum of its column over
the rows. Cells are aligned 64-bit integers, so a reader sees the old or the new number and never a mixture. The
supervisor erases the row of a worker that died. Create the scoreboard before forking: the memory is anonymous and
inherited.

Load from elsewhere, such as a gateway on another host, has guest rows after those of the workers. Each guest row also
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
from functools import lru_cache, partial
from operator import add
from struct import Struct
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from proxy.common.backend import Backend


CELLS_PER_SLOT: Final = 8
REQUESTS: Final = 0
RUNNING: Final = 1
COMPUTE: Final = 2
KV: Final = 3
_CHARGES: Final = Struct("4q")  # these
_PINNED_COUNT: Final = 4
_PINNED_TOKENS: Final = 5
_PINNED_SINCE: Final = 6
_PINNED_EVER: Final = 7
_CELL_BYTES = 8
_SLOT_BYTES = CELLS_PER_SLOT * _CELL_BYTES
# Hand-overs are counted by decoder and lane, a count and tokens each. One lane for each possible prefiller would take
# 16 MB for each worker.
LANES: Final = 64
_TICKS_PER_SECOND: Final = 1_000_000  # of the cell that holds a time


@dataclass(frozen=True, slots=True)
class Pinned:
    """KV caches that a backend keeps although no decoder is going to fetch them; see PinnedKv.

    `since`: when the oldest of them was left behind, in seconds of the system's monotonic clock, which all workers
    share; None when there are none.
    """

    count: int = 0
    tokens: int = 0
    since: float | None = None


@dataclass(frozen=True, slots=True)
class HandoffCount:
    """KV caches that were sent to a decoder, and it answered: how many since the workers started, and of how many
    prompt tokens, which is an estimate.
    """

    count: int = 0
    tokens: int = 0


class LoadRow:
    """The part of the scoreboard that one worker or guest writes."""

    __slots__ = ("_cells", "_lanes")

    def __init__(self, cells: memoryview[int], lanes: memoryview[int]) -> None:
        self._cells = cells
        self._lanes = lanes

    def add(self, slot: int, requests: int = 0, running: int = 0, compute: int = 0, kv: int = 0) -> None:
        """Charge a slot; negative numbers give back."""
        cells, place = self._cells, _SLOT_BYTES * slot
        had_requests, had_running, had_compute, had_kv = _CHARGES.unpack_from(cells, place)
        _CHARGES.pack_into(
            cells, place, had_requests + requests, had_running + running, had_compute + compute, had_kv + kv
        )

    def take_work(self, slot: int, compute: int) -> None:
        """The work on one request is done: give back its `running`, and this compute."""
        cells, first = self._cells, CELLS_PER_SLOT * slot
        cells[first + RUNNING] -= 1
        cells[first + COMPUTE] -= compute

    def take_kv(self, slot: int, requests: int, kv: int) -> None:
        """Give back this cache, and the requests that have nothing more to do with the backend."""
        cells, first = self._cells, CELLS_PER_SLOT * slot
        cells[first + KV] -= kv
        if requests:
            cells[first + REQUESTS] -= requests

    def charge(self, slot: int, running: int, compute: int, kv: int) -> None:
        """Replace what this row has. Only for guests, whose requests are not known one by one."""
        first = CELLS_PER_SLOT * slot
        cells = self._cells
        cells[first + RUNNING], cells[first + COMPUTE], cells[first + KV] = running, compute, kv

    def count_handoff(self, prefiller: int, decoder: int, tokens: int) -> None:
        """Count one more KV cache sent from slot to slot, which is never taken back."""
        lanes = self._lanes
        index = 2 * (LANES * decoder + prefiller % LANES)
        lanes[index] += 1
        lanes[index + 1] += tokens

    def count_pinned(self, slot: int) -> None:
        """Count one more KV cache that is left behind, which is never taken back."""
        self._cells[CELLS_PER_SLOT * slot + _PINNED_EVER] += 1

    def set_pinned(self, slot: int, pinned: Pinned) -> None:
        """Replace what this worker knows to be pinned. It is no load, so nothing waits for it to go."""
        cells = self._cells
        first = CELLS_PER_SLOT * slot
        cells[first + _PINNED_COUNT] = pinned.count
        cells[first + _PINNED_TOKENS] = pinned.tokens
        cells[first + _PINNED_SINCE] = 0 if pinned.since is None else max(1, round(pinned.since * _TICKS_PER_SECOND))


@lru_cache(maxsize=64)
def layout(slots: tuple[int, ...], kinds: tuple[int, ...]) -> Struct:
    """Where the cells of these kinds are in a row, from the beginning of the first slot on. To find out takes 0.1 ms
    for 64 slots, and while one backend is passed over, every pick asks for the others.
    """
    form, at = "", CELLS_PER_SLOT * slots[0] if slots else 0
    for slot in slots:
        for kind in kinds:
            cell = CELLS_PER_SLOT * slot + kind
            form += f"{_CELL_BYTES * (cell - at)}xq"
            at = cell + 1
    return Struct(form)


class Scoreboard:
    """All rows. Every worker may read all of it and write its own `row`."""

    def __init__(self, workers: int = 1, slots: int = 1024, guests: int = 0) -> None:
        """`guests`: rows for load that does not come from this gateway's workers."""
        self.workers = workers
        self.slots = slots
        self.rows = workers + guests
        """Of workers and guests."""
        self._width = CELLS_PER_SLOT * slots
        self._cells = memoryview(mmap.mmap(-1, self.rows * self._width * _CELL_BYTES)).cast("q")
        self._lanes_width = 2 * LANES * slots
        self._lanes = memoryview(mmap.mmap(-1, self.rows * self._lanes_width * _CELL_BYTES)).cast("q")

    def row(self, number: int) -> LoadRow:
        """The workers come first, then the guests."""
        return LoadRow(self._cells_of(number), self._lanes_of(number))

    def load(self, slot: int) -> Load:
        return Load(compute=self._sum(slot, COMPUTE), kv=self._sum(slot, KV))

    def own(self, slot: int) -> tuple[int, Load]:
        """What this gateway's workers have charged: requests that the backend works on, and their load. Without guests
        it is all there is.
        """
        return self._own_sum(slot, RUNNING), Load(self._own_sum(slot, COMPUTE), self._own_sum(slot, KV))

    def own_cells(self) -> bytes:
        """All that this gateway's workers have charged, as it is now, for `changed`."""
        return self._cells[: self.workers * self._width].tobytes()

    def changed(self, slots: Iterable[int], before: bytes, after: bytes) -> Set[int]:
        """Those of the slots in which `own_cells` was another then. `before` may be empty: nothing was charged."""
        before, row_bytes = before or bytes(len(after)), self._width * _CELL_BYTES

        def differs(at: int) -> bool:
            return before[at : at + _SLOT_BYTES] != after[at : at + _SLOT_BYTES]

        return {slot for slot in slots if any(map(differs, range(slot * _SLOT_BYTES, len(after), row_bytes)))}

    def others_running(self, row: LoadRow) -> Callable[[Backend], int] | None:
        """What tells how many requests a backend works on in other rows than this one; None: there are no others."""
        if self.rows == 1:
            return None
        running, cells = self.running, row._cells
        return lambda backend: running(backend.slot) - cells[CELLS_PER_SLOT * backend.slot + RUNNING]

    def requests(self, slot: int) -> int:
        return self._sum(slot, REQUESTS)

    def running(self, slot: int) -> int:
        """How many of the requests are worked on: for the others the backend only holds the cache."""
        if self.rows == 1:
            return self._cells[CELLS_PER_SLOT * slot + RUNNING]
        return self._sum(slot, RUNNING)

    def reader(self, slots: Sequence[int], *kinds: int) -> Callable[[], Sequence[int]]:
        """What reads the cells of some kinds, one slot's after the other's, as sums over all rows. Both ascend."""
        first = CELLS_PER_SLOT * slots[0] if slots else 0
        read, cells = layout(tuple(slots), kinds).unpack_from, self._cells
        starts = [_CELL_BYTES * (row * self._width + first) for row in range(self.rows)]
        if self.rows == 1:
            return partial(read, cells, starts[0])
        first_row, *others = starts

        def sums() -> Sequence[int]:
            found: Sequence[int] = read(cells, first_row)
            for start in others:
                found = [*map(add, found, read(cells, start))]
            return found

        return sums

    def pinned(self, slot: int) -> Pinned:
        """The pinned KV of all workers: sums, and the oldest."""
        since = min((ticks for ticks in self._column(slot, _PINNED_SINCE) if ticks), default=None)
        return Pinned(
            count=self._sum(slot, _PINNED_COUNT),
            tokens=self._sum(slot, _PINNED_TOKENS),
            since=None if since is None else since / _TICKS_PER_SECOND,
        )

    def pinned_ever(self, slot: int) -> int:
        """How many KV caches were left behind, with those that are gone; of all workers, as `handovers`."""
        return self._sum(slot, _PINNED_EVER)

    def handoffs(self, slot: int) -> HandoffCount:
        """The sum over all workers. A worker that died takes its part with it; a slot that changed hands keeps what it
        had.
        """
        firsts = self._firsts(slot)
        end = 2 * LANES
        return HandoffCount(
            sum(sum(self._lanes[first : first + end : 2]) for first in firsts),
            sum(sum(self._lanes[first + 1 : first + end : 2]) for first in firsts),
        )

    def handoffs_by_lane(self, slot: int) -> dict[int, HandoffCount]:
        """The hand-overs of each lane that has any. A lane is shared by the prefillers whose slots are `LANES`
        apart.
        """
        firsts, by_lane = self._firsts(slot), {}
        for lane in range(LANES):
            if count := sum(self._lanes[first + 2 * lane] for first in firsts):
                by_lane[lane] = HandoffCount(count, sum(self._lanes[first + 2 * lane + 1] for first in firsts))
        return by_lane

    def erase(self, number: int) -> None:
        """Forget what a row had been charged with. Only for a worker that is dead, as it would go on from zero, or by
        the guest that writes it.
        """
        for cells in (self._cells_of(number), self._lanes_of(number)):
            cells[:] = memoryview(bytes(cells.nbytes)).cast("q")

    def _cells_of(self, number: int) -> memoryview[int]:
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of {self.rows}")
        return self._cells[number * self._width : (number + 1) * self._width]

    def _lanes_of(self, number: int) -> memoryview[int]:
        return self._lanes[number * self._lanes_width : (number + 1) * self._lanes_width]

    def _firsts(self, slot: int) -> range:
        """The index at which the lanes of a decoder begin, in the row of each worker."""
        return range(2 * LANES * slot, len(self._lanes), self._lanes_width)

    def _column(self, slot: int, kind: int) -> memoryview[int]:
        return self._cells[CELLS_PER_SLOT * slot + kind :: self._width]

    def _own_sum(self, slot: int, kind: int) -> int:
        return sum(self._cells[CELLS_PER_SLOT * slot + kind : self.workers * self._width : self._width])

    def _sum(self, slot: int, kind: int) -> int:
        return sum(self._column(slot, kind))


class SlotReader:
    """Reads some slots, which ascend, as every pick does: in one pass over plain integers, because a Load for each
    would triple its price. To be made once for slots that are read again and again.
    """

    __slots__ = ("compute", "running", "_loads", "_places")

    def __init__(self, scoreboard: Scoreboard, slots: Sequence[int]) -> None:
        self.running = scoreboard.reader(slots, RUNNING)
        """Scoreboard.running of each slot."""
        self.compute = scoreboard.reader(slots, COMPUTE)
        """The compute of each."""
        self._loads = scoreboard.reader(slots, COMPUTE, KV, _PINNED_TOKENS)
        self._places = range(0, 3 * len(slots), 3)

    def weights(self, per_compute: int, per_kv: int) -> list[int]:
        """`per_compute * compute + per_kv * (kv + pinned tokens)` of each."""
        loads, weights = self._loads(), []  # a comprehension would be a call more
        for place in self._places:
            weight = per_compute * loads[place] + per_kv * (loads[place + 1] + loads[place + 2])
            weights.append(weight)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """One KV cache on `backend`, left behind at `since` and freed by the engine itself at `until`, in clock seconds.

    `suspected`: the prefiller's answer was lost, so it is not known whether there is any.
    """

    backend: Backend
    tokens: int
    since: float
    until: float
    suspected: bool


@dataclass(slots=True)
class _Slot:
    pins: dict[Pin, None] = field(default_factory=dict)  # oldest first
    tokens: int = 0


class PinnedKv:
    """One worker's pins. `row` is its own; `clock` is the system's monotonic one except in tests."""

    def __init__(self, row: LoadRow, clock: Callable[[], float] = time.monotonic) -> None:
        self._row = row
        self._clock = clock
        # By slot and not by backend: one that was removed and added again is equal, but it is elsewhere.
        self._slots: dict[int, _Slot] = {}
        # A heap; the number keeps pins from being compared.
        self.expiries: list[tuple[float, int, Pin]] = []
        """When what ends, the soonest first; empty while nothing is pinned."""
        self._numbers = itertools.count()

    def pin(self, backend: Backend, tokens: int, seconds: float, *, suspected: bool = False) -> Pin:
        """Account for KV that the engine keeps for `seconds` more."""
        now = self._clock()
        pin = Pin(backend, tokens, now, now + seconds, suspected)
        slot = self._slots.setdefault(backend.slot, _Slot())
        slot.pins[pin] = None
        self._row.count_pinned(backend.slot)
        slot.tokens += tokens
        heapq.heappush(self.expiries, (pin.until, next(self._numbers), pin))
        self._publish(backend.slot, slot)
        return pin

    def unpin(self, pin: Pin) -> None:
        """The engine has let go of it. May be called again, and for what has expired."""
        slot = self._slots.get(pin.backend.slot)
        if slot is not None and pin in slot.pins:
            del slot.pins[pin]
            slot.tokens -= pin.tokens
            self._publish(pin.backend.slot, slot)

    def expire(self) -> None:
        """Drop what the engines have freed by now. To be called before the scoreboard's sums are read."""
        if not self.expiries:
            return
        now = self._clock()
        while self.expiries and self.expiries[0][0] <= now:
            self.unpin(heapq.heappop(self.expiries)[2])

    def forget(self, backend: Backend) -> None:
        """Drop everything on a backend that has left."""
        slot = self._slots.pop(backend.slot, None)
        if slot is not None:
            self._publish(backend.slot, _Slot())

    def pins(self) -> list[Pin]:
        """What this worker knows of."""
        self.expire()
        return [pin for slot in self._slots.values() for pin in slot.pins]

    def _publish(self, number: int, slot: _Slot) -> None:
        oldest = next(iter(slot.pins), None)
        since = None if oldest is None else oldest.since
        self._row.set_pinned(number, Pinned(len(slot.pins), slot.tokens, since))
