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
from proxy.gateway.work import RequestService
from proxy.listener import replies
from proxy.observe.key_metrics import collect_keys
from proxy.observe.key_usage import KeyUsageListener
from proxy.observe.listeners import AccessLog, RequestMetrics
from proxy.observe.logs import Redaction
from proxy.observe.observers import RequestObservers
from proxy.process.configuration import secrets_of
from proxy.process.worker.applications import administrators_of, make_application, make_http_listener

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
    from proxy.process.worker.basis import WorkerBasis
    from proxy.process.worker.engines import EngineParts
    from proxy.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """The parts of a worker on the client side of a call."""

    lanes: Lanes
    request_observers: RequestObservers
    probe_api: ProbeApi
    application: web.Application
    client_listener: HttpListener
    """Listener for clients."""


def build_clients(basis: WorkerBasis, balancing: Balancing, engines: EngineParts, drain: DrainManager) -> ClientParts:
    """Build the client side. Its listener does not listen yet."""
    # Lanes of single models have queues that belong to each worker.
    queue_front = basis.shared.queue_heads.view_of_worker(basis.worker_number)
    service = _make_request_service(basis, engines, balancing.pools, engines.connector, queue_front)
    basis.live_configuration.call_on_change(service.on_settings_change)
    lanes = _make_lanes(basis, balancing, engines, Lane(service))
    dialects = [dialect for dialect in DIALECTS if dialect.api in engines.connector.apis]
    observers = _make_observers(basis, dialects)
    probes = ProbeApi(lanes, drain)
    api_keys = _make_client_keys(basis, lanes)
    keys = KeyAuth(api_keys)
    generation_parts = GenerationParts(
        lanes=lanes,
        key_auth=keys,
        drain_manager=drain,
        request_observers=observers,
        get_cors=lambda: cors,
        administrators=administrators_of(basis, basis.settings.listen.host),
    )
    generation = GenerationApi(generation_parts, dialects, lambda: basis.settings.listen)
    counting = _make_count_tokens_api(basis, engines, lanes, keys)
    questions = QuestionParts(
        engine_client=engines.engine_clients.engine_client,
        engine_keys=balancing.engine_keys,
        key_auth=keys,
        metrics=basis.metrics,
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
    cors = Cors(signposts.is_client_route, lambda: basis.settings.listen.cors_origins)

    def lost(request: web.Request, status: int) -> web.Response | GatewayError | None:
        return signposts.make_not_found_answer(request) if status == 404 else cors.make_preflight_answer(request)

    app = make_application(basis)
    app.middlewares.append(drain.count_while_answering)
    app.add_routes([*routes, *signposts.routes()])
    app[replies.LOST] = lost
    app[replies.ERROR_BODIES] = {**generation.error_bodies(), **counting.error_bodies()}
    app[replies.REQUEST_ID_HEADERS] = {**generation.request_id_headers(), **counting.request_id_headers()}
    app.on_response_prepare.append(cors.on_prepare)
    front = make_http_listener(basis, app, tls_section="listen")
    parts = RequestParts(
        all_lanes=lanes,
        upstream=engines.engine_clients.upstream,
        drain_manager=drain,
        http_listener=front,
        request_observers=observers,
        metrics=basis.metrics,
        settings=basis.settings,
        loop=asyncio.get_running_loop(),
    )
    generation.request_intake = Intake(parts, dialects, api_keys, basis.shared.logged_omissions.is_news)
    _open_fast_path(basis, generation.request_intake, front)
    return ClientParts(
        lanes=lanes, request_observers=observers, probe_api=probes, application=app, client_listener=front
    )


def _make_observers(basis: WorkerBasis, dialects: Sequence[Dialect]) -> RequestObservers:
    observers = RequestObservers((RequestMetrics(basis.metrics, [dialect.label for dialect in dialects]), AccessLog()))
    if basis.shared.request_receipts.is_kept:
        redact = Redaction(secrets_of(basis.settings))
        observers.add_listener(basis.shared.request_receipts.writer_for(basis.worker_number, redact))
    key_usage, accounts = basis.shared.key_usage, basis.shared.key_accounts
    observers.add_listener(
        KeyUsageListener(accounts, basis.worker_number, lambda: basis.live_configuration.current_snapshot.slots_by_key)
    )
    basis.metrics.watch_keys(
        lambda: collect_keys(
            accounts,
            basis.live_configuration.current_snapshot.slots_by_key,
            basis.settings.auth.max_key_series,
            key_usage.count_own_in_flight,
        )
    )
    basis.metrics.call_before_scrape(observers.flush_batch)
    return observers


def _make_count_tokens_api(
    basis: WorkerBasis, engines: EngineParts, lanes: Lanes, client_keys: KeyAuth
) -> CountTokensApi:
    return CountTokensApi(
        lanes=lanes,
        upstream=engines.engine_clients.upstream,
        client_keys=client_keys,
        settings=lambda: basis.settings,
        metrics=basis.metrics,
    )


def _make_lanes(basis: WorkerBasis, balancing: Balancing, engines: EngineParts, whole: Lane) -> Lanes:
    def make(serving: Serving) -> Lane:
        pools, configure_pools = balancing.make_pools_part(serving)
        made = _make_request_service(basis, engines, pools, engines.make_connector(pools))
        made.admission_queue.priorities = whole.request_service.admission_queue.priorities
        made.admission_queue.buffers = whole.request_service.admission_queue.buffers

        def on_change(new: Settings) -> None:
            configure_pools(new)
            made.on_settings_change(new)

        return Lane(made, on_change)

    lanes = Lanes(balancing.served_models, whole, make, basis.settings, engines.prober.refresh_models)
    basis.live_configuration.call_on_change(lanes.apply_settings)
    balancing.pool_finder.pools_of = lambda backend: lanes.lane_of_backend(backend).pools
    keys = basis.metrics.prefix_index_keys
    basis.metrics.call_before_scrape(
        lambda: keys.set(sum(lane.pools.prefill.policy.remembered_prefixes for lane in lanes.all_lanes))
    )
    basis.metrics.call_before_scrape(partial(_count_sessions, basis.metrics, lanes))
    return lanes


def _count_sessions(metrics: Metrics, lanes: Lanes) -> None:
    """Update the metrics of sessions for a scrape."""
    known = [sets for lane in lanes.all_lanes if (sets := lane.pools.prefill.working_sets) is not None]
    metrics.resident_sessions.set(sum(sets.resident_count for sets in known))
    metrics.waiting_sessions.set(sum(sets.waiting_turn_count for sets in known))
    for sets in known:
        expected, lost = sets.take_token_counts()
        metrics.resident_tokens_total.labels("expected").inc(expected)
        metrics.resident_tokens_total.labels("lost").inc(lost)


def _make_request_service(
    basis: WorkerBasis,
    engines: EngineParts,
    pools: Pools,
    connector: Connector,
    front: WorkerQueueHead | None = None,
) -> RequestService:
    is_engine_gone, roles = engines.prober.is_backend_gone, tuple(engines.pools)
    return RequestService(
        live_settings=basis.live_configuration,
        connector=connector,
        pools=pools,
        detokenizer=Detokenizer(pools, engines.engine_clients.upstream),
        suspects=Suspects(basis.shared.suspect_memory, pools, roles, is_engine_gone, basis.metrics),
        is_engine_gone=is_engine_gone,
        metrics=basis.metrics,
        queue_head=front,
    )


def _open_fast_path(basis: WorkerBasis, intake: Intake, front: HttpListener) -> None:
    """Let the fast reader read requests first, if the settings say so."""

    def on_change(settings: Settings) -> None:
        intake.apply_settings(settings)
        front.first_protocol = partial(FastConnection, intake, front) if settings.listen.fast_path else None

    on_change(basis.settings)
    basis.live_configuration.call_on_change(on_change)


def _make_client_keys(basis: WorkerBasis, lanes: Lanes) -> ApiKeys:
    api_keys = ApiKeys(basis.shared.key_usage, basis.worker_number)

    def on_change(_: Settings) -> None:  # the keys are read from their file
        current = basis.live_configuration.current_snapshot
        api_keys.replace_keys(current.client_keys, current.slots_by_key)
        priorities = {key.name: key.priority for key in current.client_keys}
        for lane in lanes.all_lanes:
            lane.request_service.admission_queue.priorities = priorities

    on_change(basis.settings)
    basis.live_configuration.call_on_change(on_change)
    return api_keys


def _models_routes(
    basis: WorkerBasis, balancing: Balancing, engines: EngineParts, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    models = ModelsApi(parts, tuple(engines.serving_pools.values()), balancing.served_models, lambda: basis.settings)
    return models.routes()


def _passthrough_routes(
    basis: WorkerBasis, lanes: Lanes, drain: DrainManager, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    passthrough = PassthroughApi(parts, lanes, drain, basis.live_configuration)
    return passthrough.routes()


def _sglang_routes(
    basis: WorkerBasis, engines: EngineParts, probes: ProbeApi, parts: QuestionParts
) -> Sequence[web.RouteDef]:
    if not basis.settings.connector_traits.has_sglang_routes:
        return ()
    return SglangApi(parts, engines.serving_pools, probes).routes()
