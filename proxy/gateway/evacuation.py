"""Evacuation: requests that a removed instance still works on when its drain time is over go on elsewhere, and so do
those of an instance that says by its health checks that it is leaving.

An answer is taken from its instance as if the instance had failed, but without blame, and is then repeated or resumed
as usual. Each worker evacuates its own requests. It takes no more at a time than the retry budget has room for, so that
none waits for its turn without running, and none while there is no other instance to go on with it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.balancer.health import Health
    from proxy.balancer.roster import Roster
    from proxy.common.backend import Backend
    from proxy.gateway.lanes import Lanes
    from proxy.settings import Leaving
    from proxy.upstream import Upstream

logger = logging.getLogger("proxy.flow.evacuation")


class Evacuation:
    """The evacuation of one worker's requests. To be called (`look`) from time to time."""

    def __init__(
        self,
        roster: Roster,
        lanes: Lanes,
        health: Health,
        upstream: Upstream,
        settings: Leaving,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the system's monotonic one except in tests."""
        self._roster = roster
        self._lanes = lanes
        self._health = health
        self._upstream = upstream
        self._clock = clock
        self._told: set[Backend] = set()  # of which the log has said that it is being evacuated, or that it cannot be
        self.configure(settings)

    def configure(self, settings: Leaving) -> None:
        """Take changed settings from now on."""
        self._heeds_503 = settings.evacuate_on_503

    def look(self) -> None:
        """Take away what is due. Nearly free while nothing is."""
        removed, leaving = self._roster.leaving(), self._health.leaving if self._heeds_503 else ()
        if not removed and not leaving:
            self._told.clear()
            return
        now = self._clock()
        due = {member.backend for member in removed if member.leaves_at is not None and member.leaves_at <= now}
        due.update(leaving)
        self._told &= due
        for backend in due:
            self._evacuate(backend)

    def _evacuate(self, backend: Backend) -> None:
        exchanges = self._upstream.in_exchange(backend)
        if not exchanges:
            return
        lane = self._lanes.of_backend(backend)
        is_possible = bool(lane.pools.of(backend.role).eligible())
        if backend not in self._told:
            self._told.add(backend)
            what = (
                "is being evacuated"
                if is_possible
                else "cannot be evacuated yet: no other instance can continue its answers"
            )
            level = logging.INFO if is_possible else logging.WARNING
            fields = {"fields": {"left": exchanges}} | logs.ALWAYS
            logger.log(level, "%s instance %s %s", backend.role, backend.name, what, extra=fields)
        if is_possible:
            budget = lane.service.budget
            self._upstream.evacuate(backend, at_most=budget.capacity - budget.repeating - budget.waiting)
