"""What is known about one backend: the verdict of its probes, its breaker, and what it said of itself.

It knows of no other backend and of no clock; Health has one of these per backend, and both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from proxy.balancer.health.breaker import Breaker, BreakerPhase

if TYPE_CHECKING:
    from proxy.balancer.engines.engine_facts import EngineFacts
    from proxy.settings import HealthChecks

FULL_PERCENT: Final = 100
_FIRST_PERCENT: Final = 10


def slow_start_percent(elapsed_seconds: float, slow_start_seconds: float) -> int:
    """Return the share of requests of a backend that came back `elapsed_seconds` ago, from 10 to 100.

    The share grows in a straight line, as in Envoy with aggression 1: caches are cold, and graphs are not compiled yet.
    It is in whole per cent so that weights stay integers.
    """
    if elapsed_seconds >= slow_start_seconds:
        return FULL_PERCENT
    return _FIRST_PERCENT + int((FULL_PERCENT - _FIRST_PERCENT) * elapsed_seconds / slow_start_seconds)


class HealthState(StrEnum):
    """UNKNOWN is eligible, so that a gateway serves from its first second, but does not make it ready; only what was
    added later waits for its first probe. DOWN is what probes say; EJECTED and PROBATION are what requests say of a
    backend that is not down.
    """

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    EJECTED = "ejected"
    PROBATION = "on probation"


@dataclass(slots=True)
class BackendHealth:
    """The health of one backend. Times are clock seconds."""

    verdict: HealthState = HealthState.UNKNOWN
    """What the probes say: UNKNOWN, UP or DOWN. A served request confirms an unknown backend, too."""
    probe_streak: int = 0
    """Probes in a row that contradict the verdict."""
    awaits_first_probe: bool = False
    """The backend was added while others served, and has not passed a probe yet."""
    breaker: Breaker = field(default_factory=Breaker)
    back_since: float | None = None
    """When it came back, while it still starts slowly; None otherwise."""
    served_at: int = 0
    """Event of its last success; see Breaker."""
    is_unreachable: bool = False
    """The last attempt to connect failed, and nothing has shown since that the backend accepts connections."""
    is_slow: bool = False
    """The last probe was not answered in time."""
    passed_at: float = -math.inf
    """When a probe passed last."""
    worked_at: float = -math.inf
    """When it was last seen to produce a token or a prefill, as far as probes have looked."""
    seen_served_at: int = 0
    """`served_at` at the last probe."""
    was_up_until: float | None = None
    """When it was last known to be up and reachable; None: it is, or it never was up."""
    reason: str | None = None
    """Why `state` changed last; None: it never did."""
    changed_at: float | None = None
    """When `state` changed last."""
    facts: EngineFacts | None = None
    """What the engine says of itself; None: it has not been asked since it came up."""

    @property
    def state(self) -> HealthState:
        """Both facts in one word."""
        if self.breaker.phase is BreakerPhase.CLOSED or self.verdict is HealthState.DOWN:
            return self.verdict
        return HealthState.EJECTED if self.breaker.phase is BreakerPhase.EJECTED else HealthState.PROBATION

    @property
    def is_healthy(self) -> bool:
        """Whether it is not known to be of no use."""
        return self.state not in (HealthState.DOWN, HealthState.EJECTED)

    @property
    def is_confirmed(self) -> bool:
        """Whether it is up because a probe or a request succeeded, and not merely not known to be down."""
        return self.state is HealthState.UP

    @property
    def passes_probes(self) -> bool:
        """Whether its health checks pass and it accepts connections, even if it is ejected or on probation."""
        return self.verdict is HealthState.UP and not self.breaker.ends_with_connection

    @property
    def has_served(self) -> bool:
        """Whether a request has ever gone well there."""
        return self.served_at > 0

    @property
    def consecutive_failures(self) -> int:
        """Failed requests in a row that the backend is to blame for."""
        return self.breaker.failures

    @property
    def gone_at(self) -> float | None:
        """When it ceased to take connections, as a restart begins, or to answer probes in time; None: it does both, or
        it never was up. It is not back before it has passed enough probes.
        """
        is_on_its_way = self.verdict is HealthState.DOWN and (self.is_slow or self.probe_streak > 0)
        return self.was_up_until if self.is_unreachable or is_on_its_way else None

    @property
    def is_eligible(self) -> bool:
        """Whether it may get requests, as many as there are."""
        is_closed = self.breaker.phase is BreakerPhase.CLOSED
        return is_closed and self.verdict is not HealthState.DOWN and not self.awaits_first_probe

    @property
    def awaits_trial(self) -> bool:
        """Whether it may get one request."""
        return self.state is HealthState.PROBATION and not self.breaker.trial

    @property
    def is_changing(self) -> bool:
        """Whether the next probe may decide something."""
        if self.verdict is HealthState.UNKNOWN or self.probe_streak > 0:
            return True
        breaker = self.breaker
        is_refusing = breaker.refused_connections > 0 or breaker.ends_with_connection
        is_out = is_refusing or breaker.is_out_for_doubt or self.is_unreachable
        return self.verdict is HealthState.UP and is_out

    def share_percent(self, now: float, slow_start_seconds: float) -> int:
        """How much of its share of the work it is to get: less than all of it after it came back."""
        if self.back_since is None:
            return FULL_PERCENT
        return slow_start_percent(now - self.back_since, slow_start_seconds)

    def look_for_work(self, now: float) -> None:
        """Take notice of requests that it has served since the last probe."""
        if self.served_at != self.seen_served_at:
            self.seen_served_at = self.served_at
            self.worked_at = now

    def has_worked(self, now: float, seconds: float) -> bool:
        """Whether it has produced something since it last passed a probe, and in these last seconds."""
        return self.worked_at > self.passed_at and now - self.worked_at <= seconds

    def probed(
        self, ok: bool, now: float, checks: HealthChecks, *, is_late: bool = False, is_busy: bool = False
    ) -> None:
        """Take in a probe. An unknown backend believes the first, others `fall` or `rise` in a row. `is_late`: there
        was no answer in time; `is_busy`: that is because it works, so it is not taken down.
        """
        self.is_slow = is_late
        if ok:
            self.passed_at = now
            self.connected(now)
            if self.breaker.is_out_for_doubt:
                self.breaker.release()
        verdict = HealthState.UP if ok else HealthState.DOWN
        if self.verdict is verdict:
            self.probe_streak = 0
            return
        if is_late and is_busy and self.verdict is HealthState.UP:
            self.probe_streak = min(self.probe_streak + 1, checks.fall - 1)
            return
        self.probe_streak += 1
        needed = checks.rise if ok else checks.fall
        if self.verdict is HealthState.UNKNOWN or self.probe_streak >= needed:
            self.judge(verdict, now, checks)

    def connected(self, now: float) -> None:
        """The backend accepts connections."""
        self.reached()
        self.breaker.connected()
        if self.breaker.ends_with_connection:
            self.breaker.close(now)

    def reached(self) -> None:
        """The backend has answered, and so there was a connection."""
        self.is_unreachable = False
        if self.verdict is HealthState.UP:
            self.was_up_until = None

    def refused(self, now: float) -> None:
        """The backend refused a connection."""
        self.is_unreachable = True
        self._leave(now)

    def judge(self, verdict: HealthState, now: float, checks: HealthChecks) -> None:
        """The backend is up, or down, from now on."""
        if verdict is HealthState.DOWN:
            self._leave(now)
            self.breaker.rest(now, checks.eject_seconds)
            if self.breaker.is_doubted:  # it was seen by now, and has to show that it is well after it came up
                self.breaker.release()
                self.breaker.is_doubted = False
        elif self.verdict is HealthState.DOWN:
            self.breaker.forgive()
            self.breaker.resume(now)
        self.verdict = verdict
        self.probe_streak = 0
        self.facts = None
        if verdict is HealthState.UP and not self.is_unreachable:
            self.was_up_until = None

    def _leave(self, now: float) -> None:
        if self.verdict is HealthState.UP and self.was_up_until is None:
            self.was_up_until = now
