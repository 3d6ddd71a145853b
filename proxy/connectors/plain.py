"""No disaggregation ("PD mixed"): one pool of engines, each of which prefills and decodes a request by itself.

For single-node and data-parallel deployments. Promises the same leases, retries and answers as the PD protocols.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.balancer.backend import Role
from proxy.connectors.base import Attempt, check_status, first_byte_seconds, new_attempt_id
from proxy.record import Journey, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from aiohttp import web

    from proxy.balancer.backend import Backend
    from proxy.call import Call
    from proxy.connectors.base import Kit
    from proxy.settings import Settings


class Plain:
    """Sends a call to one engine as it is."""

    roles: tuple[Role, ...] = (Role.DECODE,)
    one_sequence_per_call = False
    continues_answers = True

    def __init__(self, kit: Kit) -> None:
        self._pool = kit.pools.decode
        self._upstream = kit.upstream
        self._timeouts = kit.settings.timeouts

    def check(self, call: Call) -> None:
        """Everything an engine can do alone is served."""

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is opened from now on."""
        self._timeouts = settings.timeouts

    def routes(self) -> Sequence[web.RouteDef]:
        """Engines call nobody."""
        return ()

    @asynccontextmanager
    async def open(
        self, call: Call, avoid: Collection[Backend], journey: Journey, prefer: Backend | None = None
    ) -> AsyncIterator[Attempt]:
        """One leg, and no prefiller to prefer. See Connector.open."""
        changes = {"kv_transfer_params": dict(call.kv_params)} if call.kv_params else {}
        with self._pool.lease(call.decode_load, avoid) as lease:
            journey.begin_attempt()
            journey.enter(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)
            journey.decoder = lease.backend.name
            with await self._upstream.open(
                lease.backend,
                call.api.path,
                call.body(changes),
                {**call.headers, "x-request-id": new_attempt_id()},
                silence_seconds=first_byte_seconds(self._timeouts, call),
                resend_if_stale=True,
            ) as response:
                await check_status(response)
                yield Attempt(
                    response,
                    journey,
                    prefiller=None,
                    kv_handed_over=False,
                    on_arrival=lambda works: lease.confirm() if works else None,
                )
