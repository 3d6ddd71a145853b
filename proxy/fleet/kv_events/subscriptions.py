"""Subscriptions to the KV events of instances, for all workers of the gateway.

One worker keeps the subscriber process, passes the endpoints of instances to it, and writes its reports to the journal,
which the policies of all workers read. Each problem of an instance is logged once, and so is its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import proxy
from proxy.balancer.policies.prefiller import write_cache_count
from proxy.balancer.policies.prefixes import CacheCount
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.common.errors import Failure
from proxy.common.terms import KV_EVENT_GAPS, KV_EVENTS
from proxy.fleet.discovery.facts import SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS
from proxy.fleet.kv_events.messages import EventSource, InstanceReport, SubscribeTo
from proxy.observe import logs
from proxy.settings.fleet import ASK_ENGINES, KvEvents, replace_port
from proxy.upstream import AddressProblem, EngineClient, EngineRequestError, HostNames
from proxy.wire.kv_events import EventPublisher, parse_configured_publishers, parse_publishers, publishers_of_ranks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.backend import Backend
    from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.kv_events.subscriptions")

# The subscriber process


_STOP_SECONDS: Final = 2.0
_MAX_LINE_BYTES: Final = 1024 * 1024
_decode_report: Final = msgspec.json.Decoder(InstanceReport).decode
_encode: Final = msgspec.json.Encoder().encode


class SubscriberProcess:
    """The running subscriber process; see `subscriber_process`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last_sources: list[EventSource] | None = None

    def subscribe_to(self, sources: list[EventSource]) -> None:
        """Have the process subscribe to these sources, and to no others."""
        if sources != self._last_sources:
            self._last_sources = sources
            assert self._process.stdin is not None
            self._process.stdin.write(_encode(SubscribeTo(sources)) + b"\n")

    async def read_reports(self) -> AsyncIterator[InstanceReport]:
        """Yield the reports of the process until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield _decode_report(line)

    async def wait_for_exit(self) -> int:
        """Wait for the end of the process, and return its exit code, which is negative for a signal."""
        return await self._process.wait()


@asynccontextmanager
async def subscriber_process() -> AsyncIterator[SubscriberProcess]:
    """Run the process inside `async with`. Raises OSError if it cannot be started."""
    # The directory of this package comes first, so that no other `proxy` in the working directory is imported.
    path = os.pathsep.join(filter(None, (str(Path(proxy.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "proxy.fleet.kv_events.subscriber"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield SubscriberProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# Endpoints of instances: the instance's own address, and ports from the settings or from the engine's report


_SOURCES_PATH: Final = "/kv_event_sources"


def configured_publishers(settings: KvEvents, backend: Backend) -> list[EventPublisher]:
    """Return the publishers that the settings name. Raises ValueError for an impossible port."""
    assert settings.endpoint is not None
    replay = None if settings.replay_endpoint is None else replace_port(settings.replay_endpoint, backend.port)
    return publishers_of_ranks(settings.ranks, replace_port(settings.endpoint, backend.port), replay, settings.topic)


async def reported_publishers(client: EngineClient, keys: EngineKeys, backend: Backend) -> list[EventPublisher]:
    """Return the publishers that the engine reports; empty if it reports none.

    Raises EngineRequestError, and ValueError for an address at which no engine can publish.
    """
    publishers = parse_publishers(await _query_json(client, keys, backend, _SOURCES_PATH))
    if publishers is None:
        publishers = parse_configured_publishers(await _query_json(client, keys, backend, SERVER_INFO_PATH))
    return publishers or []


async def _query_json(client: EngineClient, keys: EngineKeys, backend: Backend, path: str) -> Any:
    """Return the JSON of an engine's answer, or None if it is not JSON.

    Raises EngineRequestError, also for a status that says that the engine has no answer now.
    """
    headers = keys.credential_headers(backend)
    answer = await client.get_body(backend.url, path, SERVER_INFO_TIMEOUT_SECONDS, headers)
    if answer.status >= 500:
        raise EngineRequestError(Failure.BAD_ANSWER, f"{path} answered {answer.status}")
    return answer.parsed_json_or_none


def choose_address(host_names: HostNames, host: str, last_address: str | None) -> str | None:
    """Return an address of the host, or None if none is known yet, or none is allowed.

    The gateway resolves names itself, because ZeroMQ would not check whether an address is allowed. IPv4 comes first:
    publishers that bind to `*` listen only there.

    Args:
        host_names: Known addresses of hosts.
        host: Name or address of the instance.
        last_address: The previous result, which is kept while the host has this address.
    """
    try:
        known = host_names.known_addresses(host)
    except AddressProblem:
        return None
    return last_address if last_address in known else min(known, key=lambda each: ":" in each, default=None)


def event_sources_at(address: str, backend: Backend, publishers: Sequence[EventPublisher]) -> list[EventSource]:
    """Return the endpoints of publishers at the instance's own address, whatever host the engine reports."""
    host = f"[{address}]" if ":" in address else address
    return [
        EventSource(
            backend.key,
            f"tcp://{host}:{publisher.port}",
            None if publisher.replay_port is None else f"tcp://{host}:{publisher.replay_port}",
            publisher.topic,
        )
        for publisher in publishers
    ]


