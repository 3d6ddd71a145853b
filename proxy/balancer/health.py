"""Health of all backends, from health checks (probes) and from requests, as pure state transitions.

Probes decide whether a backend is up. It is unknown until something confirms it, and then up or down; a backend that is
down comes back only through probes. Requests decide whether a backend is ejected. A backend that fails requests is
ejected for a while, even if its probes pass, because a wedged engine still answers /health; see `Breaker`. Whether the
operator wants a backend is a third fact, which the roster holds.

Ejections never take more than a share of a role's backends, nor the last one. If all backends fail, they are probably
not the cause, and requests must go somewhere. Probes may take all of them down. Each worker has one Health.
"""

from __future__ import annotations

import math
import mmap
import random
import time
import zlib
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import BackendHealth, BreakerPhase, HealthState
from proxy.common.errors import Failure
from proxy.settings import HealthChecks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.balancer.backend_health import EjectionCause
    from proxy.balancer.engines import EngineFacts
    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError


_CELL_BYTES: Final = 8
_TICKS_PER_SECOND: Final = 1_000_000
_STATES: Final = tuple(HealthState)


class HealthBoard:
    """State of every backend as each worker sees it, for status pages and metrics.

    Decisions use the Health of the worker. Each worker writes only one row, at each change, so there are no locks. The
    verdicts of other gateways have a row with one writer. In the last row all workers write when a backend last
    produced something. Create the board before forking.
    """

    def __init__(self, worker_count: int = 1, slot_count: int = 1024) -> None:
        self._worker_count = worker_count
        self._slot_count = slot_count
        self._state_cells = memoryview(mmap.mmap(-1, (worker_count + 2) * slot_count * _CELL_BYTES)).cast("q")
        self._peer_verdict_cells = self._state_cells[worker_count * slot_count : (worker_count + 1) * slot_count]
        self._last_output_cells = self._state_cells[(worker_count + 1) * slot_count :]

    def set_state(self, worker: int, backend: Backend, state: HealthState, *, is_from_peer: bool = False) -> None:
        """Record the state of a backend as a worker sees it. `is_from_peer`: it comes from another gateway."""
        self._state_cells[worker * self._slot_count + backend.slot] = _encode_state_cell(backend, state, is_from_peer)

    def states_by_worker(self, backend: Backend) -> Sequence[HealthState]:
        """Return the state of a backend in each worker."""
        by_cell = {
            _encode_state_cell(backend, state, is_from_peer): state
            for state in _STATES
            for is_from_peer in (False, True)
        }
        return [by_cell.get(cell, HealthState.UNKNOWN) for cell in self._state_cells_of(backend)]

    def is_found_unhealthy(self, backend: Backend) -> bool:
        """Return whether a worker of this gateway has found a backend down or has ejected it."""
        bad = [
            _encode_state_cell(backend, state, is_from_peer=False) for state in (HealthState.DOWN, HealthState.EJECTED)
        ]
        return any(cell in bad for cell in self._state_cells_of(backend))

    def record_output_time(self, backend: Backend, output_at: float) -> None:
        """Record when a backend last produced something, in seconds of the system's monotonic clock."""
        self._last_output_cells[backend.slot] = round(output_at * _TICKS_PER_SECOND)

    def last_output_at(self, backend: Backend) -> float:
        """Return when a backend last produced something for any worker. 0.0: not yet."""
        return self._last_output_cells[backend.slot] / _TICKS_PER_SECOND

    def copy_own_states(self) -> bytes:
        """Return a copy of the states that this gateway's workers see, to find out whether they have changed."""
        return self._state_cells[: self._worker_count * self._slot_count].tobytes()

    # Verdicts of other gateways

    def set_peer_verdict(self, slot: int, verdict_number: int) -> None:
        """Record the number of another gateway's verdict that the backend in a slot is unhealthy. 0: there is none."""
        self._peer_verdict_cells[slot] = verdict_number

    def peer_verdicts(self) -> list[int]:
        """Return the number of the verdict on each slot. 0: there is none."""
        return self._peer_verdict_cells.tolist()

    def clear_peer_verdicts(self) -> None:
        """Remove all health verdicts of other gateways."""
        self.erase_worker(self._worker_count)

    def erase_worker(self, worker: int) -> None:
        """Reset the health row of a worker that has died."""
        first = worker * self._slot_count
        self._state_cells[first : first + self._slot_count] = memoryview(bytes(self._slot_count * _CELL_BYTES)).cast(
            "q"
        )

    def _state_cells_of(self, backend: Backend) -> memoryview[int]:
        return self._state_cells[backend.slot : self._worker_count * self._slot_count : self._slot_count]


