"""Pool of the backends of one role: their eligibility, leases on them, and the outcomes of requests.

An eligible backend is enabled, which the operator decides through the roster, and healthy, which health checks and
traffic decide. The `Chooser` selects among the eligible backends. If none is eligible, there is no lease; pdproxy does
not try a backend that is down. A backend on probation gets the next lease, and no further one until the outcome of that
lease is known.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import FULL_PERCENT, HealthState
from proxy.balancer.blame import PairQuarantine
from proxy.balancer.chooser import Chooser
from proxy.balancer.engines import UNKNOWN_VERSION
from proxy.balancer.health import ProbeFailure
from proxy.balancer.lease import Lease
from proxy.balancer.pick import TRIAL, PickRequest, Policy
from proxy.balancer.policies.handoff_times import HandoffTimes
from proxy.balancer.shared.back_offs import BackOffs
from proxy.common.backend import Load, Role
from proxy.common.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.balancer.backend_health import BackendHealth
    from proxy.balancer.engines import EngineVersion
    from proxy.balancer.health import Health, Transition
    from proxy.balancer.incompatibilities import CompatibilityMonitor
    from proxy.balancer.pick import Pick, SessionLimits
    from proxy.balancer.roster import Roster, RosterMember
    from proxy.balancer.shared.scoreboard import LoadRow, PinnedKv, Scoreboard
    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError


_NO_LOAD: Final = Load()
_UNAUTHORIZED: Final = 401


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of one role from the settings."""

    max_running: int | None = None
    """Maximum running requests per backend. None: as many as its engine reports, or any number."""
    kv_pressure_seconds: float = 5.0
    """Time for which a backend that ran out of KV memory is passed over."""
    max_restart_seconds: float = 0.0
    """Time for which requests wait if all backends are gone. See `Pool.are_all_restarting`."""
    queues_refused_requests: bool = True
    """Whether requests wait while all backends refuse. Otherwise one of them gets the request and refuses it."""


def ignore_report(*_: object) -> None:
    """Do nothing with a report."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolParts:
    """Parts of a pool."""

    role: Role
    policy: Policy
    scoreboard: Scoreboard
    load_row: LoadRow
    """Row of this worker, which its leases write."""
    roster: Roster
    health: Health
    pool_limits: PoolLimits = field(default_factory=PoolLimits)
    on_transition: Callable[[Transition], None] = ignore_report
    """Called with each change of a backend's health."""
    on_lease_end: Callable[[Backend, str], None] = ignore_report
    """Called at the end of a lease with `ok`, the name of the failure, or `abandoned` if the backend is not to
    blame."""
    on_change: Callable[[], None] = ignore_report
    """Called when backends, their health or their facts have changed."""
    pinned_kv: PinnedKv | None = None
    """Pinned KV on these backends. None: it is not counted."""
    pair_quarantine: PairQuarantine | None = None
    """Quarantine that drops backends that leave. None: there is none."""
    handoff_times: HandoffTimes | None = None
    """Handoff times that drop backends that leave. None: there are none."""
    compatibility_monitor: CompatibilityMonitor | None = None
    """Monitor that records rejected keys. None: there is none."""
    whole_pool: Pool | None = None
    """Pool of all backends of the role, if this is a pool of some of them. It updates health and other state when
    backends come and go. None: this pool has all backends."""
    select_serving: Callable[[Collection[Backend]], tuple[Backend, ...]] = tuple
    """Selects the backends of `whole_pool` that belong to this pool, in their order."""
    back_offs: BackOffs | None = None
    """Back-offs that all workers share. None: this is the only pool of the role."""
    clock: Callable[[], float] = time.monotonic
    random_source: random.Random = field(default_factory=random.Random)


