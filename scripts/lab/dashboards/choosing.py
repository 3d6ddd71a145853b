"""How well requests are spread over the instances, and who waits."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import (
    ADDRESS,
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
        description=f"Choices of an instance of role {role}, per second, by reason (pdproxy_choices_total), such as "
        "the prompt in its cache, being soonest done, being one of several equal ones, or the only candidate.",
        unit="ops",
        width=12,
        stacked=True,
        queries=[Query(rate("pdproxy_choices_total", f'role="{role}"', by="reason"), "{{reason}}")],
        runbook="how-it-chooses",
    )


_KNEES: Final = gauge("pdproxy_instance_knee", by="address", of=INSTANCES, over="max")

PREDICTIONS: Final = Row(
    "What is predicted, and why",
    [
        _reasons("prefill"),
        _reasons("decode"),
        Panel(
            title="Prefills: taken over predicted",
            description="What prefills took over what was predicted when their prefillers were chosen "
            "(pdproxy_prefill_prediction_ratio). 1 is right; steadily elsewhere, prefillers do something else besides, "
            "or their speed changes.",
            unit="none",
            decimals=2,
            queries=percentiles("pdproxy_prefill_prediction_ratio"),
            runbook="how-it-chooses",
        ),
        Panel(
            title="Cached tokens: predicted and found",
            description="Prompt tokens per second that prefillers were thought to have cached, and those that they "
            "had, as far as they tell (pdproxy_prefill_hit_tokens_total). Far fewer found than predicted: caches are "
            "smaller than thought, or switched off.",
            unit="short",
            queries=[Query(rate("pdproxy_prefill_hit_tokens_total", by="kind"), "{{kind}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            title="What requests wait for",
            description="Requests that had to wait, per second, by what for (pdproxy_queue_waits_total): room at an "
            "instance of a role, a better prefiller than those with room, or others before them.",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_queue_waits_total", by="reason"), "{{reason}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            title="Knees of decoders",
            description="Answers at a time beyond which a decoder was seen to make fewer tokens a second, so that it "
            "gets no more (pdproxy_instance_knee).",
            unit="none",
            queries=[Query(f'{_KNEES} or label_replace(vector(0), "address", "none seen", "", "")', "{{address}}")],
            runbook="how-it-chooses",
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
            description="Requests that wait for an instance with room (pdproxy_queued_requests). "
            "`admission.max_waiting` bounds each worker's.",
            unit="none",
            queries=[Query(gauge("pdproxy_queued_requests", by="instance"), "{{instance}}")],
            runbook="overload",
        ),
        Panel(
            title="How long they waited",
            description="Time in the queue, of those that had to wait (pdproxy_queue_seconds).",
            unit="s",
            queries=percentiles("pdproxy_queue_seconds"),
            runbook="overload",
        ),
        Panel(
            title="How many had to wait",
            description="Share of generation requests that waited at all (pdproxy_queue_seconds over "
            "pdproxy_requests_total). Near 1 the fleet is full: add instances of the role that is.",
            unit="percentunit",
            queries=[
                Query(share(rate("pdproxy_queue_seconds_count"), rate("pdproxy_requests_total", GENERATES)), "waited")
            ],
            runbook="overload",
        ),
        Panel(
            title="Waiting, how many how long",
            description="Requests that had to wait, by the time they did (pdproxy_queue_seconds).",
            kind="heatmap",
            unit="s",
            width=12,
            lowest=None,
            queries=buckets("pdproxy_queue_seconds"),
        ),
        Panel(
            title="Refused for lack of room",
            description="Requests per second that were 503 because the queue was full, the wait too long, or "
            "connections, buffers or memory were used up; and 429 for limits of a client's key "
            "(pdproxy_rejected_total).",
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
            runbook="pdproxyqueuerefuses",
        ),
    ],
)


def _share_of_each(role: str) -> Panel:
    picks = rate("pdproxy_instance_requests_total", f'role="{role}",address=~"$address"', by="address")
    all_picks = rate("pdproxy_instance_requests_total", f'role="{role}",address=~"$address"')
    return Panel(
        title=f"Share of each instance: {role}",
        description=f"Of the requests that instances of role {role} were sent (pdproxy_instance_requests_total). "
        "Under `least_tokens` those with longer prompts or answers get fewer; under `least_load` those "
        "with the cache get more.",
        unit="percentunit",
        highest=1,
        stacked=True,
        queries=[Query(f"{picks} / scalar({all_picks} > 0)", "{{address}}")],
        runbook="how-it-chooses",
    )


_CHOICE: Final = Row(
    "The choice",
    [
        _share_of_each("prefill"),
        _share_of_each("decode"),
        Panel(
            width=8,
            title="Uneven: requests in flight",
            description="Standard deviation over mean of the requests in flight among the instances of a role that "
            "are up (pdproxy_instance_inflight): 0 is even, 1 is one of two with everything. Few "
            "requests are never even.",
            unit="none",
            decimals=2,
            queries=[Query(_spread("pdproxy_instance_inflight"), "{{role}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            width=8,
            title="Uneven: estimated load",
            description="The same of the tokens being worked on and held as KV cache (pdproxy_instance_load_tokens), "
            "which is what `least_tokens` levels.",
            unit="none",
            decimals=2,
            queries=[Query(_spread("pdproxy_instance_load_tokens"), "{{role}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            width=8,
            title="Found in the prefix cache",
            description="Share of prompt tokens that engines found in their cache (pdproxy_tokens_total): what a "
            "choice by `least_load` is to raise.",
            unit="percentunit",
            highest=1,
            queries=[
                Query(
                    share(rate("pdproxy_tokens_total", 'kind="cached"'), rate("pdproxy_tokens_total", 'kind="prompt"')),
                    "cached",
                )
            ],
            runbook="how-it-chooses",
        ),
        Panel(
            title="Eligible instances",
            description="Instances that are up, by role (pdproxy_instance_up): what there is to choose from.",
            unit="none",
            queries=[
                Query(
                    f"sum by (role) ({gauge('pdproxy_instance_up', by='role, address', of=INSTANCES, over='max')})",
                    "{{role}}",
                )
            ],
            runbook="health-and-ejection",
        ),
        Panel(
            title="Second choices",
            description="Requests that were sent to another instance after a failure, per second, by role "
            "(pdproxy_retries_total), beside all that were sent (pdproxy_instance_requests_total).",
            unit="reqps",
            queries=[
                Query(rate("pdproxy_retries_total", by="stage"), "{{stage}} again"),
                Query(_REQUESTS, "all {{role}}"),
            ],
            runbook="what-fails-and-what-happens",
        ),
    ],
    width=12,
)

CHOOSING: Final = Dashboard(
    name="choosing",
    title="pdproxy / Choosing and queue",
    description="How well requests are spread over the instances, and who waits.",
    variables=[JOB, GATEWAYS, ROLE, ADDRESS],
    rows=[_QUEUE, _CHOICE, PREDICTIONS],
)
