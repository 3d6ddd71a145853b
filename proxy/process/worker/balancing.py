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
from proxy.balancer.pool import Pool, PoolLimits, PoolParts, Pools, ignore_report
from proxy.balancer.shared.scoreboard import LoadRow, PinnedKv
from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.prober import log_transition
from proxy.fleet.inspector import log_incompatibility, log_missing_cache_report
from proxy.process.configuration import text_of_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from proxy.balancer.shared.memory import LogOnce
    from proxy.observe.metrics import Metrics
    from proxy.process.worker.basis import WorkerBasis
    from proxy.settings import Settings

    Serving = Callable[[Collection[Backend]], tuple[Backend, ...]]


class PoolFinder:
    """Finds the pool in which a backend is compared with others: that of its role, unless there are several lanes."""

    def __init__(self, pools: Pools) -> None:
        self.pools_of: Callable[[Backend], Pools] = lambda _: pools
        """Returns the pools of a backend's lane. Replaced when the lanes exist."""

    def pool_of(self, backend: Backend) -> Pool:
        """Return the pool of a backend."""
        return self.pools_of(backend).pool_of(backend.role)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balancing:
    """The parts of a worker that choose engines. They do no IO."""

    health: Health
    engine_keys: EngineKeys
    compatibility_monitor: CompatibilityMonitor
    pinned_kv: PinnedKv
    """KV that no decoder fetches."""
    pools: Pools
    served_models: ServedModels
    """Models of the instances."""
    pool_finder: PoolFinder
    make_pools_part: Callable[[Serving], tuple[Pools, Callable[[Settings], None]]]
    """Returns the pools of the backends that serve certain models, and the function that configures them."""
    on_transition: Callable[[Transition], None]
    """Logs and counts a change of health, and reports it to other workers."""


