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


EjectionCause = Literal["failures", "connect", "timeouts", "stall", "refuses", "other_gateway"]
"""Cause of an ejection. The values are metric labels."""

# Consecutive failures that eject a backend. A single one may come from a restart, or from a request that is too large.
_REFUSED_CONNECTIONS: Final = 2
_TIMEOUTS: Final = 2
# Consecutive refusals that eject a backend. One or two may come from a burst for which an engine has no room.
_REFUSALS: Final = 3


class BreakerPhase(Enum):
    """Phase of a circuit breaker. Requests flow while it is CLOSED, and not while it is EJECTED."""

    CLOSED = auto()
    EJECTED = auto()
    PROBATION = auto()


@dataclass(slots=True)
class CircuitBreaker:
    """Circuit breaker of one backend. Times are clock seconds, and events are increasing numbers."""

    phase: BreakerPhase = BreakerPhase.CLOSED
    failure_count: int = 0
    """Consecutive failures of any kind that count against the backend."""
    ejected_until: float = 0.0
    """End of the ejection."""
    ends_with_connection: bool = False
    """Whether any accepted connection ends the ejection, because refused connections caused it."""
    is_doubted_by_peer: bool = False
    """Whether only the verdict of another gateway caused the ejection."""
    trial_number: int = 0
    """Number of the trial under way. 0: there is none."""
    refuses_since_event: int = 0
    """Event of the first refusal since the backend last served. 0: there was none."""
    _last_failure: Failure | None = None
    _repeat_count: int = 0  # consecutive failures of the same kind as the last one
    _first_failure_event: int = 0  # event of the failure before the last one
    _last_failure_event: int = 0
    _ejection_count: int = 0  # consecutive
    _healthy_since: float | None = None

    @property
    def is_out_because_of_peer(self) -> bool:
        """Whether only the verdict of another gateway keeps the backend out now."""
        return self.is_doubted_by_peer and self.phase is BreakerPhase.EJECTED

    @property
    def refused_connection_count(self) -> int:
        """Return the number of consecutive refused connections."""
        return self._repeat_count if self._last_failure is Failure.CONNECT else 0

    def record_success(self) -> None:
        """Record that the backend has served a request."""
        self.refuses_since_event = 0
        self.reset_failures()

    def record_refusal(self, event_number: int) -> None:
        """Record that the backend has refused a request. The count of failures stays."""
        self.refuses_since_event = self.refuses_since_event or event_number

    def should_eject_for_refusals(self, min_refusals: int, others_served_at_event: int) -> bool:
        """Return whether the backend has refused too many requests in a row while another backend served."""
        return min_refusals >= _REFUSALS and others_served_at_event > self.refuses_since_event > 0

    def reset_failures(self) -> None:
        """Reset the count of failures, because the backend has given an answer that is no failure."""
        if self.failure_count:
            self.failure_count = self._repeat_count = 0
            self._last_failure = None

    def record_accepted_connection(self) -> None:
        """Record that the backend accepted a connection, which ends a series of refused ones only."""
        if self._last_failure is Failure.CONNECT:
            self._repeat_count = 0
            self._last_failure = None

    def count_failure(self, failure: Failure, event_number: int) -> None:
        """Count a failed request to the backend."""
        self.failure_count += 1
        self._repeat_count = self._repeat_count + 1 if failure is self._last_failure else 1
        self._last_failure = failure
        self._first_failure_event, self._last_failure_event = self._last_failure_event, event_number

    def find_ejection_cause(self, eject_after: int, others_served_at_event: int) -> EjectionCause | None:
        """Return the cause for which the backend must be ejected now, or None.

        `others_served_at_event` is the event of the last success of another backend. Without one, timeouts may come
        from the load on all backends.
        """
        if self.refused_connection_count >= _REFUSED_CONNECTIONS:
            return "connect"
        if (
            self._last_failure is Failure.TIMEOUT
            and self._repeat_count >= _TIMEOUTS
            and others_served_at_event > self._first_failure_event
        ):
            return "timeouts"
        return "failures" if self.failure_count >= eject_after else None

    def eject_backend(
        self, cause: EjectionCause, now: float, health_checks: HealthChecks, jitter_factor: float
    ) -> float:
        """Eject the backend, and return the number of seconds. `jitter_factor` is a factor."""
        self.ends_with_connection = cause == "connect" and (
            self.phase is BreakerPhase.CLOSED or self.ends_with_connection
        )
        self.end_healthy_time(now, health_checks.eject_seconds)
        if self._ejection_count * health_checks.eject_seconds < health_checks.max_eject_seconds:
            self._ejection_count += 1
        seconds = (
            min(self._ejection_count * health_checks.eject_seconds, health_checks.max_eject_seconds) * jitter_factor
        )
        self.phase = BreakerPhase.EJECTED
        self.is_doubted_by_peer = False
        self.ejected_until = now + seconds
        self.trial_number = 0
        return seconds

    def eject_on_peer_verdict(self, now: float, health_checks: HealthChecks) -> float:
        """Take the backend out until it passes a health check, and return the maximum number of seconds.

        It counts neither as a failure nor as an ejection.
        """
        self.phase = BreakerPhase.EJECTED
        self.is_doubted_by_peer = True
        self.ejected_until = now + health_checks.eject_seconds
        self.trial_number = 0
        return health_checks.eject_seconds

    def begin_probation(self) -> None:
        """End the ejection and put the backend on probation."""
        self.phase = BreakerPhase.PROBATION

    def close_breaker(self, now: float) -> None:
        """Close the breaker, because the backend serves again."""
        self.phase = BreakerPhase.CLOSED
        self.trial_number = 0
        self.ends_with_connection = False
        self.record_success()
        self.begin_healthy_time(now)

    def end_healthy_time(self, now: float, eject_seconds: float) -> None:
        """End a healthy time. Each `eject_seconds` of it took one ejection off the count."""
        if self._healthy_since is not None:
            self._ejection_count = max(0, self._ejection_count - int((now - self._healthy_since) / eject_seconds))
            self._healthy_since = None

    def begin_healthy_time(self, now: float) -> None:
        """Record that the backend is healthy from now on, unless its breaker is open."""
        if self.phase is BreakerPhase.CLOSED:
            self._healthy_since = now


