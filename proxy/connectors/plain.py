"""No disaggregation ("PD mixed"): one pool of engines, each of which prefills and decodes a request by itself.

For single-node and data-parallel deployments. Promises the same leases, retries and answers as the PD protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.backend import Role
from proxy.connectors.alone import Alone
from proxy.connectors.ranks import Ranks
from proxy.wire.openai import OPENAI_APIS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

    from proxy.balancer.pick import PickRequest
    from proxy.call import Call
    from proxy.connectors.base import Attempt, Kit
    from proxy.observe.timeline import Journey
    from proxy.settings import Settings
    from proxy.wire.openai import Api


class Plain:
    """Sends a call to one engine as it is."""

    roles: tuple[Role, ...] = (Role.DECODE,)
    apis: Sequence[Api] = OPENAI_APIS
    continues_answers = True

    def __init__(self, kit: Kit) -> None:
        self._alone = Alone(kit, Role.DECODE, Ranks(), kv="-")

    def check(self, call: Call) -> None:
        """Everything an engine can do alone is served."""

    def splits(self, call: Call) -> bool:
        """An engine takes it whole."""
        return False

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is opened from now on."""
        self._alone.configure(settings)

    def routes(self) -> Sequence[web.RouteDef]:
        """Engines call nobody."""
        return ()

    def open(self, call: Call, request: PickRequest, journey: Journey) -> AbstractAsyncContextManager[Attempt]:
        """One leg. See Connector.open."""
        return self._alone.open(call, request, journey)
