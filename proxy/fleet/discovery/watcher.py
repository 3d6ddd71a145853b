"""Watches the sources of discovery and updates the roster.

One worker watches for all workers. Instances are published through the roster, which outlives the worker. While a
source fails, its last instances stay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.roster import ADMIN, CONFIG, Roster, SourceStates
from proxy.common.backend import Role
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.settings import Settings, canonical_host, is_ip_address
from proxy.upstream.names import AddressRules, is_odd_literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from proxy.fleet.discovery.sources import DiscoverySource, Instances, MakeSources

logger = logging.getLogger("proxy.discovery.watcher")

_RETRY_SECONDS: Final = 5.0
_FIRST_RETRY_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class _SourceWatch:
    """A source and the task that watches it."""

    watched_source: DiscoverySource
    watch_task: asyncio.Task[None]


def sources_of(source_kinds: Mapping[str, MakeSources], settings: Settings) -> dict[str, DiscoverySource]:
    """Return the sources in the settings, by the origin of their instances."""
    return {f"{kind}:{source.source_name}": source for kind, make in source_kinds.items() for source in make(settings)}


async def load_sources_once(
    source_kinds: Mapping[str, MakeSources], roster: Roster, settings: Settings, within_seconds: float
) -> Mapping[str, str]:
    """Add the current instances of all sources to a roster, and return the problems of failed sources by origin.

    The sources are read at the same time. `within_seconds`: limit for each.
    """
    sources = sources_of(source_kinds, settings)

    async def first(source: DiscoverySource) -> Instances:
        async with asyncio.timeout(within_seconds), aclosing(source.watch_instances()) as found:
            return await anext(found)

    problems: dict[str, str] = {}
    readings = [asyncio.ensure_future(first(source)) for source in sources.values()]
    await asyncio.gather(*readings, return_exceptions=True)
    for origin, reading in zip(sources, readings, strict=True):
        try:
            roster.sync_origin(origin, reading.result())
        except Exception as error:  # any failure of a source concerns this source alone
            problems[origin] = str(error) or type(error).__name__
    return problems


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatcherParts:
    """Parts of one worker that a Watcher uses."""

    source_kinds: Mapping[str, MakeSources]
    """Kinds of sources, by name."""
    roster: Roster
    """Takes the instances."""
    source_states: SourceStates
    """Takes the state of each source."""
    roles: Collection[Role]
    """Roles that this gateway has."""
    own_addresses: OwnAddresses | None = None
    """Addresses at which the gateway listens; None if not known."""


class SourceWatcher(BackgroundOwner):
    """Watches all sources inside `async with`. Exists in one worker."""

    def __init__(self, parts: WatcherParts, settings: Settings, retry_seconds: float = _RETRY_SECONDS) -> None:
        """Keep the parts. `retry_seconds`: longest pause before a failed source is read again."""
        self._source_kinds = parts.source_kinds
        self._roster = parts.roster
        self._source_states = parts.source_states
        self._roles = parts.roles
        self._settings = settings
        self._retry_seconds = retry_seconds
        self._own_addresses = parts.own_addresses
        self._watches_by_origin: dict[str, _SourceWatch] = {}
        """Running watches by origin."""
        self._pending_origins: set[str] = set()
        """Origins of watched sources without a first result."""
        self._background = BackgroundTasks(logger, "discovery")

    def _begin(self) -> None:
        self.apply_settings(self._settings)

    def apply_settings(self, settings: Settings) -> None:
        """Watch the sources in these settings. Changed sources are restarted.

        Instances of removed sources drain as soon as all new sources have their first result.
        """
        self._settings = settings
        sources = sources_of(self._source_kinds, settings)
        self._source_states.keep_only_origins(sources)
        for origin, watch in list(self._watches_by_origin.items()):
            if sources.get(origin) != watch.watched_source:
                watch.watch_task.cancel()
                del self._watches_by_origin[origin]
        self._pending_origins &= sources.keys()
        for origin in sources.keys() - self._watches_by_origin.keys():
            self._pending_origins.add(origin)
            task = self._background.start_task(self._keep_watching(origin, sources[origin]))
            self._watches_by_origin[origin] = _SourceWatch(sources[origin], task)
        self._drop_unwatched()

    async def _keep_watching(self, origin: str, source: DiscoverySource) -> None:
        failures = 0  # one after the other
        while True:
            try:
                async with aclosing(source.watch_instances()) as found:
                    async for instances in found:
                        self._publish_instances(origin, instances)
                        self._source_states.record_successful_read(origin)
                        self._pending_origins.discard(origin)
                        self._drop_unwatched()
                        if failures:
                            failures = 0
                            logger.info("discovery: source works again: %s", origin)
                return
            except Exception as error:  # a source may fail in any way, and the gateway continues
                problem = str(error) or type(error).__name__
                self._source_states.record_failed_read(origin, problem)
                failures += 1
                if failures == 1:
                    logger.warning("discovery: source failed, and its instances stay: %s: %s", origin, problem)
            # Random, so that not all gateways return to a failed server at once.
            pause_seconds = min(_FIRST_RETRY_SECONDS * 2 ** min(failures, 10), self._retry_seconds)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_seconds)

    def _publish_instances(self, origin: str, instances: Instances) -> None:
        """Publish all instances of a source. Raises ValueError, and publishes nothing, if one is impossible."""
        settings = self._settings
        rules = AddressRules(settings.admin.networks)
        configured = {endpoint.host for role in Role for endpoint in settings.instances_of(role)}
        for backend in instances:
            if backend.role not in self._roles:
                raise ValueError(f"{backend.name}: this gateway has no {backend.role} instances")
            if backend.is_elastic and not settings.connector_traits.exchanges_roles:
                raise ValueError(f"{backend.name}: connector {settings.connector} cannot exchange roles")
            if backend.host not in configured and not _is_allowed(backend.host, rules):
                raise ValueError(f"{backend.name}: the address is not in admin.networks")
            if self._own_addresses is not None and self._own_addresses.is_own_address(backend.host, backend.port):
                raise ValueError(f"{backend.name}: the gateway itself listens there")
        seconds = self._settings.leaving.evacuate_after_seconds
        leaves_at = None if seconds is None else time.monotonic() + seconds
        added, removed = self._roster.sync_origin(origin, instances, leaves_at)
        for verb, backends in (("added", added), ("removed", removed)):
            if backends:
                names = ", ".join(f"{backend.role} {backend.name}" for backend in backends)
                logger.info(f"discovery: {verb} instances: %s: %s", origin, names)

    def _drop_unwatched(self) -> None:
        """Drain the instances of removed sources, once every source has its first result.

        So an instance that has moved from one source to another stays.
        """
        if not self._pending_origins:
            for origin in self._roster.wanted_by_origin().keys() - self._watches_by_origin.keys() - {CONFIG, ADMIN}:
                self._publish_instances(origin, ())


def _is_allowed(host: str, address_rules: AddressRules) -> bool:
    """Return whether a source may name this host. The addresses of a name are checked when it is resolved."""
    return address_rules.allows_address(host) if is_ip_address(host) else not is_odd_literal(host)


class OwnAddresses:
    """Addresses at which this gateway listens. As an instance, it would send its requests to itself."""

    def __init__(self, listeners: Iterable[socket.socket]) -> None:
        self._listening_addresses = {
            (canonical_host(host), port) for host, port, *_ in (each.getsockname() for each in listeners)
        }

    def is_own_address(self, host: str, port: int) -> bool:
        """Return whether this gateway listens there. False for names, which are not resolved."""
        host = canonical_host(host)
        if (host, port) in self._listening_addresses:
            return True
        return any(
            port == own_port and _is_wildcard_address(address) for address, own_port in self._listening_addresses
        ) and _is_of_this_host(host)


def _is_wildcard_address(host_address: str) -> bool:
    return ipaddress.ip_address(host_address).is_unspecified


def _is_of_this_host(host: str) -> bool:
    """Return whether an interface of this host has this address: sockets can be bound only to such addresses."""
    if not is_ip_address(host):
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True
