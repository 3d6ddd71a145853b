"""The parts that choose engines: facts about the engines, and the pools of all roles."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from proxy.balancer.backend_health import HealthState
from proxy.balancer.blame import PairQuarantine
from proxy.balancer.engines import EngineKeys
from proxy.balancer.health import Health, Transition
from proxy.balancer.incompatibilities import CompatibilityMonitor
from proxy.balancer.models import ServedModels
from proxy.balancer.pick import PolicyContext
from proxy.balancer.policies.handoff_times import HandoffTimes, lacks_memory
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolLimits, PoolParts, Pools, ignore
from proxy.balancer.shared.scoreboard import LoadRow, PinnedKv
from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.prober import log_transition
from proxy.fleet.inspector import log_incompatibility, log_missing_cache_report
from proxy.process.configuration import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from proxy.balancer.shared.memory import LogOnce
    from proxy.observe.metrics import Metrics
    from proxy.process.worker.basis import Basis
    from proxy.settings import Settings

    Serving = Callable[[Collection[Backend]], tuple[Backend, ...]]


class PoolOf:
    """The pool in which a backend is compared with others: that of its role, unless there are several."""

    def __init__(self, pools: Pools) -> None:
        self.find: Callable[[Backend], Pool] = lambda backend: pools.of(backend.role)
        """Replaced when the lanes exist."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balancing:
    """The parts of a worker that choose engines. They do no IO."""

    health: Health
    keys: EngineKeys
    compatibility: CompatibilityMonitor
    pinned_kv: PinnedKv
    """KV that no decoder fetches."""
    pools: Pools
    models: ServedModels
    """Models of the instances."""
    pool_of: PoolOf
    part: Callable[[Serving], tuple[Pools, Callable[[Settings], None]]]
    """Returns the pools of the backends that serve certain models, and the function that configures them."""
    on_transition: Callable[[Transition], None]
    """Logs and counts a change of health, and reports it to other workers."""


