"""Scoreboard: loads as sums of rows, handoffs, and pinned KV."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from proxy.balancer.pick import PickRequest
from proxy.balancer.pool import Pool, PoolLimits
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import LANES, HandoffCount, KvPin, PinnedKv, PinnedTotals, Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.clock import Clock
from tests.forking import in_child
from tests.pools import make_pool


def test_load_is_the_sum_over_the_workers_until_it_is_released() -> None:
    board = Scoreboard(workers=3, slots=4)
    for worker in range(3):
        board.load_row(worker).add_load(2, requests=1, compute=10 * worker, kv=worker)
    assert [board.open_leases(slot) for slot in range(4)] == [0, 0, 3, 0]
    assert [board.load_of(slot) for slot in range(4)] == [Load(), Load(), Load(compute_tokens=30, kv_tokens=3), Load()]
    board.load_row(2).add_load(2, compute=-20)
    assert board.load_of(2) == Load(compute_tokens=10, kv_tokens=3)
    board.load_row(2).add_load(2, requests=-1, kv=-2)
    assert (board.open_leases(2), board.load_of(2)) == (2, Load(compute_tokens=10, kv_tokens=1))


@pytest.mark.parametrize("workers", [1, 3])
def test_slot_reader_returns_the_weights_of_the_loads(workers: int) -> None:
    board = Scoreboard(workers, slots=5)
    for worker in range(workers):
        for slot in range(5):
            board.load_row(worker).add_load(slot, requests=1, running=2, compute=slot + worker, kv=100 * slot)
            board.load_row(worker).set_pinned_totals(slot, PinnedTotals(1, 7 * slot, 1.0))
    slots = [0, 2, 4]
    loads = [board.load_of(slot) for slot in slots]
    pinned = [7 * slot * workers for slot in slots]
    reader = board.reader_of(slots, 10, 3)
    assert reader.weights_by_place == [
        10 * load.compute_tokens + 3 * (load.kv_tokens + tokens) for load, tokens in zip(loads, pinned, strict=True)
    ]
    assert reader.compute_by_place == [load.compute_tokens for load in loads]
    assert reader.running_by_place == [board.running_requests(slot) for slot in slots] == [2 * workers] * 3


def test_equal_calls_return_the_same_slot_reader() -> None:
    board = Scoreboard(slots=64)
    first = board.reader_of([5, 7], 1, 1)
    assert board.reader_of([5, 7], 1, 1) is first
    assert board.reader_of([5, 7], 1, 0) is not first
    for slot in range(20):
        board.reader_of([slot], 1, 1)
    assert board.reader_of([5, 7], 1, 1) is not first


@given(data=st.data())
def test_slot_reader_follows_all_changes_of_all_rows(data: st.DataObject) -> None:
    workers, slots = data.draw(st.integers(1, 3)), 40
    board = Scoreboard(workers, slots=slots, guests=1)
    kept = data.draw(st.lists(st.integers(0, slots - 1), unique=True, min_size=1).map(sorted))
    reader = board.reader_of(kept, 10, 3)
    numbers = st.integers(0, 5)
    changes = st.tuples(st.integers(0, workers), st.integers(0, slots - 1), numbers, numbers, numbers, numbers)
    for repeat in data.draw(st.lists(st.sampled_from([1, 1, 150]), max_size=5)):
        for row, slot, running, compute, kv, pinned in data.draw(st.lists(changes, max_size=8)):
            for _ in range(repeat):
                board.load_row(row).add_load(slot, 1, running, compute, kv)
            board.load_row(row).set_pinned_totals(slot, PinnedTotals(1, pinned, 1.0))
            if not pinned:
                board.load_row(row).release_compute(slot, compute)
                board.load_row(row).release_kv(slot, 1, kv)
            elif pinned == 5:
                board.erase_row(row)
        reader.update_loads()
        loads = [board.load_of(slot) for slot in kept]
        assert reader.running_by_place == [board.running_requests(slot) for slot in kept]
        assert reader.compute_by_place == [load.compute_tokens for load in loads]
        assert reader.held_kv_by_place == [
            load.kv_tokens + board.pinned_kv(slot).pinned_tokens for slot, load in zip(kept, loads, strict=True)
        ]
        assert reader.weights_by_place == [
            10 * each + 3 * held for each, held in zip(reader.compute_by_place, reader.held_kv_by_place, strict=True)
        ]
        assert (reader.total_running, reader.total_weight) == (
            sum(reader.running_by_place),
            sum(reader.weights_by_place),
        )
        assert reader.computing_count == sum(map(bool, reader.compute_by_place))
        having = zip(reader.running_by_place, reader.compute_by_place, reader.held_kv_by_place, strict=True)
        assert reader.busy_places == {place for place, loads in enumerate(having) if any(loads)}


def test_pinned_kv_is_summed_over_workers_with_the_oldest_time() -> None:
    board = Scoreboard(workers=3, slots=2)
    for worker, since in ((0, 12.25), (2, 7.5)):
        board.load_row(worker).set_pinned_totals(1, PinnedTotals(2, 10, since))
    assert board.pinned_kv(1) == PinnedTotals(4, 20, 7.5)
    board.load_row(2).set_pinned_totals(1, PinnedTotals())
    assert board.pinned_kv(1) == PinnedTotals(2, 10, 12.25)
    assert board.pinned_kv(0) == PinnedTotals()
    assert (board.open_leases(1), board.load_of(1)) == (0, Load())


def test_total_of_pinned_kv_is_summed_over_workers() -> None:
    board = Scoreboard(workers=2, slots=3)
    for worker in (0, 1, 1):
        board.load_row(worker).count_orphaned_kv(1)
    board.load_row(0).set_pinned_totals(1, PinnedTotals(1, 10, 1.0))
    assert [board.count_pinned_ever(slot) for slot in range(3)] == [0, 3, 0]


def test_worker_cannot_write_past_its_row() -> None:
    board = Scoreboard(workers=2, slots=2)
    with pytest.raises(struct.error):
        board.load_row(0).add_load(2, requests=1)
    with pytest.raises(IndexError):
        board.load_row(0).set_pinned_totals(2, PinnedTotals(1, 1, 1.0))
    with pytest.raises(IndexError):
        board.load_row(2)
    assert board.open_leases(0) == board.open_leases(1) == 0


def test_erasing_the_row_of_a_dead_worker_leaves_the_others_unchanged() -> None:
    board = Scoreboard(workers=2, slots=2)

    def charge(worker: int) -> None:
        board.load_row(worker).add_load(1, requests=1, compute=5, kv=6)
        board.load_row(worker).set_pinned_totals(1, PinnedTotals(1, 8, 3.0 + worker))

    in_child(lambda: charge(0))
    charge(1)
    assert (board.open_leases(1), board.load_of(1), board.pinned_kv(1)) == (2, Load(10, 12), PinnedTotals(2, 16, 3.0))
    board.erase_row(0)
    assert (board.open_leases(1), board.load_of(1), board.pinned_kv(1)) == (1, Load(5, 6), PinnedTotals(1, 8, 4.0))
    board.erase_row(1)
    assert (board.open_leases(1), board.load_of(1), board.pinned_kv(1)) == (0, Load(), PinnedTotals())


def test_handoffs_are_counted_by_decoder_and_lane() -> None:
    board = Scoreboard(workers=2, slots=LANES + 4)
    for worker in range(2):
        board.load_row(worker).count_handoff(0, 3, 100)
        board.load_row(worker).count_handoff(1, 3, 10)
    board.load_row(0).count_handoff(LANES + 1, 3, 7)  # in the lane of slot 1
    assert board.count_handoffs(3) == HandoffCount(5, 227)
    assert board.count_handoffs_by_lane(3) == {0: HandoffCount(2, 200), 1: HandoffCount(3, 27)}
    assert (board.count_handoffs(2), board.count_handoffs_by_lane(2)) == (HandoffCount(), {})
    board.erase_row(0)
    assert board.count_handoffs(3) == HandoffCount(2, 110)


class Replica:
    """Writer of a guest row with the load of another gateway."""

    def __init__(self, board: Scoreboard, number: int) -> None:
        self._board = board
        self._number = number
        self._row = board.load_row(number)
        self._known: dict[int, tuple[int, Load]] = {}

    def publish(self, slot: int, running: int, load: Load) -> None:
        """Write the other gateway's present load of a backend."""
        before, charged = self._known.get(slot, (0, Load()))
        self._row.add_load(
            slot,
            running=running - before,
            compute=load.compute_tokens - charged.compute_tokens,
            kv=load.kv_tokens - charged.kv_tokens,
        )
        self._known[slot] = running, load

    def clear(self) -> None:
        """Erase the row, because the other gateway is out of reach."""
        self._board.erase_row(self._number)
        self._known.clear()


