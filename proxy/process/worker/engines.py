"""The engine side: connections, the connector, and the parts that probe and compare engines."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from proxy.balancer.backend_health import HealthState
from proxy.common.backend import Backend, Role
from proxy.common.background import BackgroundTasks
from proxy.common.endpoints import engine_url
from proxy.connectors import CONNECTORS
from proxy.connectors.base import Connector, ConnectorContext
from proxy.connectors.encoding import EncodingConnector
from proxy.connectors.releaser import TRANSFER_SETTLE_SECONDS, KvReleaser, KvTransfer, ReleaserParts
from proxy.fleet.canary import CanaryWatch
from proxy.fleet.discovery.joining import InstanceJoiner
from proxy.fleet.discovery.prober import HealthProber, ProberParts
from proxy.fleet.discovery.sources import SOURCES
from proxy.fleet.discovery.watcher import OwnAddresses, SourceWatcher, WatcherParts
from proxy.fleet.inspector import EngineInspector, InspectorParts, do_counters_grow
from proxy.process.worker.balancing import Balancing, cache_log_subject_of, log_subject_of
from proxy.settings.tls import EngineTls
from proxy.upstream import (
    AddressRules,
    EngineClient,
    HostNames,
    SilenceChecks,
    TracedUpstream,
    Upstream,
    UpstreamOptions,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from proxy.balancer.pool import Pool, Pools
    from proxy.process.worker.basis import WorkerBasis
    from proxy.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClients:
    """The connections of a worker to engines, and the resolved names."""

    host_names: HostNames
    engine_client: EngineClient
    """Client for requests that are not legs of a call."""
    fresh_client: EngineClient
    """Client that opens a new connection for each request."""
    upstream: Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorBundle:
    """The connector of a worker, and its context."""

    connector: Connector
    connector_context: ConnectorContext
    kv_releaser: KvReleaser


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of a worker on the engine side of a call."""

    engine_clients: EngineClients
    kv_releaser: KvReleaser
    connector: Connector
    make_connector: Callable[[Pools], Connector]
    """Creates another connector, for these pools."""
    serving_pools: Mapping[Role, Pool]
    """Pools by role, of the roles that text requests need."""
    pools: Mapping[Role, Pool]
    """Pools by role, including encoders."""
    prober: HealthProber
    joiner: InstanceJoiner
    callback_url: str | None
    """URL at which engines reach this worker and no other; None if the connector has no callbacks."""


@asynccontextmanager
async def build_engines(basis: WorkerBasis, balancing: Balancing, settle_seconds: float) -> AsyncIterator[EngineParts]:
    """Build the engine side. Leaving closes connections and ends all tasks."""
    pools = balancing.pools
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(build_engine_clients(basis, balancing))
        bundle = await stack.enter_async_context(build_connector(basis, balancing, clients, settle_seconds))
        connector = _add_encoders(bundle.connector, bundle.connector_context)
        serving = {role: pools.pool_of(role) for role in connector.roles}
        pools_by_role = dict(serving) if pools.encode is None else {**serving, Role.ENCODE: pools.encode}
        prober = await stack.enter_async_context(_make_prober(basis, balancing, clients, pools_by_role))
        joiner = await stack.enter_async_context(_make_joiner(basis, balancing, clients, pools_by_role, prober))
        basis.metrics.watch_sources(basis.shared.source_states, basis.shared.roster)
        if basis.worker_number == 0:  # a worker that replaces it is number 0, too
            watcher_parts = WatcherParts(
                source_kinds=SOURCES,
                roster=basis.shared.roster,
                source_states=basis.shared.source_states,
                roles=pools_by_role,
                own_addresses=OwnAddresses(basis.shared.listeners.all_sockets),
            )
            watcher = SourceWatcher(watcher_parts, basis.settings)
            await stack.enter_async_context(watcher)
            basis.live_configuration.call_on_change(watcher.apply_settings)
            canaries = CanaryWatch(connector, bundle.connector_context, balancing.health)
            await stack.enter_async_context(canaries)
            basis.live_configuration.call_on_change(canaries.apply_settings)
        basis.metrics.watch_instances(
            tuple(pools_by_role.values()),
            basis.shared.scoreboard,
            balancing.health,
            basis.shared.incompatibilities,
            balancing.pool_finder.pool_of,
            basis.shared.history_board.rates_by_instance,
        )
        basis.metrics.watch_models(balancing.served_models, pools_by_role.values())
        await stack.enter_async_context(_make_inspector(basis, balancing, clients, pools_by_role, bundle.kv_releaser))
        yield EngineParts(
            engine_clients=clients,
            kv_releaser=bundle.kv_releaser,
            connector=connector,
            make_connector=lambda some: _make_connector(replace(bundle.connector_context, pools=some)),
            serving_pools=serving,
            pools=pools_by_role,
            prober=prober,
            joiner=joiner,
            callback_url=bundle.connector_context.callback_url,
        )


