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

    from proxy.balancer.backend_health import Cause
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

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self._workers = workers
        self._slots = slots
        self._cells = memoryview(mmap.mmap(-1, (workers + 2) * slots * _CELL_BYTES)).cast("q")
        self._verdicts = self._cells[workers * slots : (workers + 1) * slots]
        self._worked = self._cells[(workers + 1) * slots :]

    def set_state(self, worker: int, backend: Backend, state: HealthState, *, is_from_peer: bool = False) -> None:
        """Record the state of a backend as a worker sees it. `is_from_peer`: it comes from another gateway."""
        self._cells[worker * self._slots + backend.slot] = _cell(backend, state, is_from_peer)

    def states(self, backend: Backend) -> Sequence[HealthState]:
        """Return the state of a backend in each worker."""
        by_cell = {_cell(backend, state, is_from_peer): state for state in _STATES for is_from_peer in (False, True)}
        return [by_cell.get(cell, HealthState.UNKNOWN) for cell in self._worker_cells(backend)]

    def is_found_unhealthy(self, backend: Backend) -> bool:
        """Return whether a worker of this gateway has found a backend down or has ejected it."""
        bad = [_cell(backend, state, is_from_peer=False) for state in (HealthState.DOWN, HealthState.EJECTED)]
        return any(cell in bad for cell in self._worker_cells(backend))

    def note_work(self, backend: Backend, at: float) -> None:
        """Record when a backend last produced something, in seconds of the system's monotonic clock."""
        self._worked[backend.slot] = round(at * _TICKS_PER_SECOND)

    def worked_at(self, backend: Backend) -> float:
        """Return when a backend last produced something for any worker. 0.0: not yet."""
        return self._worked[backend.slot] / _TICKS_PER_SECOND

    def own_cells(self) -> bytes:
        """Return a copy of the states that this gateway's workers see, to find out whether they have changed."""
        return self._cells[: self._workers * self._slots].tobytes()

    # Verdicts of other gateways

    def set_peer_verdict(self, slot: int, number: int) -> None:
        """Record the number of another gateway's verdict that the backend in a slot is unhealthy. 0: there is none."""
        self._verdicts[slot] = number

    def peer_verdicts(self) -> list[int]:
        """Return the number of the verdict on each slot. 0: there is none."""
        return self._verdicts.tolist()

    def clear_peer_verdicts(self) -> None:
        """Remove all health verdicts of other gateways."""
        self.erase(self._workers)

    def erase(self, worker: int) -> None:
        """Reset the health row of a worker that has died."""
        first = worker * self._slots
        self._cells[first : first + self._slots] = memoryview(bytes(self._slots * _CELL_BYTES)).cast("q")

    def _worker_cells(self, backend: Backend) -> memoryview[int]:
        return self._cells[backend.slot : self._workers * self._slots : self._slots]


def _cell(backend: Backend, state: HealthState, is_from_peer: bool) -> int:
    """Return a number that is not 0 and differs for a later backend in the same slot."""
    return 2 * (zlib.crc32(backend.key.encode()) * len(_STATES) + _STATES.index(state) + 1) + is_from_peer


_JITTER: Final = (0.8, 1.2)
_UNKNOWN_BACKEND: Final = BackendHealth()
_DEFAULT_CHECKS: Final = HealthChecks()
_CAUSE_OF_FAILED_TRIAL: Final[Mapping[Failure, Cause]] = {Failure.CONNECT: "connect", Failure.TIMEOUT: "timeouts"}


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
    old: HealthState
    new: HealthState
    reason: str
    cause: Cause | None = None
    """Cause of the ejection. None: the change is no ejection."""


