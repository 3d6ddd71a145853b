"""What the guard against poison requests does for one unit: where its attempts may go, and what their failures tell."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.balancer.health.blame import Blame

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.common.backend import Backend, Role
    from proxy.common.errors import UpstreamError
    from proxy.gateway.retry_budget import RetryPermit
    from proxy.gateway.suspects import Suspects
    from proxy.gateway.suspicion import Suspicion
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline


class UnitGuard:
    """One unit's, for all of its attempts; `suspicion` is that of the client request. Holds the unit's place in the
    retry budget, because the first output of an attempt ends both at once: the attempt's trial and its being repeated.
    """

    def __init__(self, suspects: Suspects, suspicion: Suspicion, permit: RetryPermit) -> None:
        self.blame = Blame(suspicion.ways)
        self._suspects = suspects
        self._suspicion = suspicion
        self._permit = permit
        self._history = suspicion.add_unit()
        self._settling: asyncio.TimerHandle | None = None

    @property
    def bears_on_choice(self) -> bool:
        """Whether it matters on which engines the unit's attempts come to be: if not, nothing need be waited for."""
        return self._suspicion.bears_on_choice

    async def confine(self, avoid: Collection[Backend]) -> Collection[Backend]:
        """The backends that the next attempt has to avoid, `avoid` among them. A unit that waits for a place of its own
        gives up its permit to be repeated, so as not to keep others from it.
        """
        return await self._suspects.confine(self._suspicion, self._history, avoid, self._permit.release)

    def first_output(self) -> None:
        """The decoder has begun to answer. If it goes on for a while, it can do what others could not."""
        self._permit.release()
        history = self._history
        if history.began_at is None:
            history.began_at = self._suspects.clock()
            if history.reserved or self.blame.is_open:
                self._settling = asyncio.get_running_loop().call_later(history.apart_seconds, self._settle)

    def began_at(self, when: float) -> None:
        """An attempt that was begun elsewhere had its first output then, in clock seconds."""
        self._history.began_at = when

    async def broke_down(self, error: UpstreamError, timeline: Timeline, record: RequestRecord) -> bool:
        """An attempt failed: whether the request is poison, and must not be sent to another engine."""
        self.blame.failed(error)
        return error.is_breakdown and await self._suspects.broke_down(
            self._suspicion, self._history, error, timeline, record
        )

    def leave(self, role: Role) -> set[Backend]:
        """No backend of a role took an attempt: those that need not be asked again, as others may be. Empty when the
        unit was not confined to them.
        """
        return self._suspects.leave(self._suspicion, self._history, role)

    @property
    def awaits_verdict(self) -> bool:
        """Whether another unit of the request is about to tell why engines broke down."""
        return self._suspicion.is_confined and self._suspicion.has_broken_down

    async def is_acquitted(self) -> bool:
        """Wait for the verdict on the request, if it is about to be found poison. Return whether it is not."""
        return await self._suspects.is_acquitted(self._suspicion)

    def end_attempt(self) -> None:
        """The attempt is over, well or not."""
        if self._history.reserved:
            self._suspects.let_go(self._history)
        self._history.began_at = None
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    def served(self) -> None:
        """The unit has its whole answer."""
        self._suspicion.was_served(self._history)

    def _settle(self) -> None:
        self._suspects.let_go(self._history)
        self.blame.settle()