@asynccontextmanager
async def build_engine_clients(basis: WorkerBasis, balancing: Balancing) -> AsyncIterator[EngineClients]:
    """Build the connections to engines. Leaving the block closes them."""
    settings, live, traces = basis.settings, basis.live_configuration, basis.running_traces
    tls = EngineTls(lambda: (basis.settings.engines, basis.live_configuration.current_snapshot.tls_files))
    new_upstream = Upstream if traces is None else partial(TracedUpstream, traces)
    async with (
        HostNames(AddressRules(settings.admin.networks), _configured_hosts(settings), basis.metrics) as names,
        EngineClient(names, tls=tls) as client,
        EngineClient(names, keeps_connections=False, tls=tls) as fresh_client,
        new_upstream(
            settings.timeouts,
            balancing.engine_keys,
            names,
            UpstreamOptions(
                stall_seconds=stall_seconds(settings),
                on_backend_output=balancing.health.on_output,
                on_stall=lambda backend: balancing.pool_finder.pool_of(backend).report_stall(backend),
                silence_seconds=settings.health.silence_seconds,
                silence_checks=_make_silence_checks(balancing, client),
                is_news=basis.shared.log_once.is_news,
                engine_tls=tls,
                uses_pump=lambda: basis.settings.stream.native_pump,
            ),
        ) as upstream,
    ):
        basis.watch_expiry("engines", "engines.client_certificate")
        live.call_on_change(lambda new: names.set_rules(AddressRules(new.admin.networks), _configured_hosts(new)))
        live.call_on_change(
            lambda new: upstream.set_limits(new.timeouts, stall_seconds(new), new.health.silence_seconds)
        )
        yield EngineClients(host_names=names, engine_client=client, fresh_client=fresh_client, upstream=upstream)


def _make_silence_checks(balancing: Balancing, client: EngineClient) -> SilenceChecks:
    pool_of = balancing.pool_finder.pool_of
    return SilenceChecks(
        is_backend_down=lambda backend: balancing.health.health_of(backend).probe_verdict is HealthState.DOWN,
        on_refused_connection=lambda backend: pool_of(backend).report_refusal(backend),
        makes_progress=partial(do_counters_grow, client, balancing.engine_keys),
        on_engine_hang=lambda backend: pool_of(backend).report_hang(backend),
    )


@asynccontextmanager
async def build_connector(
    basis: WorkerBasis, balancing: Balancing, clients: EngineClients, settle_seconds: float = TRANSFER_SETTLE_SECONDS
) -> AsyncIterator[ConnectorBundle]:
    """Build the connector of the settings. Leaving ends its tasks."""
    settings, pools = basis.settings, balancing.pools
    parts = ReleaserParts(
        pools=pools,
        upstream=clients.upstream,
        pinned_kv=balancing.pinned_kv,
        incompatibilities=basis.shared.incompatibilities,
        models=balancing.served_models,
        metrics=basis.metrics,
        settle_seconds=settle_seconds,
    )
    async with (
        KvReleaser(parts, basis.live_configuration) as releaser,
        BackgroundTasks(logging.getLogger("proxy.worker.engines"), "a message to an engine") as background,
    ):
        context = ConnectorContext(
            pools=pools,
            upstream=clients.upstream,
            releaser=releaser,
            client=clients.engine_client,
            keys=balancing.engine_keys,
            live=basis.live_configuration,
            metrics=basis.metrics,
            compatibility=balancing.compatibility_monitor,
            background=background,
            new_journal_writer=partial(basis.shared.journal.writer_for, basis.worker_number)
            if settings.kv_events.journal_rings
            else None,
            callback_url=_make_callback_url(basis),
        )
        yield ConnectorBundle(
            connector=CONNECTORS[settings.connector](context), connector_context=context, kv_releaser=releaser
        )


