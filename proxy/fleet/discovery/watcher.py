"""Watches the sources of discovery, and lets the roster follow them.

One worker does that for all. What it finds is published through the roster, where it outlives the worker; the one that
takes its place goes on from there. What a source named last holds for as long as it fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.roster import ADMIN, CONFIG
from proxy.common.background import Background, BackgroundOwner
from proxy.settings import is_literal
from proxy.upstream.addresses import AddressRules, is_odd_literal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from proxy.balancer.roster import Roster, SourceStates
    from proxy.common.backend import Role
    from proxy.fleet.discovery.own_address import OwnAddresses
    from proxy.fleet.discovery.source import MakeSources, Source, Wanted
    from proxy.settings import Settings

logger = logging.getLogger("proxy.discovery.watcher")

_RETRY_SECONDS: Final = 5.0
_FIRST_RETRY_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Watch:
    """A source that is watched, and the task that does it."""

    source: Source
    task: asyncio.Task[None]


def sources_of(kinds: Mapping[str, MakeSources], settings: Settings) -> dict[str, Source]:
    """Those that the settings want, by the origin of what they name."""
    return {f"{kind}:{source.name}": source for kind, make in kinds.items() for source in make(settings)}


async def look_once(
    kinds: Mapping[str, MakeSources], roster: Roster, settings: Settings, within_seconds: float
) -> Mapping[str, str]:
    """Add what all sources name now to a roster that nobody watches for; what is wrong with those that fail, by
    origin. Each has so long to tell, all at the same time.
    """
    sources = sources_of(kinds, settings)

    async def named(source: Source) -> Wanted:
        async with asyncio.timeout(within_seconds), aclosing(source.watch()) as found:
            return await anext(found)

    problems: dict[str, str] = {}
    told = [asyncio.ensure_future(named(source)) for source in sources.values()]
    await asyncio.gather(*told, return_exceptions=True)
    for origin, wanted in zip(sources, told, strict=True):
        try:
            roster.sync(origin, wanted.result())
        except Exception as error:  # whatever goes wrong in a source is one source's problem
            problems[origin] = str(error) or type(error).__name__
    return problems


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatcherParts:
    """One worker's parts that a Watcher works with."""

    kinds: Mapping[str, MakeSources]
    """Kinds of sources, by name."""
    roster: Roster
    """Takes what the sources list."""
    states: SourceStates
    """Takes the state of each source."""
    roles: Collection[Role]
    """Roles that this gateway has."""
    own: OwnAddresses | None = None
    """Addresses where the gateway itself listens; None: they are not known."""


class Watcher(BackgroundOwner):
    """For the one worker that watches. `async with` it."""

    def __init__(self, parts: WatcherParts, settings: Settings, retry_seconds: float = _RETRY_SECONDS) -> None:
        """`retry_seconds`: the longest time until a source that failed is asked again."""
        self._kinds = parts.kinds
        self._roster = parts.roster
        self._states = parts.states
        self._roles = parts.roles
        self._settings = settings
        self._retry_seconds = retry_seconds
        self._own = parts.own
        self._watches: dict[str, _Watch] = {}  # by origin
        self._silent: set[str] = set()
        """Origins that are watched and have told nothing yet."""
        self._background = Background(logger, "discovery")

    def _begin(self) -> None:
        self.configure(self._settings)

    def configure(self, settings: Settings) -> None:
        """Watch the sources that these settings want. One that they want otherwise than before is begun anew; what one
        has named that they do not want any more drains, as soon as those that are new have told theirs.
        """
        self._settings = settings
        sources = sources_of(self._kinds, settings)
        self._states.keep_only(sources)
        for origin, watch in list(self._watches.items()):
            if sources.get(origin) != watch.source:
                watch.task.cancel()
                del self._watches[origin]
        self._silent &= sources.keys()
        for origin in sources.keys() - self._watches.keys():
            self._silent.add(origin)
            task = self._background.start(self._keep_watching(origin, sources[origin]))
            self._watches[origin] = _Watch(sources[origin], task)
        self._drop_unwatched()

    async def _keep_watching(self, origin: str, source: Source) -> None:
        failures = 0  # in a row
        while True:
            try:
                async with aclosing(source.watch()) as found:
                    async for wanted in found:
                        self._take(origin, wanted)
                        self._states.note_success(origin)
                        self._silent.discard(origin)
                        self._drop_unwatched()
                        if failures:
                            failures = 0
                            logger.info("discovery by %s is well again", origin)
                return
            except Exception as error:  # whatever goes wrong in a source, this gateway goes on
                why = str(error) or type(error).__name__
                self._states.note_failure(origin, why)
                failures += 1
                if failures == 1:
                    logger.warning("discovery by %s fails, and its instances stay as they are: %s", origin, why)
            # Gateways that have lost the same server do not come back to it at one time.
            pause_seconds = min(_FIRST_RETRY_SECONDS * 2 ** min(failures, 10), self._retry_seconds)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_seconds)

    def _take(self, origin: str, wanted: Wanted) -> None:
        """Raises ValueError when that cannot be: then nothing of it is taken."""
        settings = self._settings
        rules = AddressRules(settings.admin.networks)
        configured = {endpoint.host for endpoint in (*settings.encode, *settings.prefill, *settings.decode)}
        for backend in wanted:
            if backend.role not in self._roles:
                raise ValueError(f"{backend.name}: this gateway has no {backend.role} instances")
            if backend.host not in configured and not _may_be_named(backend.host, rules):
                raise ValueError(f"{backend.name}: the address is not in admin.networks")
            if self._own is not None and self._own.has(backend.host, backend.port):
                raise ValueError(f"{backend.name}: the gateway itself listens there")
        seconds = self._settings.leaving.evacuate_after_seconds
        leaves_at = None if seconds is None else time.monotonic() + seconds
        added, removed = self._roster.sync(origin, wanted, leaves_at)
        for verb, backends in (("added", added), ("removed", removed)):
            if backends:
                told = ", ".join(f"{backend.role} {backend.name}" for backend in backends)
                logger.info("discovery by %s has %s %s", origin, verb, told)

    def _drop_unwatched(self) -> None:
        """Let what nobody watches any more drain. Not before every source has told what it has: what has only moved
        from one to another stays.
        """
        if not self._silent:
            for origin in self._roster.wanted().keys() - self._watches.keys() - {CONFIG, ADMIN}:
                self._take(origin, ())


def _may_be_named(host: str, rules: AddressRules) -> bool:
    """Whether a source may name this host. The addresses of a name are judged when it is looked up."""
    return rules.allows(host) if is_literal(host) else not is_odd_literal(host)
