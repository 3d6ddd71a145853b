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
from proxy.fleet.discovery.prober import PeerVerdicts, Prober
from proxy.fleet.roles import RoleController, RoleControllerParts, RoleMover, RoleMoverParts
from proxy.gateway.lanes import Evacuation, Lanes
from proxy.listener.drain import DrainManager
from proxy.observe import logs
from proxy.observe.metrics import Metrics
from proxy.observe.usage_ledger import UsageKeeper, UsageLedger
from proxy.process.configuration import ConfigSnapshot, ConfigWatcher, shown
from proxy.process.monitor import Memory, Monitor, MonitorParts
from proxy.process.worker.applications import administrators_of, application, callback_limits, http_listener
from proxy.process.worker.balancing import Balancing, build_balancing
from proxy.process.worker.basis import Basis, LiveConfiguration
from proxy.process.worker.clients import Clients, build_clients
from proxy.process.worker.engines import EngineParts, build_engines
from proxy.process.worker.optional_parts import build_kv_events, build_replicas, build_tracing
from proxy.process.worker.status import StatusParts, StatusReporter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import PinnedKv
    from proxy.fleet.discovery.joining import Joiner
    from proxy.gateway.work import RequestService
    from proxy.listener.http_listener import HttpListener
    from proxy.observe.observers import Observers
    from proxy.observe.record import Traces
    from proxy.process.shared import Shared
    from proxy.settings import Settings
    from proxy.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The parts of a worker that its process uses. They do not listen yet."""

    index: int
    """Number of the worker, from 0."""
    live: LiveConfiguration
    metrics: Metrics
    monitor: Monitor
    drain: DrainManager
    watcher: ConfigWatcher
    health: Health
    pools: Pools
    pinned_kv: PinnedKv
    prober: Prober
    joiner: Joiner
    upstream: Upstream
    releaser: KvReleaser
    lanes: Lanes
    service: RequestService
    """The service of the lane with all instances."""
    observers: Observers
    evacuation: Evacuation
    role_mover: RoleMover | None
    """Moves elastic instances. None: another worker does that."""
    role_controller: RoleController | None
    """Decides which elastic instances move. None: another worker does that."""
    peer_verdicts: PeerVerdicts
    front: HttpListener
    """Listener for clients."""
    admin_front: HttpListener | None
    """Listener for operators; None if they use the listener for clients."""
    callback_front: HttpListener | None
    """Listener for callbacks of engines; None if the connector has none."""

    @property
    def current(self) -> ConfigSnapshot:
        """The configuration that the worker uses now."""
        return self.live.current

    @property
    def settings(self) -> Settings:
        """The settings that the worker uses now."""
        return self.live.settings

    def apply(self, current: ConfigSnapshot) -> None:
        """Apply a configuration to every part; see `LiveConfiguration.apply`."""
        self.live.apply(current)

    def look(self) -> None:
        """Apply the decisions of other processes. Must be called regularly."""
        self.watcher.look()
        self.releaser.check_doubtful_kv()
        self.front.close_after_each_answer = self.drain.is_draining or self.monitor.closes_connections
        self.service.admission.is_short_of_memory = self.monitor.refuses
        self.evacuation.look()
        if self.role_mover is not None:
            self.role_mover.look()
        if self.role_controller is not None:
            self.role_controller.look()
        self.peer_verdicts.handle_new()


@asynccontextmanager
async def build(
    shared: Shared, index: int = 0, *, settle_seconds: float = TRANSFER_SETTLE_SECONDS
) -> AsyncIterator[Worker]:
    """Build the parts of one worker on the running loop. Leaving the context stops them.

    `settle_seconds`: time before KV that no decoder fetches is released; see `connectors/releaser.py`.
    """
    live = LiveConfiguration(shared.configuration.current())
    live.call_on_change(lambda settings: logs.set_level(settings.log.level))
    metrics = Metrics()
    metrics.watch_workers(shared.heartbeats.replacements)
    traces: Traces | None = None if live.settings.tracing.endpoint is None else {}
    basis = Basis(shared=shared, index=index, live=live, metrics=metrics, traces=traces)
    drain = DrainManager()
    balancing = build_balancing(basis)
    async with build_tracing(basis) as tracer, build_engines(basis, balancing, settle_seconds) as engines:
        clients = build_clients(basis, balancing, engines, drain)
        if tracer is not None:
            clients.observers.add(tracer)
        watcher = ConfigWatcher(shared.configuration, live.current, live.apply, metrics)
        usage = _usage(basis)
        admin_front = build_administration(basis, balancing, engines, clients, watcher, usage)
        status = _status(basis, balancing, engines, clients)
        metrics.watch_status(lambda: shared.status.verdict(time.monotonic()))
        upstream = engines.lines.upstream

        def gather(busy_share: float) -> None:
            metrics.gather_seconds.set(upstream.gather(busy_share, live.settings.stream))

        monitor_parts = MonitorParts(
            memory=Memory(basis.settings.workers),
            every_tick=(lambda: worker.look(), lambda: shared.heartbeats.beat(index), metrics.settle, status.look),
            is_ready=clients.probes.is_ready,
            loop_lag=basis.loop_lag,
            on_busy_share=gather,
        )
        monitor = Monitor(metrics, monitor_parts)
        role_mover = _role_mover(basis, balancing, engines) if index == 0 else None
        role_controller = _role_controller(basis, balancing, clients) if index == 0 else None
        worker = Worker(
            index=index,
            live=live,
            metrics=metrics,
            monitor=monitor,
            drain=drain,
            watcher=watcher,
            health=balancing.health,
            pools=balancing.pools,
            pinned_kv=balancing.pinned_kv,
            prober=engines.prober,
            joiner=engines.joiner,
            upstream=upstream,
            releaser=engines.releaser,
            lanes=clients.lanes,
            service=clients.lanes.whole.service,
            observers=clients.observers,
            evacuation=_evacuation(basis, balancing, engines, clients),
            role_mover=role_mover,
            role_controller=role_controller,
            peer_verdicts=PeerVerdicts(shared.health_board, shared.roster, engines.prober),
            front=clients.front,
            admin_front=admin_front,
            callback_front=_callback_front(basis, engines),
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
                metrics.settle()


def _status(basis: Basis, balancing: Balancing, engines: EngineParts, clients: Clients) -> StatusReporter:
    parts = StatusParts(
        shared=basis.shared,
        index=basis.index,
        live=basis.live,
        metrics=basis.metrics,
        health=balancing.health,
        pools=engines.serving,
        quarantine=balancing.pools.quarantine,
        handoffs=balancing.pools.handoffs,
        lanes=clients.lanes,
        upstream=engines.lines.upstream,
    )
    return StatusReporter(parts)


def _usage(basis: Basis) -> UsageKeeper:
    shared, live = basis.shared, basis.live
    ledger = UsageLedger(
        shared.key_accounts,
        shared.replica,
        slots=lambda: live.current.slots,
        path=lambda: live.settings.admin.usage_file,
    )
    restarts = basis.metrics.background_restarts_total
    return UsageKeeper(ledger, restarts, shared.log_once.is_news, is_logging=basis.index == 0)


def _evacuation(basis: Basis, balancing: Balancing, engines: EngineParts, clients: Clients) -> Evacuation:
    return Evacuation(
        basis.shared.roster,
        clients.lanes,
        balancing.health,
        engines.lines.upstream,
        lambda: basis.settings.leaving,
    )


def _role_mover(basis: Basis, balancing: Balancing, engines: EngineParts) -> RoleMover:
    parts = RoleMoverParts(
        roster=basis.shared.roster,
        scoreboard=basis.shared.scoreboard,
        health=balancing.health,
        client=engines.lines.client,
        engine_headers=balancing.keys.headers,
        settings=lambda: basis.settings,
        metrics=basis.metrics,
        on_moved=engines.prober.note_moved,
    )
    return RoleMover(parts)


def _role_controller(basis: Basis, balancing: Balancing, clients: Clients) -> RoleController | None:
    """Return the controller, or None if the connector has one role."""
    shared = basis.shared
    if not basis.settings.connector_traits.takes_prefillers:
        return None
    parts = RoleControllerParts(
        roster=shared.roster,
        scoreboard=shared.scoreboard,
        pools=balancing.pools,
        queued=lambda: sum(int(report.get("queued", 0)) for report in shared.status.reports().values()),
        settings=lambda: basis.settings,
        metrics=basis.metrics,
        is_mixed=lambda: clients.lanes.models.is_mixed,
    )
    return RoleController(parts)


def _callback_front(basis: Basis, engines: EngineParts) -> HttpListener | None:
    if engines.callback_url is None:
        return None
    app = application(basis)
    app.add_routes(engines.connector.routes())
    return http_listener(basis, app, callback_limits)


# Routes for operators: metrics, instances, reloads, and messages to all engines.


def build_administration(
    basis: Basis,
    balancing: Balancing,
    engines: EngineParts,
    clients: Clients,
    watcher: ConfigWatcher,
    usage: UsageKeeper,
) -> HttpListener | None:
    """Return the application for operators, or None if its routes belong to the application for clients."""
    routes = _routes(basis, balancing, engines, clients, watcher, usage)
    if basis.settings.admin.port is None:
        clients.app.add_routes(routes)
        return None
    app = application(basis)
    app.add_routes([*StatusPage().routes(), *clients.probes.routes(), *OpenApi().routes(), *routes])
    return http_listener(basis, app, tls_section="admin")


def _routes(
    basis: Basis,
    balancing: Balancing,
    engines: EngineParts,
    clients: Clients,
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
        models=balancing.models,
        pool_of=lambda backend: balancing.pool_of.find(backend),
        handoffs=balancing.pools.handoffs,
        apart_from=lambda backend: shared.status.apart_from(backend, time.monotonic()),
    )
    instances = InstancesApi(
        parts=parts,
        sources=shared.sources,
        drop_drained=engines.prober.drop_drained,
        names=engines.lines.names,
        administrators=administrators,
        settings=lambda: basis.settings,
    )
    broadcasts = BroadcastApi(
        parts=parts,
        client=engines.lines.client,
        keys=balancing.keys,
        administrators=administrators,
        cache_path=settings.connector_traits.cache_path,
    )
    roles = RolesApi(parts, administrators, lambda: basis.settings)
    admin = AdminApi(basis.metrics, lambda: shown(basis.live.current), watcher.reload, administrators)
    requests = RequestsApi(shared.receipts, clients.observers.settle, administrators)
    apis = (
        admin,
        StatusApi(lambda: shared.status.verdict(time.monotonic()), shared.history.shown, administrators),
        instances,
        broadcasts,
        roles,
        requests,
        UsageApi(usage, clients.observers.settle, administrators),
    )
    return [route for api in apis for route in api.routes()]
