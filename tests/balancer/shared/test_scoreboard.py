"""The scoreboard: rows add up, and a dead worker's row goes away."""

from __future__ import annotations

import os
import struct

import pytest

from proxy.balancer.health import Health
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolLimits, PoolParts
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import LANES, HandoffCount, Pinned, Scoreboard, SlotReader, _layout
from proxy.common.backend import Load, Role


def test_new_scoreboard_is_zero() -> None:
    board = Scoreboard(workers=2, slots=3)
    assert [board.requests(slot) for slot in range(3)] == [0, 0, 0]
    assert [board.load(slot) for slot in range(3)] == [Load()] * 3


def test_load_is_the_sum_over_the_workers() -> None:
    board = Scoreboard(workers=3, slots=4)
    for worker in range(3):
        board.row(worker).add(2, requests=1, compute=10 * worker, kv=worker)
    assert board.requests(2) == 3
    assert board.load(2) == Load(compute=30, kv=3)
    assert board.load(1) == board.load(3) == Load()


def test_negative_numbers_release_load() -> None:
    board = Scoreboard(workers=1, slots=2)
    board.row(0).add(1, requests=1, compute=7, kv=9)
    board.row(0).add(1, compute=-7)
    assert board.load(1) == Load(compute=0, kv=9)
    board.row(0).add(1, requests=-1, kv=-9)
    assert (board.requests(1), board.load(1)) == (0, Load())


@pytest.mark.parametrize("workers", [1, 3])
def test_slot_reader_returns_the_weights_of_the_loads(workers: int) -> None:
    board = Scoreboard(workers, slots=5)
    for worker in range(workers):
        for slot in range(5):
            board.row(worker).add(slot, requests=1, running=2, compute=slot + worker, kv=100 * slot)
            board.row(worker).set_pinned(slot, Pinned(1, 7 * slot, 1.0))
    slots = [0, 2, 4]
    loads = [board.load(slot) for slot in slots]
    pinned = [7 * slot * workers for slot in slots]
    assert SlotReader(board, slots).weights(10, 3) == [
        10 * load.compute + 3 * (load.kv + tokens) for load, tokens in zip(loads, pinned, strict=True)
    ]
    assert list(SlotReader(board, slots).compute()) == [load.compute for load in loads]
    assert list(SlotReader(board, slots).running()) == [board.running(slot) for slot in slots] == [2 * workers] * 3


def test_layout_of_the_same_slots_is_cached() -> None:
    board = Scoreboard(workers=2, slots=64)
    made = []
    for _ in range(3):
        SlotReader(board, [5, *range(20, 64)])
        made.append(_layout.cache_info().misses)
    assert made[0] == made[1] == made[2]


def test_pinned_kv_is_summed_over_workers_with_the_oldest_time() -> None:
    board = Scoreboard(workers=3, slots=2)
    for worker, since in ((0, 12.25), (2, 7.5)):
        board.row(worker).set_pinned(1, Pinned(2, 10, since))
    assert board.pinned(1) == Pinned(4, 20, 7.5)
    board.row(2).set_pinned(1, Pinned())
    assert board.pinned(1) == Pinned(2, 10, 12.25)
    assert board.pinned(0) == Pinned()
    assert (board.requests(1), board.load(1)) == (0, Load())


def test_total_of_pinned_kv_is_summed_over_workers() -> None:
    board = Scoreboard(workers=2, slots=3)
    for worker in (0, 1, 1):
        board.row(worker).count_pinned(1)
    board.row(0).set_pinned(1, Pinned(1, 10, 1.0))
    assert [board.pinned_ever(slot) for slot in range(3)] == [0, 3, 0]


def test_worker_cannot_write_past_its_row() -> None:
    board = Scoreboard(workers=2, slots=2)
    with pytest.raises(struct.error):
        board.row(0).add(2, requests=1)
    with pytest.raises(IndexError):
        board.row(0).set_pinned(2, Pinned(1, 1, 1.0))
    with pytest.raises(IndexError):
        board.row(2)
    assert board.requests(0) == board.requests(1) == 0


