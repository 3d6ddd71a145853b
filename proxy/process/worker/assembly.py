"""All parts of one worker, built and connected once by the builders beside this file, in their order."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.api.admin import AdminApi, RequestsApi, StatusApi, UsageApi
from proxy.api.broadcasts import BroadcastApi
from proxy.api.instances import InstanceParts, InstancesApi
from proxy.api.openapi import OpenApi
from proxy.api.roles import RolesApi
from proxy.api.status_page import StatusPage
from proxy.connectors.releaser import TRANSFER_SETTLE_SECONDS, KvReleaser
from proxy.fleet.discovery.prober import HealthProber, PeerVerdicts
from proxy.fleet.roles import RoleController, RoleControllerParts, RoleMover, RoleMoverParts
from proxy.gateway.lanes import Evacuation, Lanes
from proxy.listener.drain import DrainManager
from proxy.observe import logs
from proxy.observe.metrics import Metrics
from proxy.observe.usage_ledger import UsageKeeper, UsageLedger
from proxy.process.configuration import ConfigSnapshot, ConfigWatcher, masked_options
from proxy.process.monitor import MemoryUse, MonitorParts, WorkerMonitor
from proxy.process.worker.applications import administrators_of, callback_limits, make_application, make_http_listener
from proxy.process.worker.balancing import Balancing, build_balancing
from proxy.process.worker.basis import LiveConfiguration, WorkerBasis
from proxy.process.worker.clients import ClientParts, build_clients
from proxy.process.worker.engines import EngineParts, build_engines
from proxy.process.worker.optional_parts import build_kv_events, build_replicas, build_tracing
from proxy.process.worker.status import StatusParts, StatusReporter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import PinnedKv
    from proxy.fleet.discovery.joining import InstanceJoiner
    from proxy.gateway.work import RequestService
    from proxy.listener.http_listener import HttpListener
    from proxy.observe.observers import RequestObservers
    from proxy.observe.record import Traces
    from proxy.process.shared import SharedState
    from proxy.settings import Settings
    from proxy.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The parts of a worker that its process uses. They do not listen yet."""

    worker_number: int
    """Number of the worker, from 0."""
    live_configuration: LiveConfiguration
    metrics: Metrics
    monitor: WorkerMonitor
    drain_manager: DrainManager
    config_watcher: ConfigWatcher
    health: Health
    pools: Pools
    pinned_kv: PinnedKv
    prober: HealthProber
    joiner: InstanceJoiner
    upstream: Upstream
    releaser: KvReleaser
    lanes: Lanes
    request_service: RequestService
    """The service of the lane with all instances."""
    request_observers: RequestObservers
    evacuation: Evacuation
    role_mover: RoleMover | None
    """Moves elastic instances. None: another worker does that."""
    role_controller: RoleController | None
    """Decides which elastic instances move. None: another worker does that."""
    peer_verdicts: PeerVerdicts
    client_listener: HttpListener
    """Listener for clients."""
    admin_listener: HttpListener | None
    """Listener for operators; None if they use the listener for clients."""
    callback_listener: HttpListener | None
    """Listener for callbacks of engines; None if the connector has none."""

    @property
    def current_snapshot(self) -> ConfigSnapshot:
        """The configuration that the worker uses now."""
        return self.live_configuration.current_snapshot

    @property
    def settings(self) -> Settings:
        """The settings that the worker uses now."""
        return self.live_configuration.settings

    def apply_snapshot(self, current: ConfigSnapshot) -> None:
        """Apply a configuration to every part; see `LiveConfiguration.apply_snapshot`."""
        self.live_configuration.apply_snapshot(current)

    def apply_other_decisions(self) -> None:
        """Apply the decisions of other processes. Must be called regularly."""
        self.config_watcher.apply_new_configuration()
        self.releaser.check_doubtful_kv()
        self.client_listener.closes_after_each_answer = (
            self.drain_manager.is_draining or self.monitor.closes_connections
        )
        self.request_service.admission_queue.is_short_of_memory = self.monitor.refuses_requests
        self.evacuation.evacuate_leaving()
        if self.role_mover is not None:
            self.role_mover.continue_moves()
        if self.role_controller is not None:
            self.role_controller.measure_and_decide()
        self.peer_verdicts.probe_new_verdicts()


