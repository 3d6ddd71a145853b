"""Tests of simultaneous picks of several workers: distance from the least loaded backend.

A worker reads the loads and then charges its choice, and other workers may do the same in between. So the chosen
backend may exceed the least loaded one by the concurrent charges on it and by the concurrent releases on others. There
is no other error: reads are exact, and loads are never stale.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.balancer.pick import PickRequest, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.pools import make_pool

ONE = Load(compute_tokens=1)


@dataclass
class Workers:
    """Workers with one pool each over shared loads. No time passes between choice and charge."""

    count: int
    backends: int
    policy: str = "least_tokens"
    scoreboard: Scoreboard = field(init=False)

    def __post_init__(self) -> None:
        self.scoreboard = Scoreboard(self.count, self.backends)
        roster = Roster([], [("d", 1 + number) for number in range(self.backends)], self.scoreboard)
        self.pools = [
            make_pool(
                Role.DECODE,
                roster,
                self.scoreboard,
                policy=make_policy(self.policy, PolicyContext(worker_number=worker)),
                load_row=self.scoreboard.load_row(worker),
            )
            for worker in range(self.count)
        ]

    def loads(self) -> list[int]:
        return [self.scoreboard.load_of(slot).compute_tokens for slot in range(self.backends)]

    def look(self, worker: int, load: Load = ONE) -> Backend:
        """Choose a backend, the first half of entering a lease."""
        return self.pools[worker].take_pick(PickRequest.make_for_load(load))[0][0]

    def charge(self, worker: int, backend: Backend, load: Load = ONE) -> None:
        """Charge a backend, the second half. A negative load releases."""
        self.pools[worker].load_row.add_load(backend.slot, compute=load.compute_tokens)

    def pick_at_once(self) -> list[int]:
        """Let all workers choose before the first one charges, and return the chosen slots."""
        chosen = [self.look(worker) for worker in range(self.count)]
        for worker, backend in enumerate(chosen):
            self.charge(worker, backend)
        return [backend.slot for backend in chosen]


@pytest.mark.parametrize("policy", ["least_tokens", "round_robin"])
@pytest.mark.parametrize(("workers", "backends"), [(2, 2), (4, 8), (8, 8), (3, 20)])
def test_simultaneous_workers_choose_different_equal_backends(policy: str, workers: int, backends: int) -> None:
    together = Workers(workers, backends, policy)
    for _ in range(backends // workers):
        assert len(set(together.pick_at_once())) == workers


def test_four_simultaneous_workers_fill_backends_as_evenly_as_one() -> None:
    together = Workers(4, 8)
    for turn in range(200):
        together.pick_at_once()
        assert max(together.loads()) - min(together.loads()) <= 1, turn


@pytest.mark.parametrize("worker", range(5))
def test_short_requests_of_any_worker_reach_all_backends(worker: int) -> None:
    together = Workers(5, 4)
    slots = [together.look(worker).slot for _ in range(12)]
    assert slots[:4] == slots[4:8] == slots[8:]
    assert set(slots) == {0, 1, 2, 3}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_simultaneous_picks_differ_by_fewer_requests_than_workers(workers: int) -> None:
    together = Workers(workers, 3)
    for _ in range(50):
        chosen = [together.look(worker) for worker in range(workers)]
        for worker, backend in enumerate(chosen):
            loads = together.loads()
            assert loads[backend.slot] - min(loads) <= workers - 1
            together.charge(worker, backend)


_steps = st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 1000))


@settings(max_examples=200, deadline=None)
@given(st.lists(_steps, max_size=60))
def test_pick_error_is_bounded_by_concurrent_changes(steps: list[tuple[int, bool, int]]) -> None:
    together = Workers(4, 3)
    looking: dict[int, tuple[Backend, Load, list[int], list[int]]] = {}
    open_leases: list[tuple[int, Backend, Load]] = []

    def change(worker: int, backend: Backend, load: Load) -> None:
        together.charge(worker, backend, load)
        for _, _, charged, given_back in looking.values():
            charged[backend.slot] += max(0, load.compute_tokens)
            given_back[backend.slot] += max(0, -load.compute_tokens)

    for worker, gives_back, size in steps:
        if gives_back and open_leases:
            owner, backend, load = open_leases.pop(size % len(open_leases))
            change(owner, backend, Load(compute_tokens=-load.compute_tokens))
        elif worker not in looking:
            load = Load(compute_tokens=size)
            looking[worker] = together.look(worker, load), load, [0] * 3, [0] * 3
        else:
            backend, load, charged, given_back = looking.pop(worker)
            loads = together.loads()
            for slot in range(3):
                assert loads[backend.slot] - loads[slot] <= charged[backend.slot] + given_back[slot]
            change(worker, backend, load)
            open_leases.append((worker, backend, load))


def test_burst_of_several_processes_is_balanced_within_one_per_worker() -> None:
    # However they interleave: the last charge of the fullest backend was chosen when that one was the least loaded, and
    # since then each other worker can have brought one charge that it had decided on before.
    workers, each = 4, 300
    together = Workers(workers, 8)
    reading, writing = os.pipe()
    children = []
    for worker in range(workers):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(writing)
                os.read(reading, 1)  # all of them begin when the pipe is closed
                for _ in range(each):
                    together.pools[worker].make_lease(PickRequest.make_for_load(ONE)).__enter__()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(reading)
    os.close(writing)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * workers
    loads = together.loads()
    assert sum(loads) == workers * each
    assert max(loads) - min(loads) <= workers