def test_erasing_a_row_leaves_the_others_unchanged() -> None:
    board = Scoreboard(workers=2, slots=2)
    for worker in range(2):
        board.row(worker).add(1, requests=1, compute=5, kv=6)
        board.row(worker).set_pinned(1, Pinned(1, 8, 3.0 + worker))
    board.erase(0)
    assert (board.requests(1), board.load(1), board.pinned(1)) == (1, Load(5, 6), Pinned(1, 8, 4.0))
    board.erase(1)
    assert (board.requests(1), board.load(1), board.pinned(1)) == (0, Load(), Pinned())


def test_load_of_a_dead_forked_worker_can_be_erased() -> None:
    board = Scoreboard(workers=2, slots=2)
    child = os.fork()
    if child == 0:
        board.row(1).add(0, requests=1, compute=5, kv=6)
        os._exit(0)
    os.waitpid(child, 0)
    assert (board.requests(0), board.load(0)) == (1, Load(5, 6))
    board.erase(1)
    assert (board.requests(0), board.load(0)) == (0, Load())


def test_handoffs_are_counted_by_decoder_and_lane() -> None:
    board = Scoreboard(workers=2, slots=LANES + 4)
    for worker in range(2):
        board.row(worker).count_handoff(0, 3, 100)
        board.row(worker).count_handoff(1, 3, 10)
    board.row(0).count_handoff(LANES + 1, 3, 7)  # in the lane of slot 1
    assert board.handoffs(3) == HandoffCount(5, 227)
    assert board.handoffs_by_lane(3) == {0: HandoffCount(2, 200), 1: HandoffCount(3, 27)}
    assert (board.handoffs(2), board.handoffs_by_lane(2)) == (HandoffCount(), {})
    board.erase(0)
    assert board.handoffs(3) == HandoffCount(2, 110)


class Replica:
    """A plug-in that brings the load of another gateway: the one writer of a guest row."""

    def __init__(self, board: Scoreboard, number: int) -> None:
        self._board = board
        self._number = number
        self._row = board.row(number)
        self._known: dict[int, tuple[int, Load]] = {}

    def publish(self, slot: int, running: int, load: Load) -> None:
        """What the other gateway has on a backend now."""
        before, charged = self._known.get(slot, (0, Load()))
        self._row.add(slot, running=running - before, compute=load.compute - charged.compute, kv=load.kv - charged.kv)
        self._known[slot] = running, load

    def lose_sight(self) -> None:
        """Nothing is known any more."""
        self._board.erase(self._number)
        self._known.clear()


def test_load_of_another_gateway_is_a_guest_row() -> None:
    board = Scoreboard(workers=2, slots=2, guests=1)
    replica = Replica(board, 2)
    board.row(0).add(1, requests=1, running=1, compute=5, kv=5)
    replica.publish(1, 3, Load(compute=100, kv=10))
    replica.publish(1, 2, Load(compute=70, kv=20))
    assert (board.running(1), board.load(1)) == (3, Load(compute=75, kv=25))
    assert SlotReader(board, [0, 1]).weights(10, 3) == [0, 825]
    assert board.requests(1) == 1  # an instance that is removed is not kept by the requests of others
    replica.lose_sight()
    assert (board.running(1), board.load(1)) == (1, Load(compute=5, kv=5))


def test_guest_row_written_by_another_process_is_visible() -> None:
    board = Scoreboard(workers=1, slots=2, guests=1)
    child = os.fork()
    if child == 0:
        Replica(board, 1).publish(0, 1, Load(compute=9))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert SlotReader(board, [0, 1]).weights(1, 1) == [9, 0]
    assert board.running(0) == 1


def test_pool_considers_the_load_of_another_gateway() -> None:
    board = Scoreboard(workers=1, slots=2, guests=1)
    roster = Roster([], [("d", 1), ("d", 2)], board)
    pool = Pool(
        PoolParts(
            role=Role.DECODE,
            policy=make_policy("least_tokens"),
            scoreboard=board,
            row=board.row(0),
            roster=roster,
            health=Health(),
            limits=PoolLimits(max_running=2),
        )
    )
    one, two = pool.backends()
    replica = Replica(board, 1)
    replica.publish(one.slot, 2, Load(compute=5))
    assert {pool.pick() for _ in range(4)} == {two}
    replica.publish(two.slot, 2, Load(compute=50))
    assert not pool.has_room()
    replica.lose_sight()
    assert pool.has_room()
    assert {pool.pick() for _ in range(4)} == {one, two}