@asynccontextmanager
async def build_worker(
    shared: SharedState, index: int = 0, *, settle_seconds: float = TRANSFER_SETTLE_SECONDS
) -> AsyncIterator[Worker]:
    """Build the parts of one worker on the running loop. Leaving the context stops them.

    `settle_seconds`: time before KV that no decoder fetches is released; see `connectors/releaser.py`.
    """
    live = LiveConfiguration(shared.configuration.current_snapshot())
    live.call_on_change(lambda settings: logs.set_level(settings.log.level))
    metrics = Metrics()
    metrics.watch_workers(shared.heartbeats.replacements_by_reason)
    traces: Traces | None = None if live.settings.tracing.endpoint is None else {}
    basis = WorkerBasis(
        shared=shared, worker_number=index, live_configuration=live, metrics=metrics, running_traces=traces
    )
    drain = DrainManager()
    balancing = build_balancing(basis)
    async with build_tracing(basis) as tracer, build_engines(basis, balancing, settle_seconds) as engines:
        clients = build_clients(basis, balancing, engines, drain)
        if tracer is not None:
            clients.request_observers.add_listener(tracer)
        watcher = ConfigWatcher(shared.configuration, live.current_snapshot, live.apply_snapshot, metrics)
        usage = _make_usage_keeper(basis)
        admin_front = build_administration(basis, balancing, engines, clients, watcher, usage)
        status = _make_status_reporter(basis, balancing, engines, clients)
        metrics.watch_status(lambda: shared.status_board.current_verdict(time.monotonic()))
        monitor = _make_monitor(basis, engines, clients, status, lambda: worker.apply_other_decisions())
        role_mover = _make_role_mover(basis, balancing, engines) if index == 0 else None
        role_controller = _make_role_controller(basis, balancing, clients) if index == 0 else None
        worker = Worker(
            worker_number=index,
            live_configuration=live,
            metrics=metrics,
            monitor=monitor,
            drain_manager=drain,
            config_watcher=watcher,
            health=balancing.health,
            pools=balancing.pools,
            pinned_kv=balancing.pinned_kv,
            prober=engines.prober,
            joiner=engines.joiner,
            upstream=engines.engine_clients.upstream,
            releaser=engines.kv_releaser,
            lanes=clients.lanes,
            request_service=clients.lanes.whole_lane.request_service,
            request_observers=clients.request_observers,
            evacuation=_make_evacuation(basis, balancing, engines, clients),
            role_mover=role_mover,
            role_controller=role_controller,
            peer_verdicts=PeerVerdicts(shared.health_board, shared.roster, engines.prober),
            client_listener=clients.client_listener,
            admin_listener=admin_front,
            callback_listener=_make_callback_listener(basis, engines),
        )
        async with (
            role_mover or nullcontext(),
            watcher,
            monitor,
            usage,
            build_replicas(basis, worker.peer_verdicts, role_controller),
            build_kv_events(basis, balancing, engines),
        ):
            try:
                yield worker
            finally:
                metrics.settle_noted_values()


def _make_monitor(
    basis: WorkerBasis,
    engines: EngineParts,
    clients: ClientParts,
    status: StatusReporter,
    apply_other_decisions: Callable[[], None],
) -> WorkerMonitor:
    """Make the monitor, which calls `apply_other_decisions` in each of its ticks."""
    metrics, live, upstream = basis.metrics, basis.live_configuration, engines.engine_clients.upstream

    def gather(busy_share: float) -> None:
        metrics.gather_seconds.set(upstream.set_gathering(busy_share, live.settings.stream))

    parts = MonitorParts(
        memory=MemoryUse(basis.settings.workers),
        tick_callbacks=(
            apply_other_decisions,
            lambda: basis.shared.heartbeats.record_beat(basis.worker_number),
            metrics.settle_noted_values,
            status.report_and_judge,
        ),
        is_ready=clients.probe_api.is_ready,
        loop_lag=basis.loop_lag,
        on_busy_share=gather,
    )
    return WorkerMonitor(metrics, parts)


def _make_status_reporter(
    basis: WorkerBasis, balancing: Balancing, engines: EngineParts, clients: ClientParts
) -> StatusReporter:
    parts = StatusParts(
        shared=basis.shared,
        worker_number=basis.worker_number,
        live_configuration=basis.live_configuration,
        metrics=basis.metrics,
        health=balancing.health,
        pools=engines.serving_pools,
        pair_quarantine=balancing.pools.pair_quarantine,
        handoff_times=balancing.pools.handoff_times,
        lanes=clients.lanes,
        upstream=engines.engine_clients.upstream,
    )
    return StatusReporter(parts)


def _make_usage_keeper(basis: WorkerBasis) -> UsageKeeper:
    shared, live = basis.shared, basis.live_configuration
    ledger = UsageLedger(
        shared.key_accounts,
        shared.replica_name,
        slots=lambda: live.current_snapshot.slots_by_key,
        path=lambda: live.settings.admin.usage_file,
    )
    restarts = basis.metrics.background_restarts_total
    return UsageKeeper(ledger, restarts, shared.log_once.is_news, is_logging=basis.worker_number == 0)


