"""The backends of one role: leases on them, and what is known of them.

`members` says which are eligible now, `chooser` which of them gets a request, and `outcomes` reports how it went.
When none is eligible there is no lease: a down backend is not tried for want of a better one. A backend on probation
gets the next lease there is, and no other until that one has told something.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.backend import Load, Role
from proxy.balancer.choice import TRIAL
from proxy.balancer.chooser import Chooser
from proxy.balancer.engines.engine_facts import UNKNOWN_VERSION
from proxy.balancer.health.backend_health import HealthState
from proxy.balancer.lease import Lease
from proxy.balancer.members import Members, SomeMembers
from proxy.balancer.outcomes import Outcomes
from proxy.balancer.pick import PickRequest, Policy
from proxy.balancer.slow_start import FULL

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from proxy.backend import Backend
    from proxy.balancer.choice import Pick
    from proxy.balancer.engines.engine_facts import EngineFacts, EngineVersion
    from proxy.balancer.fitness.fitness import Fitness
    from proxy.balancer.fitness.pinned_kv import PinnedKv
    from proxy.balancer.health.health import Health, Transition
    from proxy.balancer.health.pair_quarantine import PairQuarantine
    from proxy.balancer.roster import Roster
    from proxy.balancer.shared.back_offs import BackOffs
    from proxy.balancer.shared.scoreboard import Row, Scoreboard

_NO_LOAD: Final = Load()


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


class Pool:
    """One role's backends as one worker sees them. `row` is that worker's own; its leases write it."""

    def __init__(
        self,
        role: Role,
        *,
        policy: Policy,
        scoreboard: Scoreboard,
        row: Row,
        roster: Roster,
        health: Health,
        limits: PoolLimits | None = None,
        on_transition: Callable[[Transition], None] | None = None,
        on_end: Callable[[Backend, str], None] | None = None,
        pinned_kv: PinnedKv | None = None,
        quarantine: PairQuarantine | None = None,
        fitness: Fitness | None = None,
        on_change: Callable[[], None] | None = None,
        part: tuple[Pool, Callable[[Collection[Backend]], tuple[Backend, ...]]] | None = None,
        back_offs: BackOffs | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`on_transition` hears of changes of health; `on_end` how each lease ended: `ok`, the failure's name, or
        `abandoned` when the reason lies outside the backend. `pinned_kv`: the KV that stays pinned on these backends.
        `quarantine`, `fitness` and it forget the backends that leave. `on_change` hears when backends or what is known
        of them have changed. `part`: the pool of all backends of the role, and which of them are this one's.
        `back_offs`: see Chooser.
        """
        self.role = role
        self.is_decode = role is Role.DECODE
        """For leases: which of its two costs a request has here."""
        self.row = row
        self.changes = 0
        """How often members, their health, their facts or the limits have changed, as far as this pool has noticed."""
        self.on_release: Callable[[], None] | None = None
        """Called when there may be room where there was none: a lease has given its request back, or backends have
        come, come back or gone."""
        self._scoreboard = scoreboard
        self._health = health
        on_transition = on_transition or _nobody_asks
        self._tell_change = on_change or _nobody_listens
        self._clock = clock
        self._engine_ids: dict[Backend, str] = {}
        self._room: object = None  # who could take requests, and how many, at the last look
        if part is not None:
            whole, serving = part
            self._members: Members = SomeMembers(whole._members, serving, notes=[self], on_change=self._on_change)
        else:
            self._members = Members(
                role,
                roster,
                health,
                pinned_kv=pinned_kv,
                notes=[notes for notes in (pinned_kv, quarantine, fitness, self) if notes is not None],
                on_transition=on_transition,
                on_change=self._on_change,
            )
        if part is not None and back_offs is None:
            back_offs = part[0]._chooser.back_offs
        self._chooser: Chooser = Chooser(
            role, policy, scoreboard, self._share_percent, back_offs=back_offs, clock=clock, rng=rng
        )
        self.outcomes = Outcomes(
            self._members, self._chooser, health, fitness=fitness, on_transition=on_transition, on_end=on_end
        )
        self.use(policy)
        self.configure(limits or PoolLimits())

    def configure(self, limits: PoolLimits) -> None:
        """Take changed settings for the leases from now on."""
        self._limits = limits
        self._chooser.pressure_seconds = limits.pressure_seconds
        self._chooser.queues_refused = limits.queues_refused
        self._on_change()

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
        members, chooser = self._members, self._chooser
        members.refresh()
        if chooser.changes[0] != chooser.seen_changes:
            chooser.look()
        if members.awaiting_trial and (trial := self._trial_for(request)) is not None:
            return (trial, TRIAL), self._health.begin_trial(trial)
        if request.avoid or request.prefer is not None or chooser.passes_over or not chooser.candidates:
            backend = chooser.choose(request)
            if chooser.passes_over:
                chooser.back_offs.take_turn(backend, self._clock())
            return (backend, chooser.looked), 0
        return (chooser.ask(chooser.candidates, request).backend, chooser.looked), 0

    def _trial_for(self, request: PickRequest) -> Backend | None:
        """The backend for which a request is a trial; None: it is none."""
        members, avoid = self._members, request.avoid
        is_wanted_elsewhere = not request.proves_generation or (
            request.prefer is not None and request.prefer in members.eligible
        )
        if is_wanted_elsewhere and not all(backend in avoid for backend in members.eligible):
            return None
        is_refusing = self._chooser.back_offs.refuses
        now = self._clock()
        takes_any = not (members.eligible or self._limits.queues_refused)
        return next(
            (
                backend
                for backend in members.awaiting_trial
                if backend not in avoid and (takes_any or not is_refusing(backend, now))
            ),
            None,
        )

    def choose(self, request: PickRequest) -> Backend:
        """An eligible backend, of which nothing is to be told. Raises NoBackendAvailable."""
        self._members.refresh()
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
        self._members.refresh()
        return self._members.eligible

    def backends(self) -> tuple[Backend, ...]:
        """All backends in slot order, also those that are down, disabled or draining."""
        self._members.refresh()
        return self._members.all

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
        members = self._members
        members.refresh()
        if members.gone_at is not None and self.is_restarting():
            return False
        if members.awaiting_trial:
            if not self._all_on_probation_refuse():
                return True
            if not members.eligible:
                return not self._limits.queues_refused
        return self._chooser.has_room(request)

    def refuse_all(self) -> bool:
        """Whether all backends that may get requests would probably refuse one now."""
        members = self._members
        members.refresh()
        if members.awaiting_trial and not self._all_on_probation_refuse():
            return False
        return self._chooser.refuse_all if members.eligible else bool(members.awaiting_trial)

    def refused_until(self) -> float:
        """Return until when all backends that may get requests refuse them by their own Retry-After.

        Returns:
            Seconds of the clock; 0: some backend may take a request sooner, or there is none.
        """
        if not self.refuse_all():
            return 0.0
        of = self._chooser.back_offs.of
        times = [of(backend).closed_until for backend in self._members.awaiting_trial]
        if self._members.eligible:
            times.append(self._chooser.refused_until())
        return min(times)

    def takes(self, avoid: Collection[Backend]) -> bool:
        """Whether some eligible backend that is not to be avoided would probably take a request now."""
        self._members.refresh()
        return self._chooser.takes(avoid)

    def _all_on_probation_refuse(self) -> bool:
        now, refuses = self._clock(), self._chooser.back_offs.refuses
        return all(refuses(backend, now) for backend in self._members.awaiting_trial)

    def would_take(self) -> bool:
        """Return whether an engine would take a request now, limits that were learned aside. Not while all restart."""
        members = self._members
        members.refresh()
        if members.gone_at is not None and self.is_restarting():
            return False
        return self._chooser.would_take()

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return how long at most a request should wait because of a limit that was learned, see Policy."""
        return self.policy.hold_seconds(request, waiting)

    def work_seconds(self, request: PickRequest) -> float:
        """What a request takes where it takes least, by the policy; 0: it does not know."""
        self._members.refresh()
        return self._chooser.work_seconds(request)

    def soonest_seconds(self, request: PickRequest) -> float | None:
        """When the soonest would have done its work for a request, by the policy; None: it does not know, or there are
        none.
        """
        self._members.refresh()
        candidates = self._chooser.candidates
        return self.policy.soonest_seconds(candidates, request) if candidates else None

    @property
    def holds_queue(self) -> bool:
        """Whether the policy has a say in who had better wait."""
        return self._chooser.holds_queue

    def waits_no_more(self, request: PickRequest) -> None:
        """It has left the queue: for a lease, or for good."""
        self._chooser.policy.waits_no_more(request)

    def first_to_go(self, waiting: Sequence[PickRequest]) -> int | None:
        """Of those who wait the place of the first that should go now, by the policy; None: all had better wait."""
        self._members.refresh()
        if self._members.awaiting_trial and not self._all_on_probation_refuse():
            return 0
        return self._chooser.first_to_go(waiting)

    def forget(self, backend: Backend) -> None:
        """A backend has left. See members.Notes."""
        self._engine_ids.pop(backend, None)
        self._chooser.back_offs.forget(backend)
        self.policy.emptied(backend)

    def is_gone(self) -> bool:
        """Whether no backend takes connections any more, though at least one was up before."""
        self._members.refresh()
        return self._members.gone_at is not None

    def is_restarting(self) -> bool:
        """Whether they are gone for less than `restart_seconds`, so that they may soon be back. Backends that never
        were up, or are gone for longer, are not waited for.
        """
        self._members.refresh()
        return (
            self._members.gone_at is not None and self._clock() - self._members.gone_at < self._limits.restart_seconds
        )

    def is_ready(self) -> bool:
        """Whether a request that came now could be expected to be served, if only as a trial."""
        self._members.refresh()
        serving = (HealthState.UP, HealthState.PROBATION)
        health = self._health
        if any(health.of(backend).state in serving for backend in self._members.enabled):
            return True
        # Those that are only slow to probes may well serve what waits for them.
        return self.is_restarting() and any(health.of(backend).is_slow for backend in self._members.enabled)

    def is_last(self, backend: Backend) -> bool:
        """Whether a backend is the only one that may get requests."""
        self._members.refresh()
        return self._members.eligible == (backend,)

    def weight(self, backend: Backend) -> int:
        """How much of its share of requests it is let to get, in per cent; 0: none, it is disabled or drains."""
        return self._members.weights.get(backend, FULL) if backend in self._members.enabled else 0

    def in_flight(self, backend: Backend) -> int:
        """Open leases on a backend, over all workers."""
        return self._scoreboard.requests(backend.slot)

    def running(self, backend: Backend) -> int:
        """Requests that a backend works on, for all workers."""
        return self._scoreboard.running(backend.slot)

    def load(self, backend: Backend) -> Load:
        """What a backend is charged with, by all workers."""
        return self._scoreboard.load(backend.slot)

    # How

    def _share_percent(self, backend: Backend) -> int:
        """Of its share of requests what it is to get now: by its weight, and by how long ago it came back."""
        percent = self._health.share_percent(backend)
        weight = self._members.weights.get(backend)
        return percent if weight is None else max(1, percent * weight // FULL)

    def _on_change(self) -> None:
        """Backends, their health, or what settings say of them may be other ones than before."""
        self._tell_change()
        members = self._members
        self.changes += 1
        limits = tuple(map(self.limit, members.eligible))
        self._chooser.consider(members.eligible, limits)
        self.outcomes.consider(members.eligible)
        if self._looks_for_restarts:
            for backend in members.all:
                if self._has_gone(backend):
                    self.policy.emptied(backend)
        room = (members.eligible, members.awaiting_trial, limits)
        if room != self._room:
            self._room = room
            self.released()

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


def _nobody_listens() -> None:
    """For pools whose changes concern nobody else."""


def _nobody_asks(transition: Transition) -> None:
    """For pools whose changes of health need not be reported."""


def _overrides(policy: Policy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(Policy, name)
