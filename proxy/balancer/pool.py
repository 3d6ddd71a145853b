"""The backends of one role: which of them are eligible, leases on them, and how requests on them ended.

Eligible means enabled, which the operator says through the roster, and healthy, which probes and traffic say. The
`Chooser` says which of the eligible ones gets a request. When none is eligible there is no lease: a down backend is not
tried for want of a better one. A backend on probation gets the next lease there is, and no other until that one has
told something.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import FULL_PERCENT, HealthState
from proxy.balancer.blame import PairQuarantine
from proxy.balancer.chooser import Chooser
from proxy.balancer.engines import UNKNOWN_VERSION
from proxy.balancer.health import ProbeFailure
from proxy.balancer.lease import Lease
from proxy.balancer.pick import TRIAL, PickRequest, Policy
from proxy.common.backend import Load, Role
from proxy.common.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.balancer.backend_health import BackendHealth
    from proxy.balancer.engines import EngineFacts, EngineVersion
    from proxy.balancer.health import Health, Transition
    from proxy.balancer.incompatibilities import CompatibilityMonitor
    from proxy.balancer.pick import Pick
    from proxy.balancer.roster import Member, Roster
    from proxy.balancer.shared.back_offs import BackOffs
    from proxy.balancer.shared.scoreboard import LoadRow, PinnedKv, Scoreboard
    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError


_NO_LOAD: Final = Load()
_UNAUTHORIZED: Final = 401


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What settings say of one role."""

    max_running: int | None = None
    """Requests a backend works on at a time; None is what its engine says, or any number."""
    pressure_seconds: float = 5.0
    """How long a backend that ran out of KV memory is passed over."""
    restart_seconds: float = 0.0
    """How long they are waited for when all are gone, see `Pool.is_restarting`."""
    queues_refused: bool = True
    """Whether requests wait while all of them refuse. Otherwise they go to one of them and get its refusal."""


def ignore(*_: object) -> None:
    """Do nothing with a report that nobody needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolParts:
    """What a pool is made of."""

    role: Role
    policy: Policy
    scoreboard: Scoreboard
    row: LoadRow
    """The worker's own row of the scoreboard. Its leases write it."""
    roster: Roster
    health: Health
    limits: PoolLimits = field(default_factory=PoolLimits)
    on_transition: Callable[[Transition], None] = ignore
    """Called when the health of a backend has changed."""
    on_end: Callable[[Backend, str], None] = ignore
    """Called when a lease has ended: `ok`, the failure's name, or `abandoned` if the backend is not the reason."""
    on_change: Callable[[], None] = ignore
    """Called when backends, or what is known of them, have changed."""
    pinned_kv: PinnedKv | None = None
    """The KV that stays pinned on these backends."""
    quarantine: PairQuarantine | None = None
    """Forgets the backends that leave."""
    fitness: CompatibilityMonitor | None = None
    whole: Pool | None = None
    """The pool of all backends of the role, if this is a pool of some of them. It looks after health and the rest of
    what is known of backends when they come and go."""
    serving: Callable[[Collection[Backend]], tuple[Backend, ...]] = tuple
    """Which backends of `whole` belong to this pool, in their order."""
    back_offs: BackOffs | None = None
    """What all workers know of backends that refuse requests; None: as for `whole`, or this is the only worker."""
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)