@pytest.mark.parametrize("runs", [lambda work: work(), in_child], ids=["in this process", "in another process"])
def test_load_of_another_gateway_is_a_guest_row(runs: Callable[[Callable[[], None]], None]) -> None:
    board = Scoreboard(workers=2, slots=2, guests=1)
    replica = Replica(board, 2)
    board.load_row(0).add_load(1, requests=1, running=1, compute=5, kv=5)

    def publish() -> None:
        replica.publish(1, 3, Load(compute_tokens=100, kv_tokens=10))
        replica.publish(1, 2, Load(compute_tokens=70, kv_tokens=20))

    runs(publish)
    assert (board.running_requests(1), board.load_of(1)) == (3, Load(compute_tokens=75, kv_tokens=25))
    assert board.reader_of([0, 1], 10, 3).weights_by_place == [0, 825]
    assert board.open_leases(1) == 1  # requests of other gateways do not keep a removed instance
    runs(replica.clear)
    assert (board.running_requests(1), board.load_of(1)) == (1, Load(compute_tokens=5, kv_tokens=5))


def test_pool_considers_the_load_of_another_gateway() -> None:
    board = Scoreboard(workers=1, slots=2, guests=1)
    roster = Roster([], [("d", 1), ("d", 2)], board)
    pool = make_pool(Role.DECODE, roster, board, pool_limits=PoolLimits(max_running=2))
    one, two = pool.all_backends()
    replica = Replica(board, 1)
    replica.publish(one.slot, 2, Load(compute_tokens=5))
    assert {pool.pick_backend() for _ in range(4)} == {two}
    replica.publish(two.slot, 2, Load(compute_tokens=50))
    assert not pool.has_room()
    replica.clear()
    assert pool.has_room()
    assert {pool.pick_backend() for _ in range(4)} == {one, two}