def _encode_state_cell(backend: Backend, state: HealthState, is_from_peer: bool) -> int:
    """Return a number that is not 0 and differs for a later backend in the same slot."""
    return 2 * (zlib.crc32(backend.key.encode()) * len(_STATES) + _STATES.index(state) + 1) + is_from_peer


_JITTER: Final = (0.8, 1.2)
_UNKNOWN_BACKEND: Final = BackendHealth()
_DEFAULT_CHECKS: Final = HealthChecks()
_CAUSE_OF_FAILED_TRIAL: Final[Mapping[Failure, EjectionCause]] = {
    Failure.CONNECT: "connect",
    Failure.TIMEOUT: "timeouts",
}


class ProbeFailure(Enum):
    """The kind of a failed health check, if the kind matters."""

    REFUSED = auto()
    """The connection was refused."""
    UNAVAILABLE = auto()
    """The answer was 503. A backend that is down and still answers 503 is leaving."""
    LATE = auto()
    """There was no answer in time. It does not take down a backend that has produced something since its last
    successful probe, nor the last backend of a role while it serves a request."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a backend's state. It is returned once, so that the caller can log and count it."""

    backend: Backend
    old_state: HealthState
    new_state: HealthState
    reason: str
    ejection_cause: EjectionCause | None = None
    """Cause of the ejection. None: the change is no ejection."""