class Pool:
    """One role's backends as one worker sees them."""

    def __init__(self, parts: PoolParts) -> None:
        self.role = parts.role
        self.is_decode = parts.role is Role.DECODE
        """For leases: which of its two costs a request has here."""
        self.row = parts.row
        self.changes = 0
        """How often members, their health, their facts or the limits have changed, as far as this pool has noticed."""
        self.on_release: Callable[[], None] | None = None
        """Called when there may be room where there was none: a lease has given its request back, or backends have
        come, come back or gone."""
        self._scoreboard = parts.scoreboard
        self._roster = parts.roster
        self._roster_versions = parts.roster.versions
        self._health = parts.health
        self._fitness = parts.fitness
        self._pinned_kv = parts.pinned_kv
        self._expiries = () if parts.pinned_kv is None else parts.pinned_kv.expiries
        self._quarantine = parts.quarantine
        self._on_transition = parts.on_transition
        self._on_end = parts.on_end
        self._on_change = parts.on_change
        self._clock = parts.clock
        self._whole = parts.whole
        self._serving = parts.serving
        # In slot order, by the versions of roster and health below. `_refresh` comes before they are read.
        self._all: tuple[Backend, ...] = ()  # also those that are down, disabled or draining
        self._enabled: tuple[Backend, ...] = ()  # those that neither drain nor are disabled
        self._eligible: tuple[Backend, ...] = ()
        self._awaiting_trial: tuple[Backend, ...] = ()
        self._weights: Mapping[Backend, int] = {}  # percent of their share, of those that are to get less than it
        self._gone_at: float | None = None  # when the last one that was up became unreachable; None: some are reachable
        self._seen_roster = self._seen_health = -1
        self._has_looked = False
        self._disabled: frozenset[Backend] = frozenset()
        self._well: dict[str, BackendHealth] = {}  # by the keys of those that are well, at that version of health
        self._well_at = -1
        self._engine_ids: dict[Backend, str] = {}
        self._room: object = None  # who could take requests, and how many, at the last look
        back_offs = parts.back_offs
        if back_offs is None and parts.whole is not None:
            back_offs = parts.whole._chooser.back_offs
        self._chooser: Chooser = Chooser(
            parts.role, parts.scoreboard, self._share_percent, back_offs=back_offs, clock=parts.clock, rng=parts.rng
        )
        self.use(parts.policy)
        self.configure(parts.limits)

    def configure(self, limits: PoolLimits) -> None:
        """Take changed settings for the leases from now on."""
        self._limits = limits
        self._chooser.pressure_seconds = limits.pressure_seconds
        self._chooser.queues_refused = limits.queues_refused
        self._changed()

    @property
    def policy(self) -> Policy:
        """The policy by which it chooses now."""
        return self._chooser.policy

    def use(self, policy: Policy) -> None:
        """Choose by another policy from now on. The one before still hears how its leases end."""
        self._chooser.use(policy)
        self.cost_of = policy.cost_of if _overrides(policy, "cost_of") else None
        """For leases: what a request costs the backend that was chosen; None: the same on all."""
        self.track = policy.track if _overrides(policy, "track") else None
        """For leases: what follows them for the policy; None: it does not want to hear of them."""
        self._looks_for_restarts = _overrides(policy, "emptied")

    # Choosing

    def lease(self, request: PickRequest) -> Lease:
        """A claim on some eligible backend, which costs nothing until it is entered."""
        return Lease(self, request)

    def reserve(self, request: PickRequest) -> Lease:
        """Keep room for a lease on some eligible backend, for a request that has something to do before. To be left
        right before that lease is taken, with nothing in between: then the room is still there. The backend hears
        nothing of it, so nothing is told of the backend, and one on probation is not tried.
        """
        return Lease(self, request, has_outcome=False)

    def take(self, request: PickRequest) -> tuple[Pick, int]:
        """The backend for a lease, with why, and the number of the trial that the lease is, 0 if it is none: see Lease.
        Raises NoBackendAvailable.
        """
        chooser = self._chooser
        self._refresh()
        if chooser.changes[0] != chooser.seen_changes:
            chooser.look()
        if self._awaiting_trial and (trial := self._trial_for(request)) is not None:
            return (trial, TRIAL), self._health.begin_trial(trial)
        if request.avoid or request.prefer is not None or chooser.passes_over or not chooser.candidates:
            backend = chooser.choose(request)
            if chooser.passes_over:
                chooser.back_offs.take_turn(backend, self._clock())
            return (backend, chooser.looked), 0
        return (chooser.ask(chooser.candidates, request).backend, chooser.looked), 0

    def _trial_for(self, request: PickRequest) -> Backend | None:
        """The backend for which a request is a trial; None: it is none."""
        avoid = request.avoid
        is_wanted_elsewhere = not request.proves_generation or (
            request.prefer is not None and request.prefer in self._eligible
        )
        if is_wanted_elsewhere and not all(backend in avoid for backend in self._eligible):
            return None
        is_refusing = self._chooser.back_offs.refuses
        now = self._clock()
        takes_any = not (self._eligible or self._limits.queues_refused)
        return next(
            (
                backend
                for backend in self._awaiting_trial
                if backend not in avoid and (takes_any or not is_refusing(backend, now))
            ),
            None,
        )

    def choose(self, request: PickRequest) -> Backend:
        """An eligible backend, of which nothing is to be told. Raises NoBackendAvailable."""
        self._refresh()
        return self._chooser.choose(request)

    def pick(self, avoid: Collection[Backend] = (), prefer: Backend | None = None) -> Backend:
        """An eligible backend for what needs no lease, because it holds nothing and tells nothing. Raises
        NoBackendAvailable.
        """
        return self.choose(PickRequest.of(_NO_LOAD, avoid=avoid, prefer=prefer))

    def released(self) -> None:
        """A lease has given its request back, or the backend has done its work for it."""
        if self.on_release is not None:
            self.on_release()

    # What is known

    def eligible(self) -> tuple[Backend, ...]:
        """The backends that may get new requests, in slot order."""
        self._refresh()
        return self._eligible

    def backends(self) -> tuple[Backend, ...]:
        """All backends in slot order, also those that are down, disabled or draining."""
        self._refresh()
        return self._all

    def is_healthy(self, backend: Backend) -> bool:
        """Whether it is not known to be down or of no use; a draining one may well be healthy."""
        return self._health.of(backend).is_healthy

    def facts(self, backend: Backend) -> EngineFacts | None:
        """What an engine that is up says of itself; None: nothing yet."""
        return self._health.of(backend).facts

    def engine_version(self, backend: Backend) -> EngineVersion | None:
        """What an engine says it is; None when that is not known."""
        facts = self._health.of(backend).facts
        return None if facts is None or facts.version == UNKNOWN_VERSION else facts.version

    def engine_id(self, backend: Backend) -> str | None:
        """What an engine of vLLM says its KV connector calls it; None when it does not say."""
        facts = self._health.of(backend).facts
        return None if facts is None or facts.identity.setup is None else facts.identity.setup.engine_id

    def max_model_len(self, backend: Backend) -> int | None:
        """Tokens that fit into a sequence of an engine; None when that is not known."""
        facts = self._health.of(backend).facts
        return None if facts is None else facts.max_model_len

    def limit(self, backend: Backend) -> int | None:
        """Requests it works on at a time: more only where all others have as many as they can. None: any number."""
        if self._limits.max_running is not None:
            return self._limits.max_running
        facts = self._health.of(backend).facts
        return None if facts is None else facts.max_num_seqs

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Whether some eligible backend is below its limit. True also where none is eligible, unless they are only
        restarting: a lease that fails at once is nothing to wait for. `request`: of one that nobody is in front of,
        whether it need not wait for a better place, by the policy.
        """
        self._refresh()
        if self._gone_at is not None and self.is_restarting():
            return False
        if self._awaiting_trial:
            if not self._all_on_probation_refuse():
                return True
            if not self._eligible:
                return not self._limits.queues_refused
        return self._chooser.has_room(request)

    def refuse_all(self) -> bool:
        """Whether all backends that may get requests would probably refuse one now."""
        self._refresh()
        if self._awaiting_trial and not self._all_on_probation_refuse():
            return False
        return self._chooser.refuse_all if self._eligible else bool(self._awaiting_trial)

    def refused_until(self) -> float:
        """Return until when all backends that may get requests refuse them by their own Retry-After.

        Returns:
            Seconds of the clock; 0: some backend may take a request sooner, or there is none.
        """
        if not self.refuse_all():
            return 0.0
        of = self._chooser.back_offs.of
        times = [of(backend).closed_until for backend in self._awaiting_trial]
        if self._eligible:
            times.append(self._chooser.refused_until())
        return min(times)

    def would_accept(self, avoid: Collection[Backend]) -> bool:
        """Whether some eligible backend that is not to be avoided would probably take a request now."""
        self._refresh()
        return self._chooser.would_accept(avoid)

    def _all_on_probation_refuse(self) -> bool:
        now, refuses = self._clock(), self._chooser.back_offs.refuses
        return all(refuses(backend, now) for backend in self._awaiting_trial)

    def would_take(self) -> bool:
        """Return whether an engine would take a request now, limits that were learned aside. Not while all restart."""
        self._refresh()
        if self._gone_at is not None and self.is_restarting():
            return False
        return self._chooser.would_take()

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return how long at most a request should wait because of a limit that was learned, see Policy."""
        return self.policy.hold_seconds(request, waiting)

    def work_seconds(self, request: PickRequest) -> float:
        """What a request takes where it takes least, by the policy; 0: it does not know."""
        self._refresh()
        return self._chooser.work_seconds(request)

    def soonest_seconds(self, request: PickRequest) -> float | None:
        """When the soonest would have done its work for a request, by the policy; None: it does not know, or there are
        none.
        """
        self._refresh()
        candidates = self._chooser.candidates
        return self.policy.soonest_seconds(candidates, request) if candidates else None

    @property
    def holds_queue(self) -> bool:
        """Whether the policy has a say in who had better wait."""
        return self._chooser.holds_queue

    def left_queue(self, request: PickRequest) -> None:
        """It has left the queue: for a lease, or for good."""
        self._chooser.policy.left_queue(request)

    def first_to_go(self, waiting: Sequence[PickRequest]) -> int | None:
        """Of those who wait the place of the first that should go now, by the policy; None: all had better wait."""
        self._refresh()
        if self._awaiting_trial and not self._all_on_probation_refuse():
            return 0
        return self._chooser.first_to_go(waiting)

    def is_gone(self) -> bool:
        """Whether no backend takes connections any more, though at least one was up before."""
        self._refresh()
        return self._gone_at is not None

    def is_restarting(self) -> bool:
        """Whether they are gone for less than `restart_seconds`, so that they may soon be back. Backends that never
        were up, or are gone for longer, are not waited for.
        """
        self._refresh()
        return self._gone_at is not None and self._clock() - self._gone_at < self._limits.restart_seconds

    def is_ready(self) -> bool:
        """Whether a request that came now could be expected to be served, if only as a trial."""
        self._refresh()
        serving = (HealthState.UP, HealthState.PROBATION)
        health = self._health
        if any(health.of(backend).state in serving for backend in self._enabled):
            return True
        # Those that are only slow to probes may well serve what waits for them.
        return self.is_restarting() and any(health.of(backend).is_slow for backend in self._enabled)

    def is_last(self, backend: Backend) -> bool:
        """Whether a backend is the only one that may get requests."""
        self._refresh()
        return self._eligible == (backend,)

    def weight(self, backend: Backend) -> int:
        """How much of its share of requests it is let to get, in per cent; 0: none, it is disabled or drains."""
        return self._weights.get(backend, FULL_PERCENT) if backend in self._enabled else 0

    def in_flight(self, backend: Backend) -> int:
        """Open leases on a backend, over all workers."""
        return self._scoreboard.requests(backend.slot)

    def running(self, backend: Backend) -> int:
        """Requests that a backend works on, for all workers."""
        return self._scoreboard.running(backend.slot)

    def load(self, backend: Backend) -> Load:
        """What a backend is charged with, by all workers."""
        return self._scoreboard.load(backend.slot)

    # How requests ended

    def report(
        self,
        backend: Backend,
        error: UpstreamError | None,
        trial: int = 0,
        is_proof: bool = True,
        others_running: int = 0,
    ) -> None:
        """How a request on a backend ended; None means well. `others_running`: requests that it works on besides."""
        if error is None:
            self.served(backend, trial, is_proof)
            self.count_served(backend)
            return
        if error.failure is Failure.REMOVED:
            self.abandon(backend, trial)
            return
        refusals = 0
        if error.failure is Failure.RECOMPUTED:
            self._chooser.press(backend)
        elif error.is_refusal and is_proof:
            refusals = self._chooser.refused(backend, error.retry_after_seconds)
        elif self._chooser.passes_over:
            self._chooser.make_room(backend)
        self._refresh()
        if error.engine_status == _UNAUTHORIZED and self._fitness and not self._health.of(backend).has_served:
            self._fitness.refused_key(backend)
        transition = self._health.on_outcome(
            backend,
            error,
            self._enabled,
            trial=trial,
            is_proof=is_proof,
            # An engine that works on other requests is busy.
            refusals=0 if others_running else refusals,
        )
        self._tell(transition)
        self._on_end(backend, error.failure.value)

    def defer_blame(self, backend: Backend, error: UpstreamError, is_proof: bool = True) -> Callable[[], None]:
        """A request on a backend broke down. What is returned holds it against the backend: to be called once it is
        known that the request fares better elsewhere.
        """
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
        return backend not in self._enabled or not self._health.of(backend).is_healthy

    def report_hang(self, backend: Backend) -> bool:
        """Report that a backend is silent on all of its streams and makes no progress.

        Returns:
            Whether another backend could go on with its answers.
        """
        self._refresh()
        enabled, health = self._enabled, self._health
        self._tell(health.on_stall(backend, enabled, "sends nothing and makes no progress"))
        return any(health.of(other).is_eligible for other in enabled if other != backend)

    def report_refusal(self, backend: Backend) -> None:
        """Report that a backend with silent answers refused a connection that was opened to find out."""
        health, reason = self._health, "refuses connections, and its answers are silent"
        if health.of(backend).verdict is not HealthState.UNKNOWN:  # it may have been removed
            self._tell(health.on_probe(backend, False, reason, failure=ProbeFailure.REFUSED))

    def report_peer_verdict(self, backend: Backend) -> None:
        """Another gateway has found a backend of no use."""
        self._refresh()
        self._tell(self._health.on_peer_verdict(backend, self._enabled))

    def served(self, backend: Backend, trial: int = 0, is_proof: bool = True) -> None:
        """A request has gone well, perhaps before its lease ends, or a trial before its request does."""
        health = self._health
        if is_proof and self._chooser.passes_over:
            self._chooser.served(backend, is_complete=True)
        condition = self._well.get(backend.key)
        if condition is not None and health.version == self._well_at and is_proof and not trial:
            # What `on_outcome` comes to for a backend that is well, without a call: every request comes by here.
            health.events += 1
            condition.served_at = health.events
            if condition.breaker.failures or condition.breaker.refuses_since:
                condition.breaker.served()
            return
        self._tell(health.on_outcome(backend, None, self._enabled, trial=trial, is_proof=is_proof))

    def began(self, backend: Backend) -> None:
        """A backend has begun to answer a request."""
        if self._chooser.passes_over:
            self._chooser.served(backend, is_complete=False)

    def count_served(self, backend: Backend) -> None:
        """The lease of such a request has ended."""
        fitness = self._fitness
        if fitness is not None and fitness.takes_key_at != fitness.versions[0]:
            fitness.served(backend)
        self._on_end(backend, "ok")

    def abandon(self, backend: Backend, trial: int = 0) -> None:
        """A request on a backend was broken off, and the backend is not to blame."""
        if trial:
            self._health.abandon_trial(backend, trial)
        if self._chooser.passes_over:
            self._chooser.make_room(backend)
        self._on_end(backend, "abandoned")

    def _tell(self, transition: Transition | None) -> None:
        if transition is not None:
            self._on_transition(transition)

    # Who is eligible

    def _refresh(self) -> None:
        """Find out which backends there are, and which are eligible, if roster or health have changed.

        Every pick and every scrape comes by here, and in each worker at least the prober.
        """
        health = self._health
        if self._whole is not None:
            self._whole._refresh()
            if self._whole._seen_roster != self._seen_roster or health.version != self._seen_health:
                self._take_part_of(self._whole)
            return
        if (
            self._roster_versions[0] == self._seen_roster
            and health.version == self._seen_health
            and health.due == math.inf
            and not self._expiries
        ):
            return
        if self._pinned_kv is not None:
            self._pinned_kv.expire()
        for transition in health.advance():
            self._on_transition(transition)
        roster_version = self._roster_versions[0]  # before the members: another worker may change them meanwhile
        if roster_version == self._seen_roster and health.version == self._seen_health:
            return
        members = self._roster.members(self.role)
        self._meet(members)
        self._enabled = tuple(member.backend for member in members if member.serves)
        self._weights = {member.backend: member.weight for member in members if member.weight < FULL_PERCENT}
        self._judge(roster_version)

    def _take_part_of(self, whole: Pool) -> None:
        """Look at the backends of `whole` that belong to this pool."""
        before, self._all = self._all, self._serving(whole._all)
        self._enabled = tuple(backend for backend in self._all if backend in whole._enabled)
        self._weights = whole._weights
        for gone in set(before).difference(self._all):
            self._forget(gone)
        self._judge(whole._seen_roster)

    def _judge(self, roster_version: int) -> None:
        """Who of the enabled may get requests; all else was computed by this version of the roster."""
        for transition in self._health.relieve(self._enabled):
            self._on_transition(transition)
        health = self._health
        self._eligible = tuple(backend for backend in self._enabled if health.of(backend).is_eligible)
        self._awaiting_trial = tuple(backend for backend in self._enabled if health.of(backend).awaits_trial)
        if not self._eligible and not self._awaiting_trial:
            # All are new, as after a reload that replaces them: unprobed backends are better than none.
            unknown = (backend for backend in self._enabled if health.of(backend).state is HealthState.UNKNOWN)
            self._eligible = tuple(unknown)
        self._gone_at = None
        if all(health.of(backend).is_unreachable for backend in (*self._eligible, *self._awaiting_trial)):
            gone = (health.of(backend).gone_at for backend in self._enabled)
            self._gone_at = max((since for since in gone if since is not None), default=None)
        self._seen_roster, self._seen_health = roster_version, health.version
        self._changed()

    def _meet(self, members: Sequence[Member]) -> None:
        """Forget who has left, whichever worker finalised that, and note who came later than the first look. One that
        is enabled again may be another process than the one that was disabled, so that nothing is known of its health.
        """
        backends = tuple(member.backend for member in members)
        for back in self._disabled.intersection(member.backend for member in members if member.serves):
            transition = self._health.on_enabled(back)
            if transition is not None:
                self._on_transition(transition)
        self._disabled = frozenset(member.backend for member in members if member.is_disabled)
        for gone in set(self._all).difference(backends):
            self._health.forget(gone)
            for part in (self._pinned_kv, self._quarantine, self._fitness):
                if part is not None:
                    part.forget(gone)
            self._forget(gone)
        if self._has_looked:
            for added in set(backends).difference(self._all):
                self._health.on_added(added)
        self._has_looked = True
        self._all = backends

    def _changed(self) -> None:
        """Backends, their health, or what settings say of them may be other ones than before."""
        self._on_change()
        self.changes += 1
        limits = tuple(map(self.limit, self._eligible))
        self._chooser.consider(self._eligible, limits)
        health = self._health
        conditions = {backend.key: health.of(backend) for backend in self._eligible}
        self._well = {
            key: condition
            for key, condition in conditions.items()
            if condition.state is HealthState.UP and not condition.is_unreachable
        }
        self._well_at = health.version
        if self._looks_for_restarts:
            for backend in self._all:
                if self._has_gone(backend):
                    self.policy.emptied(backend)
        room = (self._eligible, self._awaiting_trial, limits)
        if room != self._room:
            self._room = room
            self.released()

    def _forget(self, backend: Backend) -> None:
        """Forget a backend that has left."""
        self._engine_ids.pop(backend, None)
        self._chooser.back_offs.forget(backend)
        self.policy.emptied(backend)

    def _has_gone(self, backend: Backend) -> bool:
        """Whether it is down, or another process than at the last look."""
        health = self._health.of(backend)
        if health.is_unreachable or health.verdict is HealthState.DOWN:
            return True
        engine_id = self.engine_id(backend)
        if engine_id is None:
            return False
        before = self._engine_ids.setdefault(backend, engine_id)
        self._engine_ids[backend] = engine_id
        return before != engine_id

    def _share_percent(self, backend: Backend) -> int:
        """Of its share of requests what it is to get now: by its weight, and by how long ago it came back."""
        percent = self._health.share_percent(backend)
        weight = self._weights.get(backend)
        return percent if weight is None else max(1, percent * weight // FULL_PERCENT)


def _overrides(policy: Policy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(Policy, name)


@dataclass(slots=True, eq=False)
class Pools:
    """The backends of all roles."""

    prefill: Pool
    decode: Pool
    quarantine: PairQuarantine = field(default_factory=PairQuarantine)
    """Which prefillers and decoders had better not be brought together."""
    encode: Pool | None = None
    """None: there are no encoders."""

    def of(self, role: Role) -> Pool:
        """The pool of one role."""
        if self.encode is not None and role == self.encode.role:
            return self.encode
        return self.prefill if role == self.prefill.role else self.decode

    def prefiller_for(self, decoder: Backend, request: PickRequest) -> Lease:
        """A prefiller's lease, to be entered at once, for a request whose decoder is leased already.

        Prefillers that are kept apart from this decoder are avoided, too, unless no other would be left.
        """
        if self.quarantine.apart and (apart := self.quarantine.partners_to_avoid(decoder)):
            both = apart.union(request.avoid)
            if not both.issuperset(self.prefill.eligible()):
                request = request.avoiding(both)
        return Lease(self.prefill, request)
