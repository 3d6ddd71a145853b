"""What serving a request takes: one worker's parts, put together for the gateway and its attempt loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.balancer.pool import Pools
    from proxy.connectors.base import Connector
    from proxy.gateway.admission import AdmissionQueue
    from proxy.gateway.common_abilities import CommonAbilities
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.gateway.retry_budget import RetryBudget
    from proxy.gateway.suspects import Suspects
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings


@dataclass(slots=True, kw_only=True)
class FlowParts:
    """Only `settings` is ever replaced: an attempt loop keeps those it began with."""

    connector: Connector
    pools: Pools
    abilities: CommonAbilities
    detokenizer: Detokenizer
    suspects: Suspects
    budget: RetryBudget
    admission: AdmissionQueue
    metrics: Metrics
    settings: Settings