def _make_connector(context: ConnectorContext) -> Connector:
    return _add_encoders(CONNECTORS[context.live.settings.connector](context), context)


def _add_encoders(connector: Connector, context: ConnectorContext) -> Connector:
    encoders = context.pools.encode
    return connector if encoders is None else EncodingConnector(connector, encoders, context)


def _make_prober(
    basis: WorkerBasis, balancing: Balancing, clients: EngineClients, pools: Mapping[Role, Pool]
) -> HealthProber:
    shared = basis.shared

    def forget(backend: Backend) -> None:
        shared.log_once.forget_subject(log_subject_of(backend))
        shared.log_once.forget_subject(cache_log_subject_of(backend))

    parts = ProberParts(
        pools=pools,
        roster=shared.roster,
        health=balancing.health,
        upstream=clients.upstream,
        engine_client=clients.engine_client,
        fresh_client=clients.fresh_client,
        engine_headers=balancing.engine_keys.credential_headers,
        on_transition=balancing.on_transition,
        on_backend_removed=forget,
        pool_of=balancing.pool_finder.pool_of,
        restart_counter=basis.metrics.background_restarts_total,
    )
    return HealthProber(parts, lambda: basis.settings.health)


def _make_joiner(
    basis: WorkerBasis, balancing: Balancing, clients: EngineClients, pools: Mapping[Role, Pool], prober: HealthProber
) -> InstanceJoiner:
    return InstanceJoiner(
        pools=pools,
        roster=basis.shared.roster,
        settings=lambda: basis.settings.joining,
        client=clients.engine_client,
        engine_headers=balancing.engine_keys.credential_headers,
        on_joined=prober.on_backend_joined,
    )


def _make_inspector(
    basis: WorkerBasis, balancing: Balancing, clients: EngineClients, pools: Mapping[Role, Pool], releaser: KvReleaser
) -> EngineInspector:
    lease = KvTransfer.OTHER if basis.settings.connector_traits.meets_at_bootstrap else KvTransfer.NIXL
    parts = InspectorParts(
        pools=pools,
        scoreboard=basis.shared.scoreboard,
        health=balancing.health,
        compatibility_monitor=balancing.compatibility_monitor,
        served_models=balancing.served_models,
        engine_client=clients.engine_client,
        engine_keys=balancing.engine_keys,
        metrics=basis.metrics,
        lease_seconds_of=lambda prefiller: releaser.pin_seconds(prefiller, lease),
    )
    return EngineInspector(
        parts,
        lambda: basis.settings.health.transfer_interval_seconds,
        basis.settings.connector,
        reads_metrics=basis.worker_number == 0,
    )


def stall_seconds(settings: Settings) -> float:
    """Without a prefill leg, a stream is silent while its prompt is computed."""
    seconds = settings.health.stall_seconds
    if settings.connector_traits.has_prefill_first:
        return seconds
    return max(seconds, settings.timeouts.first_token_seconds)


def _make_callback_url(basis: WorkerBasis) -> str | None:
    callbacks = basis.shared.listeners.callbacks
    if not callbacks:
        return None
    port = callbacks[basis.worker_number].getsockname()[1]
    return engine_url(basis.settings.callback_host, port)


def _configured_hosts(settings: Settings) -> set[str]:
    """Return the hosts of the configured instances."""
    return {endpoint.host for role in Role for endpoint in settings.instances_of(role)}
