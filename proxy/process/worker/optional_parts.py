"""Optional parts of a worker: tracing, KV events and replicas, each if the settings name its endpoint."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from proxy.common.backend import Role
from proxy.dialects import DIALECTS
from proxy.process.shared import EXCHANGER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from proxy.fleet.discovery.prober import PeerVerdicts
    from proxy.fleet.roles import RoleController
    from proxy.observe.observers import RequestListener
    from proxy.process.worker.balancing import Balancing
    from proxy.process.worker.basis import Basis
    from proxy.process.worker.engines import EngineParts


@asynccontextmanager
async def build_tracing(basis: Basis) -> AsyncIterator[RequestListener | None]:
    """Return the listener that traces requests, or None without tracing. Leaving sends the last spans."""
    if basis.traces is None:
        yield None
        return
    # imported here, because only this needs the extra, and it is slow
    from proxy.observe.collector import export_spans
    from proxy.observe.tracing import TracedGateway, Tracer

    settings = basis.settings
    traced = TracedGateway(
        connector=settings.connector,
        engine=settings.connector_traits.engine,
        routes={dialect.label: dialect.path for dialect in DIALECTS},
    )
    async with export_spans(settings.tracing, basis.shared.log_once.is_news) as (provider, ids):
        yield Tracer(provider, ids, basis.traces, traced)


# KV events of engines, if the settings say that they publish them.


@asynccontextmanager
async def build_kv_events(basis: Basis, balancing: Balancing, engines: EngineParts) -> AsyncIterator[None]:
    """Subscribe in worker 0 to the KV events of all engines, inside `async with`.

    The other workers get them through the journal. Does nothing in other workers, or if KV events are not configured.
    """
    settings, journal = basis.settings.kv_events, basis.shared.journal
    if settings.endpoint is None or basis.index != 0 or Role.PREFILL not in engines.serving:
        yield
        return
    # imported here, because no other part needs it
    from proxy.fleet.kv_events.subscriptions import SubscriptionParts, Subscriptions

    # The cache of a decoder matters if it may get a prompt without prefill.
    roles = [Role.PREFILL, Role.DECODE] if basis.settings.kv.skip_prefill else [Role.PREFILL]
    async with Subscriptions(
        SubscriptionParts(
            pools=[engines.serving[role] for role in roles],
            health=balancing.health,
            journal=journal.writer(journal.workers),
            names=engines.lines.names,
            client=engines.lines.client,
            keys=balancing.keys,
            settings=settings,
            metrics=basis.metrics,
        )
    ):
        yield


# Sharing loads with other gateways, if the settings name a store.


@asynccontextmanager
async def build_replicas(
    basis: Basis, peer_verdicts: PeerVerdicts, roles: RoleController | None
) -> AsyncIterator[None]:
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

    def on_roles(leader_roles: Mapping[str, str] | None) -> None:
        if roles is not None:
            roles.leader_roles = leader_roles

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
                on_roles=on_roles,
            )
        ),
    ):
        yield


def _key_slots(basis: Basis) -> Mapping[str, int]:
    """Return the slots of client keys whose limits hold over all gateways."""
    if not basis.settings.replicas.key_limits:
        return {}
    current = basis.live.current
    return {
        key.name: current.slots[key.name]
        for key in current.client_keys
        if (key.max_concurrent, key.requests_per_minute, key.tokens_per_minute) != (None, None, None)
    }