class Health:
    """Health of every backend that this worker knows.

    In all methods `enabled_backends` are the enabled backends of one role, including the backend in question.
    """

    def __init__(
        self,
        checks: Callable[[], HealthChecks] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        board: HealthBoard | None = None,
    ) -> None:
        """Create the health table without backends.

        Args:
            checks: Returns the current settings. An ejection keeps the duration that it began with. None: the defaults.
            clock: Returns monotonic seconds.
            rng: Spreads the ends of ejections.
            board: States that workers share. None: this is the only worker.
        """
        self.version_number = 0
        """Increases with every change that may affect which backends are eligible."""
        self._get_health_checks = checks or (lambda: _DEFAULT_CHECKS)
        self._clock = clock
        self._random_source = rng or random.Random()
        self._health_board = board or HealthBoard()
        self.health_by_backend: dict[Backend, BackendHealth] = {}
        """Health of the known backends. Others must not change it. Compiled code reads it faster than by
        `health_of`."""
        self.event_count = 0
        """Number of outcomes, which orders them without a clock."""
        self._trial_count = 0
        self.next_change_at = math.inf
        """Clock time of the next change that happens without an event."""
        self.leaving_backends: frozenset[Backend] = frozenset()
        """Backends that are down and answer their probes with 503."""

    # Observations

    def on_added(self, backend: Backend) -> None:
        """Record that a backend was added while others serve. It gets no request before its first successful probe."""
        condition = self._health_of(backend)
        if condition.probe_verdict is HealthState.UNKNOWN:
            condition.awaits_first_probe = True
            self.version_number += 1

    def on_enabled(self, backend: Backend) -> Transition | None:
        """Record that a disabled backend is enabled again. It may be another process, so it counts as added."""
        old = self.health_of(backend).health_state
        self.forget_backend(backend)
        self.on_added(backend)
        return self._apply_transition(backend, self._health_of(backend), old, "enabled again")

    def on_output(self, backend: Backend) -> None:
        """Record that a backend has sent something on a stream."""
        self._health_board.record_output_time(backend, self._clock())

    def on_probe(
        self,
        backend: Backend,
        has_passed: bool,
        reason: str,
        *,
        failure: ProbeFailure | None = None,
        is_last_backend: bool = False,
        is_serving: bool = False,
    ) -> Transition | None:
        """Record the result of a health check.

        Args:
            has_passed: Whether the probe passed.
            reason: The result for the log.
            failure: Kind of failure. None: the probe passed, or failed in another way.
            is_last_backend: Whether no other backend of its role may get requests.
            is_serving: Whether the backend works on a request.
        """
        condition = self._health_of(backend)
        now = self._clock()
        old, was_away = (
            condition.health_state,
            (condition.is_unreachable, condition.is_slow, condition.unavailable_since),
        )
        if failure is ProbeFailure.REFUSED:
            condition.record_refused_connection(now)
        self._update_last_output_at(backend, condition, now)
        # A stuck backend may have worked a moment ago, so if others are left, recent work counts for a limited time.
        max_age_seconds = math.inf if is_last_backend else self._get_health_checks().stall_seconds
        is_busy = (is_last_backend and is_serving) or condition.has_produced_output_since_probe(now, max_age_seconds)
        condition.record_probe(
            has_passed, now, self._get_health_checks(), is_late=failure is ProbeFailure.LATE, is_busy=is_busy
        )
        if (condition.is_unreachable, condition.is_slow, condition.unavailable_since) != was_away:
            self.version_number += 1
        is_leaving = failure is ProbeFailure.UNAVAILABLE and condition.probe_verdict is HealthState.DOWN
        if is_leaving is not (backend in self.leaving_backends):
            self.leaving_backends ^= {backend}
        return self._apply_transition(backend, condition, old, reason)

    def on_outcome(
        self,
        backend: Backend,
        error: UpstreamError | None,
        enabled_backends: Collection[Backend] = (),
        *,
        trial_number: int = 0,
        proves_generation: bool = True,
        refusal_count: int = 0,
    ) -> Transition | None:
        """Record the outcome of a request for a backend's health.

        Args:
            error: Its failure. None: it served the request.
            enabled_backends: Enabled backends of the role.
            trial_number: Number from `begin_trial`. 0: the request was no trial.
            proves_generation: Whether the request shows that the backend can generate. Otherwise only the connection
                counts.
            refusal_count: Requests that the backend refused while idle since it last served.
        """
        condition = self._health_of(backend)
        old = condition.health_state
        is_trial = self._end_trial(condition, trial_number)
        self.event_count += 1
        if error is not None and error.failure is Failure.CONNECT:
            if not condition.is_unreachable:
                self.version_number += 1
            condition.record_refused_connection(self._clock())
        elif condition.is_unreachable and (error is None or error.failure is Failure.STATUS):
            condition.record_answer()
            self.version_number += 1
        if error is not None and error.is_fault_of_backend and (proves_generation or error.failure is Failure.CONNECT):
            condition.breaker.count_failure(error.failure, self.event_count)
            return self._eject_for_failures(backend, condition, error, enabled_backends, is_trial)
        if error is not None and error.is_refusal:
            condition.breaker.record_accepted_connection()
            if proves_generation:
                condition.breaker.record_refusal(self.event_count)
            transition = self._eject_for_refusals(backend, condition, error, enabled_backends, is_trial, refusal_count)
            if transition is not None:
                return transition
        elif proves_generation:
            condition.breaker.reset_failures()
            if error is None:
                condition.breaker.record_success()
                condition.last_served_event = self.event_count
        else:
            condition.breaker.record_accepted_connection()
        if old is HealthState.UP:
            return None
        condition.record_accepted_connection(self._clock())
        if error is None:
            if is_trial and proves_generation:
                condition.breaker.close_breaker(self._clock())
            is_only_slow = condition.probe_verdict is HealthState.DOWN and condition.is_slow and proves_generation
            if condition.probe_verdict is HealthState.UNKNOWN or is_only_slow:
                condition.set_probe_verdict(HealthState.UP, self._clock(), self._get_health_checks())
        return self._apply_transition(backend, condition, old, "served a request")

    def on_stall(
        self, backend: Backend, enabled_backends: Collection[Backend], reason: str = "sends nothing while others do"
    ) -> Transition | None:
        """Eject a backend that sends nothing on its streams although it should."""
        condition = self._health_of(backend)
        is_out = condition.health_state in (HealthState.DOWN, HealthState.EJECTED)
        if is_out or not self._may_eject(backend, enabled_backends):
            return None
        return self._eject_backend(backend, condition, "stall", reason)

    def on_peer_verdict(self, backend: Backend, enabled_backends: Collection[Backend]) -> Transition | None:
        """Check a backend that another gateway has found unhealthy, if enough other backends are left.

        The verdict is not proof. So the backend gets no request until a probe has passed, and then one as a trial.
        """
        condition = self._health_of(backend)
        if not condition.is_eligible or not self._may_eject(backend, enabled_backends):
            return None
        old = condition.health_state
        seconds = condition.breaker.eject_on_peer_verdict(self._clock(), self._get_health_checks())
        self.next_change_at = min(self.next_change_at, condition.breaker.ejected_until)
        reason = f"another gateway has found it unhealthy; until a health check has passed, or for {seconds:.0f} s"
        return self._apply_transition(backend, condition, old, reason, "other_gateway")

    def begin_trial(self, backend: Backend) -> int:
        """Begin a trial of a backend on probation, and return its number."""
        self._trial_count += 1
        self._health_of(backend).breaker.trial_number = self._trial_count
        self.version_number += 1
        return self._trial_count

    def abandon_trial(self, backend: Backend, trial_number: int) -> None:
        """End a trial that has shown nothing, so that the next request is a trial."""
        self._end_trial(self._health_of(backend), trial_number)

    def make_due_changes(self) -> Sequence[Transition]:
        """Make the changes that are due by now, and return them. Costs one comparison while none is due."""
        if self.next_change_at == math.inf or (now := self._clock()) < self.next_change_at:
            return ()
        self.next_change_at = math.inf
        released = []
        for backend, condition in self.health_by_backend.items():
            if condition.breaker.phase is BreakerPhase.EJECTED:
                if condition.breaker.ejected_until <= now:
                    released.append(self._begin_probation(backend, condition, "the next request decides"))
                else:
                    self.next_change_at = min(self.next_change_at, condition.breaker.ejected_until)
            if condition.recovered_at is not None:
                full_at = condition.recovered_at + self._get_health_checks().slow_start_seconds
                if full_at <= now:
                    condition.recovered_at = None
                    self.version_number += 1
                else:
                    self.next_change_at = min(self.next_change_at, full_at)
        return [transition for transition in released if transition is not None]

    def release_last_ejected(self, enabled_backends: Collection[Backend]) -> Sequence[Transition]:
        """Put ejected backends on probation early if no other backend is left, because the others went down or left."""
        conditions = {peer: self._health_of(peer) for peer in enabled_backends}
        if any(c.is_eligible or c.health_state is HealthState.PROBATION for c in conditions.values()):
            return ()
        released = [
            self._begin_probation(peer, condition, "no other backend is left")
            for peer, condition in conditions.items()
            if condition.health_state is HealthState.EJECTED
        ]
        return [transition for transition in released if transition is not None]

    def set_engine_facts(self, backend: Backend, facts: EngineFacts) -> None:
        """Keep the facts about an engine that passes its health checks, until it goes down."""
        if self.health_of(backend).passes_probes:
            self._health_of(backend).engine_facts = facts
            self.version_number += 1

    def forget_backend(self, backend: Backend) -> None:
        """Drop the state of a backend that has left. If it returns, it is unknown."""
        self.leaving_backends -= {backend}
        self._health_board.record_output_time(backend, 0.0)
        if self.health_by_backend.pop(backend, None) is not None:
            self.version_number += 1

    # State

    def health_of(self, backend: Backend) -> BackendHealth:
        """Return the health of a backend, which the caller must not change."""
        return self.health_by_backend.get(backend, _UNKNOWN_BACKEND)

    def request_share_percent(self, backend: Backend) -> int:
        """Return the share of its requests that a backend gets now, in percent. It is below 100 after it came back."""
        return self.health_of(backend).request_share_percent(
            self._clock(), self._get_health_checks().slow_start_seconds
        )

    # Details

    def _health_of(self, backend: Backend) -> BackendHealth:
        condition = self.health_by_backend.get(backend)
        if condition is None:
            condition = self.health_by_backend[backend] = BackendHealth()
        return condition

    def _update_last_output_at(self, backend: Backend, condition: BackendHealth, now: float) -> None:
        """Update `last_output_at` from this worker's requests and from the other workers, and share it with them."""
        if condition.last_served_event != condition.previous_served_event:
            condition.previous_served_event = condition.last_served_event
            condition.last_output_at = now
        of_others = self._health_board.last_output_at(backend)
        if condition.last_output_at > of_others:
            self._health_board.record_output_time(backend, condition.last_output_at)
        else:
            condition.last_output_at = of_others

    def _end_trial(self, condition: BackendHealth, trial: int) -> bool:
        """End a trial, and return whether it was the current one, not one from before the last ejection."""
        if not trial or trial != condition.breaker.trial_number:
            return False
        condition.breaker.trial_number = 0
        self.version_number += 1
        return True

    def _eject_for_failures(
        self,
        backend: Backend,
        condition: BackendHealth,
        error: UpstreamError,
        enabled_backends: Collection[Backend],
        is_trial: bool,
    ) -> Transition | None:
        """Eject a backend after too many failures.

        A failure on a backend that is already out does not count, because its request was sent before.
        """
        breaker = condition.breaker
        cause: EjectionCause | None = None
        if breaker.phase is BreakerPhase.CLOSED:
            others_served_at = max((self.health_of(peer).last_served_event for peer in enabled_backends), default=0)
            cause = breaker.find_ejection_cause(self._get_health_checks().eject_after, others_served_at)
        elif is_trial:
            cause = _CAUSE_OF_FAILED_TRIAL.get(error.failure, "failures")
        if (
            cause is None
            or condition.probe_verdict is HealthState.DOWN
            or not self._may_eject(backend, enabled_backends)
        ):
            return None
        return self._eject_backend(
            backend, condition, cause, f"{error.describe()}, {breaker.failure_count} failures in a row"
        )

    def _eject_for_refusals(
        self,
        backend: Backend,
        condition: BackendHealth,
        error: UpstreamError,
        enabled_backends: Collection[Backend],
        is_trial: bool,
        refusals: int,
    ) -> Transition | None:
        """Eject a backend that refuses requests that others serve."""
        others_served_at = max(
            (self.health_of(peer).last_served_event for peer in enabled_backends if peer != backend), default=0
        )
        is_judged = is_trial or condition.breaker.phase is BreakerPhase.CLOSED
        if not is_judged or not condition.breaker.should_eject_for_refusals(refusals, others_served_at):
            return None
        if condition.probe_verdict is HealthState.DOWN or not self._may_eject(backend, enabled_backends):
            return None
        return self._eject_backend(backend, condition, "refuses", f"{error.describe()}, while others serve")

    def _may_eject(self, backend: Backend, enabled_backends: Collection[Backend]) -> bool:
        others = [self.health_of(peer) for peer in enabled_backends if peer != backend]
        is_enabled = len(others) < len(enabled_backends)
        if not is_enabled or not any(other.is_eligible for other in others):
            return False
        share = self._get_health_checks().max_ejected_share
        max_ejected = max(1, int(len(enabled_backends) * share + 1e-9)) if share else 0
        return sum(other.breaker.phase is not BreakerPhase.CLOSED for other in others) < max_ejected

    def _eject_backend(
        self, backend: Backend, condition: BackendHealth, cause: EjectionCause, reason: str
    ) -> Transition | None:
        old = condition.health_state
        seconds = condition.breaker.eject_backend(
            cause, self._clock(), self._get_health_checks(), self._random_source.uniform(*_JITTER)
        )
        self.next_change_at = min(self.next_change_at, condition.breaker.ejected_until)
        if condition.breaker.ends_with_connection:
            condition.engine_facts = None  # the engine may return with another version
        return self._apply_transition(backend, condition, old, f"{reason}, for {seconds:.0f} s", cause)

    def _begin_probation(self, backend: Backend, condition: BackendHealth, reason: str) -> Transition | None:
        old = condition.health_state
        condition.breaker.begin_probation()
        return self._apply_transition(backend, condition, old, reason)

    def _apply_transition(
        self,
        backend: Backend,
        condition: BackendHealth,
        old: HealthState,
        reason: str,
        cause: EjectionCause | None = None,
    ) -> Transition | None:
        """Return the transition from `old` and apply its consequences, or return None if the state is the same."""
        new = condition.health_state
        if new is old:
            return None
        self.version_number += 1
        condition.state_reason, condition.state_changed_at = reason, self._clock()
        condition.recovered_at = None
        if new is HealthState.UP:
            was_doubted, condition.breaker.is_doubted_by_peer = condition.breaker.is_doubted_by_peer, False
            if (old is not HealthState.UNKNOWN and not was_doubted) or condition.awaits_first_probe:
                condition.recovered_at = self._clock()
                self.next_change_at = min(
                    self.next_change_at, condition.recovered_at + self._get_health_checks().slow_start_seconds
                )
            condition.awaits_first_probe = False
        return Transition(backend, old, new, reason, cause)
