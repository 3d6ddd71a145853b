"""Watches the sources of discovery, and lets the roster follow them.

One worker does that for all. What it finds is published through the roster, where it outlives the worker; the one that
takes its place goes on from there. What a source named last holds for as long as it fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.background import Background, BackgroundOwner

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from proxy.backend import Role
    from proxy.balancer.roster import Roster
    from proxy.discovery.source import MakeSource, Source, Wanted
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Watch:
    """A source that is watched, and the task that does it."""

    source: Source
    task: asyncio.Task[None]


class Watcher(BackgroundOwner):
    """For the one worker that watches. `async with` it."""

    def __init__(
        self,
        sources: Mapping[str, MakeSource],
        roster: Roster,
        roles: Collection[Role],
        settings: Settings,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        """`sources` by the name that their instances have as their origin. `roles`: those that this gateway has."""
        self._sources = sources
        self._roster = roster
        self._roles = roles
        self._settings = settings
        self._retry_seconds = retry_seconds
        self._watches: dict[str, _Watch] = {}
        self._background = Background(logger, "discovery")

    def _begin(self) -> None:
        self.configure(self._settings)

    def configure(self, settings: Settings) -> None:
        """Watch the sources that these settings want. One that they want otherwise than before is begun anew; what one
        has named that they do not want any more drains.
        """
        self._settings = settings
        for origin, make in self._sources.items():
            source, watch = make(settings), self._watches.get(origin)
            if watch is not None and watch.source == source:
                continue
            if watch is not None:
                self._watches.pop(origin).task.cancel()
            if source is None:
                self._take(origin, ())
            else:
                self._watches[origin] = _Watch(source, self._background.start(self._keep_watching(origin, source)))

    async def _keep_watching(self, origin: str, source: Source) -> None:
        is_failing = False
        while True:
            try:
                async with aclosing(source.watch()) as found:
                    async for wanted in found:
                        self._take(origin, wanted)
                        if is_failing:
                            is_failing = False
                            logger.info("discovery by %s is well again", origin)
                return
            except Exception as error:  # whatever goes wrong in a source, this gateway goes on
                if not is_failing:
                    is_failing = True
                    why = str(error) or type(error).__name__
                    logger.warning("discovery by %s fails, and its instances stay as they are: %s", origin, why)
            await asyncio.sleep(self._retry_seconds)

    def _take(self, origin: str, wanted: Wanted) -> None:
        """Raises ValueError when that cannot be."""
        for backend in wanted:
            if backend.role not in self._roles:
                raise ValueError(f"{backend.name}: this gateway has no {backend.role} instances")
        seconds = self._settings.leaving.evacuate_after_seconds
        leaves_at = None if seconds is None else time.monotonic() + seconds
        added, removed = self._roster.sync(origin, wanted, leaves_at)
        for verb, backends in (("added", added), ("removed", removed)):
            if backends:
                told = ", ".join(f"{backend.role} {backend.name}" for backend in backends)
                logger.info("discovery by %s has %s %s", origin, verb, told)