# Subscriptions


_UPDATE_SECONDS: Final = 0.25
_RESTART_SECONDS: Final = (0.5, 60.0)
_ASK_AGAIN_SECONDS: Final = 5.0
# An engine that worked during this number of updates without publishing does not publish, or at another endpoint.
_SILENT_UPDATES: Final = 120

_NOT_REPORTED: Final = (
    "does not report where it publishes KV events: start it with --kv-events-config and publisher zmq, or set "
    "kv_events.endpoint for vLLM before 0.32"
)
_NO_ANSWER: Final = "has not reported yet where it publishes KV events, asking again: %s"
_IMPOSSIBLE: Final = "reports an endpoint at which it cannot publish KV events: %s"
_UNOPENED: Final = "publishes KV events at an endpoint that cannot be opened: %s"
_UNREADABLE: Final = "publishes KV events that cannot be read: %s"
_SILENT: Final = (
    "has served requests and published no KV events at %s: check --kv-events-config (publisher zmq, an endpoint with * "
    "as the host), prefix caching, and whether its topic begins with %r"
)


@dataclass(slots=True)
class _InstanceState:
    """The subscription to one instance since it came up."""

    publishers: Sequence[EventPublisher] = ()
    """Empty if not known yet, or if there are none."""
    known_address: str | None = None
    """Address of the endpoints; None if not known."""
    silent_updates: int = 0
    """Number of updates during which the instance worked and had published nothing."""
    has_published: bool = False
    logged_warnings: set[str] = field(default_factory=set)
    """Warnings in the log."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubscriptionParts:
    """Parts of Subscriptions."""

    pools: Sequence[Pool]
    """Pools of instances whose caches matter for choices."""
    health: Health
    journal_writer: JournalWriter
    """Used by Subscriptions alone."""
    host_names: HostNames
    engine_client: EngineClient
    engine_keys: EngineKeys
    kv_event_settings: KvEvents
    metrics: Metrics


class Subscriptions(BackgroundOwner):
    """Keeps the subscriber process and its subscriptions inside `async with`."""

    def __init__(self, parts: SubscriptionParts) -> None:
        self._pools = parts.pools
        self._health = parts.health
        self._journal_writer = parts.journal_writer
        self._host_names = parts.host_names
        self._engine_client = parts.engine_client
        self._engine_keys = parts.engine_keys
        self._kv_event_settings = parts.kv_event_settings
        self._metrics = parts.metrics
        self._instances: dict[Backend, _InstanceState] = {}
        self._background = BackgroundTasks(logger, "the subscription to KV events")

    def _begin(self) -> None:
        self._background.keep_running(self._keep_subscribing, "kv_events", self._metrics.background_restarts_total)

    async def _keep_subscribing(self) -> None:
        pause_seconds, max_pause_seconds = _RESTART_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            problem = await self._subscribe_until_end()
            if asyncio.get_running_loop().time() - began > max_pause_seconds:
                pause_seconds = _RESTART_SECONDS[0]
            logger.warning("KV events: the subscriber process %s; restart in %g s", problem, pause_seconds)
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(max_pause_seconds, 2 * pause_seconds)

    async def _subscribe_until_end(self) -> str:
        """Subscribe until the process ends, and return the reason."""
        try:
            async with (
                subscriber_process() as process,
                BackgroundTasks(logger, "an update of subscriptions") as background,
            ):
                background.start_task(self._keep_updating(process))
                async for report in process.read_reports():
                    self._handle_report(report)
                return f"has ended with code {await process.wait_for_exit()}"
        except OSError as error:
            return f"cannot be started: {error}"

    # Sources

    async def _keep_updating(self, process: SubscriberProcess) -> None:
        while True:
            process.subscribe_to(list(self._sources_of_instances()))
            await asyncio.sleep(_UPDATE_SECONDS)

    def _sources_of_instances(self) -> Iterator[EventSource]:
        """Return the sources of all instances that are up. An instance that was down may publish at other endpoints."""
        up = [
            backend
            for pool in self._pools
            for backend in pool.all_backends()
            if self._health.health_of(backend).engine_facts is not None
        ]
        for removed in self._instances.keys() - set(up):
            del self._instances[removed]
        for backend in up:
            state = self._instances.get(backend)
            if state is None:
                state = self._instances[backend] = _InstanceState()
                if self._kv_event_settings.endpoint == ASK_ENGINES:
                    self._background.start_task(self._ask_for_publishers(backend, state))
                else:
                    self._use_configured_publishers(backend, state)
            state.known_address = choose_address(self._host_names, backend.host, state.known_address)
            if state.publishers and state.known_address is not None:
                sources = event_sources_at(state.known_address, backend, state.publishers)
                self._check_silence(backend, state, sources)
                yield from sources

    def _use_configured_publishers(self, backend: Backend, state: _InstanceState) -> None:
        try:
            state.publishers = configured_publishers(self._kv_event_settings, backend)
        except ValueError as error:
            self._warn_once(backend, state, _IMPOSSIBLE, error)

    async def _ask_for_publishers(self, backend: Backend, state: _InstanceState) -> None:
        """Ask the engine for its publishers until it answers or goes down."""
        while self._instances.get(backend) is state:
            try:
                state.publishers = await reported_publishers(self._engine_client, self._engine_keys, backend)
                if not state.publishers:
                    self._warn_once(backend, state, _NOT_REPORTED)
                return
            except ValueError as error:
                self._warn_once(backend, state, _IMPOSSIBLE, error)
                return
            except EngineRequestError as error:
                self._warn_once(backend, state, _NO_ANSWER, error)
            await asyncio.sleep(_ASK_AGAIN_SECONDS)

    def _check_silence(self, backend: Backend, state: _InstanceState, sources: Sequence[EventSource]) -> None:
        if state.has_published or state.logged_warnings & {_UNOPENED, _UNREADABLE, _SILENT}:
            return
        state.silent_updates += any(pool.scoreboard.open_leases(backend.slot) for pool in self._pools)
        if state.silent_updates >= _SILENT_UPDATES:
            names = ", ".join(source.endpoint for source in sources)
            self._warn_once(backend, state, _SILENT, names, sources[0].topic)

    # Reports

    def _handle_report(self, report: InstanceReport) -> None:
        found = next((each for each in self._instances.items() if each[0].key == report.instance), None)
        if found is None:
            return  # the instance went down in the meantime
        backend, state = found
        for kind in KV_EVENTS:
            if count := report.events.get(kind):
                self._metrics.kv_events_total.labels(backend.role.value, backend.name, kind).inc(count)
        for gap in KV_EVENT_GAPS:
            if count := report.gaps.get(gap):
                self._metrics.kv_event_gaps_total.labels(backend.role.value, backend.name, gap).inc(count)
        write_cache_count(self._journal_writer, backend.slot, CacheCount(*report.count))
        if report.unopened:
            self._warn_once(backend, state, _UNOPENED, report.unopened)
        if report.events.get("unreadable"):
            self._warn_once(backend, state, _UNREADABLE, report.unreadable)
        if not state.has_published and sum(report.events.values()) > report.events.get("unreadable", 0):
            state.has_published = True
            logger.info("KV events: %s instance %s publishes", backend.role, backend.name, extra=logs.ALWAYS)

    def _warn_once(self, backend: Backend, state: _InstanceState, warning: str, *arguments: object) -> None:
        """Log a warning once per instance, unless the instance is down."""
        if warning not in state.logged_warnings and self._instances.get(backend) is state:
            state.logged_warnings.add(warning)
            line = f"KV events: %s instance %s {warning}"
            logger.warning(line, backend.role, backend.name, *arguments, extra=logs.ALWAYS)
