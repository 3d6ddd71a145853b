"""Pinned KV: what nobody fetches is accounted for until it is released or expires, and is nobody's load."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from proxy.balancer.health import Health
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolParts
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Pin, Pinned, PinnedKv, Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.clock import Clock

BACKENDS = [Backend(Role.PREFILL, "p", port, slot=port) for port in range(3)]


@pytest.fixture
def board() -> Scoreboard:
    return Scoreboard(workers=2, slots=3)


def test_pinned_kv_of_one_worker_is_visible_to_all(board: Scoreboard, clock: Clock) -> None:
    one, other = (PinnedKv(board.row(worker), clock) for worker in range(2))
    one.pin(BACKENDS[1], 100, 480.0)
    clock.now += 5.0
    one.pin(BACKENDS[1], 10, 480.0)
    other.pin(BACKENDS[1], 1, 480.0)
    other.pin(BACKENDS[2], 7, 480.0)
    assert board.pinned(1) == Pinned(count=3, tokens=111, since=1000.0)
    assert board.pinned(2) == Pinned(count=1, tokens=7, since=1005.0)
    assert board.pinned(0) == Pinned()


def test_age_of_pinned_kv_is_that_of_the_oldest_remaining_pin(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    first = pinned_kv.pin(BACKENDS[0], 1, 480.0)
    clock.now += 2.5
    second = pinned_kv.pin(BACKENDS[0], 2, 480.0)
    pinned_kv.unpin(first)
    assert board.pinned(0) == Pinned(count=1, tokens=2, since=1002.5)
    pinned_kv.unpin(second)
    assert board.pinned(0) == Pinned()


def test_pin_may_be_removed_twice(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    pin = pinned_kv.pin(BACKENDS[0], 5, 480.0)
    for _ in range(2):
        pinned_kv.unpin(pin)
    assert board.pinned(0) == Pinned()
    assert pinned_kv.pins() == []


def test_each_pin_expires_at_its_time(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    late = pinned_kv.pin(BACKENDS[0], 1, 480.0)
    early = pinned_kv.pin(BACKENDS[0], 2, 30.0, suspected=True)
    clock.now += 29.9
    assert pinned_kv.pins() == [late, early]
    clock.now += 0.1
    assert pinned_kv.pins() == [late]
    assert board.pinned(0) == Pinned(count=1, tokens=1, since=1000.0)
    pinned_kv.unpin(early)
    clock.now += 450.0
    pinned_kv.expire()
    assert board.pinned(0) == Pinned()


def test_pins_of_a_backend_that_has_left_are_dropped(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    gone, stays = (pinned_kv.pin(backend, 5, 480.0) for backend in BACKENDS[:2])
    pinned_kv.forget(BACKENDS[0])
    assert pinned_kv.pins() == [stays]
    assert board.pinned(0) == Pinned()
    pinned_kv.unpin(gone)
    assert board.pinned(0) == Pinned()


def test_backend_in_a_new_slot_does_not_inherit_pins(board: Scoreboard, clock: Clock) -> None:
    """The same address in another slot is an equal backend."""
    pinned_kv = PinnedKv(board.row(0), clock)
    pinned_kv.pin(BACKENDS[0], 5, 480.0)
    back = Backend(Role.PREFILL, "p", 0, slot=2)
    assert back == BACKENDS[0]
    pinned_kv.pin(back, 7, 480.0)
    pinned_kv.forget(BACKENDS[0])
    assert board.pinned(0) == Pinned()
    assert board.pinned(2).tokens == 7


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
    pinned_kv = PinnedKv(board.row(0), clock)
    ever: list[Pin] = []
    live: list[Pin] = []
    for step, which, amount in steps:
        match step:
            case "pin":
                ever.append(pinned_kv.pin(BACKENDS[which], amount, seconds=float(amount)))
                live.append(ever[-1])
            case "unpin" if ever:
                pinned_kv.unpin(ever[which % len(ever)])
                live = [pin for pin in live if pin is not ever[which % len(ever)]]
            case "wait":
                clock.now += amount
            case "forget":
                pinned_kv.forget(BACKENDS[which])
                live = [pin for pin in live if pin.backend is not BACKENDS[which]]
        live = [pin for pin in live if pin.until > clock.now]
        pinned_kv.expire()
        for slot in range(3):
            pins = [pin for pin in live if pin.backend.slot == slot]
            since = min((pin.since for pin in pins), default=None)
            assert board.pinned(slot) == Pinned(len(pins), sum(pin.tokens for pin in pins), since)


# In the pool


def prefillers(board: Scoreboard, pinned_kv: PinnedKv) -> tuple[Pool, Roster]:
    roster = Roster([("p", 0), ("p", 1)], [], board)
    pool = Pool(
        PoolParts(
            role=Role.PREFILL,
            policy=make_policy("least_tokens"),
            scoreboard=board,
            row=board.row(0),
            roster=roster,
            health=Health(),
            pinned_kv=pinned_kv,
        )
    )
    return pool, roster


def test_pinned_kv_counts_as_load_in_the_choice_of_a_prefiller(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    pool, _ = prefillers(board, pinned_kv)
    one, two = pool.backends()
    pinned_kv.pin(one, 100, 480.0)
    with pool.lease(PickRequest.of(Load(kv=99))) as lease:
        assert lease.backend == two
        assert {pool.pick() for _ in range(3)} == {two}
        with pool.lease(PickRequest.of(Load(kv=2))):
            assert {pool.pick() for _ in range(3)} == {one}


def test_pinned_kv_of_another_worker_counts_in_the_choice(board: Scoreboard, clock: Clock) -> None:
    pool, _ = prefillers(board, PinnedKv(board.row(0), clock))
    one, two = pool.backends()
    PinnedKv(board.row(1), clock).pin(one, 100, 480.0)
    assert {pool.pick() for _ in range(3)} == {two}


def test_expired_pins_do_not_count_in_the_next_pick(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    pool, _ = prefillers(board, pinned_kv)
    pinned_kv.pin(pool.backends()[0], 100, 30.0)
    clock.now += 30.0
    assert {pool.pick() for _ in range(3)} == set(pool.backends())


def test_draining_prefiller_does_not_wait_for_its_pinned_kv(board: Scoreboard, clock: Clock) -> None:
    pinned_kv = PinnedKv(board.row(0), clock)
    pool, roster = prefillers(board, pinned_kv)
    one, two = pool.backends()
    pinned_kv.pin(one, 100, 480.0)
    assert (pool.scoreboard.requests(one.slot), board.load(one.slot)) == (0, Load())
    roster.remove(Role.PREFILL, "p", 0)
    assert roster.finalize() == [one]
    assert pool.backends() == (two,)
    assert pinned_kv.pins() == []
    assert board.pinned(one.slot) == Pinned()
