"""The parts of one lane that its requests share."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(eq=False, kw_only=True)
class LaneParts:
    """The parts of one lane. An attempt loop keeps the settings with which it began."""

    live_settings: LiveSettings
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
    common_abilities: CommonAbilities = field(init=False)
    """Abilities that all engines of the lane have."""
    retry_budget: RetryBudget = field(init=False)
    """Permits for retries of the lane's requests."""
    admission_queue: AdmissionQueue = field(init=False)
    """Queue in front of the pools."""

    def __post_init__(self) -> None:
        settings, pools, roles = self.live_settings.settings, self.pools, self.connector.roles
        traits = settings.connector_traits
        self.common_abilities = CommonAbilities([pools.pool_of(role) for role in roles], traits.engine)
        self.retry_budget = RetryBudget(lambda: self.live_settings.settings.retry)
        admission_parts = AdmissionParts(
            engine_room=PoolsRoom(pools, roles),
            skips_queue=self.connector.skips_queue,
            metrics=self.metrics,
            queue_order=pools.prefill,
            is_lower_priority_first=traits.lower_priority_first,
            queue_head=self.queue_head,
        )
        self.admission_queue = AdmissionQueue(admission_parts, settings.admission)
