"""The parts of one process: each made once, put together, and told when the configuration is another."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from aiohttp import web

from proxy import logs
from proxy.api.admin import AdminApi
from proxy.api.administrators import Administrators
from proxy.api.broadcasts import BroadcastApi
from proxy.api.cors import Cors
from proxy.api.generation import GenerationApi
from proxy.api.instances import InstancesApi
from proxy.api.keys import ClientKeys
from proxy.api.models import ModelsApi
from proxy.api.passthrough import PassthroughApi
from proxy.api.probes import ProbeApi
from proxy.api.sglang import SglangApi
from proxy.api.signposts import Signposts
from proxy.backend import Role
from proxy.background import Background
from proxy.balancer.engine_keys import EngineKeys
from proxy.balancer.fitness import Fitness
from proxy.balancer.health import Health
from proxy.balancer.ledger import Ledger
from proxy.balancer.pairs import Pairs
from proxy.balancer.pick import PolicyContext
from proxy.balancer.policies import make_policy
from proxy.balancer.pool import Pool, PoolLimits
from proxy.callers import Callers
from proxy.configuration import Follower, text_of
from proxy.connectors import CONNECTORS
from proxy.connectors.base import Kit, Pools
from proxy.connectors.encoding import Encoding
from proxy.connectors.kv_transfer import KvTransfer
from proxy.connectors.releaser import SETTLE_SECONDS, Releaser
from proxy.dialects import DIALECTS
from proxy.flow.detokenizer import Detokenizer
from proxy.flow.evacuation import Evacuation
from proxy.flow.gateway import Gateway
from proxy.flow.suspects import Suspects
from proxy.inspector import Inspector, log_misfit
from proxy.listener import replies
from proxy.listener.drain import Drain
from proxy.listener.http_listener import HttpListener
from proxy.monitor import Memory, Monitor
from proxy.observe.listeners import AccessLog, RequestMetrics
from proxy.observe.metrics import Metrics
from proxy.observe.observers import Observers
from proxy.prober import Prober, log_transition
from proxy.settings import Endpoint
from proxy.upstream import AddressRules, Names, Upstream, new_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from proxy.backend import Backend
    from proxy.balancer.health import Transition
    from proxy.configuration import Current
    from proxy.connectors.base import Connector
    from proxy.errors import GatewayError
    from proxy.settings import Listen, Settings
    from proxy.shared import Listeners, Shared

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """One process's parts, put together. They do not listen yet."""

    current: Current
    metrics: Metrics
    monitor: Monitor
    drain: Drain
    follower: Follower
    callers: Callers
    keys: EngineKeys
    names: Names
    health: Health
    pools: Pools
    ledger: Ledger
    prober: Prober
    inspector: Inspector
    upstream: Upstream
    releaser: Releaser
    gateway: Gateway
    observers: Observers
    evacuation: Evacuation
    generation: GenerationApi
    passthrough: PassthroughApi
    administrators: Administrators
    instances: InstancesApi
    front: HttpListener
    """Where clients connect."""
    admin_front: HttpListener | None
    cors: Cors
    """Where operators connect, if they do not with the clients."""
    callback_front: HttpListener | None
    """Where engines call back, if the connector has them do it."""
    index: int
    """Which of the workers it is, from 0."""

    @property
    def settings(self) -> Settings:
        """What is in force now."""
        return self.current.settings

    def apply(self, current: Current) -> None:
        """Let every part go on with this. Nothing waits here, so no request sees one half of it."""
        before, self.current = self.current.settings, current
        settings = current.settings
        logs.configure(settings.log.level)
        self.callers.configure(current.client_keys, current.slots)
        self.keys.configure(text_of(settings.auth.engine_api_key))
        self.names.configure(AddressRules(settings.admin.networks), _hosts(settings))
        self.health.configure(settings.health)
        self.pools.pairs.configure(settings.health.quarantine_after, settings.health.quarantine_seconds)
        for pool in filter(None, (self.pools.encode, self.pools.prefill, self.pools.decode)):
            pool.configure(_limits(settings, pool.role))
            if (name := _policy_name(settings, pool.role)) != _policy_name(before, pool.role):
                # A policy that stays keeps what it remembers.
                pool.use(make_policy(name, PolicyContext(worker=self.index, facts=self.health.facts)))
        self.prober.configure(settings.health, settings.joining)
        self.inspector.configure(settings.health.transfer_interval_seconds)
        self.upstream.configure(settings.timeouts, _stall_seconds(settings))
        self.releaser.configure(settings)
        self.gateway.configure(settings)
        self.generation.configure(settings)
        self.cors.configure(settings.listen)
        self.passthrough.configure(settings)
        self.administrators.configure(text_of(settings.auth.admin_key))
        self.instances.configure(settings)
        for front in (self.front, self.admin_front):
            if front is not None:
                front.configure(settings.listen)
        if self.callback_front is not None:
            self.callback_front.configure(_callback_limits(settings))

    def look(self) -> None:
        """To be called every so often: take notice of what others have decided."""
        self.follower.look()
        self.releaser.look()
        self.front.close_after_each_answer = self.drain.is_draining or self.monitor.closes_connections
        self.gateway.admission.is_short_of_memory = self.monitor.refuses
        self.evacuation.look()


