"""A balancer over two prefillers and two decoders, as a worker builds it, and a pool of any backends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.balancer.health import Health, Transition
from proxy.balancer.pick import Policy, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolLimits
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import LoadRow, Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.settings import HealthChecks
from tests.clock import Clock
from tests.pools import make_pool


@dataclass
class Balancer:
    """Balancer of one of two workers, with a clock and a record of transitions and outcomes."""

    scoreboard: Scoreboard = field(default_factory=lambda: Scoreboard(workers=2, slots=8))
    clock: Clock = field(default_factory=Clock)
    transitions: list[Transition] = field(default_factory=list)
    ends: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = HealthChecks(eject_seconds=30.0, slow_start_seconds=30.0)
        self.health = Health(lambda: self.checks, self.clock, random.Random(1))
        self.row: LoadRow = self.scoreboard.load_row(0)
        self.roster = Roster([("p", 1), ("p", 2)], [("d", 1), ("d", 2)], self.scoreboard)
        self.prefillers = self.pool(Role.PREFILL)
        self.decoders = self.pool(Role.DECODE)

    def pool(
        self, role: Role, policy: str | Policy = "least_tokens", max_running: int | None = None, **parts: Any
    ) -> Pool:
        """Return a pool of all backends of a role. `parts` are further fields of PoolParts."""
        parts = {
            "load_row": self.row,
            "health": self.health,
            "on_transition": self.transitions.append,
            "on_lease_end": lambda backend, result: self.ends.append((backend.name, result)),
            "clock": self.clock,
            "random_source": random.Random(1),
            "pool_limits": PoolLimits(max_running=max_running),
            **parts,
        }
        if isinstance(policy, str):
            policy = make_policy(policy, PolicyContext(random_source=random.Random(1), role=role))
        return make_pool(role, self.roster, self.scoreboard, policy=policy, **parts)

    def eject(self, backend: Backend) -> None:
        """Eject a backend for about eject_seconds."""
        assert self.decoders.report_stall(backend)
        assert self.transitions[-1].ejection_cause == "stall"

    def put_on_probation(self, backend: Backend) -> None:
        """Eject a backend and let the time of its ejection pass."""
        self.eject(backend)
        self.clock.now += 1.2 * self.checks.eject_seconds
        self.decoders.all_backends()
        assert self.health.health_of(backend).awaits_trial_request

    def books(self, backend: Backend) -> tuple[int, Load]:
        """Return the open leases and the load of one backend."""
        return self.scoreboard.open_leases(backend.slot), self.scoreboard.load_of(backend.slot)

    def all_books(self) -> set[tuple[int, Load]]:
        return {
            (self.scoreboard.open_leases(slot), self.scoreboard.load_of(slot))
            for slot in range(self.scoreboard.slot_count)
        }


@pytest.fixture
def balancer() -> Balancer:
    return Balancer()
