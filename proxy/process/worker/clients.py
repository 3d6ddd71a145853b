"""The client side: the service of requests, its routes, and access control."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from proxy.api.cors import Cors
from proxy.api.count_tokens import CountTokensApi
from proxy.api.credentials import KeyAuth
from proxy.api.generation import GenerationApi, GenerationParts
from proxy.api.models import ModelsApi
from proxy.api.openapi import OpenApi
from proxy.api.passthrough import PassthroughApi
from proxy.api.probes import ProbeApi
from proxy.api.questions import QuestionParts
from proxy.api.sglang import SglangApi
from proxy.api.signposts import Signposts
from proxy.api.status_page import StatusPage
from proxy.dialects import DIALECTS
from proxy.gateway.api_keys import ApiKeys
from proxy.gateway.detokenizer import Detokenizer
from proxy.gateway.fast_connection import FastConnection
from proxy.gateway.intake import Intake
from proxy.gateway.lanes import Lane, Lanes
from proxy.gateway.request_parts import RequestParts
from proxy.gateway.suspects import Suspects
from proxy.gateway.work import RequestService, ServiceParts
from proxy.listener import replies
from proxy.observe.key_metrics import collect_keys
from proxy.observe.key_usage import KeyUsageListener
from proxy.observe.listeners import AccessLog, RequestMetrics
from proxy.observe.logs import Redaction
from proxy.observe.observers import Observers
from proxy.process.configuration import secrets_of
from proxy.process.worker.applications import administrators_of, application, http_listener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.memory import WorkerQueueHead
    from proxy.common.errors import GatewayError
    from proxy.connectors.base import Connector
    from proxy.dialects.base import Dialect
    from proxy.gateway.lanes import Serving
    from proxy.listener.drain import DrainManager
    from proxy.listener.http_listener import HttpListener
    from proxy.observe.metrics import Metrics
    from proxy.process.worker.balancing import Balancing
    from proxy.process.worker.basis import Basis
    from proxy.process.worker.engines import EngineParts
    from proxy.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The parts of a worker on the client side of a call."""

    lanes: Lanes
    observers: Observers
    probes: ProbeApi
    app: web.Application
    front: HttpListener
    """Listener for clients."""


def build_clients(basis: Basis, balancing: Balancing, engines: EngineParts, drain: DrainManager) -> Clients:
    """Build the client side. Its listener does not listen yet."""
    suspects = _suspects(basis, engines, balancing.pools)
    # Lanes of single models have queues that belong to each worker.
    queue_front = basis.shared.queue_heads.of_worker(basis.index)
    service = _service(basis, engines, balancing.pools, engines.connector, suspects, queue_front)
    basis.live.call_on_change(service.on_change)
    lanes = _lanes(basis, balancing, engines, Lane(balancing.pools, service, engines.connector, suspects))
    dialects = [dialect for dialect in DIALECTS if service.can_serve(dialect)]
    observers = _observers(basis, dialects)
    probes = ProbeApi(lanes, drain)
    api_keys = _client_keys(basis, lanes)
    keys = KeyAuth(api_keys)
    generation_parts = GenerationParts(
        lanes=lanes,
        keys=keys,
        drain=drain,
        observers=observers,
        cors=lambda: cors,
        administrators=administrators_of(basis, basis.settings.listen.host),
    )
    generation = GenerationApi(generation_parts, dialects, lambda: basis.settings.listen)
    counting = _counting(basis, engines, lanes, keys)
    questions = QuestionParts(
        client=engines.lines.client, engine_keys=balancing.keys, client_keys=keys, metrics=basis.metrics
    )
    routes = [
        *generation.routes(),
        *counting.routes(),
        *_models_routes(basis, balancing, engines, questions),
        *_passthrough_routes(basis, lanes, drain, questions),
        *probes.routes(),
        *OpenApi().routes(),
        *_sglang_routes(basis, engines, probes, questions),
    ]
    signposts = Signposts(routes, StatusPage() if basis.settings.admin.port is None else None)
    cors = Cors(signposts.is_clients, lambda: basis.settings.listen.cors_origins)

    def lost(request: web.Request, status: int) -> web.Response | GatewayError | None:
        return signposts.make_not_found_answer(request) if status == 404 else cors.preflight(request)

    app = application(basis)
    app.middlewares.append(drain.middleware)
    app.add_routes([*routes, *signposts.routes()])
    app[replies.LOST] = lost
    app[replies.ERROR_BODIES] = {**generation.error_bodies(), **counting.error_bodies()}
    app[replies.REQUEST_ID_HEADERS] = {**generation.request_id_headers(), **counting.request_id_headers()}
    app.on_response_prepare.append(cors.on_prepare)
    front = http_listener(basis, app, tls_section="listen")
    parts = RequestParts(
        service=service,
        connector=engines.connector,
        suspects=suspects,
        lane=lanes.whole,
        lanes=lanes,
        upstream=engines.lines.upstream,
        drain=drain,
        listener=front,
        observers=observers,
        metrics=basis.metrics,
        settings=basis.settings,
        loop=asyncio.get_running_loop(),
    )
    generation.intake = Intake(parts, dialects, api_keys, basis.shared.left_out.is_news)
    _open_fast_path(basis, generation.intake, front)
    return Clients(lanes=lanes, observers=observers, probes=probes, app=app, front=front)


