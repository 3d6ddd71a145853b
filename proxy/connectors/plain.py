"""No disaggregation ("PD mixed"): every engine prefills and decodes its own requests.

For single-node and data-parallel deployments. Leases, retries and answers are the same as with the PD protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.common.backend import Role
from proxy.connectors.base import Connector, ConnectorContext
from proxy.connectors.legs import RankCounts
from proxy.connectors.one_engine import SingleLegMaker

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.connectors.legs import Attempt, Legs
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline


class PlainConnector(Connector):
    """Sends each call unchanged to one engine."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._leg = SingleLegMaker(context, Role.DECODE, RankCounts(), kv="-")

    def splits_into_units(self, call: Call) -> bool:
        """Return False, because an engine serves all prompts and samples of a call."""
        return False

    def open_decoder_only_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Return the same attempt as `open`. See Connector.open_decoder_only_attempt."""
        return self.open_attempt(call, request, timeline)

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Return the only leg of the call. See Connector.make_legs."""
        return self._leg.make_legs(call, request, timeline)
