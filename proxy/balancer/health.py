"""What probes and traffic say about each backend, as pure state transitions.

These are two facts. Probes say whether a backend is up: it is unknown until something confirms it, then up or down, and
a down one comes back only through probes. Requests say whether it is of use: one that fails them is ejected for a
while, whatever its probes say, because a wedged engine still answers /health; see the breaker. Whether the operator
wants a backend is a third fact, and the roster's.

Ejection never takes more than a share of a role's backends, nor the last one: when all fail, it is not they who are
broken, and requests have to go somewhere. Probes may take all of them down. One Health per worker.
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
    """The state of every backend as each worker sees it, for status pages and metrics.

    Decisions use a worker's own Health. A worker writes its own row at each change, so there are no locks. Verdicts of
    other gateways have a row with one writer. In the last row all workers write when a backend last produced something.
    Create the board before forking.
    """

    def __init__(self, workers: int = 1, slots: int = 1024) -> None:
        self._workers = workers
        self._slots = slots
        self._cells = memoryview(mmap.mmap(-1, (workers + 2) * slots * _CELL_BYTES)).cast("q")
        self._verdicts = self._cells[workers * slots : (workers + 1) * slots]
        self._worked = self._cells[(workers + 1) * slots :]

    def set_state(self, worker: int, backend: Backend, state: HealthState, *, is_from_peer: bool = False) -> None:
        """This worker sees the backend in this state from now on. `is_from_peer`: because another gateway does."""
        self._cells[worker * self._slots + backend.slot] = _cell(backend, state, is_from_peer)

    def states(self, backend: Backend) -> Sequence[HealthState]:
        """By worker; UNKNOWN where one has not seen it in another state."""
        by_cell = {_cell(backend, state, is_from_peer): state for state in _STATES for is_from_peer in (False, True)}
        return [by_cell.get(cell, HealthState.UNKNOWN) for cell in self._own(backend)]

    def is_found_unhealthy(self, backend: Backend) -> bool:
        """Whether a worker has found that out by itself."""
        bad = [_cell(backend, state, is_from_peer=False) for state in (HealthState.DOWN, HealthState.EJECTED)]
        return any(cell in bad for cell in self._own(backend))

    def note_work(self, backend: Backend, at: float) -> None:
        """A backend has produced something, in seconds of the system's monotonic clock."""
        self._worked[backend.slot] = round(at * _TICKS_PER_SECOND)

    def worked_at(self, backend: Backend) -> float:
        """When a backend last produced something, for any worker; 0.0: not yet."""
        return self._worked[backend.slot] / _TICKS_PER_SECOND

    def own_cells(self) -> bytes:
        """A copy of the states that this gateway's workers see: two copies are equal if nothing changed in between."""
        return self._cells[: self._workers * self._slots].tobytes()

    # What other gateways have found

    def set_peer_verdict(self, slot: int, number: int) -> None:
        """Another gateway has found who has this slot of no use: a verdict with a number of its own, which is not 0."""
        self._verdicts[slot] = number

    def clear_peer_verdict(self, slot: int) -> None:
        """No other gateway says so any more."""
        self._verdicts[slot] = 0

    def peer_verdicts(self) -> list[int]:
        """By slot: the number of the verdict that stands; 0: none."""
        return self._verdicts.tolist()

    def clear_peer_verdicts(self) -> None:
        """Nothing is known of other gateways."""
        self.erase(self._workers)

    def erase(self, worker: int) -> None:
        """Forget what a worker that is dead has seen."""
        first = worker * self._slots
        self._cells[first : first + self._slots] = memoryview(bytes(self._slots * _CELL_BYTES)).cast("q")

    def _own(self, backend: Backend) -> memoryview[int]:
        return self._cells[backend.slot : self._workers * self._slots : self._slots]


def _cell(backend: Backend, state: HealthState, is_from_peer: bool) -> int:
    """Never 0, and another one for who has the slot later."""
    return 2 * (zlib.crc32(backend.key.encode()) * len(_STATES) + _STATES.index(state) + 1) + is_from_peer