FULL_PERCENT: Final = 100
_FIRST_PERCENT: Final = 10


def slow_start_percent(elapsed_seconds: float, slow_start_seconds: float) -> int:
    """Return the share of requests of a backend that came back `elapsed_seconds` ago, in percent from 10 to 100.

    The share grows linearly, as in Envoy with aggression 1, because caches are cold and graphs are not compiled yet. It
    is a whole number so that weights stay integers.
    """
    if elapsed_seconds >= slow_start_seconds:
        return FULL_PERCENT
    return _FIRST_PERCENT + int((FULL_PERCENT - _FIRST_PERCENT) * elapsed_seconds / slow_start_seconds)


class HealthState(StrEnum):
    """The health of a backend: healthy, unhealthy, or in between.

    An UNKNOWN backend is eligible, so that a gateway serves from its first second, but does not make the gateway ready.
    Backends that are added later wait for their first health check. Health checks decide UP and DOWN. Requests decide
    EJECTED and PROBATION for a backend that is not down.
    """

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    EJECTED = "ejected"
    PROBATION = "on probation"


@dataclass(slots=True)
class BackendHealth:
    """Health of one backend. Times are clock seconds."""

    probe_verdict: HealthState = HealthState.UNKNOWN
    """Verdict of the health checks: UNKNOWN, UP or DOWN. A served request also confirms an unknown backend."""
    consecutive_probe_results: int = 0
    """Consecutive probes that contradict the verdict."""
    awaits_first_probe: bool = False
    """Whether the backend was added while others served, and has not passed a probe yet."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    recovered_at: float | None = None
    """When the backend came back. None: it is not in its slow start."""
    last_served_event: int = 0
    """Event of the last served request; see CircuitBreaker. 0: there was none."""
    is_unreachable: bool = False
    """Whether the last attempt to connect failed and the backend has not answered since."""
    is_slow: bool = False
    """Whether the last probe was not answered in time."""
    last_passed_probe_at: float = -math.inf
    """When a probe last passed."""
    last_output_at: float = -math.inf
    """When the backend last produced a token or a prefill, as of the last probe."""
    previous_served_event: int = 0
    """`last_served_event` at the last probe."""
    was_up_until: float | None = None
    """When the backend was last up and reachable. None: it is now, or it never was up."""
    state_reason: str | None = None
    """Reason for the last change of `health_state`. None: it has not changed."""
    state_changed_at: float | None = None
    """When `health_state` last changed. None: it has not changed."""
    engine_facts: EngineFacts | None = None
    """Facts about the engine. None: they have not been read since it came up."""

    @property
    def health_state(self) -> HealthState:
        """The state of the backend, by the verdict and the breaker."""
        if self.breaker.phase is BreakerPhase.CLOSED or self.probe_verdict is HealthState.DOWN:
            return self.probe_verdict
        return HealthState.EJECTED if self.breaker.phase is BreakerPhase.EJECTED else HealthState.PROBATION

    @property
    def is_healthy(self) -> bool:
        """Whether the backend is neither down nor ejected."""
        return self.health_state not in (HealthState.DOWN, HealthState.EJECTED)

    @property
    def is_confirmed_healthy(self) -> bool:
        """Whether a probe or a request has succeeded, so that the backend is known to be up."""
        return self.health_state is HealthState.UP

    @property
    def passes_probes(self) -> bool:
        """Whether health checks pass and connections are accepted, even on an ejected backend or one on probation."""
        return self.probe_verdict is HealthState.UP and not self.breaker.ends_with_connection

    @property
    def consecutive_failures(self) -> int:
        """Consecutive failed requests that count against the backend."""
        return self.breaker.failure_count

    @property
    def unavailable_since(self) -> float | None:
        """When the backend stopped accepting connections or answering probes in time, as at the begin of a restart.

        None: it does both, or it never was up. It is only back after enough successful probes.
        """
        is_coming_back = self.probe_verdict is HealthState.DOWN and (self.is_slow or self.consecutive_probe_results > 0)
        return self.was_up_until if self.is_unreachable or is_coming_back else None

    @property
    def is_eligible(self) -> bool:
        """Whether the backend may get any number of requests."""
        is_closed = self.breaker.phase is BreakerPhase.CLOSED
        return is_closed and self.probe_verdict is not HealthState.DOWN and not self.awaits_first_probe

    @property
    def awaits_trial_request(self) -> bool:
        """Whether the backend may get one request as a trial."""
        return self.health_state is HealthState.PROBATION and not self.breaker.trial_number

    @property
    def may_change_at_next_probe(self) -> bool:
        """Whether the next health check may change the state."""
        if self.probe_verdict is HealthState.UNKNOWN or self.consecutive_probe_results > 0:
            return True
        breaker = self.breaker
        is_refusing = breaker.refused_connection_count > 0 or breaker.ends_with_connection
        is_out = is_refusing or breaker.is_out_because_of_peer or self.is_unreachable
        return self.probe_verdict is HealthState.UP and is_out

    def request_share_percent(self, now: float, slow_start_seconds: float) -> int:
        """Return the share of its requests that the backend gets, in percent. It is below 100 after it came back."""
        if self.recovered_at is None:
            return FULL_PERCENT
        return slow_start_percent(now - self.recovered_at, slow_start_seconds)

    def has_produced_output_since_probe(self, now: float, seconds: float) -> bool:
        """Return whether the backend has produced something since it last passed a probe, and within `seconds`."""
        return self.last_output_at > self.last_passed_probe_at and now - self.last_output_at <= seconds

    def record_probe(
        self, has_passed: bool, now: float, health_checks: HealthChecks, *, is_late: bool = False, is_busy: bool = False
    ) -> None:
        """Record the result of a health check.

        The first probe decides for an unknown backend, and `fall` or `rise` consecutive ones for others.

        Args:
            has_passed: Whether the probe passed.
            now: Clock seconds.
            health_checks: Current settings.
            is_late: Whether the backend did not answer in time.
            is_busy: Whether a late answer is excused, because the backend is working.
        """
        self.is_slow = is_late
        if has_passed:
            self.last_passed_probe_at = now
            self.record_accepted_connection(now)
            if self.breaker.is_out_because_of_peer:
                self.breaker.begin_probation()
        verdict = HealthState.UP if has_passed else HealthState.DOWN
        if self.probe_verdict is verdict:
            self.consecutive_probe_results = 0
            return
        if is_late and is_busy and self.probe_verdict is HealthState.UP:
            self.consecutive_probe_results = min(self.consecutive_probe_results + 1, health_checks.fall - 1)
            return
        self.consecutive_probe_results += 1
        needed = health_checks.rise if has_passed else health_checks.fall
        if self.probe_verdict is HealthState.UNKNOWN or self.consecutive_probe_results >= needed:
            self.set_probe_verdict(verdict, now, health_checks)

    def record_accepted_connection(self, now: float) -> None:
        """Record that the backend accepts connections."""
        self.record_answer()
        self.breaker.record_accepted_connection()
        if self.breaker.ends_with_connection:
            self.breaker.close_breaker(now)

    def record_answer(self) -> None:
        """Record that the backend has answered, so that there was a connection."""
        self.is_unreachable = False
        if self.probe_verdict is HealthState.UP:
            self.was_up_until = None

    def record_refused_connection(self, now: float) -> None:
        """Record that the backend refused a connection."""
        self.is_unreachable = True
        self._record_end_of_up_state(now)

    def set_probe_verdict(self, verdict: HealthState, now: float, health_checks: HealthChecks) -> None:
        """Set the backend to UP or DOWN."""
        if verdict is HealthState.DOWN:
            self._record_end_of_up_state(now)
            self.breaker.end_healthy_time(now, health_checks.eject_seconds)
            if self.breaker.is_doubted_by_peer:
                # This gateway has seen it down itself, so a trial decides when it comes up.
                self.breaker.begin_probation()
                self.breaker.is_doubted_by_peer = False
        elif self.probe_verdict is HealthState.DOWN:
            self.breaker.reset_failures()
            self.breaker.begin_healthy_time(now)
        self.probe_verdict = verdict
        self.consecutive_probe_results = 0
        self.engine_facts = None
        if verdict is HealthState.UP and not self.is_unreachable:
            self.was_up_until = None

    def _record_end_of_up_state(self, now: float) -> None:
        if self.probe_verdict is HealthState.UP and self.was_up_until is None:
            self.was_up_until = now
