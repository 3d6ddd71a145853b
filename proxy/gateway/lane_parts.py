"""The parts of one lane that its requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.common_abilities import CommonAbilities
from proxy.gateway.engine_room import PoolsRoom
from proxy.gateway.retry import RetryBudget

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.backend import Backend
    from proxy.connectors.base import Connector
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.gateway.suspects import Suspects
    from proxy.observe.metrics import Metrics
    from proxy.settings.live import LiveSettings


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServiceParts:
    """The parts of one worker that a lane works with."""

    connector: Connector
    """Carries the calls to engines."""
    pools: Pools
    """Instances that serve the calls."""
    detokenizer: Detokenizer
    """Returns the text of token ids, by asking engines."""
    suspects: Suspects
    """Requests that may have crashed engines."""
    is_engine_gone: Callable[[Backend, float], Awaitable[bool]]
    """Returns whether an engine is down now, or after a number of seconds."""
    metrics: Metrics
    """Metrics of this worker."""
    queue_head: WorkerQueueHead | None = None
    """See AdmissionParts."""


class LaneParts:
    """The parts of one lane. An attempt loop keeps the settings with which it began."""

    def __init__(self, parts: ServiceParts, live: LiveSettings) -> None:
        pools, roles = parts.pools, parts.connector.roles
        self.live_settings = live
        self.connector = parts.connector
        self.pools = pools
        self.detokenizer = parts.detokenizer
        self.suspects = parts.suspects
        self.is_engine_gone = parts.is_engine_gone
        """See ServiceParts."""
        self.metrics = parts.metrics
        traits = live.settings.connector_traits
        self.common_abilities = CommonAbilities([pools.pool_of(role) for role in roles], traits.engine)
        self.retry_budget = RetryBudget(lambda: live.settings.retry)
        admission_parts = AdmissionParts(
            engine_room=PoolsRoom(pools, roles),
            metrics=parts.metrics,
            queue_order=pools.prefill,
            is_lower_priority_first=traits.lower_priority_first,
            queue_head=parts.queue_head,
        )
        self.admission_queue = AdmissionQueue(admission_parts, live.settings.admission)
