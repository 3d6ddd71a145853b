"""The metrics of instances, models and sources of discovery, read when somebody scrapes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from proxy.balancer.backend_health import HealthState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric

    from proxy.balancer.health import Health
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster, SourceStates
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend


_STATES: Final = {state: number for number, state in enumerate(HealthState)}


class Instances:
    """What the balancer knows about the instances at the moment of a scrape.

    `address` is `host:port`, the same as the target under which Prometheus scrapes the engine itself. It is not called
    `instance`, because Prometheus gives every series a label of that name: the gateway it was scraped from.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        scoreboard: Scoreboard,
        health: Health,
        misfits: Incompatibilities,
        pool_of: Callable[[Backend], Pool] | None = None,
    ) -> None:
        """`pools`: of all backends. `pool_of`: that in which one is chosen; None: one of these."""
        self._pool_of = pool_of
        self._pools = pools
        self._scoreboard = scoreboard
        self._health = health
        self._misfits = misfits

    def names(self) -> Iterator[tuple[str, str]]:
        """Role and instance of each."""
        return ((backend.role.value, backend.name) for pool in self._pools for backend in pool.backends())

    def _all(self) -> Iterator[tuple[Pool, Backend]]:
        return ((pool, backend) for pool in self._pools for backend in pool.backends())

    def collect(self) -> Iterator[Metric]:
        labels = ("role", "address")
        up = GaugeMetricFamily(
            "pdproxy_instance_up",
            "1 if a health check or a request has shown that the instance is healthy, otherwise 0.",
            labels=labels,
        )
        state = GaugeMetricFamily(
            "pdproxy_instance_state",
            f"What is known of an instance. {'; '.join(f'{number}: {word}' for word, number in _STATES.items())}.",
            labels=labels,
        )
        inflight = GaugeMetricFamily("pdproxy_instance_inflight", "Requests in flight at an instance.", labels=labels)
        load = GaugeMetricFamily(
            "pdproxy_instance_load_tokens",
            "Estimated tokens of the load of an instance: `compute` (being worked on) or `kv` (held as cache).",
            labels=(*labels, "kind"),
        )
        failures = GaugeMetricFamily(
            "pdproxy_instance_consecutive_failures",
            "Failed requests of an instance since its last success.",
            labels=labels,
        )
        pinned_kv = GaugeMetricFamily(
            "pdproxy_instance_pinned_kv",
            "KV caches that an instance keeps, as far as is known, although no decoder will fetch them.",
            labels=labels,
        )
        pinned_tokens = GaugeMetricFamily(
            "pdproxy_instance_pinned_kv_tokens", "Estimated tokens of pdproxy_instance_pinned_kv.", labels=labels
        )
        pinned_oldest = GaugeMetricFamily(
            "pdproxy_instance_pinned_kv_oldest_seconds",
            "Age of the oldest of pdproxy_instance_pinned_kv.",
            labels=labels,
        )
        misfits = GaugeMetricFamily(
            "pdproxy_instance_misfit",
            "Ways in which a healthy instance does not fit the others or this gateway, by kind. Always 1.",
            labels=(*labels, "kind"),
        )
        knee = GaugeMetricFamily(
            "pdproxy_instance_knee",
            "Requests at a time beyond which an instance was seen to make fewer tokens a second, as the worker that is "
            "asked has learned it; no series where that was not seen.",
            labels=labels,
        )
        weight = GaugeMetricFamily(
            "pdproxy_instance_weight",
            "How much of its share of requests an instance is to get, in per cent; 0 while it is disabled or drains.",
            labels=labels,
        )
        now = time.monotonic()
        for pool, backend in self._all():
            key = (backend.role.value, backend.name)
            chooses = pool if self._pool_of is None else self._pool_of(backend)
            if (most := chooses.policy.most_running(backend)) is not None:
                knee.add_metric(key, most)
            _, charged = self._scoreboard.own(backend.slot)
            health = self._health.of(backend)
            up.add_metric(key, health.is_confirmed)
            state.add_metric(key, _STATES[health.state])
            weight.add_metric(key, pool.weight(backend))
            inflight.add_metric(key, self._scoreboard.requests(backend.slot))
            load.add_metric((*key, "compute"), charged.compute)
            load.add_metric((*key, "kv"), charged.kv)
            failures.add_metric(key, health.consecutive_failures)
            pinned = self._scoreboard.pinned(backend.slot)
            pinned_kv.add_metric(key, pinned.count)
            pinned_tokens.add_metric(key, pinned.tokens)
            pinned_oldest.add_metric(key, 0 if pinned.since is None else now - pinned.since)
            for misfit in self._misfits.of(backend):
                misfits.add_metric((*key, misfit.kind), 1)
        yield from (up, state, weight, inflight, load, failures)
        yield from (pinned_kv, pinned_tokens, pinned_oldest, misfits, knee)


def collect_models(models: ServedModels, pools: Sequence[Pool]) -> Iterator[Metric]:
    """How many instances of these pools each model has at the moment of a scrape."""
    found = GaugeMetricFamily(
        "pdproxy_model_instances",
        "Instances that may get requests for a model or an adapter, by role; those that tell nothing are left out, and "
        "names that no instance of a role serves.",
        labels=("model", "role"),
    )
    eligible = {pool.role: pool.eligible() for pool in pools}
    models.look()
    counts = {(name, role): 0 for name in sorted(models.complete) for role in eligible}
    for role, backends in eligible.items():
        for backend in backends:
            for name in models.of(backend) & models.complete:
                counts[name, role] += 1
    for (name, role), count in counts.items():
        found.add_metric((name, role.value), count)
    yield found


def collect_sources(states: SourceStates, roster: Roster) -> Iterator[Metric]:
    """Of the sources there are at that moment."""
    labels = ("source",)
    up = GaugeMetricFamily(
        "pdproxy_discovery_up",
        "1 if a source of discovery was well when it was last asked; 0 if it failed, and its instances stay as they "
        "were, or did not answer yet.",
        labels=labels,
    )
    instances = GaugeMetricFamily(
        "pdproxy_discovery_instances", "Instances that a source of discovery has named last.", labels=labels
    )
    failures = CounterMetricFamily(
        "pdproxy_discovery_failures",
        "Times that a source of discovery could not be asked, or said what cannot be.",
        labels=labels,
    )
    last_success = GaugeMetricFamily(
        "pdproxy_discovery_last_success_timestamp_seconds",
        "When a source of discovery last said which instances there are, which a file does when it has changed, in "
        "seconds since the Unix epoch.",
        labels=labels,
    )
    wanted = roster.wanted()
    for origin, state in states.all().items():
        key = (origin,)
        up.add_metric(key, state.succeeded_at is not None and state.problem is None)
        instances.add_metric(key, len(wanted.get(origin, ())))
        failures.add_metric(key, state.failures)
        if state.succeeded_at is not None:
            last_success.add_metric(key, state.succeeded_at)
    yield from (up, instances, failures, last_success)