class Health:
    """Health of every backend that this worker knows.

    In all methods `peers` are the enabled backends of one role, including the backend in question.
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
        self.version = 0
        """Increases with every change that may affect which backends are eligible."""
        self._checks = checks or (lambda: _DEFAULT_CHECKS)
        self._clock = clock
        self._rng = rng or random.Random()
        self._board = board or HealthBoard()
        self.conditions: dict[Backend, BackendHealth] = {}
        """Health of the known backends. Others must not change it. Compiled code reads it faster than by `of`."""
        self.events = 0
        """Number of outcomes, which orders them without a clock."""
        self._trials = 0
        self.due = math.inf
        """Clock time of the next change that happens without an event."""
        self.leaving: frozenset[Backend] = frozenset()
        """Backends that are down and answer their probes with 503."""

    # Observations

    def on_added(self, backend: Backend) -> None:
        """Record that a backend was added while others serve. It gets no request before its first successful probe."""
        condition = self._condition(backend)
        if condition.verdict is HealthState.UNKNOWN:
            condition.awaits_first_probe = True
            self.version += 1

    def on_enabled(self, backend: Backend) -> Transition | None:
        """Record that a disabled backend is enabled again. It may be another process, so it counts as added."""
        old = self.of(backend).state
        self.forget(backend)
        self.on_added(backend)
        return self._changed(backend, self._condition(backend), old, "enabled again")

    def on_work(self, backend: Backend) -> None:
        """Record that a backend has sent something on a stream."""
        self._board.note_work(backend, self._clock())

    def on_probe(
        self,
        backend: Backend,
        ok: bool,
        reason: str,
        *,
        failure: ProbeFailure | None = None,
        is_last: bool = False,
        is_serving: bool = False,
    ) -> Transition | None:
        """Record the result of a health check.

        Args:
            ok: Whether the probe passed.
            reason: The result for the log.
            failure: Kind of failure. None: the probe passed, or failed in another way.
            is_last: Whether no other backend of its role may get requests.
            is_serving: Whether the backend works on a request.
        """
        condition = self._condition(backend)
        now = self._clock()
        old, was_away = condition.state, (condition.is_unreachable, condition.is_slow, condition.gone_at)
        if failure is ProbeFailure.REFUSED:
            condition.note_refused_connection(now)
        self._update_worked_at(backend, condition, now)
        # A stuck backend may have worked a moment ago, so if others are left, recent work counts for a limited time.
        max_age_seconds = math.inf if is_last else self._checks().stall_seconds
        is_busy = (is_last and is_serving) or condition.has_worked(now, max_age_seconds)
        condition.note_probe(ok, now, self._checks(), is_late=failure is ProbeFailure.LATE, is_busy=is_busy)
        if (condition.is_unreachable, condition.is_slow, condition.gone_at) != was_away:
            self.version += 1
        is_leaving = failure is ProbeFailure.UNAVAILABLE and condition.verdict is HealthState.DOWN
        if is_leaving is not (backend in self.leaving):
            self.leaving ^= {backend}
        return self._changed(backend, condition, old, reason)

    def on_outcome(
        self,
        backend: Backend,
        error: UpstreamError | None,
        peers: Collection[Backend] = (),
        *,
        trial: int = 0,
        is_proof: bool = True,
        refusals: int = 0,
    ) -> Transition | None:
        """Record the outcome of a request for a backend's health.

        Args:
            error: Its failure. None: it served the request.
            peers: Enabled backends of the role.
            trial: Number from `begin_trial`. 0: the request was no trial.
            is_proof: Whether the request shows that the backend can generate. Otherwise only the connection counts.
            refusals: Requests that the backend refused while idle since it last served.
        """
        condition = self._condition(backend)
        old = condition.state
        is_trial = self._end_trial(condition, trial)
        self.events += 1
        if error is not None and error.failure is Failure.CONNECT:
            if not condition.is_unreachable:
                self.version += 1
            condition.note_refused_connection(self._clock())
        elif condition.is_unreachable and (error is None or error.failure is Failure.STATUS):
            condition.note_answer()
            self.version += 1
        if error is not None and error.is_fault_of_backend and (is_proof or error.failure is Failure.CONNECT):
            condition.breaker.count_failure(error.failure, self.events)
            return self._eject_for_failures(backend, condition, error, peers, is_trial)
        if error is not None and error.is_refusal:
            condition.breaker.note_connection()
            if is_proof:
                condition.breaker.note_refusal(self.events)
            transition = self._eject_for_refusals(backend, condition, error, peers, is_trial, refusals)
            if transition is not None:
                return transition
        elif is_proof:
            condition.breaker.reset_failures()
            if error is None:
                condition.breaker.note_success()
                condition.served_at = self.events
        else:
            condition.breaker.note_connection()
        if old is HealthState.UP:
            return None
        condition.note_connection(self._clock())
        if error is None:
            if is_trial and is_proof:
                condition.breaker.close(self._clock())
            is_only_slow = condition.verdict is HealthState.DOWN and condition.is_slow and is_proof
            if condition.verdict is HealthState.UNKNOWN or is_only_slow:
                condition.set_verdict(HealthState.UP, self._clock(), self._checks())
        return self._changed(backend, condition, old, "served a request")

    def on_stall(
        self, backend: Backend, peers: Collection[Backend], reason: str = "sends nothing while others do"
    ) -> Transition | None:
        """Eject a backend that sends nothing on its streams although it should."""
        condition = self._condition(backend)
        is_out = condition.state in (HealthState.DOWN, HealthState.EJECTED)
        if is_out or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, "stall", reason)

    def on_peer_verdict(self, backend: Backend, peers: Collection[Backend]) -> Transition | None:
        """Check a backend that another gateway has found unhealthy, if enough other backends are left.

        The verdict is not proof. So the backend gets no request until a probe has passed, and then one as a trial.
        """
        condition = self._condition(backend)
        if not condition.is_eligible or not self._may_eject(backend, peers):
            return None
        old = condition.state
        seconds = condition.breaker.eject_on_peer_verdict(self._clock(), self._checks())
        self.due = min(self.due, condition.breaker.until)
        reason = f"another gateway has found it unhealthy; until a health check has passed, or for {seconds:.0f} s"
        return self._changed(backend, condition, old, reason, "other_gateway")

    def begin_trial(self, backend: Backend) -> int:
        """Begin a trial of a backend on probation, and return its number."""
        self._trials += 1
        self._condition(backend).breaker.trial = self._trials
        self.version += 1
        return self._trials

    def abandon_trial(self, backend: Backend, trial: int) -> None:
        """End a trial that has shown nothing, so that the next request is a trial."""
        self._end_trial(self._condition(backend), trial)

    def advance(self) -> Sequence[Transition]:
        """Make the changes that are due by now, and return them. Costs one comparison while none is due."""
        if self.due == math.inf or (now := self._clock()) < self.due:
            return ()
        self.due = math.inf
        released = []
        for backend, condition in self.conditions.items():
            if condition.breaker.phase is BreakerPhase.EJECTED:
                if condition.breaker.until <= now:
                    released.append(self._release(backend, condition, "the next request decides"))
                else:
                    self.due = min(self.due, condition.breaker.until)
            if condition.back_since is not None:
                full_at = condition.back_since + self._checks().slow_start_seconds
                if full_at <= now:
                    condition.back_since = None
                    self.version += 1
                else:
                    self.due = min(self.due, full_at)
        return [transition for transition in released if transition is not None]

    def release_if_last(self, peers: Collection[Backend]) -> Sequence[Transition]:
        """Put ejected backends on probation early if no other backend is left, because the others went down or left."""
        conditions = {peer: self._condition(peer) for peer in peers}
        if any(c.is_eligible or c.state is HealthState.PROBATION for c in conditions.values()):
            return ()
        released = [
            self._release(peer, condition, "no other backend is left")
            for peer, condition in conditions.items()
            if condition.state is HealthState.EJECTED
        ]
        return [transition for transition in released if transition is not None]

    def note_facts(self, backend: Backend, facts: EngineFacts) -> None:
        """Keep the facts about an engine that passes its health checks, until it goes down."""
        if self.of(backend).passes_probes:
            self._condition(backend).facts = facts
            self.version += 1

    def forget(self, backend: Backend) -> None:
        """Drop the state of a backend that has left. If it returns, it is unknown."""
        self.leaving -= {backend}
        self._board.note_work(backend, 0.0)
        if self.conditions.pop(backend, None) is not None:
            self.version += 1

    # State

    def of(self, backend: Backend) -> BackendHealth:
        """Return the health of a backend, which the caller must not change."""
        return self.conditions.get(backend, _UNKNOWN_BACKEND)

    def share_percent(self, backend: Backend) -> int:
        """Return the share of its requests that a backend gets now, in percent. It is below 100 after it came back."""
        return self.of(backend).share_percent(self._clock(), self._checks().slow_start_seconds)

    # Details

    def _condition(self, backend: Backend) -> BackendHealth:
        condition = self.conditions.get(backend)
        if condition is None:
            condition = self.conditions[backend] = BackendHealth()
        return condition

    def _update_worked_at(self, backend: Backend, condition: BackendHealth, now: float) -> None:
        """Update `worked_at` from this worker's requests and from the other workers, and share it with them."""
        if condition.served_at != condition.seen_served_at:
            condition.seen_served_at = condition.served_at
            condition.worked_at = now
        of_others = self._board.worked_at(backend)
        if condition.worked_at > of_others:
            self._board.note_work(backend, condition.worked_at)
        else:
            condition.worked_at = of_others

    def _end_trial(self, condition: BackendHealth, trial: int) -> bool:
        """End a trial, and return whether it was the current one, not one from before the last ejection."""
        if not trial or trial != condition.breaker.trial:
            return False
        condition.breaker.trial = 0
        self.version += 1
        return True

    def _eject_for_failures(
        self,
        backend: Backend,
        condition: BackendHealth,
        error: UpstreamError,
        peers: Collection[Backend],
        is_trial: bool,
    ) -> Transition | None:
        """Eject a backend after too many failures.

        A failure on a backend that is already out does not count, because its request was sent before.
        """
        breaker = condition.breaker
        cause: Cause | None = None
        if breaker.phase is BreakerPhase.CLOSED:
            others_served_at = max((self.of(peer).served_at for peer in peers), default=0)
            cause = breaker.cause_to_eject(self._checks().eject_after, others_served_at)
        elif is_trial:
            cause = _CAUSE_OF_FAILED_TRIAL.get(error.failure, "failures")
        if cause is None or condition.verdict is HealthState.DOWN or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, cause, f"{error.describe()}, {breaker.failures} failures in a row")

    def _eject_for_refusals(
        self,
        backend: Backend,
        condition: BackendHealth,
        error: UpstreamError,
        peers: Collection[Backend],
        is_trial: bool,
        refusals: int,
    ) -> Transition | None:
        """Eject a backend that refuses requests that others serve."""
        others_served_at = max((self.of(peer).served_at for peer in peers if peer != backend), default=0)
        is_judged = is_trial or condition.breaker.phase is BreakerPhase.CLOSED
        if not is_judged or not condition.breaker.must_eject_for_refusals(refusals, others_served_at):
            return None
        if condition.verdict is HealthState.DOWN or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, "refuses", f"{error.describe()}, while others serve")

    def _may_eject(self, backend: Backend, peers: Collection[Backend]) -> bool:
        others = [self.of(peer) for peer in peers if peer != backend]
        is_enabled = len(others) < len(peers)
        if not is_enabled or not any(other.is_eligible for other in others):
            return False
        share = self._checks().max_ejected_share
        max_ejected = max(1, int(len(peers) * share + 1e-9)) if share else 0
        return sum(other.breaker.phase is not BreakerPhase.CLOSED for other in others) < max_ejected

    def _eject(self, backend: Backend, condition: BackendHealth, cause: Cause, reason: str) -> Transition | None:
        old = condition.state
        seconds = condition.breaker.eject(cause, self._clock(), self._checks(), self._rng.uniform(*_JITTER))
        self.due = min(self.due, condition.breaker.until)
        if condition.breaker.ends_with_connection:
            condition.facts = None  # the engine may return with another version
        return self._changed(backend, condition, old, f"{reason}, for {seconds:.0f} s", cause)

    def _release(self, backend: Backend, condition: BackendHealth, reason: str) -> Transition | None:
        old = condition.state
        condition.breaker.release()
        return self._changed(backend, condition, old, reason)

    def _changed(
        self, backend: Backend, condition: BackendHealth, old: HealthState, reason: str, cause: Cause | None = None
    ) -> Transition | None:
        """Return the transition from `old` and apply its consequences, or return None if the state is the same."""
        new = condition.state
        if new is old:
            return None
        self.version += 1
        condition.reason, condition.changed_at = reason, self._clock()
        condition.back_since = None
        if new is HealthState.UP:
            was_doubted, condition.breaker.is_doubted = condition.breaker.is_doubted, False
            if (old is not HealthState.UNKNOWN and not was_doubted) or condition.awaits_first_probe:
                condition.back_since = self._clock()
                self.due = min(self.due, condition.back_since + self._checks().slow_start_seconds)
            condition.awaits_first_probe = False
        return Transition(backend, old, new, reason, cause)
