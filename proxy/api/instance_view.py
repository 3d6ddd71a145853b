"""What is shown of the instances."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.balancer.backend_health import FULL_PERCENT, HealthState
from proxy.balancer.engines import UNKNOWN_VERSION, EngineFacts
from proxy.balancer.roster import ADMIN
from proxy.common.backend import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.balancer.health import Health, HealthBoard
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Member, Roster
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.fleet.discovery.joining import Joiner


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InstanceParts:
    """One worker's parts that the routes on instances work with."""

    pools: Mapping[Role, Pool]
    """Pools of the roles that the connector uses."""
    roster: Roster
    """Members of these pools."""
    scoreboard: Scoreboard
    """Loads of the instances, summed over all workers."""
    health: Health
    """Health of the instances, as this worker sees it."""
    health_board: HealthBoard
    """Health of the instances, as each worker sees it."""
    incompatibilities: Incompatibilities
    """Incompatibilities that were found."""
    joiner: Joiner
    """Instances that were added and did not pass a health check yet."""
    models: ServedModels
    """Models that instances serve."""
    pool_of: Callable[[Backend], Pool]
    """Returns the pool in which an instance is compared with others."""


class InstanceView:
    """Describes the instances of the roles that the connector uses."""

    def __init__(self, parts: InstanceParts) -> None:
        self._pools = parts.pools
        self._roster = parts.roster
        self._scoreboard = parts.scoreboard
        self._health = parts.health
        self._health_board = parts.health_board
        self._incompatibilities = parts.incompatibilities
        self._joiner = parts.joiner
        self._models = parts.models
        self._pool_of = parts.pool_of
        self.configured: Collection[Backend] = ()
        """Those in the configuration."""

    def everything(self) -> list[dict[str, Any]]:
        """All instances. Loads are those of all workers; health is as this worker sees it."""
        shown: list[dict[str, Any]] = []
        for role, pool in self._pools.items():
            pool.backends()  # brings what is known up to date
            self._models.look()
            shown += map(self._describe, self._roster.members(role))
            shown += (_described(backend, "joining") for backend in self._joiner.joining(role))
        return shown

    def _models_of(self, backend: Backend) -> list[str]:
        """Empty: they are not known."""
        return sorted(self._models.of(backend))

    def _describe(self, member: Member) -> dict[str, Any]:
        board, backend, now = self._scoreboard, member.backend, time.monotonic()
        health = self._health.of(backend)
        (running, charged), pinned, changed_at = board.own(backend.slot), board.pinned(backend.slot), health.changed_at
        facts = health.facts or EngineFacts()
        return {
            **_described(backend, membership_of(member), health.state, health.reason),
            "configured": backend in self.configured,
            "origins": member.origins,
            "weight": member.weight,
            "states": Counter(state.value for state in self._health_board.states(backend)),
            "since_seconds": None if changed_at is None else round(now - changed_at, 3),
            "models": self._models_of(backend),
            "evacuated_in_seconds": None if member.leaves_at is None else round(max(0.0, member.leaves_at - now), 3),
            "load": {
                "inflight": board.requests(backend.slot),
                "running": running,
                "max_running": self._pools[backend.role].limit(backend),
                "learned_max_running": self._pool_of(backend).policy.most_running(backend),
                "compute_tokens": charged.compute,
                "kv_tokens": charged.kv,
                "pinned_kv": pinned.count,
                "pinned_kv_tokens": pinned.tokens,
            },
            "kv": self._incompatibilities.verdict(backend) if backend.role is Role.DECODE else None,
            "kv_from": self._incompatibilities.pairs(backend) if backend.role is Role.DECODE else None,
            "misfits": [
                {"kind": misfit.kind, "hint": misfit.hint, "since_seconds": round(now - misfit.since, 3)}
                for misfit in self._incompatibilities.of(backend)
            ],
            "engine": {
                "version": None if facts.version == UNKNOWN_VERSION else ".".join(map(str, facts.version)),
                "max_model_len": facts.max_model_len,
                "max_num_seqs": facts.max_num_seqs,
                "kv_tokens": facts.kv_tokens,
            },
        }


def membership_of(member: Member) -> str:
    """In one word."""
    return "draining" if member.is_draining else "disabled" if member.is_disabled else "enabled"


def _described(
    backend: Backend, membership: str, state: HealthState = HealthState.UNKNOWN, reason: str | None = None
) -> dict[str, Any]:
    """What is known of any instance, also of one that has not answered yet."""
    return {
        "role": backend.role,
        "address": backend.name,
        "bootstrap_port": backend.bootstrap_port,
        "configured": False,
        "origins": [ADMIN],
        "weight": FULL_PERCENT,
        "membership": membership,
        "state": state,
        "reason": reason,
        "states": {},
        "since_seconds": None,
        "models": sorted(backend.models),
        "evacuated_in_seconds": None,
        "load": None,
        "kv": None,
        "kv_from": None,
        "misfits": [],
        "engine": None,
    }