_JITTER: Final = (0.8, 1.2)
_STRANGER: Final = BackendHealth()
_DEFAULT_CHECKS: Final = HealthChecks()
_CAUSE_OF_FAILED_TRIAL: Final[Mapping[Failure, Cause]] = {Failure.CONNECT: "connect", Failure.TIMEOUT: "timeouts"}


class ProbeFailure(Enum):
    """Why a probe failed, where that matters."""

    REFUSED = auto()
    """There was no connection."""
    UNAVAILABLE = auto()
    """The answer was 503. A backend that is down and still answers that is leaving."""
    LATE = auto()
    """There was no answer in time. That does not take down a backend that has produced something since it last passed
    a probe, nor the last one of a role that is serving a request."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state: returned exactly once, so that the caller can log it and count it.

    `cause`: why it was ejected, if this is an ejection.
    """

    backend: Backend
    old: HealthState
    new: HealthState
    reason: str
    cause: Cause | None = None


class Health:
    """The health of every backend this worker has heard of. `version` moves with every change of who may be chosen.

    `peers` are the enabled backends of a role, the one in question among them.
    """

    def __init__(
        self,
        checks: Callable[[], HealthChecks] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        board: HealthBoard | None = None,
    ) -> None:
        """Know nothing yet.

        Args:
            checks: Returns the settings of now. An ejection lasts as long as they said when it began.
            clock: Returns seconds.
            rng: Spreads the ends of ejections.
            board: Where workers tell each other which backends work; None: this is the only worker.
        """
        self.version = 0
        self._checks = checks or (lambda: _DEFAULT_CHECKS)
        self._clock = clock
        self._rng = rng or random.Random()
        self._board = board or HealthBoard()
        self._conditions: dict[Backend, BackendHealth] = {}
        self.events = 0
        """Outcomes so far: their order, without asking the clock."""
        self._trials = 0
        self.due = math.inf
        """Clock time of the next change that time alone makes."""
        self.leaving: frozenset[Backend] = frozenset()
        """The backends that say that they are leaving, as `on_probe` has heard."""

    # What is observed

    def on_added(self, backend: Backend) -> None:
        """A backend was added while others serve: it gets no request before it has passed a probe."""
        condition = self._condition(backend)
        if condition.verdict is HealthState.UNKNOWN:
            condition.awaits_first_probe = True
            self.version += 1

    def on_enabled(self, backend: Backend) -> Transition | None:
        """A backend that was disabled is enabled again, perhaps as another process: it is as one that was added."""
        old = self.of(backend).state
        self.forget(backend)
        self.on_added(backend)
        return self._changed(backend, self._condition(backend), old, "it is enabled again")

    def on_work(self, backend: Backend) -> None:
        """A backend has sent something on a stream lately."""
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
        """Take in the answer of one probe.

        Args:
            failure: Why it failed; None: it did not, or for another reason.
            is_last: No other backend of its role may get requests.
            is_serving: It works on a request.
        """
        condition = self._condition(backend)
        now = self._clock()
        old, was_away = condition.state, (condition.is_unreachable, condition.is_slow, condition.gone_at)
        if failure is ProbeFailure.REFUSED:
            condition.refused(now)
        self._look_for_work(backend, condition, now)
        # What is stuck may have worked a moment ago. Where others are left, that counts for a while only.
        believed_seconds = math.inf if is_last else self._checks().stall_seconds
        is_busy = (is_last and is_serving) or condition.has_worked(now, believed_seconds)
        condition.probed(ok, now, self._checks(), is_late=failure is ProbeFailure.LATE, is_busy=is_busy)
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
        """Take in how a request went; error None means that the backend served it.

        `trial`: its number from `begin_trial`, if it was one. `is_proof` False: it could not show whether the backend
        generates, so that all it tells is whether there was a connection. `refusals`: how often an idle backend has
        refused requests since it last served.
        """
        condition = self._condition(backend)
        old = condition.state
        is_trial = self._end_trial(condition, trial)
        self.events += 1
        if error is not None and error.failure is Failure.CONNECT:
            if not condition.is_unreachable:
                self.version += 1
            condition.refused(self._clock())
        elif condition.is_unreachable and (error is None or error.failure is Failure.STATUS):
            condition.reached()
            self.version += 1
        if error is not None and error.is_backends_fault and (is_proof or error.failure is Failure.CONNECT):
            condition.breaker.blame(error.failure, self.events)
            return self._blamed(backend, condition, error, peers, is_trial)
        if error is not None and error.is_refusal:
            condition.breaker.connected()
            if is_proof:
                condition.breaker.refuse(self.events)
            if (transition := self._refused(backend, condition, error, peers, is_trial, refusals)) is not None:
                return transition
        elif is_proof:
            condition.breaker.forgive()
            if error is None:
                condition.breaker.served()
                condition.served_at = self.events
        else:
            condition.breaker.connected()
        if old is HealthState.UP:
            return None
        condition.connected(self._clock())
        if error is None:
            if is_trial and is_proof:
                condition.breaker.close(self._clock())
            is_only_slow = condition.verdict is HealthState.DOWN and condition.is_slow and is_proof
            if condition.verdict is HealthState.UNKNOWN or is_only_slow:
                condition.judge(HealthState.UP, self._clock(), self._checks())
        return self._changed(backend, condition, old, "served a request")

    def on_stall(
        self, backend: Backend, peers: Collection[Backend], reason: str = "sends nothing while others do"
    ) -> Transition | None:
        """A backend sends nothing on any of its streams, and the reason is not that it has nothing to send."""
        condition = self._condition(backend)
        is_out = condition.state in (HealthState.DOWN, HealthState.EJECTED)
        if is_out or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, "stall", reason)

    def on_peer_verdict(self, backend: Backend, peers: Collection[Backend]) -> Transition | None:
        """Another gateway has found a backend of no use. That is no reason to believe it, but one to find out: no
        request goes there before a probe has passed, and then one, as long as enough others are left.
        """
        condition = self._condition(backend)
        if not condition.is_eligible or not self._may_eject(backend, peers):
            return None
        old = condition.state
        seconds = condition.breaker.doubt(self._clock(), self._checks())
        self.due = min(self.due, condition.breaker.until)
        reason = f"another gateway has found it of no use; until a health check has passed, or for {seconds:.0f} s"
        return self._changed(backend, condition, old, reason, "other_gateway")

    def begin_trial(self, backend: Backend) -> int:
        """A request tries a backend that awaits one; the number of this trial."""
        self._trials += 1
        self._condition(backend).breaker.trial = self._trials
        self.version += 1
        return self._trials

    def abandon_trial(self, backend: Backend, trial: int) -> None:
        """The trial ended without telling anything: the next request may try."""
        self._end_trial(self._condition(backend), trial)

    def advance(self) -> Sequence[Transition]:
        """Let happen what is due by now. Nearly free while nothing is."""
        if self.due == math.inf or (now := self._clock()) < self.due:
            return ()
        self.due = math.inf
        released = []
        for backend, condition in self._conditions.items():
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

    def relieve(self, peers: Collection[Backend]) -> Sequence[Transition]:
        """Put those that are ejected on probation before their time, if they are all that is left: the others have gone
        down since, or were removed.
        """
        conditions = {peer: self._condition(peer) for peer in peers}
        if any(c.is_eligible or c.state is HealthState.PROBATION for c in conditions.values()):
            return ()
        released = [
            self._release(peer, condition, "nobody else is left")
            for peer, condition in conditions.items()
            if condition.state is HealthState.EJECTED
        ]
        return [transition for transition in released if transition is not None]

    def note_facts(self, backend: Backend, facts: EngineFacts) -> None:
        """Keep what an engine said that passes its health checks, until it goes down. Its version may then change."""
        if self.of(backend).passes_probes:
            self._condition(backend).facts = facts
            self.version += 1

    def forget(self, backend: Backend) -> None:
        """Drop what is known about a backend that has left; should it come back, it is unknown."""
        self.leaving -= {backend}
        self._board.note_work(backend, 0.0)
        if self._conditions.pop(backend, None) is not None:
            self.version += 1

    # What follows from it

    def of(self, backend: Backend) -> BackendHealth:
        """What is known about it, to be read only."""
        return self._conditions.get(backend, _STRANGER)

    def share_percent(self, backend: Backend) -> int:
        """How much of its share of the work it is to get now: less than all of it after it came back."""
        return self.of(backend).share_percent(self._clock(), self._checks().slow_start_seconds)

    # How

    def _condition(self, backend: Backend) -> BackendHealth:
        condition = self._conditions.get(backend)
        if condition is None:
            condition = self._conditions[backend] = BackendHealth()
        return condition

    def _look_for_work(self, backend: Backend, condition: BackendHealth, now: float) -> None:
        """Take notice of what a backend has done since the last probe, for any worker, and tell the other workers."""
        condition.look_for_work(now)
        known = self._board.worked_at(backend)
        if condition.worked_at > known:
            self._board.note_work(backend, condition.worked_at)
        else:
            condition.worked_at = known

    def _end_trial(self, condition: BackendHealth, trial: int) -> bool:
        """Whether this was the trial that is under way, and not one from before another ejection."""
        if not trial or trial != condition.breaker.trial:
            return False
        condition.breaker.trial = 0
        self.version += 1
        return True

    def _blamed(
        self,
        backend: Backend,
        condition: BackendHealth,
        error: UpstreamError,
        peers: Collection[Backend],
        is_trial: bool,
    ) -> Transition | None:
        """Eject it if that was one failure too many. What fails on a backend that is out already was sent before."""
        breaker = condition.breaker
        cause: Cause | None = None
        if breaker.phase is BreakerPhase.CLOSED:
            others_served_at = max((self.of(peer).served_at for peer in peers), default=0)
            cause = breaker.cause(self._checks().eject_after, others_served_at)
        elif is_trial:
            cause = _CAUSE_OF_FAILED_TRIAL.get(error.failure, "failures")
        if cause is None or condition.verdict is HealthState.DOWN or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, cause, f"{error.message}, {breaker.failures} failures in a row")

    def _refused(
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
        if not is_judged or not condition.breaker.refuses(refusals, others_served_at):
            return None
        if condition.verdict is HealthState.DOWN or not self._may_eject(backend, peers):
            return None
        return self._eject(backend, condition, "refuses", f"{error.message}, while others serve")

    def _may_eject(self, backend: Backend, peers: Collection[Backend]) -> bool:
        others = [self.of(peer) for peer in peers if peer != backend]
        is_enabled = len(others) < len(peers)
        if not is_enabled or not any(other.is_eligible for other in others):
            return False
        share = self._checks().max_ejected_share
        most = max(1, int(len(peers) * share + 1e-9)) if share else 0
        return sum(other.breaker.phase is not BreakerPhase.CLOSED for other in others) < most

    def _eject(self, backend: Backend, condition: BackendHealth, cause: Cause, reason: str) -> Transition | None:
        old = condition.state
        seconds = condition.breaker.eject(cause, self._clock(), self._checks(), self._rng.uniform(*_JITTER))
        self.due = min(self.due, condition.breaker.until)
        if condition.breaker.ends_with_connection:
            condition.facts = None  # it may come back as another version
        return self._changed(backend, condition, old, f"{reason}, for {seconds:.0f} s", cause)

    def _release(self, backend: Backend, condition: BackendHealth, reason: str) -> Transition | None:
        old = condition.state
        condition.breaker.release()
        return self._changed(backend, condition, old, reason)

    def _changed(
        self, backend: Backend, condition: BackendHealth, old: HealthState, reason: str, cause: Cause | None = None
    ) -> Transition | None:
        """The transition from `old`, if there was one, and what any transition brings with it."""
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
