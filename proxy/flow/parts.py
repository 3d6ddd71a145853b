"""What serving a request takes: one worker's parts, put together for the gateway and its attempt loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.backend import Backend
    from proxy.balancer.capabilities import Capability
    from proxy.balancer.pool import Pool
    from proxy.balancer.pools import Pools
    from proxy.connectors.base import Connector
    from proxy.flow.admission import Admission
    from proxy.flow.budget import RetryBudget
    from proxy.flow.detokenizer import Detokenizer
    from proxy.flow.suspects import Suspects
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings


@dataclass(slots=True, kw_only=True)
class FlowParts:
    """Only `settings` is ever replaced: an attempt loop keeps those it began with."""

    connector: Connector
    pools: Pools
    detokenizer: Detokenizer
    suspects: Suspects
    budget: RetryBudget
    admission: Admission
    metrics: Metrics
    settings: Settings

    def is_in_every_engine(self, capability: Capability) -> bool:
        """Whether all engines that an attempt may come to have it; False when there are none."""
        versions = [pool.engine_version(backend) for pool, backend in self._engines()]
        return bool(versions) and all(version is not None and capability.is_in(version) for version in versions)

    def max_model_len(self) -> int | None:
        """Tokens that fit into a sequence on every engine; None when none has told."""
        known = [pool.max_model_len(backend) for pool, backend in self._engines()]
        return min((length for length in known if length is not None), default=None)

    def _engines(self) -> list[tuple[Pool, Backend]]:
        pools = [self.pools.of(role) for role in self.connector.roles]
        return [(pool, backend) for pool in pools for backend in pool.eligible()]
