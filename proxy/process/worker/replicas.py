"""Sharing loads with other gateways, if the settings name a store."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from proxy.process.shared import EXCHANGER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from proxy.fleet.discovery.prober import PeerVerdicts
    from proxy.process.worker.basis import Basis


@asynccontextmanager
async def build_replicas(basis: Basis, peer_verdicts: PeerVerdicts) -> AsyncIterator[None]:
    """Exchange loads with the other gateways in one worker, inside `async with`.

    Leaving deletes this gateway's loads from the store. Does nothing in other workers, or without `replicas.url`.
    """
    shared, settings = basis.shared, basis.settings
    if settings.replicas.url is None or basis.index != EXCHANGER:
        yield
        return
    # imported here, because only this needs the extra
    from proxy.fleet.replicas import ExchangeParts, LocalState, PeerRows, SharedRows, StateExchange, Store

    rows = SharedRows(
        scoreboard=shared.scoreboard,
        key_usage=shared.key_usage,
        board=shared.health_board,
        queue_heads=shared.queue_heads,
        journal=shared.journal.writer(settings.workers),
    )
    key_slots = partial(_key_slots, basis)
    async with (
        Store(settings, shared.replica) as store,
        StateExchange(
            ExchangeParts(
                store=store,
                me=shared.replica,
                own=LocalState(shared.replica, shared.roster, key_slots, rows),
                guests=PeerRows(rows),
                key_slots=key_slots,
                settings=settings,
                metrics=basis.metrics,
                on_verdict=peer_verdicts.handle_new,
            )
        ),
    ):
        yield


def _key_slots(basis: Basis) -> Mapping[str, int]:
    """Return the slots of client keys whose limits hold over all gateways."""
    if not basis.settings.replicas.key_limits:
        return {}
    current = basis.live.current
    limited = (key for key in current.client_keys if (key.max_concurrent, key.requests_per_minute) != (None, None))
    return {key.name: current.slots[key.name] for key in limited}
