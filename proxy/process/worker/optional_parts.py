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
    from proxy.process.worker.basis import WorkerBasis
    from proxy.process.worker.engines import EngineParts


@asynccontextmanager
async def build_tracing(basis: WorkerBasis) -> AsyncIterator[RequestListener | None]:
    """Return the listener that traces requests, or None without tracing. Leaving sends the last spans."""
    if basis.running_traces is None:
        yield None
        return
    # imported here, because only this needs the extra, and it is slow
    from proxy.observe.collector import export_spans
    from proxy.observe.tracing import RequestTracer, TracedGateway

    settings = basis.settings
    traced = TracedGateway(
        connector_name=settings.connector,
        engine_kind=settings.connector_traits.engine,
        routes_by_api={dialect.label: dialect.path for dialect in DIALECTS},
    )
    async with export_spans(settings.tracing, basis.shared.log_once.is_news) as (provider, ids):
        yield RequestTracer(provider, ids, basis.running_traces, traced)


# KV events of engines, if the settings say that they publish them.


@asynccontextmanager
async def build_kv_events(basis: WorkerBasis, balancing: Balancing, engines: EngineParts) -> AsyncIterator[None]:
    """Subscribe in worker 0 to the KV events of all engines, inside `async with`.

    The other workers get them through the journal. Does nothing in other workers, or if KV events are not configured.
    """
    settings, journal = basis.settings.kv_events, basis.shared.journal
    if settings.endpoint is None or basis.worker_number != 0 or Role.PREFILL not in engines.serving_pools:
        yield
        return
    # imported here, because no other part needs it
    from proxy.fleet.kv_events.subscriptions import SubscriptionParts, Subscriptions

    # The cache of a decoder matters if it may get a prompt without prefill. `auto` works without its events.
    roles = [Role.PREFILL, Role.DECODE] if basis.settings.kv.skip_prefill is True else [Role.PREFILL]
    async with Subscriptions(
        SubscriptionParts(
            pools=[engines.serving_pools[role] for role in roles],
            health=balancing.health,
            journal_writer=journal.writer_for(journal.worker_count),
            host_names=engines.engine_clients.host_names,
            engine_client=engines.engine_clients.engine_client,
            engine_keys=balancing.engine_keys,
            kv_event_settings=settings,
            metrics=basis.metrics,
        )
    ):
        yield


# Sharing loads with other gateways, if the settings name a store.


@asynccontextmanager
async def build_replicas(
    basis: WorkerBasis, peer_verdicts: PeerVerdicts, roles: RoleController | None
) -> AsyncIterator[None]:
    """Exchange loads with the other gateways in one worker, inside `async with`.

    Leaving deletes this gateway's loads from the store. Does nothing in other workers, or without `replicas.url`.
    """
    shared, settings = basis.shared, basis.settings
    if settings.replicas.url is None or basis.worker_number != EXCHANGER:
        yield
        return
    # imported here, because only this needs the extra
    from proxy.fleet.replicas import ExchangeParts, LocalState, PeerRows, SharedRows, StateExchange, Store

    rows = SharedRows(
        scoreboard=shared.scoreboard,
        key_usage=shared.key_usage,
        health_board=shared.health_board,
        queue_heads=shared.queue_heads,
        journal_writer=shared.journal.writer_for(settings.workers),
    )
    key_slots = partial(_slots_of_limited_keys, basis)

    def on_roles(leader_roles: Mapping[str, str] | None) -> None:
        if roles is not None:
            roles.leader_roles = leader_roles

    async with (
        Store(settings, shared.replica_name) as store,
        StateExchange(
            ExchangeParts(
                store=store,
                own_name=shared.replica_name,
                local_state=LocalState(shared.replica_name, shared.roster, key_slots, rows),
                peer_rows=PeerRows(rows),
                get_key_slots=key_slots,
                settings=settings,
                metrics=basis.metrics,
                on_new_verdict=peer_verdicts.probe_new_verdicts,
                on_leader_roles=on_roles,
            )
        ),
    ):
        yield


def _slots_of_limited_keys(basis: WorkerBasis) -> Mapping[str, int]:
    """Return the slots of client keys whose limits hold over all gateways."""
    if not basis.settings.replicas.key_limits:
        return {}
    current = basis.live_configuration.current_snapshot
    return {
        key.name: current.slots_by_key[key.name]
        for key in current.client_keys
        if (key.max_concurrent, key.requests_per_minute, key.tokens_per_minute) != (None, None, None)
    }
