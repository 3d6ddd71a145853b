"""What vLLM's protocols have in common: two legs for most calls, and one engine for what no hand-over can serve."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from proxy.connectors.base import Connector
from proxy.connectors.one_engine import RARE, OneEngine, is_search
from proxy.connectors.ranks import Ranks

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.call import Call
    from proxy.connectors.attempt import Attempt
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Legs
    from proxy.observe.timeline import Timeline


class Disaggregated(Connector):
    """Prefill on one vLLM engine, decode on another. A protocol says how, in `open_both`."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._upstream = context.upstream
        self._ranks = Ranks()
        self._one_engine = OneEngine(context, self._ranks)

    def check(self, call: Call) -> None:
        """Refuse what can neither be handed over nor be served by one engine."""
        if not call.is_ordinary and not RARE.isdisjoint(call.values):
            self._one_engine.check(call)

    def splits(self, call: Call) -> bool:
        """A hand-over is of one sequence."""
        return call.is_ordinary or not is_search(call)

    def open(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """Both legs, or one engine's alone. See Connector.open."""
        return self._one_engine.open(call, request, timeline) or self.open_both(call, request, timeline)

    def alone(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """A decoder's. See Connector.alone."""
        return self._one_engine.decoder.open(call, request, timeline)

    def legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """See Connector.legs."""
        if call.is_ordinary or RARE.isdisjoint(call.values):
            return self.legs_of_both(call, request, timeline)
        return self._one_engine.legs(call, request, timeline) or self.legs_of_both(call, request, timeline)

    def legs_of_both(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """The legs of a call that can be handed over; None: they do not come one after the other."""
        return None

    @abstractmethod
    def open_both(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """Both legs of a call that can be handed over. See Connector.open."""
