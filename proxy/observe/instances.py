"""Metrics of instances, models, discovery sources and the status, which are read at each scrape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from proxy.balancer.backend_health import HealthState
from proxy.common.backend import Role
from proxy.observe.verdict import StatusLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from proxy.balancer.health import Health
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster, SourceStates
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend


_STATES: Final = {state: number for number, state in enumerate(HealthState)}
_INSTANCE_GAUGES: Final = (
    ("up", "1 if a health check or a request has shown that the instance is healthy, otherwise 0."),
    ("state", f"State of an instance. {'; '.join(f'{number}: {word}' for word, number in _STATES.items())}."),
    ("weight", "Share of requests of an instance, in per cent of its full share; 0 while it is disabled or drains."),
    ("inflight", "Requests in flight at an instance."),
    (
        "load_tokens",
        "Estimated tokens of the load of an instance: `compute` (being worked on) or `kv` (held as cache).",
        "kind",
    ),
    (
        "tokens_per_second",
        "Parts of answers that a decoder has streamed, per second over 5 s. Most engines send a token each.",
    ),
    (
        "kv_capacity_tokens",
        "Tokens that fit into the KV cache of an instance; no series if the engine does not report it.",
    ),
    ("consecutive_failures", "Failed requests of an instance since its last success."),
    (
        "pinned_kv",
        "KV caches that a prefiller keeps for no decoder, or a decoder for the next turn of a chat, as far as known.",
    ),
    ("pinned_kv_tokens", "Estimated tokens of pdproxy_instance_pinned_kv."),
    ("pinned_kv_oldest_seconds", "Age of the oldest of pdproxy_instance_pinned_kv."),
    (
        "misfit",
        "Incompatibilities of a healthy instance with others or with this gateway, by kind. Always 1.",
        "kind",
    ),
    (
        "working_set_tokens",
        (
            "Tokens that the residents of a prefiller need in its cache (`used`), and their learned maximum (`limit`, "
            "only while there is one), as known to the worker that answers."
        ),
        "kind",
    ),
    (
        "knee",
        (
            "Number of concurrent requests above which an instance generated fewer tokens per second, as learned by "
            "the worker that answers; no series if nothing was learned."
        ),
    ),
)
"""Gauges of instances: name, help text, and labels beside `role` and `address`."""


class InstanceMetrics:
    """Metrics of the instances at the moment of a scrape.

    The label `address` is `host:port`, like the target under which Prometheus scrapes the engine itself. It is not
    called `instance`, because Prometheus adds a label of that name, for the gateway that it scrapes.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        scoreboard: Scoreboard,
        health: Health,
        incompatibilities: Incompatibilities,
        pool_of: Callable[[Backend], Pool] | None = None,
        rates: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Create the instances.

        Args:
            pools: Pools of all backends.
            scoreboard: Loads of backends.
            health: Health of backends.
            incompatibilities: Incompatibilities of backends.
            pool_of: Returns the pool in which a backend is chosen; None: the one among `pools`.
            rates: Returns the tokens per second that each backend streams, by its name.
        """
        self._pool_of = pool_of
        self._get_token_rates = rates
        self._pools = pools
        self._scoreboard = scoreboard
        self._health = health
        self._incompatibilities = incompatibilities

    def role_and_name_pairs(self) -> Iterator[tuple[str, str]]:
        """Return role and address of each instance."""
        return ((backend.role.value, backend.name) for pool in self._pools for backend in pool.all_backends())

    def collect_in_steps(self, found_metrics: list[Iterable[Metric]]) -> Iterator[None]:
        """Read one instance at each step. The last step adds the metrics to `found_metrics`.

        The first step reads the requests in flight of all instances, so that they add up.
        """
        gauges = {
            name: GaugeMetricFamily(f"pdproxy_instance_{name}", meaning, labels=("role", "address", *labels))
            for name, meaning, *labels in _INSTANCE_GAUGES
        }
        now, rates = time.monotonic(), self._get_token_rates()
        members = [(pool, backend) for pool in self._pools for backend in pool.all_backends()]
        in_flight = [self._scoreboard.open_leases(backend.slot) for _, backend in members]
        for (pool, backend), requests in zip(members, in_flight, strict=True):
            key = (backend.role.value, backend.name)
            chooses = pool if self._pool_of is None else self._pool_of(backend)
            if (limit := chooses.policy.learned_max_running(backend)) is not None:
                gauges["knee"].add_metric(key, limit)
            for kind, tokens in chooses.policy.working_set_tokens(backend).items():
                gauges["working_set_tokens"].add_metric((*key, kind), tokens)
            _, charged = self._scoreboard.own_load(backend.slot)
            health = self._health.health_of(backend)
            gauges["up"].add_metric(key, health.is_confirmed_healthy)
            gauges["state"].add_metric(key, _STATES[health.health_state])
            gauges["weight"].add_metric(key, pool.weight_percent(backend))
            gauges["inflight"].add_metric(key, requests)
            gauges["load_tokens"].add_metric((*key, "compute"), charged.compute_tokens)
            gauges["load_tokens"].add_metric((*key, "kv"), charged.kv_tokens)
            if backend.role is Role.DECODE:
                gauges["tokens_per_second"].add_metric(key, rates.get(backend.name, 0.0))
            if health.engine_facts is not None and health.engine_facts.kv_memory_tokens is not None:
                gauges["kv_capacity_tokens"].add_metric(key, health.engine_facts.kv_memory_tokens)
            gauges["consecutive_failures"].add_metric(key, health.consecutive_failures)
            pinned = self._scoreboard.pinned_kv(backend.slot)
            gauges["pinned_kv"].add_metric(key, pinned.cache_count)
            gauges["pinned_kv_tokens"].add_metric(key, pinned.pinned_tokens)
            gauges["pinned_kv_oldest_seconds"].add_metric(
                key, 0 if pinned.oldest_pinned_at is None else now - pinned.oldest_pinned_at
            )
            for misfit in self._incompatibilities.incompatibilities_of(backend):
                gauges["misfit"].add_metric((*key, misfit.kind), 1)
            yield
        found_metrics.append(gauges.values())


def collect_models(served_models: ServedModels, pools: Sequence[Pool]) -> Iterator[Metric | None]:
    """Yield None after each instance, where the caller may pause, and then the number of instances of each model."""
    instances = GaugeMetricFamily(
        "pdproxy_model_instances",
        "Instances that may get requests for a model or an adapter, by role. Instances that report no models are left "
        "out, and so are models that lack instances of a role.",
        labels=("model", "role"),
    )
    eligible = {pool.role: pool.eligible_backends() for pool in pools}
    served_models.update_names()
    fully_served_names = served_models.fully_served_names  # it may change meanwhile
    counts = {(name, role): 0 for name in sorted(fully_served_names) for role in eligible}
    for role, backends in eligible.items():
        for backend in backends:
            for name in served_models.names_of(backend) & fully_served_names:
                counts[name, role] += 1
            yield None
    for (name, role), count in counts.items():
        instances.add_metric((name, role.value), count)
    yield instances


def collect_sources(source_states: SourceStates, roster: Roster) -> Iterator[Metric]:
    """Return the states of the current discovery sources."""
    labels = ("source",)
    up = GaugeMetricFamily(
        "pdproxy_discovery_up",
        "1 if the last reading of a discovery source succeeded. 0 if it failed or has not ended; then its last "
        "instances stay.",
        labels=labels,
    )
    instances = GaugeMetricFamily(
        "pdproxy_discovery_instances", "Number of instances in the last reading of a discovery source.", labels=labels
    )
    failures = CounterMetricFamily(
        "pdproxy_discovery_failures",
        "Failed readings of a discovery source.",
        labels=labels,
    )
    last_success = GaugeMetricFamily(
        "pdproxy_discovery_last_success_timestamp_seconds",
        "Time of the last reading of a discovery source, in seconds since the Unix epoch. A file is read when it has "
        "changed.",
        labels=labels,
    )
    wanted = roster.wanted_by_origin()
    for origin, state in source_states.states_by_origin().items():
        key = (origin,)
        up.add_metric(key, state.succeeded_at is not None and state.problem is None)
        instances.add_metric(key, len(wanted.get(origin, ())))
        failures.add_metric(key, state.failures)
        if state.succeeded_at is not None:
            last_success.add_metric(key, state.succeeded_at)
    yield from (up, instances, failures, last_success)


def collect_status(status_verdict: Mapping[str, Any]) -> Iterator[Metric]:
    """Return the metrics of a verdict; see Verdicts."""
    state = GaugeMetricFamily(
        "pdproxy_status_state",
        "State of the gateway and its engines. "
        f"{'; '.join(f'{level}: {level.name.lower()}' for level in StatusLevel)}.",
    )
    state.add_metric((), StatusLevel[status_verdict["state"].upper()])
    reasons = GaugeMetricFamily(
        "pdproxy_status_reason",
        "Reasons why the gateway is not healthy, as in `GET /admin/status`. Always 1; no series: the reason does not "
        "hold.",
        labels=("code", "kind", "subject"),
    )
    labels = [
        (reason["code"], reason["subject"]["kind"], reason["subject"]["name"]) for reason in status_verdict["reasons"]
    ]
    for row in dict.fromkeys(labels):  # long names of subjects are cut, and may be equal
        reasons.add_metric(row, 1)
    yield from (state, reasons)