def build_balancing(basis: Basis) -> Balancing:
    """Build the parts that choose engines. Nearly all other parts use them."""
    shared, live, settings = basis.shared, basis.live, basis.settings
    row = shared.scoreboard.row(basis.index)
    health = Health(lambda: live.settings.health, board=shared.health_board)
    keys = EngineKeys(text_of(settings.auth.engine_api_key))
    live.call_on_change(lambda new: keys.configure(text_of(new.auth.engine_api_key)))
    compatibility = CompatibilityMonitor(
        shared.incompatibilities, row, keys, log_incompatibility, _missing_reports(shared.log_once)
    )
    pinned_kv = PinnedKv(row)
    quarantine = PairQuarantine(lambda: live.settings.health)
    handoffs = HandoffTimes(
        PolicyContext(lag_within=basis.loop_lag.within),
        lambda decoder: lacks_memory(shared.scoreboard, decoder, health.of(decoder).facts),
    )
    on_transition = _transitions(basis, handoffs)
    needed = (Role.PREFILL, Role.DECODE) if settings.connector_traits.takes_prefillers else (Role.DECODE,)
    models = ServedModels(shared.roster, health, needed)

    builder = _PoolBuilder(
        basis=basis,
        row=row,
        health=health,
        compatibility=compatibility,
        pinned_kv=pinned_kv,
        quarantine=quarantine,
        handoffs=handoffs,
        models=models,
        on_transition=on_transition,
        count_ends=_InstanceRequests(basis.metrics).of,
    )
    everybody, on_change = builder.pools()
    live.call_on_change(on_change)
    return Balancing(
        health=health,
        keys=keys,
        compatibility=compatibility,
        pinned_kv=pinned_kv,
        pools=everybody,
        models=models,
        pool_of=PoolOf(everybody),
        part=lambda serving: builder.pools(everybody, serving),
        on_transition=on_transition,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PoolBuilder:
    """Builds the pools of a worker: those of all backends, and those of the backends that serve certain models."""

    basis: Basis
    row: LoadRow
    health: Health
    compatibility: CompatibilityMonitor
    pinned_kv: PinnedKv
    quarantine: PairQuarantine
    handoffs: HandoffTimes
    models: ServedModels
    on_transition: Callable[[Transition], None]
    count_ends: Callable[[Role], Callable[[Backend, str], None]]

    def pools(
        self, whole: Pools | None = None, serving: Serving | None = None
    ) -> tuple[Pools, Callable[[Settings], None]]:
        """Return one pool for each role, and the function that configures them all."""
        made = {}
        for role in Role:
            if role is not Role.ENCODE or self.basis.settings.has_encoders:
                made[role] = self._pool(role, None if whole is None or serving is None else (whole.of(role), serving))

        def on_change(new: Settings) -> None:
            for _, configure_one in made.values():
                configure_one(new)

        by_role = {role: one for role, (one, _) in made.items()}
        pools = Pools(
            prefill=by_role[Role.PREFILL],
            decode=by_role[Role.DECODE],
            quarantine=self.quarantine,
            encode=by_role.get(Role.ENCODE),
            handoffs=self.handoffs,
        )
        return pools, on_change

    def _pool(self, role: Role, part: tuple[Pool, Serving] | None) -> tuple[Pool, Callable[[Settings], None]]:
        shared, settings = self.basis.shared, self.basis.live.settings
        context = self._policy_context(role)
        pool = Pool(
            PoolParts(
                role=role,
                policy=make_policy(_policy_name(settings, role), context),
                scoreboard=shared.scoreboard,
                row=self.row,
                roster=shared.roster,
                health=self.health,
                limits=_limits(settings, role),
                on_transition=self.on_transition,
                on_end=self.count_ends(role),
                pinned_kv=self.pinned_kv if role is Role.PREFILL else None,
                quarantine=self.quarantine,
                handoffs=self.handoffs,
                compatibility=self.compatibility,
                on_change=self.models.refresh if part is None else ignore,
                whole=None if part is None else part[0],
                serving=tuple if part is None else part[1],
                back_offs=shared.back_offs,
            )
        )
        return pool, _configuring(pool, settings, context)

    def _policy_context(self, role: Role) -> PolicyContext:
        shared, live = self.basis.shared, self.basis.live
        index = self.basis.index
        return PolicyContext(
            worker=index,
            role=role,
            facts=lambda backend: self.health.of(backend).facts,
            journal=shared.journal.writer(index) if shared.journal.rings > 1 else None,
            others_running=shared.scoreboard.others_running(self.row),
            lag_within=self.basis.loop_lag.within,
            balance=lambda: live.settings.balance,
            handoffs=self.handoffs,
        )


def subject(backend: Backend) -> str:
    """Return the subject of a backend for LogOnce."""
    return f"{backend.role} {backend.name}"


def cache_subject(backend: Backend) -> str:
    """Return the subject of a backend's reports of cached tokens for LogOnce."""
    return f"{subject(backend)} cached_tokens"


def _missing_reports(log_once: LogOnce) -> Callable[[Backend], None]:
    def on_missing_report(backend: Backend) -> None:
        if log_once.is_news(cache_subject(backend), "missing"):
            log_missing_cache_report(backend)

    return on_missing_report


def _transitions(basis: Basis, handoffs: HandoffTimes) -> Callable[[Transition], None]:
    log_once, board = basis.shared.log_once, basis.shared.health_board
    ejected = basis.metrics.instance_ejected_total

    def on_transition(transition: Transition) -> None:
        backend = transition.backend
        board.set_state(basis.index, backend, transition.new, is_from_peer=transition.cause == "other_gateway")
        if transition.new is HealthState.DOWN or transition.cause == "connect":
            # The instance may return as another process. Its old handoffs would make a pair slow, and so avoided, after
            # one handoff, which is too few for the status to name the pair.
            handoffs.forget(backend)
        log_transition(transition, is_news=log_once.is_news(subject(backend), transition.new))
        if transition.cause is not None:
            ejected.labels(backend.role.value, backend.name, transition.cause).inc()

    return on_transition


class _InstanceRequests:
    """Counts the results of requests to instances in batches."""

    def __init__(self, metrics: Metrics) -> None:
        # To find a series by its labels costs more than to count in it, and there are few series.
        self._counters = cache(metrics.instance_requests_total.labels)
        self._untold: dict[Role, dict[str, Counter[str]]] = {role: {} for role in Role}  # by results
        metrics.settle_first(self.count)

    def of(self, role: Role) -> Callable[[Backend, str], None]:
        """Return the function to call at the end of each lease of this role."""
        untold = self._untold[role]

        def on_end(backend: Backend, result: str) -> None:
            known = untold.get(result)
            if known is None:
                known = untold[result] = Counter()
            known[backend.name] += 1

        return on_end

    def count(self) -> None:
        """Count the leases that have ended."""
        for role, untold in self._untold.items():
            for result, counts in untold.items():
                for name, count in counts.items():
                    self._counters(role.value, name, result).inc(count)
                counts.clear()


def _configuring(pool: Pool, settings: Settings, context: PolicyContext) -> Callable[[Settings], None]:
    name = _policy_name(settings, pool.role)

    def on_change(new: Settings) -> None:
        nonlocal name
        pool.configure(_limits(new, pool.role))
        if (newest := _policy_name(new, pool.role)) != name:  # a policy that stays keeps its state
            name = newest
            pool.use(make_policy(name, context))

    return on_change


def _policy_name(settings: Settings, role: Role) -> str:
    if role is Role.ENCODE:
        return "least_tokens"
    return settings.balance.prefill_policy if role is Role.PREFILL else settings.balance.decode_policy


def _limits(settings: Settings, role: Role) -> PoolLimits:
    admission = settings.admission
    max_running = {Role.PREFILL: admission.max_running_prefill, Role.DECODE: admission.max_running_decode}
    return PoolLimits(
        max_running=max_running.get(role),  # encoders have no other limit
        pressure_seconds=settings.resume.pressure_seconds,
        restart_seconds=admission.wait_seconds,
        queues_refused=settings.retry.max_attempts > 1,
    )
