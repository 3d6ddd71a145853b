"""What requests say about one backend: a circuit breaker.

Closed, it counts failures in a row. Too many, and the backend is ejected: the n-th time in a row for n times as long.
When that time is over it is on probation: one request at a time is tried on it, and how this trial ends closes the
breaker or ejects the backend again. It decides for one backend alone; whether the others can do without it is for
Health to say.

The times are those of Envoy's outlier detection. The trial is what Fowler calls the trial call of a half-open breaker,
and linkerd the probe of its probation; here a probe is a health check.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Literal

from proxy.common.errors import Failure

if TYPE_CHECKING:
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
