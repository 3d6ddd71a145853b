"""One leg: an engine that prefills and decodes a request by itself."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.connectors.base import Attempt, check_status, first_byte_seconds, new_attempt_id
from proxy.record import Journey, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from proxy.balancer.backend import Backend
    from proxy.call import Call
    from proxy.connectors.base import Kit
    from proxy.connectors.ranks import Ranks
    from proxy.settings import Settings


class Alone:
    """Sends a call to one decoder as it is."""

    def __init__(self, kit: Kit, ranks: Ranks) -> None:
        self._pool = kit.pools.decode
        self._upstream = kit.upstream
        self._ranks = ranks
        self.configure(kit.settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is opened from now on."""
        self._timeouts = settings.timeouts
        self._dp_ranks = settings.balance.decode_dp_ranks

    @asynccontextmanager
    async def open(self, call: Call, avoid: Collection[Backend], journey: Journey) -> AsyncIterator[Attempt]:
        """The attempt, as in Connector.open; there is no prefiller to prefer."""
        changes = {"kv_transfer_params": dict(call.kv_params)} if call.kv_params else {}
        with self._pool.lease(call.decode_load, avoid) as lease, self._ranks.claim() as rank:
            journey.begin_attempt()
            journey.enter(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)
            journey.decoder = lease.backend.name
            steering = rank.header(lease.backend, self._dp_ranks)
            with await self._upstream.open(
                lease.backend,
                call.api.path,
                call.body(changes),
                {**call.headers, "x-request-id": new_attempt_id(), **steering},
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