@asynccontextmanager
async def build(shared: Shared, index: int = 0, *, settle_seconds: float = SETTLE_SECONDS) -> AsyncIterator[Worker]:
    """Put the parts of one worker together on the running loop; leaving the context stops them.

    `settle_seconds`: how long KV that nobody fetches is left alone before it is released; see `connectors/releaser.py`.
    """
    current = shared.configuration.current()
    settings = current.settings
    metrics = Metrics()
    drain = Drain()

    def heed(transition: Transition) -> None:
        backend = transition.backend
        log_transition(transition, is_news=shared.bulletin.is_news(_subject(backend), transition.new))
        if transition.cause is not None:
            metrics.instance_ejected_total.labels(backend.role.value, backend.name, transition.cause).inc()

    health = Health(settings.health)
    keys = EngineKeys(text_of(settings.auth.engine_api_key))
    fitness = Fitness(shared.misfits, shared.scoreboard.row(index), keys, log_misfit)
    pools, ledger = _balance(shared, index, health, fitness, heed, metrics)
    callers = Callers(shared.key_usage, index)
    callers.configure(current.client_keys, current.slots)
    client_keys = ClientKeys(callers)
    async with AsyncExitStack() as stack:
        names = await stack.enter_async_context(Names(AddressRules(settings.admin.networks), _hosts(settings), metrics))
        session = await stack.enter_async_context(new_session(names))
        upstream = await stack.enter_async_context(
            Upstream(
                *(settings.timeouts, keys, names),
                stall_seconds=_stall_seconds(settings),
                on_stall=lambda backend: pools.of(backend.role).outcomes.report_stall(backend),
                is_news=shared.bulletin.is_news,
            )
        )
        misfits = shared.misfits
        releaser = await stack.enter_async_context(
            Releaser(pools, upstream, settings, ledger, misfits, metrics, settle_seconds=settle_seconds)
        )
        callback_url = _callback_url(settings, shared.listeners, index)
        background = await stack.enter_async_context(Background(logger, "a message to an engine"))
        kit = Kit(*(pools, upstream, releaser, session, keys, settings, metrics, fitness, background), callback_url)
        connector = CONNECTORS[settings.connector](kit)
        serving = {role: pools.of(role) for role in connector.roles}
        everybody = dict(serving)  # text needs no encoders
        if pools.encode is not None:
            connector = Encoding(connector, pools.encode, kit)
            everybody[Role.ENCODE] = pools.encode
        prober = await stack.enter_async_context(
            Prober(
                *(everybody, shared.roster, health, settings.health, settings.joining, session, keys.headers, heed),
                on_removed=lambda backend: shared.bulletin.forget(_subject(backend)),
            )
        )
        metrics.watch_instances(tuple(everybody.values()), shared.scoreboard, health, misfits)
        metrics.watch_workers(shared.heartbeats.replacements)
        inspector = await stack.enter_async_context(
            Inspector(
                *(everybody, shared.scoreboard, health, fitness, session, keys, metrics),
                *(settings.health.transfer_interval_seconds, settings.connector),
                lambda prefiller: releaser.pin_seconds(prefiller, KvTransfer.NIXL),
                reads=index == 0,
            )
        )
        suspects = Suspects(shared.suspects, pools, tuple(everybody), prober.is_gone, metrics)
        gateway = Gateway(connector, pools, Detokenizer(pools, upstream), suspects, settings, metrics)
        evacuation = Evacuation(shared.roster, everybody, upstream, gateway.budget)
        follower = Follower(shared.configuration, current, lambda newest: worker.apply(newest), metrics)
        probes = ProbeApi(serving, drain)
        monitor = Monitor(
            *(metrics, Memory(settings.workers)),
            every_tick=(lambda: worker.look(), lambda: shared.heartbeats.beat(index)),
            is_ready=probes.is_ready,
        )
        labels = [dialect.label for dialect in DIALECTS if gateway.speaks(dialect)]
        observers = Observers((RequestMetrics(metrics, labels), AccessLog()))
        generation = GenerationApi(gateway, client_keys, drain, settings, observers)
        models = ModelsApi(tuple(serving.values()), session, keys, client_keys, metrics)
        passthrough = PassthroughApi(
            *(serving[connector.roles[0]], session, keys, client_keys, drain, gateway.admission, gateway.budget),
            *(settings, metrics),
        )
        administrators = Administrators(text_of(settings.auth.admin_key), listens_on=settings.administration_host)
        instances = InstancesApi(
            *(everybody, shared.roster, shared.scoreboard, health, misfits, prober, names, administrators, settings)
        )
        administration = [
            *AdminApi(metrics, follower.reload, administrators).routes(),
            *instances.routes(),
            *BroadcastApi(*(everybody, session, keys, administrators, settings.connector_traits.cache_path)).routes(),
        ]
        app = _application(metrics)
        app.middlewares.append(drain.middleware)
        clients = [route for api in (generation, models, passthrough, probes) for route in api.routes()]
        if settings.connector_traits.has_sglang_routes:
            clients += SglangApi(serving, session, keys, client_keys, probes, metrics).routes()
        signposts = Signposts(clients)
        cors = Cors(signposts.is_clients, settings.listen)
        app.add_routes([*clients, *signposts.routes()])

        def lost(request: web.Request, status: int) -> web.Response | GatewayError | None:
            return signposts.lost(request) if status == 404 else cors.preflight(request)

        app[replies.LOST] = lost
        app.on_response_prepare.append(cors.on_prepare)
        front = HttpListener(app, settings.listen, metrics)
        admin_front = None
        if settings.admin.port is None:
            app.add_routes(administration)
        else:
            admin_app = _application(metrics)
            admin_app.add_routes([*probes.routes(), *administration])
            admin_front = HttpListener(admin_app, settings.listen, metrics)
        callback_front = None if callback_url is None else _callback_front(connector, settings, metrics)
        worker = Worker(
            *(current, metrics, monitor, drain, follower, callers, keys, names, health, pools, ledger, prober),
            *(inspector, upstream, releaser, gateway, observers, evacuation, generation, passthrough, administrators),
            *(instances, front, admin_front, cors, callback_front, index),
        )
        await stack.enter_async_context(follower)
        await stack.enter_async_context(monitor)
        yield worker