# Pinned KV


BACKENDS = [Backend(Role.PREFILL, "p", port, slot=port) for port in range(3)]


@pytest.fixture
def board() -> Scoreboard:
    return Scoreboard(workers=2, slots=3)


def test_pinned_kv_of_one_worker_is_visible_to_all(board: Scoreboard, clock: Clock) -> None:
    one, other = (PinnedKv(board.load_row(worker), clock) for worker in range(2))
    one.add_pin(BACKENDS[1], 100, 480.0)
    clock.now += 5.0
    one.add_pin(BACKENDS[1], 10, 480.0)
    other.add_pin(BACKENDS[1], 1, 480.0)
    other.add_pin(BACKENDS[2], 7, 480.0)
    assert board.pinned_kv(1) == PinnedTotals(cache_count=3, pinned_tokens=111, oldest_pinned_at=1000.0)
    assert board.pinned_kv(2) == PinnedTotals(cache_count=1, pinned_tokens=7, oldest_pinned_at=1005.0)
    assert board.pinned_kv(0) == PinnedTotals()


def test_age_of_pinned_kv_is_that_of_the_oldest_remaining_pin(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    first = pinned_kv.add_pin(BACKENDS[0], 1, 480.0)
    clock.now += 2.5
    second = pinned_kv.add_pin(BACKENDS[0], 2, 480.0)
    pinned_kv.remove_pin(first)
    assert board.pinned_kv(0) == PinnedTotals(cache_count=1, pinned_tokens=2, oldest_pinned_at=1002.5)
    pinned_kv.remove_pin(second)
    assert board.pinned_kv(0) == PinnedTotals()


def test_pin_may_be_removed_twice(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    pin = pinned_kv.add_pin(BACKENDS[0], 5, 480.0)
    for _ in range(2):
        pinned_kv.remove_pin(pin)
    assert board.pinned_kv(0) == PinnedTotals()
    assert pinned_kv.current_pins() == []


def test_each_pin_expires_at_its_time(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    late = pinned_kv.add_pin(BACKENDS[0], 1, 480.0)
    early = pinned_kv.add_pin(BACKENDS[0], 2, 30.0, is_suspected=True)
    clock.now += 29.9
    assert pinned_kv.current_pins() == [late, early]
    clock.now += 0.1
    assert pinned_kv.current_pins() == [late]
    assert board.pinned_kv(0) == PinnedTotals(cache_count=1, pinned_tokens=1, oldest_pinned_at=1000.0)
    pinned_kv.remove_pin(early)
    clock.now += 450.0
    pinned_kv.remove_expired_pins()
    assert board.pinned_kv(0) == PinnedTotals()


def test_pins_of_a_backend_that_has_left_are_dropped(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    gone, stays = (pinned_kv.add_pin(backend, 5, 480.0) for backend in BACKENDS[:2])
    pinned_kv.forget_backend(BACKENDS[0])
    assert pinned_kv.current_pins() == [stays]
    assert board.pinned_kv(0) == PinnedTotals()
    pinned_kv.remove_pin(gone)
    assert board.pinned_kv(0) == PinnedTotals()


def test_backend_in_a_new_slot_does_not_inherit_pins(board: Scoreboard, clock: Clock) -> None:
    """The same address in another slot is an equal backend."""
    pinned_kv = PinnedKv(board.load_row(0), clock)
    pinned_kv.add_pin(BACKENDS[0], 5, 480.0)
    back = Backend(Role.PREFILL, "p", 0, slot=2)
    assert back == BACKENDS[0]
    pinned_kv.add_pin(back, 7, 480.0)
    pinned_kv.forget_backend(BACKENDS[0])
    assert board.pinned_kv(0) == PinnedTotals()
    assert board.pinned_kv(2).pinned_tokens == 7


def test_pins_follow_a_backend_to_its_new_role(board: Scoreboard, clock: Clock) -> None:
    """Pins of another backend in the new slot stay there, as until the worker has noticed its move, too."""
    pinned_kv = PinnedKv(board.load_row(0), clock)
    first = pinned_kv.add_pin(BACKENDS[0], 5, 480.0, is_suspected=True)
    clock.now += 1.0
    pinned_kv.add_pin(BACKENDS[2], 7, 480.0)
    moved = replace(BACKENDS[0], role=Role.DECODE, slot=2)
    pinned_kv.follow_move(BACKENDS[0], moved)
    assert board.pinned_kv(0) == PinnedTotals()
    assert board.pinned_kv(2) == PinnedTotals(cache_count=2, pinned_tokens=12, oldest_pinned_at=1000.0)
    back = replace(moved, role=Role.PREFILL, slot=1)
    pinned_kv.follow_move(moved, back)
    assert board.pinned_kv(1) == PinnedTotals(cache_count=1, pinned_tokens=5, oldest_pinned_at=1000.0)
    assert board.pinned_kv(2) == PinnedTotals(cache_count=1, pinned_tokens=7, oldest_pinned_at=1001.0)
    pinned_kv.remove_pin(first)
    clock.now += 480.0
    assert pinned_kv.current_pins() == []
    assert [board.pinned_kv(slot) for slot in range(3)] == [PinnedTotals()] * 3


steps = st.lists(
    st.one_of(
        st.tuples(st.just("pin"), st.integers(0, 2), st.integers(1, 99)),
        st.tuples(st.just("unpin"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 20)),
        st.tuples(st.just("forget"), st.integers(0, 2), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_published_sums_match_the_pins_after_any_steps(steps: list[tuple[str, int, int]]) -> None:
    clock, board = Clock(), Scoreboard(workers=1, slots=3)
    pinned_kv = PinnedKv(board.load_row(0), clock)
    ever: list[KvPin] = []
    live: list[KvPin] = []
    for step, which, amount in steps:
        match step:
            case "pin":
                ever.append(pinned_kv.add_pin(BACKENDS[which], amount, seconds=float(amount)))
                live.append(ever[-1])
            case "unpin" if ever:
                pinned_kv.remove_pin(ever[which % len(ever)])
                live = [pin for pin in live if pin is not ever[which % len(ever)]]
            case "wait":
                clock.now += amount
            case "forget":
                pinned_kv.forget_backend(BACKENDS[which])
                live = [pin for pin in live if pin.backend is not BACKENDS[which]]
        live = [pin for pin in live if pin.expires_at > clock.now]
        pinned_kv.remove_expired_pins()
        for slot in range(3):
            pins = [pin for pin in live if pin.backend.slot == slot]
            since = min((pin.pinned_at for pin in pins), default=None)
            assert board.pinned_kv(slot) == PinnedTotals(len(pins), sum(pin.pinned_tokens for pin in pins), since)


# In the pool


def prefillers(board: Scoreboard, pinned_kv: PinnedKv) -> tuple[Pool, Roster]:
    roster = Roster([("p", 0), ("p", 1)], [], board)
    return make_pool(Role.PREFILL, roster, board, pinned_kv=pinned_kv), roster


def test_pinned_kv_counts_as_load_in_the_choice_of_a_prefiller(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    pool, _ = prefillers(board, pinned_kv)
    one, two = pool.all_backends()
    pinned_kv.add_pin(one, 100, 480.0)
    with pool.make_lease(PickRequest.make_for_load(Load(kv_tokens=99))) as lease:
        assert lease.backend == two
        assert {pool.pick_backend() for _ in range(3)} == {two}
        with pool.make_lease(PickRequest.make_for_load(Load(kv_tokens=2))):
            assert {pool.pick_backend() for _ in range(3)} == {one}


def test_pinned_kv_of_another_worker_counts_in_the_choice(board: Scoreboard, clock: Clock) -> None:
    pool, _ = prefillers(board, PinnedKv(board.load_row(0), clock))
    one, two = pool.all_backends()
    PinnedKv(board.load_row(1), clock).add_pin(one, 100, 480.0)
    assert {pool.pick_backend() for _ in range(3)} == {two}


def test_expired_pins_do_not_count_in_the_next_pick(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    pool, _ = prefillers(board, pinned_kv)
    pinned_kv.add_pin(pool.all_backends()[0], 100, 30.0)
    clock.now += 30.0
    assert {pool.pick_backend() for _ in range(3)} == set(pool.all_backends())


def test_draining_prefiller_does_not_wait_for_its_pinned_kv(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.load_row(0), clock)
    pool, roster = prefillers(board, pinned_kv)
    one, two = pool.all_backends()
    pinned_kv.add_pin(one, 100, 480.0)
    assert (pool.scoreboard.open_leases(one.slot), board.load_of(one.slot)) == (0, Load())
    roster.remove_backend(Role.PREFILL, "p", 0)
    assert roster.drop_drained_backends() == [one]
    assert pool.all_backends() == (two,)
    assert pinned_kv.current_pins() == []
    assert board.pinned_kv(one.slot) == PinnedTotals()