def _observers(basis: Basis, dialects: Sequence[Dialect]) -> Observers:
    observers = Observers((RequestMetrics(basis.metrics, [dialect.label for dialect in dialects]), AccessLog()))
    if basis.shared.receipts.is_kept:
        redact = Redaction(secrets_of(basis.settings))
        observers.add(basis.shared.receipts.writer(basis.index, redact))
    key_usage, accounts = basis.shared.key_usage, basis.shared.key_accounts
    observers.add(KeyUsageListener(accounts, basis.index, lambda: basis.live.current.slots))
    basis.metrics.watch_keys(
        lambda: collect_keys(
            accounts, basis.live.current.slots, basis.settings.auth.max_key_series, key_usage.own_in_flight
        )
    )
    basis.metrics.settle_first(observers.settle)
    return observers


def _counting(basis: Basis, engines: EngineParts, lanes: Lanes, client_keys: KeyAuth) -> CountTokensApi:
    return CountTokensApi(
        lanes=lanes,
        upstream=engines.lines.upstream,
        client_keys=client_keys,
        settings=lambda: basis.settings,
        metrics=basis.metrics,
    )


def _lanes(basis: Basis, balancing: Balancing, engines: EngineParts, whole: Lane) -> Lanes:
    def make(serving: Serving) -> Lane:
        pools, configure_pools = balancing.part(serving)
        connector, suspects = engines.connect(pools), _suspects(basis, engines, pools)
        made = _service(basis, engines, pools, connector, suspects)
        made.admission.priorities = whole.service.admission.priorities
        made.admission.buffers = whole.service.admission.buffers

        def on_change(new: Settings) -> None:
            configure_pools(new)
            made.on_change(new)

        return Lane(pools, made, connector, suspects, on_change)

    lanes = Lanes(balancing.models, whole, make, basis.settings, engines.prober.refresh_models)
    basis.live.call_on_change(lanes.configure)
    balancing.pool_of.find = lambda backend: lanes.of_backend(backend).pools.of(backend.role)
    keys = basis.metrics.prefix_index_keys
    basis.metrics.settle_first(
        lambda: keys.set(sum(lane.pools.prefill.policy.remembered_prefixes for lane in lanes.all))
    )
    basis.metrics.settle_first(partial(_count_sessions, basis.metrics, lanes))
    return lanes


def _count_sessions(metrics: Metrics, lanes: Lanes) -> None:
    """Update the metrics of sessions for a scrape."""
    known = [sets for lane in lanes.all if (sets := lane.pools.prefill.working_sets) is not None]
    metrics.resident_sessions.set(sum(sets.residents for sets in known))
    metrics.waiting_sessions.set(sum(sets.waiting for sets in known))
    for sets in known:
        expected, lost = sets.take_counts()
        metrics.resident_tokens_total.labels("expected").inc(expected)
        metrics.resident_tokens_total.labels("lost").inc(lost)


def _suspects(basis: Basis, engines: EngineParts, pools: Pools) -> Suspects:
    return Suspects(basis.shared.suspects, pools, tuple(engines.pools), engines.prober.is_gone, basis.metrics)


def _service(
    basis: Basis,
    engines: EngineParts,
    pools: Pools,
    connector: Connector,
    suspects: Suspects,
    front: WorkerQueueHead | None = None,
) -> RequestService:
    parts = ServiceParts(
        connector=connector,
        pools=pools,
        detokenizer=Detokenizer(pools, engines.lines.upstream),
        suspects=suspects,
        is_gone=engines.prober.is_gone,
        metrics=basis.metrics,
        front=front,
    )
    return RequestService(parts, basis.live)


def _open_fast_path(basis: Basis, intake: Intake, front: HttpListener) -> None:
    """Let the fast reader read requests first, if the settings say so."""

    def on_change(settings: Settings) -> None:
        intake.configure(settings)
        front.first_protocol = partial(FastConnection, intake, front) if settings.listen.fast_path else None

    on_change(basis.settings)
    basis.live.call_on_change(on_change)


def _client_keys(basis: Basis, lanes: Lanes) -> ApiKeys:
    api_keys = ApiKeys(basis.shared.key_usage, basis.index)

    def on_change(_: Settings) -> None:  # the keys are read from their file
        current = basis.live.current
        api_keys.configure(current.client_keys, current.slots)
        priorities = {key.name: key.priority for key in current.client_keys}
        for lane in lanes.all:
            lane.service.admission.priorities = priorities

    on_change(basis.settings)
    basis.live.call_on_change(on_change)
    return api_keys


def _models_routes(
    basis: Basis, balancing: Balancing, engines: EngineParts, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    models = ModelsApi(parts, tuple(engines.serving.values()), balancing.models, lambda: basis.settings)
    return models.routes()


def _passthrough_routes(
    basis: Basis, lanes: Lanes, drain: DrainManager, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    passthrough = PassthroughApi(parts, lanes, drain, basis.live)
    return passthrough.routes()


def _sglang_routes(
    basis: Basis, engines: EngineParts, probes: ProbeApi, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    if not basis.settings.connector_traits.has_sglang_routes:
        return ()
    return SglangApi(parts, engines.serving, probes).routes()
