"""Distribution of requests over the instances, and the queue."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import (
    ADDRESS,
    GATEWAY,
    GATEWAYS,
    GENERATES,
    INSTANCES,
    JOB,
    ROLE,
    buckets,
    gauge,
    percentiles,
    rate,
    share,
)


def _reasons(role: str) -> Panel:
    return Panel(
        title=f"Why: {role}",
        description=f"Selections of an instance of role {role} per second, by reason "
        "(pdproxy_choices_total). Examples: the prefix is cached, lowest predicted time, "
        "rotation between equal candidates, only candidate.",
        unit="ops",
        width=12,
        stacked=True,
        queries=[Query(rate("pdproxy_choices_total", f'role="{role}"', by="reason"), "{{reason}}")],
        runbook="concepts/routing.md#routing",
    )


_KNEES: Final = gauge("pdproxy_instance_knee", by="address", of=INSTANCES, over="max")

PREDICTIONS: Final = Row(
    "What is predicted, and why",
    [
        _reasons("prefill"),
        _reasons("decode"),
        Panel(
            title="Prefills: taken over predicted",
            description="Actual prefill time divided by the predicted time "
            "(pdproxy_prefill_prediction_ratio). Ideal value: 1. A persistent deviation means "
            "that the prefill speed changed or that the instances serve other traffic.",
            unit="none",
            decimals=2,
            queries=percentiles("pdproxy_prefill_prediction_ratio"),
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Cached tokens: predicted and found",
            description="Prompt tokens per second that were predicted to be cached, and that prefillers "
            "reported as cached (pdproxy_prefill_hit_tokens_total). If far fewer are found than "
            "predicted, caches are smaller than assumed or disabled.",
            unit="short",
            queries=[Query(rate("pdproxy_prefill_hit_tokens_total", by="kind"), "{{kind}}")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="What requests wait for",
            description="Requests that had to wait, per second, by cause (pdproxy_queue_waits_total): no "
            "capacity at an instance of a role, a better prefiller without capacity, or other "
            "queued requests.",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_queue_waits_total", by="reason"), "{{reason}}")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Knees of decoders",
            description="Saturation point: number of concurrent answers beyond which a decoder produces fewer "
            "tokens per second (pdproxy_instance_knee). pdproxy sends no more than this.",
            unit="none",
            queries=[Query(f'{_KNEES} or label_replace(vector(0), "address", "none seen", "", "")', "{{address}}")],
            runbook="concepts/routing.md#routing",
        ),
    ],
    width=6,
)


_REQUESTS: Final = rate("pdproxy_instance_requests_total", by="role", of=INSTANCES)


def _spread(metric: str, where: str = "") -> str:
    """Return a query for the standard deviation over the mean, among the healthy instances of each role."""
    loads = gauge(metric, where, by="role, address", of=INSTANCES)
    up = f"({gauge('pdproxy_instance_up', by='role, address', of=INSTANCES, over='max')} == 1)"
    of_those_up = f"({loads} and {up})"
    return f"stddev by (role) {of_those_up} / (avg by (role) {of_those_up} > 0)"


_QUEUE: Final = Row(
    "The queue",
    [
        Panel(
            title="Waiting",
            description="Requests in the queue (pdproxy_queued_requests). The limit of each worker is "
            "`admission.max_waiting`.",
            unit="none",
            queries=[Query(gauge("pdproxy_queued_requests", by="instance"), "{{instance}}")],
            runbook="concepts/overload.md#overload",
        ),
        Panel(
            title="How long they waited",
            description="Time in the queue of the requests that had to wait (pdproxy_queue_seconds).",
            unit="s",
            queries=percentiles("pdproxy_queue_seconds"),
            runbook="concepts/overload.md#overload",
        ),
        Panel(
            title="How many had to wait",
            description="Share of generation requests that waited (pdproxy_queue_seconds over "
            "pdproxy_requests_total). Near 1 the fleet is saturated: add instances of the "
            "saturated role.",
            unit="percentunit",
            queries=[
                Query(share(rate("pdproxy_queue_seconds_count"), rate("pdproxy_requests_total", GENERATES)), "waited")
            ],
            runbook="concepts/overload.md#overload",
        ),
        Panel(
            title="Waiting, how many how long",
            description="Distribution of the time in the queue (pdproxy_queue_seconds).",
            kind="heatmap",
            unit="s",
            width=12,
            lowest=None,
            queries=buckets("pdproxy_queue_seconds"),
        ),
        Panel(
            title="Refused for lack of room",
            description="Requests per second that were rejected with 503 because the queue was full, the wait "
            "too long, or connections, buffers or memory exhausted, and with 429 because of the "
            "limits of a client key (pdproxy_rejected_total).",
            unit="reqps",
            width=12,
            queries=[
                Query(
                    rate(
                        "pdproxy_rejected_total",
                        'reason=~"queue_.+|buffers_full|memory|connections|key_.+"',
                        by="reason",
                    ),
                    "{{reason}}",
                )
            ],
            runbook="troubleshooting/alerts.md#pdproxyqueuerefuses",
        ),
    ],
)


def _share_of_each(role: str) -> Panel:
    picks = rate("pdproxy_instance_requests_total", f'role="{role}",address=~"$address"', by="address")
    all_picks = rate("pdproxy_instance_requests_total", f'role="{role}",address=~"$address"')
    return Panel(
        title=f"Share of each instance: {role}",
        description=f"Share of each instance in the requests of role {role} "
        "(pdproxy_instance_requests_total). Under `least_tokens`, instances with longer "
        "prompts or answers get fewer requests. Under `least_load`, instances with the cached "
        "prefix get more.",
        unit="percentunit",
        highest=1,
        stacked=True,
        queries=[Query(f"{picks} / scalar({all_picks} > 0)", "{{address}}")],
        runbook="concepts/routing.md#routing",
    )


_CHOICE: Final = Row(
    "The choice",
    [
        _share_of_each("prefill"),
        _share_of_each("decode"),
        Panel(
            width=8,
            title="Uneven: requests in flight",
            description="Standard deviation divided by the mean of the requests in flight at the healthy "
            "instances of a role (pdproxy_instance_inflight). 0: even. 1: one of two instances "
            "has all requests. With few requests, the distribution is always uneven.",
            unit="none",
            decimals=2,
            queries=[Query(_spread("pdproxy_instance_inflight"), "{{role}}")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            width=8,
            title="Uneven: estimated load",
            description="Standard deviation divided by the mean of the estimated tokens in computation and in "
            "the KV cache (pdproxy_instance_load_tokens). `least_tokens` keeps this low.",
            unit="none",
            decimals=2,
            queries=[Query(_spread("pdproxy_instance_load_tokens"), "{{role}}")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            width=8,
            title="Found in the prefix cache",
            description="Share of prompt tokens that engines found in their prefix cache "
            "(pdproxy_tokens_total). `least_load` increases it.",
            unit="percentunit",
            highest=1,
            queries=[
                Query(
                    share(rate("pdproxy_tokens_total", 'kind="cached"'), rate("pdproxy_tokens_total", 'kind="prompt"')),
                    "cached",
                )
            ],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Eligible instances",
            description="Healthy instances by role (pdproxy_instance_up).",
            unit="none",
            queries=[
                Query(
                    f"sum by (role) ({gauge('pdproxy_instance_up', by='role, address', of=INSTANCES, over='max')})",
                    "{{role}}",
                )
            ],
            runbook="concepts/health.md#ejection",
        ),
        Panel(
            title="Second choices",
            description="Retries per second, by role (pdproxy_retries_total), and all requests sent to "
            "instances (pdproxy_instance_requests_total).",
            unit="reqps",
            queries=[
                Query(rate("pdproxy_retries_total", by="stage"), "{{stage}} again"),
                Query(_REQUESTS, "all {{role}}"),
            ],
            runbook="concepts/failures.md#failures",
        ),
    ],
    width=12,
)

_SESSIONS: Final = Row(
    "Conversations in the prefix caches",
    [
        Panel(
            title="Conversations",
            description="Sessions that keep their prefix in a cache, and turns that wait for room in one "
            "(pdproxy_resident_sessions, pdproxy_waiting_sessions).",
            unit="none",
            queries=[
                Query(gauge("pdproxy_resident_sessions"), "resident"),
                Query(gauge("pdproxy_waiting_sessions"), "waiting"),
            ],
            runbook="concepts/working-set.md#observe",
        ),
        Panel(
            title="How long turns waited",
            description="Time that turns of sessions waited for room in a prefix cache "
            "(pdproxy_session_wait_seconds). No data: no turn waited.",
            unit="s",
            queries=percentiles("pdproxy_session_wait_seconds"),
            runbook="concepts/working-set.md#observe",
            needs="balance.working_sets",
        ),
        Panel(
            title="Admitted after the longest wait",
            description="Turns per second that were admitted because they had waited for "
            "`admission.session_wait_seconds` (pdproxy_session_waits_overdue_total).",
            unit="ops",
            queries=[Query(rate("pdproxy_session_waits_overdue_total"), "overdue")],
            runbook="concepts/working-set.md#observe",
        ),
        Panel(
            title="Evicted before their next use",
            description="Prompt tokens per second that sessions should have found in caches, and those that were "
            "evicted before (pdproxy_resident_tokens_total).",
            unit="short",
            queries=[Query(rate("pdproxy_resident_tokens_total", by="kind"), "{{kind}}")],
            runbook="concepts/working-set.md#observe",
        ),
    ],
    width=6,
)

_CAPACITY: Final = Row(
    "Instances by demand",
    [
        Panel(
            title="Desired instances",
            description="Instances of each role that the demand of the last minute needs "
            "(pdproxy_desired_instances), for autoscalers.",
            unit="none",
            queries=[Query(gauge("pdproxy_desired_instances", by="role", over="max"), "{{role}}")],
            runbook="guides/elastic-roles.md#scale-engines-by-demand",
        ),
        Panel(
            title="Moves between roles",
            description="Moves of elastic instances per hour, by new role and result (pdproxy_role_moves_total).",
            unit="none",
            queries=[
                Query(
                    f"sum by (role, result) (increase(pdproxy_role_moves_total{{{GATEWAY}}}[1h]))",
                    "to {{role}} {{result}}",
                )
            ],
            runbook="guides/elastic-roles.md#let-pdproxy-choose-the-roles",
        ),
    ],
    width=12,
)

CHOOSING: Final = Dashboard(
    name="choosing",
    title="pdproxy / Choosing and queue",
    description="Distribution of requests over the instances, and the queue.",
    variables=[JOB, GATEWAYS, ROLE, ADDRESS],
    rows=[_QUEUE, _CHOICE, PREDICTIONS, _SESSIONS, _CAPACITY],
)
