"""The whole balancer over two prefillers and two decoders, put together as a worker does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from proxy.balancer.backend import Backend, Load, Role
from proxy.balancer.health import Health, Transition
from proxy.balancer.policies import POLICIES
from proxy.balancer.pool import Pool
from proxy.balancer.roster import Roster
from proxy.balancer.scoreboard import Row, Scoreboard


@dataclass
class Balancer:
    scoreboard: Scoreboard = field(default_factory=lambda: Scoreboard(workers=2, slots=8))
    health: Health = field(default_factory=Health)
    transitions: list[Transition] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.row: Row = self.scoreboard.row(0)
        self.roster = Roster([("p", 1), ("p", 2)], [("d", 1), ("d", 2)], self.scoreboard)
        self.prefillers = self.pool(Role.PREFILL)
        self.decoders = self.pool(Role.DECODE)

    def pool(self, role: Role, policy: str = "least_load") -> Pool:
        return Pool(
            role, POLICIES[policy](), self.scoreboard, self.row, self.roster, self.health, self.transitions.append
        )

    def books(self, backend: Backend) -> tuple[int, Load]:
        """Open leases and load of one backend."""
        return self.scoreboard.requests(backend.slot), self.scoreboard.load(backend.slot)

    def all_books(self) -> set[tuple[int, Load]]:
        return {(self.scoreboard.requests(slot), self.scoreboard.load(slot)) for slot in range(self.scoreboard.slots)}


@pytest.fixture
def balancer() -> Balancer:
    return Balancer()
