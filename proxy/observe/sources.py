"""The metrics of the sources of discovery, read when somebody scrapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from proxy.balancer.roster import Roster
    from proxy.balancer.shared.source_states import SourceStates


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
        up.add_metric(key, state.told_at is not None and state.problem is None)
        instances.add_metric(key, len(wanted.get(origin, ())))
        failures.add_metric(key, state.failures)
        if state.told_at is not None:
            last_success.add_metric(key, state.told_at)
    yield from (up, instances, failures, last_success)
