"""Pools of backends, as a worker builds them."""

from __future__ import annotations

from typing import Any

from proxy.balancer.health import Health
from proxy.balancer.pick import Policy
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolParts
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Role


def make_pool(
    role: Role, roster: Roster, scoreboard: Scoreboard, *, policy: str | Policy = "least_tokens", **parts: Any
) -> Pool:
    """Return a pool of the first worker. `parts` are further fields of PoolParts."""
    parts = {"load_row": scoreboard.load_row(0), "health": Health(), **parts}
    made = make_policy(policy) if isinstance(policy, str) else policy
    return Pool(PoolParts(role=role, policy=made, scoreboard=scoreboard, roster=roster, **parts))