class Pool:
    """Backends of one role, as one worker sees them."""

    def __init__(self, parts: PoolParts) -> None:
        self.role = parts.role
        self.is_decode = parts.role is Role.DECODE
        """Whether leases charge the decode cost of a request. Otherwise they charge its prefill cost."""
        self.scoreboard = parts.scoreboard
        self.load_row = parts.load_row
        self.health = parts.health
        self.change_count = 0
        """Number of noticed changes of members, their health, their facts or the limits."""
        self.on_release: Callable[[], None] | None = None
        """Called when there may be new room: a lease has released its request, or the backends have changed. None:
        nothing waits."""
        self._roster = parts.roster
        self._roster_versions = parts.roster.version_cells
        self._compatibility = parts.compatibility_monitor
        self._pinned_kv = parts.pinned_kv
        self._expiries = () if parts.pinned_kv is None else parts.pinned_kv.expiries
        self._pair_quarantine = parts.pair_quarantine
        self._handoff_times = parts.handoff_times
        self._on_transition = parts.on_transition
        self._on_lease_end = parts.on_lease_end
        self._on_change = parts.on_change
        self._clock = parts.clock
        self._whole_pool = parts.whole_pool
        self._select_serving = parts.select_serving
        # In slot order. Call `_update_backends` before reading them.
        self._members: tuple[Backend, ...] = ()  # including those that are down, disabled or draining
        self._enabled: tuple[Backend, ...] = ()  # neither draining nor disabled
        self._eligible: tuple[Backend, ...] = ()
        self._awaiting_trial: tuple[Backend, ...] = ()
        self._weights: Mapping[Backend, int] = {}  # in percent; without those of 100
        self._gone_at: float | None = None  # when the last backend became unreachable; None: not all are
        self._seen_roster = self._seen_health = -1
        self._has_looked = False
        self._disabled: frozenset[Backend] = frozenset()
        self._healthy: dict[str, BackendHealth] = {}  # backends that are up and reachable, by key
        self._healthy_version = -1  # version of health at which `_healthy` is valid
        self._engine_ids: dict[Backend, str] = {}
        self._last_room: object = None  # eligible backends and limits at the last change
        self._back_offs = parts.back_offs or BackOffs(parts.scoreboard.slot_count)
        self._chooser: Chooser = Chooser(
            parts.role,
            parts.scoreboard,
            self._request_share_percent,
            self._back_offs,
            clock=parts.clock,
            random_source=parts.random_source,
        )
        self.use_policy(parts.policy)
        self.set_limits(parts.pool_limits)

    def set_limits(self, pool_limits: PoolLimits) -> None:
        """Apply changed limits to future leases."""
        self._limits = pool_limits
        self._chooser.queues_refused_requests = pool_limits.queues_refused_requests
        self._apply_changes()

    def use_policy(self, policy: Policy) -> None:
        """Use a policy for future leases. The previous policy still gets the outcomes of the leases that it picked."""
        self.policy = policy
        self._chooser.use_policy(policy)
        self.working_sets: SessionLimits | None = policy.working_sets
        """Working sets of the policy that hold back turns of sessions. None: nothing holds them back."""
        self.holds_queue = self._chooser.policy_holds_queue
        """Whether the policy decides which requests should wait."""
        self.cost_of = policy.load_of_request if _overrides_method(policy, "load_of_request") else None
        """Returns the cost of a request on the chosen backend. None: it is the same on all."""
        self.track = policy.start_tracker if _overrides_method(policy, "start_tracker") else None
        """Creates the policy's tracker for a lease. None: the policy needs none."""
        self._looks_for_restarts = _overrides_method(policy, "forget_cache")

    # Choosing

    def make_lease(self, pick_request: PickRequest) -> Lease:
        """Return a lease, which picks an eligible backend when it is entered."""
        return Lease(self, pick_request)

    def make_reservation(self, pick_request: PickRequest) -> Lease:
        """Return a lease that only keeps room on an eligible backend while the request has other work to do first.

        Leave it directly before the real lease is entered; the room is then still there. The backend gets no request,
        so no outcome is reported and a backend on probation is not tried.
        """
        return Lease(self, pick_request, has_outcome=False)

    def take_pick(self, pick_request: PickRequest) -> tuple[Pick, int]:
        """Pick the backend for a lease.

        Returns:
            The backend with the reason, and the number of the trial, or 0 if the lease is no trial.

        Raises:
            NoBackendAvailable: No backend is eligible.
        """
        chooser = self._chooser
        self._update_backends()
        if chooser.back_off_changes[0] != chooser.seen_back_off_changes:
            chooser.update_passed_over()
        if self._awaiting_trial and (trial := self._find_trial_backend(pick_request)) is not None:
            return (trial, TRIAL), self.health.begin_trial(trial)
        if (
            pick_request.avoided_backends
            or pick_request.preferred_backend is not None
            or chooser.may_pass_over
            or not chooser.candidates
        ):
            backend = chooser.choose_backend(pick_request)
            if chooser.may_pass_over:
                self._back_offs.use_turn(backend, self._clock())
            return (backend, chooser.choice_basis), 0
        return (chooser.choose_among(chooser.candidates, pick_request).backend, chooser.choice_basis), 0

    def _find_trial_backend(self, request: PickRequest) -> Backend | None:
        """Return the backend on probation that a request tries, or None."""
        avoid = request.avoided_backends
        has_better_use = not request.proves_generation or (
            request.preferred_backend is not None and request.preferred_backend in self._eligible
        )
        if has_better_use and not all(backend in avoid for backend in self._eligible):
            return None
        is_refusing = self._back_offs.would_refuse
        now = self._clock()
        takes_any = not (self._eligible or self._limits.queues_refused_requests)
        return next(
            (
                backend
                for backend in self._awaiting_trial
                if backend not in avoid and (takes_any or not is_refusing(backend, now))
            ),
            None,
        )

    def choose_backend(self, request: PickRequest) -> Backend:
        """Return an eligible backend without a lease. Raises NoBackendAvailable."""
        self._update_backends()
        return self._chooser.choose_backend(request)

    def pick_backend(
        self, avoided_backends: Collection[Backend] = (), preferred_backend: Backend | None = None
    ) -> Backend:
        """Return an eligible backend for a request without load. Raises NoBackendAvailable."""
        return self.choose_backend(
            PickRequest.make_for_load(_NO_LOAD, avoided_backends=avoided_backends, preferred_backend=preferred_backend)
        )

    # State of the backends

    def eligible_backends(self) -> tuple[Backend, ...]:
        """Return the backends that may get new requests, in slot order."""
        self._update_backends()
        return self._eligible

    def all_backends(self) -> tuple[Backend, ...]:
        """Return all backends in slot order, including those that are down, disabled or draining."""
        self._update_backends()
        return self._members

    def has_backend(self, backend: Backend) -> bool:
        """Return whether a backend is among `all_backends`. A change of health causes no update of all backends."""
        if self._whole_pool is not None or self._roster_versions[0] != self._seen_roster:
            self._update_backends()
        return backend in self._members

    def engine_version_of(self, backend: Backend) -> EngineVersion | None:
        """Return the version of an engine, or None if it is unknown."""
        facts = self.health.health_of(backend).engine_facts
        return None if facts is None or facts.version == UNKNOWN_VERSION else facts.version

    def engine_id_of(self, backend: Backend) -> str | None:
        """Return the ID by which vLLM's KV connector names an engine, or None if it is unknown."""
        facts = self.health.health_of(backend).engine_facts
        return None if facts is None or facts.identity.engine_setup is None else facts.identity.engine_setup.engine_id

    def running_limit(self, backend: Backend) -> int | None:
        """Return the running requests at which a backend gets no more unless all are full. None: there is no limit."""
        if self._limits.max_running is not None:
            return self._limits.max_running
        facts = self.health.health_of(backend).engine_facts
        return None if facts is None else facts.max_num_seqs

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Return whether a request need not wait: a backend is below its limit, or the request fails at once.

        It fails at once if no backend is eligible, unless all are only restarting.

        Args:
            request: Makes the first request of the queue, for which the policy may prefer to wait for a better backend.
                None: the policy only decides whether there is room for any request.
        """
        self._update_backends()
        if self._gone_at is not None and self.are_all_restarting():
            return False
        if self._awaiting_trial:
            if not self._all_on_probation_refuse():
                return True
            if not self._eligible:
                return not self._limits.queues_refused_requests
        return self._chooser.has_room(request)

    def do_all_refuse(self) -> bool:
        """Return whether all backends that may get requests would probably refuse one now."""
        self._update_backends()
        if self._awaiting_trial and not self._all_on_probation_refuse():
            return False
        return self._chooser.do_all_refuse if self._eligible else bool(self._awaiting_trial)

    def refused_until(self) -> float:
        """Return the clock time until which all backends refuse requests according to their Retry-After.

        0: a backend may take a request sooner, or there is no backend.
        """
        if not self.do_all_refuse():
            return 0.0
        times = [self._back_offs.standing_of(backend).retry_after_until for backend in self._awaiting_trial]
        if self._eligible:
            times.append(self._chooser.refused_until())
        return min(times)

    def would_accept(self, avoided_backends: Collection[Backend]) -> bool:
        """Return whether an eligible backend outside `avoided_backends` would probably take a request now."""
        self._update_backends()
        return self._chooser.would_accept(avoided_backends)

    def _all_on_probation_refuse(self) -> bool:
        now, refuses = self._clock(), self._back_offs.would_refuse
        return all(refuses(backend, now) for backend in self._awaiting_trial)

    def would_take_now(self) -> bool:
        """Return whether an engine would take a request now, ignoring learned limits. False while all restart."""
        self._update_backends()
        if self._gone_at is not None and self.are_all_restarting():
            return False
        return self._chooser.would_take_now()

    def predict_work_seconds(self, request: PickRequest) -> float:
        """Return the shortest time that a request takes on any backend, by the policy. 0: unknown."""
        self._update_backends()
        candidates = self._chooser.candidates
        return self.policy.shortest_work_seconds(candidates, request) if candidates else 0.0

    def soonest_completion_seconds(self, request: PickRequest) -> float | None:
        """Return the shortest time in which a backend would complete a request, by the policy, or None if unknown."""
        self._update_backends()
        candidates = self._chooser.candidates
        return self.policy.soonest_completion_seconds(candidates, request) if candidates else None

    def queue_relief_seconds(self, request: PickRequest) -> float:
        """Return the seconds that all queued requests together gain if no backend serves this one."""
        self._update_backends()
        candidates = self._chooser.candidates
        return self.policy.queue_relief_seconds(candidates, request) if candidates else 0.0

    def queue_wait_seconds(self, request: PickRequest) -> float:
        """Return the predicted time that a new request would wait in the queue, by the policy, in seconds."""
        self._update_backends()
        candidates = self._chooser.candidates
        return self.policy.queue_wait_seconds(candidates, request) if candidates else 0.0

    def on_left_queue(self, request: PickRequest) -> None:
        """Tell the policy that a request has left the queue."""
        self.policy.on_left_queue(request)

    def index_to_admit(self, waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the index of the waiting request that the policy lets go now, or None if all should wait."""
        self._update_backends()
        if self._awaiting_trial and not self._all_on_probation_refuse():
            return 0
        return self._chooser.index_to_admit(waiting_requests)

    def are_all_gone(self) -> bool:
        """Return whether no backend accepts connections any more, although at least one was up before."""
        self._update_backends()
        return self._gone_at is not None

    def are_all_restarting(self) -> bool:
        """Return whether all backends have been gone for less than `max_restart_seconds`, so they may soon be back.

        Backends that never were up do not count.
        """
        self._update_backends()
        return self._gone_at is not None and self._clock() - self._gone_at < self._limits.max_restart_seconds

    def is_ready_to_serve(self) -> bool:
        """Return whether a request that comes now is likely to be served, at least as a trial."""
        self._update_backends()
        serving = (HealthState.UP, HealthState.PROBATION)
        health = self.health
        if any(health.health_of(backend).health_state in serving for backend in self._enabled):
            return True
        # Backends that only answer health checks slowly may serve the requests that wait for them.
        return self.are_all_restarting() and any(health.health_of(backend).is_slow for backend in self._enabled)

    def weight_percent(self, backend: Backend) -> int:
        """Return the weight of a backend in percent. 0: it is disabled or draining."""
        return self._weights.get(backend, FULL_PERCENT) if backend in self._enabled else 0

    # Outcomes of requests

    def report_outcome(
        self,
        backend: Backend,
        error: UpstreamError | None,
        trial_number: int = 0,
        proves_generation: bool = True,
        others_running: int = 0,
    ) -> None:
        """Record the outcome of a request on a backend.

        Args:
            error: Its failure. None: it served the request.
            trial_number: Number of the trial that the request was. 0: no trial.
            proves_generation: Whether the request shows that the backend can generate.
            others_running: Other running requests of the backend.
        """
        if error is None:
            self.record_success(backend, trial_number, proves_generation)
            self.count_served_lease(backend)
            return
        if error.failure is Failure.REMOVED:
            self.record_abandoned_request(backend, trial_number)
            return
        refusals = 0
        if error.failure is Failure.RECOMPUTED:
            self._back_offs.record_kv_pressure(backend, self._clock() + self._limits.kv_pressure_seconds)
        elif error.is_refusal and proves_generation:
            refusals = self._chooser.record_refusal(backend, error.retry_after_seconds)
        elif self._chooser.may_pass_over:
            self._back_offs.record_end_without_success(backend, self._clock())
        self._update_backends()
        if (
            error.engine_status == _UNAUTHORIZED
            and self._compatibility
            and not self.health.health_of(backend).last_served_event
        ):
            self._compatibility.record_rejected_key(backend)
        transition = self.health.on_outcome(
            backend,
            error,
            self._enabled,
            trial_number=trial_number,
            proves_generation=proves_generation,
            # An engine that works on other requests is busy.
            refusal_count=0 if others_running else refusals,
        )
        self._announce_transition(transition)
        self._on_lease_end(backend, "invalid_request" if error.is_client_mistake else error.failure.value)

    def defer_blame(self, backend: Backend, error: UpstreamError, proves_generation: bool = True) -> Callable[[], None]:
        """Record that a request broke down on a backend, and return a function that charges the backend with it.

        Call that function once another backend has served the request.
        """
        self._on_lease_end(backend, error.failure.value)

        def blame() -> None:
            self._update_backends()
            self._announce_transition(
                self.health.on_outcome(backend, error, self._enabled, proves_generation=proves_generation)
            )

        return blame

    def report_stall(self, backend: Backend) -> bool:
        """Record that a backend sends nothing on its streams while others do, and return whether it is out now.

        A backend that is out, for this or another reason, is not expected to continue its answers.
        """
        self._update_backends()
        self._announce_transition(self.health.on_stall(backend, self._enabled))
        return backend not in self._enabled or not self.health.health_of(backend).is_healthy

    def report_hang(self, backend: Backend) -> bool:
        """Record that a backend is silent on all its streams and makes no progress.

        Returns:
            Whether another backend could continue its answers.
        """
        self._update_backends()
        enabled, health = self._enabled, self.health
        self._announce_transition(health.on_stall(backend, enabled, "sends nothing and makes no progress"))
        return any(health.health_of(other).is_eligible for other in enabled if other != backend)

    def report_refusal(self, backend: Backend) -> None:
        """Record that a backend with silent answers refused a connection that was opened as a test."""
        health, reason = self.health, "refuses connections, and its answers are silent"
        if health.health_of(backend).probe_verdict is not HealthState.UNKNOWN:  # otherwise it may have been removed
            self._announce_transition(health.on_probe(backend, False, reason, failure=ProbeFailure.REFUSED))

    def report_peer_verdict(self, backend: Backend) -> None:
        """Record that another gateway has ejected a backend or found it down."""
        self._update_backends()
        self._announce_transition(self.health.on_peer_verdict(backend, self._enabled))

    def record_success(self, backend: Backend, trial_number: int = 0, proves_generation: bool = True) -> None:
        """Record that a backend has served a request, whose lease may still be open."""
        health = self.health
        if proves_generation and self._chooser.may_pass_over:
            self._back_offs.record_answer_begin(backend, self._clock(), is_complete=True)
        condition = self._healthy.get(backend.key)
        if (
            condition is not None
            and health.version_number == self._healthy_version
            and proves_generation
            and not trial_number
        ):
            # The result of `on_outcome` for a healthy backend, inlined because every request passes here.
            health.event_count += 1
            condition.last_served_event = health.event_count
            if condition.breaker.failure_count or condition.breaker.refuses_since_event:
                condition.breaker.record_success()
            return
        self._announce_transition(
            health.on_outcome(
                backend, None, self._enabled, trial_number=trial_number, proves_generation=proves_generation
            )
        )

    def record_answer_begin(self, backend: Backend) -> None:
        """Record that a backend has begun to answer a request."""
        if self._chooser.may_pass_over:
            self._back_offs.record_answer_begin(backend, self._clock(), is_complete=False)

    def count_served_lease(self, backend: Backend) -> None:
        """Count the end of a lease whose request was served."""
        compatibility = self._compatibility
        if compatibility is not None and compatibility.key_checked_at_version != compatibility.version_cells[0]:
            compatibility.record_success(backend)
        self._on_lease_end(backend, "ok")

    def record_abandoned_request(self, backend: Backend, trial_number: int = 0) -> None:
        """Record that a request on a backend was broken off without a fault of the backend."""
        if trial_number:
            self.health.abandon_trial(backend, trial_number)
        if self._chooser.may_pass_over:
            self._back_offs.record_end_without_success(backend, self._clock())
        self._on_lease_end(backend, "abandoned")

    def _announce_transition(self, transition: Transition | None) -> None:
        if transition is not None:
            self._on_transition(transition)

    # Eligibility

    def _update_backends(self) -> None:
        """Update the members and the eligible backends if the roster or health has changed.

        Every pick and every scrape calls it, and at least the prober does in each worker.
        """
        health = self.health
        if self._whole_pool is not None:
            self._whole_pool._update_backends()
            if self._whole_pool._seen_roster != self._seen_roster or health.version_number != self._seen_health:
                self._update_from_whole_pool(self._whole_pool)
            return
        if (
            self._roster_versions[0] == self._seen_roster
            and health.version_number == self._seen_health
            and health.next_change_at == math.inf
            and not self._expiries
        ):
            return
        if self._pinned_kv is not None:
            self._pinned_kv.remove_expired_pins()
        for transition in health.make_due_changes():
            self._on_transition(transition)
        roster_version = self._roster_versions[0]  # before the members, which another worker may change
        if roster_version == self._seen_roster and health.version_number == self._seen_health:
            return
        members = self._roster.members_of_role(self.role)
        self._update_members(members)
        self._enabled = tuple(member.backend for member in members if member.may_serve)
        self._weights = {
            member.backend: member.weight_percent for member in members if member.weight_percent < FULL_PERCENT
        }
        self._update_eligible(roster_version)

    def _update_from_whole_pool(self, whole_pool: Pool) -> None:
        """Update the members from the pool of all backends."""
        before, self._members = self._members, self._select_serving(whole_pool._members)
        self._enabled = tuple(backend for backend in self._members if backend in whole_pool._enabled)
        self._weights = whole_pool._weights
        for gone in set(before).difference(self._members):
            self._forget_backend(gone)
        self._update_eligible(whole_pool._seen_roster)

    def _update_eligible(self, roster_version: int) -> None:
        """Update the eligible backends from the enabled ones, which are those of this version of the roster."""
        for transition in self.health.release_last_ejected(self._enabled):
            self._on_transition(transition)
        health = self.health
        self._eligible = tuple(backend for backend in self._enabled if health.health_of(backend).is_eligible)
        self._awaiting_trial = tuple(
            backend for backend in self._enabled if health.health_of(backend).awaits_trial_request
        )
        if not self._eligible and not self._awaiting_trial:
            # All are new, as after a reload that replaced them. Backends that were never probed are better than none.
            unknown = (
                backend for backend in self._enabled if health.health_of(backend).health_state is HealthState.UNKNOWN
            )
            self._eligible = tuple(unknown)
        self._gone_at = None
        if all(health.health_of(backend).is_unreachable for backend in (*self._eligible, *self._awaiting_trial)):
            gone = (health.health_of(backend).unavailable_since for backend in self._enabled)
            self._gone_at = max((since for since in gone if since is not None), default=None)
        self._seen_roster, self._seen_health = roster_version, health.version_number
        self._apply_changes()

    def _update_members(self, members: Sequence[RosterMember]) -> None:
        """Drop the state of members that have left, and report new and enabled ones to health.

        A member that is enabled again may be another process than the disabled one, so its health is unknown. Members
        of the first look are not new. The engine of a member that has moved to another role keeps its pinned KV.
        """
        backends = tuple(member.backend for member in members)
        for back in self._disabled.intersection(member.backend for member in members if member.may_serve):
            transition = self.health.on_enabled(back)
            if transition is not None:
                self._on_transition(transition)
        self._disabled = frozenset(member.backend for member in members if member.is_disabled)
        for gone in set(self._members).difference(backends):
            self.health.forget_backend(gone)
            for part in (self._pair_quarantine, self._handoff_times, self._compatibility):
                if part is not None:
                    part.forget_backend(gone)
            if self._pinned_kv is not None:
                moved = self._roster.find_backend_at(gone.place)
                if moved is None:
                    self._pinned_kv.forget_backend(gone)
                else:
                    self._pinned_kv.follow_move(gone, moved)
            self._forget_backend(gone)
        if self._has_looked:
            for added in set(backends).difference(self._members):
                self.health.on_added(added)
        self._has_looked = True
        self._members = backends

    def _apply_changes(self) -> None:
        """Apply a possible change of backends, their health or the limits."""
        self._on_change()
        self.change_count += 1
        limits = tuple(map(self.running_limit, self._eligible))
        self._chooser.set_candidates(self._eligible, limits)
        health = self.health
        conditions = {backend.key: health.health_of(backend) for backend in self._eligible}
        self._healthy = {
            key: condition
            for key, condition in conditions.items()
            if condition.health_state is HealthState.UP and not condition.is_unreachable
        }
        self._healthy_version = health.version_number
        if self._looks_for_restarts:
            for backend in self._members:
                if self._has_backend_gone(backend):
                    self.policy.forget_cache(backend)
        room = (self._eligible, self._awaiting_trial, limits)
        if room != self._last_room:
            self._last_room = room
            if self.on_release is not None:
                self.on_release()

    def _forget_backend(self, backend: Backend) -> None:
        """Drop the state of a backend that has left."""
        self._engine_ids.pop(backend, None)
        self._back_offs.forget_backend(backend)
        self.policy.forget_cache(backend)

    def _has_backend_gone(self, backend: Backend) -> bool:
        """Return whether a backend is down, or another process than at the last look."""
        health = self.health.health_of(backend)
        if health.is_unreachable or health.probe_verdict is HealthState.DOWN:
            return True
        engine_id = self.engine_id_of(backend)
        if engine_id is None:
            return False
        before = self._engine_ids.setdefault(backend, engine_id)
        self._engine_ids[backend] = engine_id
        return before != engine_id

    def _request_share_percent(self, backend: Backend) -> int:
        """Return the share of requests that a backend gets now, by its weight and its slow start, in percent."""
        percent = self.health.request_share_percent(backend)
        weight = self._weights.get(backend)
        return percent if weight is None else max(1, percent * weight // FULL_PERCENT)


def _overrides_method(policy: Policy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(Policy, name)


@dataclass(slots=True, eq=False)
class Pools:
    """Pools of all roles."""

    prefill: Pool
    decode: Pool
    pair_quarantine: PairQuarantine = field(default_factory=PairQuarantine)
    """Pairs of prefillers and decoders that should not work together."""
    encode: Pool | None = None
    """Pool of encoders. None: there are none."""
    handoff_times: HandoffTimes = field(default_factory=HandoffTimes)
    """Learned times of handoffs between prefillers and decoders."""

    def pool_of(self, role: Role) -> Pool:
        """Return the pool of a role."""
        if self.encode is not None and role == self.encode.role:
            return self.encode
        return self.prefill if role == self.prefill.role else self.decode

    def enter_both_leases(self, request: PickRequest) -> tuple[Lease, Lease]:
        """Return entered leases of a prefiller and a decoder. Raises NoBackendAvailable.

        They are not quarantined with each other, unless the second one to be chosen would have no other partner. The
        decoder comes first. But while some pairs are slow the prefiller does, because the cached part of a prompt
        usually saves more time than the best link, and the decoder is then chosen for it.
        """
        if not self.handoff_times.slow_pairs_by_decoder:
            decoder = Lease(self.decode, request)
            decoder.__enter__()
            return _enter_lease(
                self.prefill, self._without_quarantined(request, decoder.backend, self.prefill), decoder
            ), decoder
        prefiller = Lease(self.prefill, request)
        prefiller.__enter__()
        suiting = self._without_quarantined(request, prefiller.backend, self.decode)
        decoder = _enter_lease(self.decode, replace(suiting, handoff_partner=prefiller.backend), prefiller)
        self.handoff_times.record_pick(prefiller.backend, decoder.backend)
        return prefiller, decoder

    def _without_quarantined(self, request: PickRequest, partner: Backend, pool: Pool) -> PickRequest:
        """Return the request without the backends of a pool that are quarantined with a partner, if others are left."""
        if self.pair_quarantine.quarantined_partners and (partners := self.pair_quarantine.partners_to_avoid(partner)):
            avoid = partners.union(request.avoided_backends)
            if not avoid.issuperset(pool.eligible_backends()):
                return replace(request, avoided_backends=avoid)
        return request


def _enter_lease(pool: Pool, request: PickRequest, first: Lease) -> Lease:
    """Return an entered lease of a pool. If there is none, leave the first lease."""
    lease = Lease(pool, request)
    try:
        lease.__enter__()
    except BaseException as error:
        first.__exit__(type(error), error, error.__traceback__)
        raise
    return lease