def _subject(backend: Backend) -> str:
    """On the bulletin."""
    return f"{backend.role} {backend.name}"


def _balance(
    shared: Shared,
    index: int,
    health: Health,
    fitness: Fitness,
    heed: Callable[[Transition], None],
    metrics: Metrics,
) -> tuple[Pools, Ledger]:
    """The part that decides: the pools of all roles, and the account of the KV that nobody fetches."""
    settings = shared.configuration.current().settings
    row = shared.scoreboard.row(index)
    ledger = Ledger(row)
    pairs = Pairs(settings.health.quarantine_after, settings.health.quarantine_seconds)

    # Finding a series by its labels costs more than counting with it, and there are few.
    counters = cache(metrics.instance_requests_total.labels)

    def count(backend: Backend, result: str) -> None:
        counters(backend.role.value, backend.name, result).inc()

    def pool(role: Role) -> Pool:
        return Pool(
            role,
            policy=make_policy(_policy_name(settings, role), PolicyContext(worker=index, facts=health.facts)),
            scoreboard=shared.scoreboard,
            row=row,
            roster=shared.roster,
            health=health,
            limits=_limits(settings, role),
            on_transition=heed,
            on_end=count,
            ledger=ledger if role is Role.PREFILL else None,
            pairs=pairs,
            fitness=fitness,
        )

    encoders = pool(Role.ENCODE) if settings.encode else None
    return Pools(pool(Role.PREFILL), pool(Role.DECODE), pairs, encoders), ledger


def _policy_name(settings: Settings, role: Role) -> str:
    if role is Role.ENCODE:
        return "least_load"
    return settings.balance.prefill_policy if role is Role.PREFILL else settings.balance.decode_policy


def _limits(settings: Settings, role: Role) -> PoolLimits:
    admission = settings.admission
    max_running = {Role.PREFILL: admission.max_running_prefill, Role.DECODE: admission.max_running_decode}
    return PoolLimits(
        max_running=max_running.get(role),  # of encoders as many as they say
        pressure_seconds=settings.resume.pressure_seconds,
        restart_seconds=admission.wait_seconds,
    )


def _stall_seconds(settings: Settings) -> float:
    """Where no prefill leg goes before, a stream is silent while its prompt is computed."""
    seconds = settings.health.stall_seconds
    if settings.connector_traits.has_prefill_first:
        return seconds
    return max(seconds, settings.timeouts.first_token_seconds)


def _callback_url(settings: Settings, listeners: Listeners, index: int) -> str | None:
    """Where engines reach this worker and no other. None: the connector has nothing that they call."""
    if not listeners.callbacks:
        return None
    port = listeners.callbacks[index].getsockname()[1]
    return f"http://{Endpoint(host=settings.callback_host, port=port)}"


def _callback_front(connector: Connector, settings: Settings, metrics: Metrics) -> HttpListener:
    app = _application(metrics)
    app.add_routes(connector.routes())
    return HttpListener(app, _callback_limits(settings), metrics)


def _callback_limits(settings: Settings) -> Listen:
    """Those of clients, but for the number of connections: an engine takes any answer for a good one, and would wait
    for what was turned away.
    """
    return settings.listen.model_copy(update={"max_connections": None})


def _application(metrics: Metrics) -> web.Application:
    app = web.Application()
    replies.install(app, metrics)
    return app


def _hosts(settings: Settings) -> set[str]:
    """Of the configured instances."""
    return {endpoint.host for endpoint in (*settings.encode, *settings.prefill, *settings.decode)}
