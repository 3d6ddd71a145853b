"""State of one backend: the verdict of its health checks, its circuit breaker, and facts about its engine.

The classes here know no other backend and no clock. `Health` holds one `BackendHealth` for each backend.

The circuit breaker follows Envoy's outlier detection. While it is closed, it counts consecutive failures. Too many
eject the backend; the n-th ejection in a row lasts n times as long. After an ejection the backend is on probation and
gets one request at a time. The outcome of this trial closes the breaker or ejects the backend again. Whether the other
backends can do without it is decided by `Health`. In Fowler's terms probation is the half-open state. A probe is always
a health check here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Final, Literal

from proxy.common.errors import Failure

if TYPE_CHECKING:
    from proxy.balancer.engines import EngineFacts
    from proxy.settings import HealthChecks


Cause = Literal["failures", "connect", "timeouts", "stall", "refuses", "other_gateway"]
"""Why a backend was ejected, as the metric says it."""

# One alone may be an engine that is just being restarted, or a request that is too large.
_REFUSED_CONNECTIONS: Final = 2
_TIMEOUTS: Final = 2
# One or two may be a burst that an engine has no room for.
_REFUSALS: Final = 3


class BreakerPhase(Enum):
    """CLOSED is as a circuit is closed: requests flow."""

    CLOSED = auto()
    EJECTED = auto()
    PROBATION = auto()


@dataclass(slots=True)
class Breaker:
    """One backend's breaker. Times are clock seconds, events are numbers that only grow."""

    phase: BreakerPhase = BreakerPhase.CLOSED
    failures: int = 0
    """Failures in a row, of any kind that the backend is to blame for."""
    until: float = 0.0
    """When an ejection is over."""
    ends_with_connection: bool = False
    """The backend is out because it refused connections, so any accepted connection brings it back."""
    is_doubted: bool = False
    """It is out because another gateway has found it of no use, and nothing that was seen here says so."""
    trial: int = 0
    """The number of the request that is being tried, 0 for none."""
    refuses_since: int = 0
    """Event of the first request that it refused since it last served; 0: none."""
    _last: Failure | None = None
    _repeats: int = 0  # how often in a row the last failure was of its kind
    _since: int = 0  # event of the last failure but one of that kind
    _last_event: int = 0
    _ejections: int = 0  # in a row
    _healthy_since: float | None = None

    @property
    def is_out_for_doubt(self) -> bool:
        """Nothing but what another gateway says keeps it out."""
        return self.is_doubted and self.phase is BreakerPhase.EJECTED

    @property
    def refused_connections(self) -> int:
        """How many connections in a row were refused."""
        return self._repeats if self._last is Failure.CONNECT else 0

    def served(self) -> None:
        """The backend has served a request."""
        self.refuses_since = 0
        self.forgive()

    def refuse(self, event: int) -> None:
        """The backend has refused a request. That neither counts as a failure nor forgives one."""
        self.refuses_since = self.refuses_since or event

    def refuses(self, refusals: int, others_served_at: int) -> bool:
        """Whether it refuses requests for no good reason: `refusals` in a row, while another backend served."""
        return refusals >= _REFUSALS and others_served_at > self.refuses_since > 0

    def forgive(self) -> None:
        """Begin to count afresh: the backend served, or said something that is no failure of its own."""
        if self.failures:
            self.failures = self._repeats = 0
            self._last = None

    def connected(self) -> None:
        """The backend accepted a connection, which says nothing more."""
        if self._last is Failure.CONNECT:
            self._repeats = 0
            self._last = None

    def blame(self, failure: Failure, event: int) -> None:
        """Count a failure."""
        self.failures += 1
        self._repeats = self._repeats + 1 if failure is self._last else 1
        self._last = failure
        self._since, self._last_event = self._last_event, event

    def cause(self, eject_after: int, others_served_at: int) -> Cause | None:
        """Why it ought to be ejected now, None if it ought not. `others_served_at`: the event of the last success of
        another backend, because a timeout may as well be the load on all of them.
        """
        if self.refused_connections >= _REFUSED_CONNECTIONS:
            return "connect"
        if self._last is Failure.TIMEOUT and self._repeats >= _TIMEOUTS and others_served_at > self._since:
            return "timeouts"
        return "failures" if self.failures >= eject_after else None

    def eject(self, cause: Cause, now: float, checks: HealthChecks, jitter: float) -> float:
        """Take it out; for how many seconds. `jitter` is a factor."""
        self.ends_with_connection = cause == "connect" and (
            self.phase is BreakerPhase.CLOSED or self.ends_with_connection
        )
        self.rest(now, checks.eject_seconds)
        if self._ejections * checks.eject_seconds < checks.max_eject_seconds:
            self._ejections += 1
        seconds = min(self._ejections * checks.eject_seconds, checks.max_eject_seconds) * jitter
        self.phase = BreakerPhase.EJECTED
        self.is_doubted = False
        self.until = now + seconds
        self.trial = 0
        return seconds

    def doubt(self, now: float, checks: HealthChecks) -> float:
        """Take it out until it has shown that it is well; for how many seconds at most. That is no failure of its own,
        and counts for none.
        """
        self.phase = BreakerPhase.EJECTED
        self.is_doubted = True
        self.until = now + checks.eject_seconds
        self.trial = 0
        return checks.eject_seconds

    def release(self) -> None:
        """Its time is over, or cut short: it is on probation."""
        self.phase = BreakerPhase.PROBATION

    def close(self, now: float) -> None:
        """The backend serves again."""
        self.phase = BreakerPhase.CLOSED
        self.trial = 0
        self.ends_with_connection = False
        self.served()
        self.resume(now)

    def rest(self, now: float, eject_seconds: float) -> None:
        """The backend is no longer healthy: each `eject_seconds` of its health take one ejection off the count."""
        if self._healthy_since is not None:
            self._ejections = max(0, self._ejections - int((now - self._healthy_since) / eject_seconds))
            self._healthy_since = None

    def resume(self, now: float) -> None:
        """The backend is healthy from now on."""
        if self.phase is BreakerPhase.CLOSED:
            self._healthy_since = now


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
