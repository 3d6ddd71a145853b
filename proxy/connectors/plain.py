"""No disaggregation ("PD mixed"): one pool of engines, each of which prefills and decodes its requests alone.

For single-node and data-parallel deployments. Promises the same leases, retries and answers as the PD protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.common.backend import Role
from proxy.connectors.base import Connector
from proxy.connectors.legs import Ranks
from proxy.connectors.one_engine import SingleLeg

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Attempt, Legs
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline


class Plain(Connector):
    """Sends a call to one engine as it is."""

    roles = (Role.DECODE,)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._leg = SingleLeg(context, Role.DECODE, Ranks(), kv="-")

    def splits(self, call: Call) -> bool:
        """An engine takes it whole."""
        return False

    def alone(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """The same. See Connector.alone."""
        return self.open(call, request, timeline)

    def legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """One leg. See Connector.legs."""
        return self._leg.legs(call, request, timeline)
