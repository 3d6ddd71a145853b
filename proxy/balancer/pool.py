"""The backends of one role: who is eligible now, and leases on them.

Eligible means enabled, which the operator says through the roster, and healthy, which probes and traffic say. When
nobody is eligible there is no lease: a down backend is not tried for want of a better one. A backend on probation gets
the next lease there is, and no other until that one has told something.

Of the eligible ones, those short of KV memory are passed over for a while, and those that work on as many requests as
they can, as long as there are others.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from proxy.backend import Load
from proxy.balancer import slow_start
from proxy.balancer.condition import HealthState
from proxy.balancer.engine_facts import UNKNOWN_VERSION
from proxy.balancer.lease import Lease
from proxy.balancer.policies import WEIGHTS
from proxy.errors import Failure, NoBackendAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from proxy.backend import Backend, Role
    from proxy.balancer.engine_facts import EngineVersion
    from proxy.balancer.fitness import Fitness
    from proxy.balancer.health import Health, Transition
    from proxy.balancer.ledger import Ledger
    from proxy.balancer.pairs import Pairs
    from proxy.balancer.policies import Policy
    from proxy.balancer.roster import Roster
    from proxy.balancer.scoreboard import Row, Scoreboard
    from proxy.errors import UpstreamError

_NO_LOAD: Final = Load()
_UNAUTHORIZED: Final = 401


class Pool:
    """One role's backends as one worker sees them. `row` is that worker's own; its leases write it."""

    def __init__(
        self,
        role: Role,
        policy: Policy,
        scoreboard: Scoreboard,
        row: Row,
        roster: Roster,
        health: Health,
        on_transition: Callable[[Transition], None] | None = None,
        on_end: Callable[[Backend, str], None] | None = None,
        *,
        ledger: Ledger | None = None,
        pairs: Pairs | None = None,
        fitness: Fitness | None = None,
        worker: int = 0,
        max_running: int | None = None,
        pressure_seconds: float = 5.0,
        restart_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`on_transition` hears of changes of health; `on_end` how each lease ended: `ok`, the failure's name, or
        `abandoned` when the reason lies outside the backend. `ledger`: the KV that stays pinned on these backends.
        `pairs`, `fitness` and it forget the backends that leave. `worker`: the number of the worker, see Policy.
        `max_running`: requests a backend works on at a time; None is what its engine says, or any number.
        `pressure_seconds`: how long a backend that ran out of KV memory is passed over.
        `restart_seconds`: see `is_restarting`.
        """
        self.role = role
        self.row = row
        self.on_release: Callable[[], None] | None = None
        """Called when there may be room where there was none: a lease has given its request back, or backends have
        come, come back or gone."""
        self._policy = policy
        self._scoreboard = scoreboard
        self._roster = roster
        self._health = health
        self._on_transition = on_transition
        self._on_end = on_end
        self._ledger = ledger
        self._pairs = pairs
        self._fitness = fitness
        self._worker = worker
        self._max_running = max_running
        self._pressure_seconds = pressure_seconds
        self._restart_seconds = restart_seconds
        self._clock = clock
        self._rng = rng or random.Random()
        self._pressed: dict[Backend, float] = {}  # short of KV memory, until when
        self._has_looked = False
        self._versions: tuple[int, int] | None = None  # of roster and health, when all below was computed
        self._backends: tuple[Backend, ...] = ()
        self._enabled: tuple[Backend, ...] = ()
        self._eligible: tuple[Backend, ...] = ()
        self._awaiting_trial: tuple[Backend, ...] = ()
        self._limits: dict[Backend, int] = {}  # of the eligible ones that have any
        self._is_any_slow = False
        self._gone_at: float | None = None  # when the last one ceased to take connections that was up; None: some do

    def configure(
        self, policy: Policy, max_running: int | None, pressure_seconds: float, restart_seconds: float = 0.0
    ) -> None:
        """Take changed settings for the leases from now on."""
        self._policy = policy
        self._max_running = max_running
        self._pressure_seconds = pressure_seconds
        self._restart_seconds = restart_seconds
        self._versions = None

    # Choosing

    def lease(
        self, load: Load, avoid: Collection[Backend] = (), prefer: Backend | None = None, *, is_proof: bool = True
    ) -> Lease:
        """A claim of `load` on some eligible backend not in `avoid`: on `prefer` if it may be, otherwise on what the
        policy chooses. It costs nothing until entered. `is_proof` False: what it is for does not show whether the
        backend generates, so how it ends tells only whether there was a connection.
        """
        return Lease(self, load, avoid, prefer, is_proof)

    def take(
        self, load: Load, avoid: Collection[Backend] = (), prefer: Backend | None = None, is_proof: bool = True
    ) -> tuple[Backend, int]:
        """The backend for a lease, and the number of the trial that the lease is, 0 if it is none: see Lease. Raises
        NoBackendAvailable.
        """
        self._refresh()
        if self._awaiting_trial:
            is_wanted_elsewhere = not is_proof or (prefer is not None and prefer in self._eligible)
            if not is_wanted_elsewhere or all(backend in avoid for backend in self._eligible):
                for backend in self._awaiting_trial:
                    if backend not in avoid:
                        return backend, self._health.begin_trial(backend)
        return self._pick(load, avoid, prefer), 0

    def pick(self, avoid: Collection[Backend] = (), prefer: Backend | None = None) -> Backend:
        """An eligible backend for what needs no lease, because it holds nothing and tells nothing. Raises
        NoBackendAvailable.
        """
        self._refresh()
        return self._pick(_NO_LOAD, avoid, prefer)

    @contextmanager
    def room(self, load: Load, avoid: Collection[Backend] = ()) -> Iterator[None]:
        """Keep room for a lease on some eligible backend, if there is one, for a request that has something to do
        before. To be left right before that lease is taken, with nothing in between: then the room is still there. The
        backend hears nothing of it, and nothing is told of the backend.
        """
        try:
            backend = self.pick(avoid)
        except NoBackendAvailable:
            yield  # the lease will tell, unless somebody is back by then
            return
        self.row.add(backend.slot, requests=1, running=1, compute=load.compute, kv=load.kv)
        try:
            yield
        finally:
            self.row.add(backend.slot, requests=-1, running=-1, compute=-load.compute, kv=-load.kv)
            self.released()

    def report(self, backend: Backend, error: UpstreamError | None, trial: int = 0, is_proof: bool = True) -> None:
        """How a request on a backend ended; None means well."""
        if error is not None and error.failure is Failure.REMOVED:
            self.abandon(backend, trial)
            return
        if error is not None:
            if error.failure is Failure.RECOMPUTED:
                self._pressed[backend] = self._clock() + self._pressure_seconds
            self._refresh()
            if error.engine_status == _UNAUTHORIZED and self._fitness and not self._health.has_served(backend):
                self._fitness.refused_key(backend)
        elif self._fitness is not None:
            self._fitness.served(backend)
        self._tell(self._health.on_outcome(backend, error, self._enabled, trial=trial, is_proof=is_proof))
        if self._on_end is not None:
            self._on_end(backend, "ok" if error is None else error.failure.value)

    def accuse(self, backend: Backend, error: UpstreamError, is_proof: bool = True) -> Callable[[], None]:
        """A request on a backend broke down. Whether it is held against the backend is up to whoever learns how the
        request fares elsewhere: what is returned does it.
        """
        if self._on_end is not None:
            self._on_end(backend, error.failure.value)

        def blame() -> None:
            self._refresh()
            self._tell(self._health.on_outcome(backend, error, self._enabled, is_proof=is_proof))

        return blame

    def report_stall(self, backend: Backend) -> bool:
        """A backend sends nothing on any of its streams while others do; whether it is out now, for this or for another
        reason, so that nothing more is to be expected of it.
        """
        self._refresh()
        self._tell(self._health.on_stall(backend, self._enabled))
        return backend not in self._enabled or not self._health.is_healthy(backend)

    def confirm(self, backend: Backend, trial: int, is_proof: bool = True) -> None:
        """A request has gone well before its lease ended, or a trial before its request did."""
        self._tell(self._health.on_outcome(backend, None, trial=trial, is_proof=is_proof))

    def count_served(self, backend: Backend) -> None:
        """The lease of such a request has ended."""
        if self._fitness is not None:
            self._fitness.served(backend)
        if self._on_end is not None:
            self._on_end(backend, "ok")

    def abandon(self, backend: Backend, trial: int = 0) -> None:
        """A request on a backend was broken off, and the backend is not to blame."""
        if trial:
            self._health.abandon_trial(backend, trial)
        if self._on_end is not None:
            self._on_end(backend, "abandoned")

    def released(self) -> None:
        """A lease has given its request back, or the backend has done its work for it."""
        if self.on_release is not None:
            self.on_release()

    # What is known

    def eligible(self) -> tuple[Backend, ...]:
        """Those that may get new requests, in slot order."""
        self._refresh()
        return self._eligible

    def backends(self) -> tuple[Backend, ...]:
        """All there are, in slot order: also those that are down or draining."""
        self._refresh()
        return self._backends

    def is_healthy(self, backend: Backend) -> bool:
        """Whether it is not known to be down or of no use; a draining one may well be healthy."""
        return self._health.is_healthy(backend)

    def engine_version(self, backend: Backend) -> EngineVersion | None:
        """What an engine says it is; None when that is not known."""
        facts = self._health.facts(backend)
        return None if facts is None or facts.version == UNKNOWN_VERSION else facts.version

    def engine_id(self, backend: Backend) -> str | None:
        """What an engine of vLLM says its KV connector calls it; None when it does not say."""
        facts = self._health.facts(backend)
        return None if facts is None or facts.identity.setup is None else facts.identity.setup.engine_id

    def max_model_len(self, backend: Backend) -> int | None:
        """Tokens that fit into a sequence of an engine; None when that is not known."""
        facts = self._health.facts(backend)
        return None if facts is None else facts.max_model_len

    def limit(self, backend: Backend) -> int | None:
        """Requests it works on at a time: more only where all others have as many as they can. None: any number."""
        if self._max_running is not None:
            return self._max_running
        facts = self._health.facts(backend)
        return None if facts is None else facts.max_num_seqs

    def has_room(self) -> bool:
        """Whether some eligible backend is below its limit. True also where nobody is eligible, unless they are only
        restarting: a lease that fails at once is nothing to wait for.
        """
        self._refresh()
        if self._gone_at is not None and self.is_restarting():
            return False
        if self._awaiting_trial or len(self._limits) < len(self._eligible) or not self._limits:
            return True
        return any(self._scoreboard.running(backend.slot) < limit for backend, limit in self._limits.items())

    def is_gone(self) -> bool:
        """Whether nobody takes connections, and somebody did who was up."""
        self._refresh()
        return self._gone_at is not None

    def is_restarting(self) -> bool:
        """Whether they are gone for less than `restart_seconds`, so that they may soon be back. Who never was up, or is
        gone for longer, is not waited for.
        """
        self._refresh()
        return self._gone_at is not None and self._clock() - self._gone_at < self._restart_seconds

    def is_ready(self) -> bool:
        """Whether a request that came now could be expected to be served, if only as a trial."""
        self._refresh()
        serving = (HealthState.UP, HealthState.PROBATION)
        return any(self._health.state(backend) in serving for backend in self._enabled)

    def in_flight(self, backend: Backend) -> int:
        """Open leases on a backend, over all workers."""
        return self._scoreboard.requests(backend.slot)

    # How

    def _pick(self, load: Load, avoid: Collection[Backend], prefer: Backend | None) -> Backend:
        candidates = self._eligible
        if avoid:
            candidates = tuple(backend for backend in candidates if backend not in avoid)
        if self._pressed:
            candidates = self._without_pressed(candidates)
        if not candidates:
            raise NoBackendAvailable(self.role)
        if prefer is not None:
            for backend in candidates:
                if backend == prefer and self._has_room_on(backend):
                    return backend
        chosen = self._choose(candidates, load)
        if not self._has_room_on(chosen):
            roomy = tuple(backend for backend in candidates if self._has_room_on(backend))
            if roomy:
                return self._choose(roomy, load)
        return chosen

    def _choose(self, candidates: Sequence[Backend], load: Load) -> Backend:
        """What the policy says, with those that came back spared."""
        per_compute, per_kv = WEIGHTS[self.role]
        if self._is_any_slow:
            percents = [self._health.share_percent(backend) for backend in candidates]
            if not self._policy.weighs_load:
                candidates = slow_start.taking_part(candidates, percents, self._rng)
        weights = self._scoreboard.weigh([backend.slot for backend in candidates], per_compute, per_kv)
        if self._is_any_slow and self._policy.weighs_load:
            cost = per_compute * load.compute + per_kv * load.kv
            weights = slow_start.slowed(weights, percents, max(1, cost))
        return self._policy(candidates, weights, self._worker)

    def _has_room_on(self, backend: Backend) -> bool:
        limit = self._limits.get(backend) if self._limits else None
        return limit is None or self._scoreboard.running(backend.slot) < limit

    def _without_pressed(self, candidates: tuple[Backend, ...]) -> tuple[Backend, ...]:
        """Those with KV memory to spare, or all of them if none has."""
        now = self._clock()
        self._pressed = {backend: until for backend, until in self._pressed.items() if until > now}
        return tuple(backend for backend in candidates if backend not in self._pressed) or candidates

    def _tell(self, transition: Transition | None) -> None:
        if transition is not None and self._on_transition is not None:
            self._on_transition(transition)

    def _refresh(self) -> None:
        """Recompute who there is, only when roster or health have changed: every pick and every scrape comes by here,
        and in each worker at least the prober.
        """
        if self._ledger is not None:
            self._ledger.expire()
        for transition in self._health.advance():
            self._tell(transition)
        roster_version = self._roster.version  # read before the members: another worker may change them meanwhile
        if self._versions == (roster_version, self._health.version):
            return
        before = (self._eligible, self._awaiting_trial, self._limits)
        members = self._roster.members(self.role)
        self._meet(tuple(member.backend for member in members))
        self._enabled = tuple(member.backend for member in members if not member.draining)
        for transition in self._health.relieve(self._enabled):
            self._tell(transition)
        self._eligible = tuple(backend for backend in self._enabled if self._health.is_eligible(backend))
        self._awaiting_trial = tuple(backend for backend in self._enabled if self._health.awaits_trial(backend))
        if not self._eligible and not self._awaiting_trial:
            # All are new, as after a reload that replaces them: who has not answered yet is better than nobody.
            unknown = (backend for backend in self._enabled if self._health.state(backend) is HealthState.UNKNOWN)
            self._eligible = tuple(unknown)
        candidates = (*self._eligible, *self._awaiting_trial)
        self._gone_at = None
        if all(self._health.is_unreachable(backend) for backend in candidates):
            gone = (self._health.gone_at(backend) for backend in self._enabled)
            self._gone_at = max((since for since in gone if since is not None), default=None)
        limits = ((backend, self.limit(backend)) for backend in self._eligible)
        self._limits = {backend: limit for backend, limit in limits if limit is not None}
        self._is_any_slow = any(self._health.share_percent(backend) < slow_start.FULL for backend in self._eligible)
        self._versions = (roster_version, self._health.version)
        if before != (self._eligible, self._awaiting_trial, self._limits):
            self.released()

    def _meet(self, backends: tuple[Backend, ...]) -> None:
        """Forget who has left, whichever worker finalised that, and note who came later than the first look."""
        for gone in set(self._backends).difference(backends):
            self._health.forget(gone)
            for books in (self._ledger, self._pairs, self._fitness):
                if books is not None:
                    books.forget(gone)
        if self._has_looked:
            for added in set(backends).difference(self._backends):
                self._health.on_added(added)
        self._has_looked = True
        self._backends = backends
