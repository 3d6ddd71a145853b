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
from proxy.fleet.discovery.joining import Joiner
from proxy.fleet.discovery.prober import Prober, ProberParts
from proxy.fleet.discovery.sources import SOURCES
from proxy.fleet.discovery.watcher import OwnAddresses, Watcher, WatcherParts
from proxy.fleet.inspector import Inspector, InspectorParts, makes_progress
from proxy.process.worker.balancing import Balancing, cache_subject, subject
from proxy.settings.tls import EngineTls
from proxy.upstream import AddressRules, EngineClient, Names, SilenceChecks, TracedUpstream, Upstream, UpstreamOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from proxy.balancer.pool import Pool, Pools
    from proxy.process.worker.basis import Basis
    from proxy.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The connections of a worker to engines, and the resolved names."""

    names: Names
    client: EngineClient
    """Client for requests that are not legs of a call."""
    fresh_client: EngineClient
    """Client that opens a new connection for each request."""
    upstream: Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connector of a worker, and its context."""

    connector: Connector
    context: ConnectorContext
    releaser: KvReleaser


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of a worker on the engine side of a call."""

    lines: Lines
    releaser: KvReleaser
    connector: Connector
    connect: Callable[[Pools], Connector]
    """Creates another connector, for these pools."""
    serving: Mapping[Role, Pool]
    """Roles that text requests need."""
    pools: Mapping[Role, Pool]
    """Pools by role, including encoders."""
    prober: Prober
    joiner: Joiner
    callback_url: str | None
    """URL at which engines reach this worker and no other; None if the connector has no callbacks."""


@asynccontextmanager
async def build_engines(basis: Basis, balancing: Balancing, settle_seconds: float) -> AsyncIterator[EngineParts]:
    """Build the engine side. Leaving closes connections and ends all tasks."""
    pools = balancing.pools
    async with AsyncExitStack() as stack:
        lines = await stack.enter_async_context(build_lines(basis, balancing))
        link = await stack.enter_async_context(build_link(basis, balancing, lines, settle_seconds))
        connector = _with_encoders(link.connector, link.context)
        serving = {role: pools.of(role) for role in connector.roles}
        everybody = dict(serving) if pools.encode is None else {**serving, Role.ENCODE: pools.encode}
        prober = await stack.enter_async_context(_prober(basis, balancing, lines, everybody))
        joiner = await stack.enter_async_context(_joiner(basis, balancing, lines, everybody, prober))
        basis.metrics.watch_sources(basis.shared.sources, basis.shared.roster)
        if basis.index == 0:  # a worker that replaces it is number 0, too
            watcher_parts = WatcherParts(
                kinds=SOURCES,
                roster=basis.shared.roster,
                states=basis.shared.sources,
                roles=everybody,
                own=OwnAddresses(basis.shared.listeners.all),
            )
            watcher = Watcher(watcher_parts, basis.settings)
            await stack.enter_async_context(watcher)
            basis.live.call_on_change(watcher.configure)
            canaries = CanaryWatch(connector, link.context, balancing.health)
            await stack.enter_async_context(canaries)
            basis.live.call_on_change(canaries.configure)
        basis.metrics.watch_instances(
            tuple(everybody.values()),
            basis.shared.scoreboard,
            balancing.health,
            basis.shared.incompatibilities,
            lambda backend: balancing.pool_of.find(backend),
            basis.shared.history.rates,
        )
        basis.metrics.watch_models(balancing.models, everybody.values())
        await stack.enter_async_context(_inspector(basis, balancing, lines, everybody, link.releaser))
        yield EngineParts(
            lines=lines,
            releaser=link.releaser,
            connector=connector,
            connect=lambda some: _connector(replace(link.context, pools=some)),
            serving=serving,
            pools=everybody,
            prober=prober,
            joiner=joiner,
            callback_url=link.context.callback_url,
        )


@asynccontextmanager
async def build_lines(basis: Basis, balancing: Balancing) -> AsyncIterator[Lines]:
    """Build the connections to engines. Leaving the block closes them."""
    settings, live, traces = basis.settings, basis.live, basis.traces
    tls = EngineTls(lambda: (basis.settings.engines, basis.live.current.tls))
    new_upstream = Upstream if traces is None else partial(TracedUpstream, traces)
    async with (
        Names(AddressRules(settings.admin.networks), _hosts(settings), basis.metrics) as names,
        EngineClient(names, tls=tls) as client,
        EngineClient(names, keeps_connections=False, tls=tls) as fresh_client,
        new_upstream(
            settings.timeouts,
            balancing.keys,
            names,
            UpstreamOptions(
                stall_seconds=stall_seconds(settings),
                on_work=balancing.health.on_work,
                on_stall=lambda backend: balancing.pool_of.find(backend).report_stall(backend),
                silence_seconds=settings.health.silence_seconds,
                silence_checks=_silence_checks(balancing, client),
                is_news=basis.shared.log_once.is_news,
                tls=tls,
                uses_pump=lambda: basis.settings.stream.native_pump,
            ),
        ) as upstream,
    ):
        basis.watch_expiry("engines", "engines.client_certificate")
        live.call_on_change(lambda new: names.configure(AddressRules(new.admin.networks), _hosts(new)))
        live.call_on_change(
            lambda new: upstream.configure(new.timeouts, stall_seconds(new), new.health.silence_seconds)
        )
        yield Lines(names=names, client=client, fresh_client=fresh_client, upstream=upstream)


def _silence_checks(balancing: Balancing, client: EngineClient) -> SilenceChecks:
    pool_of = balancing.pool_of
    return SilenceChecks(
        is_down=lambda backend: balancing.health.of(backend).verdict is HealthState.DOWN,
        on_refused=lambda backend: pool_of.find(backend).report_refusal(backend),
        makes_progress=partial(makes_progress, client, balancing.keys),
        on_hang=lambda backend: pool_of.find(backend).report_hang(backend),
    )


@asynccontextmanager
async def build_link(
    basis: Basis, balancing: Balancing, lines: Lines, settle_seconds: float = TRANSFER_SETTLE_SECONDS
) -> AsyncIterator[Link]:
    """Build the connector of the settings. Leaving ends its tasks."""
    settings, pools = basis.settings, balancing.pools
    parts = ReleaserParts(
        pools=pools,
        upstream=lines.upstream,
        pinned_kv=balancing.pinned_kv,
        incompatibilities=basis.shared.incompatibilities,
        models=balancing.models,
        metrics=basis.metrics,
        settle_seconds=settle_seconds,
    )
    async with (
        KvReleaser(parts, basis.live) as releaser,
        BackgroundTasks(logging.getLogger("proxy.worker.engines"), "a message to an engine") as background,
    ):
        context = ConnectorContext(
            pools=pools,
            upstream=lines.upstream,
            releaser=releaser,
            client=lines.client,
            keys=balancing.keys,
            live=basis.live,
            metrics=basis.metrics,
            compatibility=balancing.compatibility,
            background=background,
            new_journal_writer=partial(basis.shared.journal.writer, basis.index)
            if settings.kv_events.journal_rings
            else None,
            callback_url=_callback_url(basis),
        )
        yield Link(connector=CONNECTORS[settings.connector](context), context=context, releaser=releaser)


def _connector(context: ConnectorContext) -> Connector:
    return _with_encoders(CONNECTORS[context.live.settings.connector](context), context)


def _with_encoders(connector: Connector, context: ConnectorContext) -> Connector:
    encoders = context.pools.encode
    return connector if encoders is None else EncodingConnector(connector, encoders, context)


def _prober(basis: Basis, balancing: Balancing, lines: Lines, pools: Mapping[Role, Pool]) -> Prober:
    shared = basis.shared

    def forget(backend: Backend) -> None:
        shared.log_once.forget(subject(backend))
        shared.log_once.forget(cache_subject(backend))

    parts = ProberParts(
        pools=pools,
        roster=shared.roster,
        health=balancing.health,
        client=lines.client,
        fresh_client=lines.fresh_client,
        engine_headers=balancing.keys.headers,
        on_transition=balancing.on_transition,
        on_removed=forget,
        pool_of=lambda backend: balancing.pool_of.find(backend),
        restarts=basis.metrics.background_restarts_total,
    )
    return Prober(parts, lambda: basis.settings.health)


def _joiner(basis: Basis, balancing: Balancing, lines: Lines, pools: Mapping[Role, Pool], prober: Prober) -> Joiner:
    return Joiner(
        pools=pools,
        roster=basis.shared.roster,
        settings=lambda: basis.settings.joining,
        client=lines.client,
        engine_headers=balancing.keys.headers,
        on_joined=prober.note_joined,
    )


def _inspector(
    basis: Basis, balancing: Balancing, lines: Lines, pools: Mapping[Role, Pool], releaser: KvReleaser
) -> Inspector:
    lease = KvTransfer.OTHER if basis.settings.connector_traits.meets_at_bootstrap else KvTransfer.NIXL
    parts = InspectorParts(
        pools=pools,
        scoreboard=basis.shared.scoreboard,
        health=balancing.health,
        compatibility=balancing.compatibility,
        models=balancing.models,
        client=lines.client,
        keys=balancing.keys,
        metrics=basis.metrics,
        lease_seconds=lambda prefiller: releaser.pin_seconds(prefiller, lease),
    )
    return Inspector(
        parts,
        lambda: basis.settings.health.transfer_interval_seconds,
        basis.settings.connector,
        reads=basis.index == 0,
    )


def stall_seconds(settings: Settings) -> float:
    """Without a prefill leg, a stream is silent while its prompt is computed."""
    seconds = settings.health.stall_seconds
    if settings.connector_traits.has_prefill_first:
        return seconds
    return max(seconds, settings.timeouts.first_token_seconds)


def _callback_url(basis: Basis) -> str | None:
    callbacks = basis.shared.listeners.callbacks
    if not callbacks:
        return None
    port = callbacks[basis.index].getsockname()[1]
    return engine_url(basis.settings.callback_host, port)


def _hosts(settings: Settings) -> set[str]:
    """Return the hosts of the configured instances."""
    return {endpoint.host for role in Role for endpoint in settings.instances_of(role)}