def _make_evacuation(
    basis: WorkerBasis, balancing: Balancing, engines: EngineParts, clients: ClientParts
) -> Evacuation:
    return Evacuation(
        basis.shared.roster,
        clients.lanes,
        balancing.health,
        engines.engine_clients.upstream,
        lambda: basis.settings.leaving,
    )


def _make_role_mover(basis: WorkerBasis, balancing: Balancing, engines: EngineParts) -> RoleMover:
    parts = RoleMoverParts(
        roster=basis.shared.roster,
        scoreboard=basis.shared.scoreboard,
        health=balancing.health,
        engine_client=engines.engine_clients.engine_client,
        engine_headers=balancing.engine_keys.credential_headers,
        get_settings=lambda: basis.settings,
        metrics=basis.metrics,
        on_backend_moved=engines.prober.on_backend_moved,
    )
    return RoleMover(parts)


def _make_role_controller(basis: WorkerBasis, balancing: Balancing, clients: ClientParts) -> RoleController | None:
    """Return the controller, or None if the connector has one role."""
    shared = basis.shared
    if not basis.settings.connector_traits.takes_prefillers:
        return None
    parts = RoleControllerParts(
        roster=shared.roster,
        scoreboard=shared.scoreboard,
        pools=balancing.pools,
        count_queued=lambda: sum(
            int(report.get("queued", 0)) for report in shared.status_board.latest_reports().values()
        ),
        get_settings=lambda: basis.settings,
        metrics=basis.metrics,
        has_several_models=lambda: clients.lanes.served_models.has_several_groups,
    )
    return RoleController(parts)


def _make_callback_listener(basis: WorkerBasis, engines: EngineParts) -> HttpListener | None:
    if engines.callback_url is None:
        return None
    app = make_application(basis)
    app.add_routes(engines.connector.routes())
    return make_http_listener(basis, app, callback_limits)


# Routes for operators: metrics, instances, reloads, and messages to all engines.


def build_administration(
    basis: WorkerBasis,
    balancing: Balancing,
    engines: EngineParts,
    clients: ClientParts,
    watcher: ConfigWatcher,
    usage: UsageKeeper,
) -> HttpListener | None:
    """Return the application for operators, or None if its routes belong to the application for clients."""
    routes = _administration_routes(basis, balancing, engines, clients, watcher, usage)
    if basis.settings.admin.port is None:
        clients.application.add_routes(routes)
        return None
    app = make_application(basis)
    app.add_routes([*StatusPage().routes(), *clients.probe_api.routes(), *OpenApi().routes(), *routes])
    return make_http_listener(basis, app, tls_section="admin")


def _administration_routes(
    basis: WorkerBasis,
    balancing: Balancing,
    engines: EngineParts,
    clients: ClientParts,
    watcher: ConfigWatcher,
    usage: UsageKeeper,
) -> list[web.RouteDef]:
    shared, settings = basis.shared, basis.settings
    has_own_port = settings.admin.port is not None
    administrators = administrators_of(basis, settings.administration_host, trusts_local=has_own_port)
    parts = InstanceParts(
        pools=engines.pools,
        roster=shared.roster,
        scoreboard=shared.scoreboard,
        health=balancing.health,
        health_board=shared.health_board,
        incompatibilities=shared.incompatibilities,
        joiner=engines.joiner,
        served_models=balancing.served_models,
        pool_of=balancing.pool_finder.pool_of,
        handoff_times=balancing.pools.handoff_times,
        quarantined_partners=lambda backend: shared.status_board.quarantined_partners(backend, time.monotonic()),
    )
    instances = InstancesApi(
        parts=parts,
        sources=shared.source_states,
        drop_drained=engines.prober.remove_drained_backends,
        names=engines.engine_clients.host_names,
        administrators=administrators,
        settings=lambda: basis.settings,
    )
    broadcasts = BroadcastApi(
        parts=parts,
        client=engines.engine_clients.engine_client,
        keys=balancing.engine_keys,
        administrators=administrators,
        cache_path=settings.connector_traits.cache_path,
    )
    roles = RolesApi(parts, administrators, lambda: basis.settings)
    admin = AdminApi(
        basis.metrics,
        lambda: masked_options(basis.live_configuration.current_snapshot),
        watcher.reload_and_apply,
        administrators,
    )
    requests = RequestsApi(shared.request_receipts, clients.request_observers.flush_batch, administrators)
    apis = (
        admin,
        StatusApi(
            lambda: shared.status_board.current_verdict(time.monotonic()),
            shared.history_board.history_for_clients,
            administrators,
        ),
        instances,
        broadcasts,
        roles,
        requests,
        UsageApi(usage, clients.request_observers.flush_batch, administrators),
    )
    return [route for api in apis for route in api.routes()]