def build_balancing(basis: WorkerBasis) -> Balancing:
    """Build the parts that choose engines. Nearly all other parts use them."""
    shared, live, settings = basis.shared, basis.live_configuration, basis.settings
    row = shared.scoreboard.load_row(basis.worker_number)
    health = Health(lambda: live.settings.health, board=shared.health_board)
    keys = EngineKeys(text_of_secret(settings.auth.engine_api_key))
    live.call_on_change(lambda new: keys.use_key(text_of_secret(new.auth.engine_api_key)))
    compatibility = CompatibilityMonitor(
        shared.incompatibilities, row, keys, log_incompatibility, _make_missing_report_logger(shared.log_once)
    )
    pinned_kv = PinnedKv(row)
    quarantine = PairQuarantine(lambda: live.settings.health)
    handoffs = HandoffTimes(
        PolicyContext(loop_lag_within=basis.loop_lag.longest_lag_within),
        lambda decoder: lacks_memory(shared.scoreboard, decoder, health.health_of(decoder).engine_facts),
    )
    on_transition = _make_transition_callback(basis, handoffs)
    needed = (Role.PREFILL, Role.DECODE) if settings.connector_traits.takes_prefillers else (Role.DECODE,)
    models = ServedModels(shared.roster, health, needed)

    builder = _PoolBuilder(
        worker_basis=basis,
        load_row=row,
        health=health,
        compatibility_monitor=compatibility,
        pinned_kv=pinned_kv,
        pair_quarantine=quarantine,
        handoff_times=handoffs,
        served_models=models,
        on_transition=on_transition,
        count_ends=_InstanceRequests(basis.metrics).end_callback_of,
    )
    pools, on_change = builder.make_pools()
    live.call_on_change(on_change)
    return Balancing(
        health=health,
        engine_keys=keys,
        compatibility_monitor=compatibility,
        pinned_kv=pinned_kv,
        pools=pools,
        served_models=models,
        pool_finder=PoolFinder(pools),
        make_pools_part=lambda serving: builder.make_pools(pools, serving),
        on_transition=on_transition,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PoolBuilder:
    """Builds the pools of a worker: those of all backends, and those of the backends that serve certain models."""

    worker_basis: WorkerBasis
    load_row: LoadRow
    health: Health
    compatibility_monitor: CompatibilityMonitor
    pinned_kv: PinnedKv
    pair_quarantine: PairQuarantine
    handoff_times: HandoffTimes
    served_models: ServedModels
    on_transition: Callable[[Transition], None]
    count_ends: Callable[[Role], Callable[[Backend, str], None]]

    def make_pools(
        self, whole: Pools | None = None, serving: Serving | None = None
    ) -> tuple[Pools, Callable[[Settings], None]]:
        """Return one pool for each role, and the function that configures them all."""
        made = {}
        for role in Role:
            if role is not Role.ENCODE or self.worker_basis.settings.has_encoders:
                made[role] = self._make_pool(
                    role, None if whole is None or serving is None else (whole.pool_of(role), serving)
                )

        def on_change(new: Settings) -> None:
            for _, configure_one in made.values():
                configure_one(new)

        by_role = {role: one for role, (one, _) in made.items()}
        pools = Pools(
            prefill=by_role[Role.PREFILL],
            decode=by_role[Role.DECODE],
            pair_quarantine=self.pair_quarantine,
            encode=by_role.get(Role.ENCODE),
            handoff_times=self.handoff_times,
        )
        return pools, on_change

    def _make_pool(self, role: Role, part: tuple[Pool, Serving] | None) -> tuple[Pool, Callable[[Settings], None]]:
        shared, settings = self.worker_basis.shared, self.worker_basis.live_configuration.settings
        context = self._make_policy_context(role)
        pool = Pool(
            PoolParts(
                role=role,
                policy=make_policy(_policy_name(settings, role), context),
                scoreboard=shared.scoreboard,
                load_row=self.load_row,
                roster=shared.roster,
                health=self.health,
                pool_limits=_pool_limits(settings, role),
                on_transition=self.on_transition,
                on_lease_end=self.count_ends(role),
                pinned_kv=self.pinned_kv,
                pair_quarantine=self.pair_quarantine,
                handoff_times=self.handoff_times,
                compatibility_monitor=self.compatibility_monitor,
                on_change=self.served_models.update_names if part is None else ignore_report,
                whole_pool=None if part is None else part[0],
                select_serving=tuple if part is None else part[1],
                back_offs=shared.back_offs,
            )
        )
        return pool, _make_pool_configurer(pool, settings, context)

    def _make_policy_context(self, role: Role) -> PolicyContext:
        shared, live = self.worker_basis.shared, self.worker_basis.live_configuration
        index = self.worker_basis.worker_number
        return PolicyContext(
            worker_number=index,
            role=role,
            facts_of_engine=lambda backend: self.health.health_of(backend).engine_facts,
            journal_writer=shared.journal.writer_for(index) if shared.journal.ring_count > 1 else None,
            others_running_requests=shared.scoreboard.others_running_requests(self.load_row),
            loop_lag_within=self.worker_basis.loop_lag.longest_lag_within,
            get_balance_options=lambda: live.settings.balance,
            handoff_predictions=self.handoff_times,
        )


def log_subject_of(backend: Backend) -> str:
    """Return the subject of a backend for LogOnce."""
    return f"{backend.role} {backend.name}"


def cache_log_subject_of(backend: Backend) -> str:
    """Return the subject of a backend's reports of cached tokens for LogOnce."""
    return f"{log_subject_of(backend)} cached_tokens"


def _make_missing_report_logger(log_once: LogOnce) -> Callable[[Backend], None]:
    def on_missing_report(backend: Backend) -> None:
        if log_once.is_news(cache_log_subject_of(backend), "missing"):
            log_missing_cache_report(backend)

    return on_missing_report


def _make_transition_callback(basis: WorkerBasis, handoffs: HandoffTimes) -> Callable[[Transition], None]:
    log_once, board = basis.shared.log_once, basis.shared.health_board
    ejected = basis.metrics.instance_ejected_total

    def on_transition(transition: Transition) -> None:
        backend = transition.backend
        board.set_state(
            basis.worker_number,
            backend,
            transition.new_state,
            is_from_peer=transition.ejection_cause == "other_gateway",
        )
        if transition.new_state is HealthState.DOWN or transition.ejection_cause == "connect":
            # The instance may return as another process. Its old handoffs would make a pair slow, and so avoided, after
            # one handoff, which is too few for the status to name the pair.
            handoffs.forget_backend(backend)
        log_transition(transition, is_news=log_once.is_news(log_subject_of(backend), transition.new_state))
        if transition.ejection_cause is not None:
            ejected.labels(backend.role.value, backend.name, transition.ejection_cause).inc()

    return on_transition


class _InstanceRequests:
    """Counts the results of requests to instances in batches."""

    def __init__(self, metrics: Metrics) -> None:
        # To find a series by its labels costs more than to count in it, and there are few series.
        self._request_counters = cache(metrics.instance_requests_total.labels)
        self._uncounted_results: Counter[tuple[str, str, str]] = Counter()
        """Leases that have ended since the last count, by role, name of the instance and result."""
        metrics.call_before_scrape(self.count_ended)

    def end_callback_of(self, role: Role) -> Callable[[Backend, str], None]:
        """Return the function to call at the end of each lease of this role."""
        role_name, results = role.value, self._uncounted_results

        def on_end(backend: Backend, result: str) -> None:
            results[role_name, backend.name, result] += 1

        return on_end

    def count_ended(self) -> None:
        """Count the leases that have ended."""
        for labels, count in self._uncounted_results.items():
            self._request_counters(*labels).inc(count)
        self._uncounted_results.clear()


def _make_pool_configurer(pool: Pool, settings: Settings, context: PolicyContext) -> Callable[[Settings], None]:
    name = _policy_name(settings, pool.role)

    def on_change(new: Settings) -> None:
        nonlocal name
        pool.set_limits(_pool_limits(new, pool.role))
        if (newest := _policy_name(new, pool.role)) != name:  # a policy that stays keeps its state
            name = newest
            pool.use_policy(make_policy(name, context))

    return on_change


def _policy_name(settings: Settings, role: Role) -> str:
    if role is Role.ENCODE:
        return "least_tokens"
    return settings.balance.prefill_policy if role is Role.PREFILL else settings.balance.decode_policy


def _pool_limits(settings: Settings, role: Role) -> PoolLimits:
    admission = settings.admission
    max_running = {Role.PREFILL: admission.max_running_prefill, Role.DECODE: admission.max_running_decode}
    return PoolLimits(
        max_running=max_running.get(role),  # encoders have no other limit
        kv_pressure_seconds=settings.resume.pressure_seconds,
        max_restart_seconds=admission.wait_seconds,
        queues_refused_requests=settings.retry.max_attempts > 1,
    )
