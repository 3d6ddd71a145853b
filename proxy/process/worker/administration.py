"""Routes for operators: metrics, instances, reloads, and messages to all engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.api.admin import AdminApi, RequestsApi
from proxy.api.broadcasts import BroadcastApi
from proxy.api.instances import InstanceParts, InstancesApi
from proxy.api.status_page import StatusPage
from proxy.process.configuration import shown
from proxy.process.worker.applications import administrators_of, application, http_listener

if TYPE_CHECKING:
    from aiohttp import web

    from proxy.listener.http_listener import HttpListener
    from proxy.process.configuration import ConfigWatcher
    from proxy.process.worker.balancing import Balancing
    from proxy.process.worker.basis import Basis
    from proxy.process.worker.clients import Clients
    from proxy.process.worker.engines import Engines


def build_administration(
    basis: Basis, balancing: Balancing, engines: Engines, clients: Clients, watcher: ConfigWatcher
) -> HttpListener | None:
    """Return the application for operators, or None if its routes belong to the application for clients."""
    routes = _routes(basis, balancing, engines, clients, watcher)
    if basis.settings.admin.port is None:
        clients.app.add_routes(routes)
        return None
    app = application(basis)
    app.add_routes([*StatusPage().routes(), *clients.probes.routes(), *routes])
    return http_listener(basis, app)


def _routes(
    basis: Basis, balancing: Balancing, engines: Engines, clients: Clients, watcher: ConfigWatcher
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
    admin = AdminApi(basis.metrics, lambda: shown(basis.live.current), watcher.reload, administrators)
    requests = RequestsApi(shared.receipts, clients.observers.settle, administrators)
    return [*admin.routes(), *instances.routes(), *broadcasts.routes(), *requests.routes()]
