"""Dashboard of the instances: state, traffic, load and failures of each."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import ADDRESS, GATEWAYS, INSTANCES, JOB, ROLE, gauge, rate, share

_EACH: Final = "role, address"
_LEGEND: Final = "{{role}} {{address}}"
# In the order of the numbers of pdproxy_instance_state.
STATES: Final = (
    ("unknown", "blue"),
    ("up", "green"),
    ("down", "red"),
    ("ejected", "orange"),
    ("on probation", "yellow"),
)


def _requests(where: str = "") -> str:
    return rate("pdproxy_instance_requests_total", where, by=_EACH, of=INSTANCES)


def _gauge(metric: str, where: str = "", over: str = "sum") -> str:
    return gauge(metric, where, by=_EACH, of=INSTANCES, over=over)


_FAILED: Final = _requests('result!~"ok|invalid_request"')

_STATE: Final = Row(
    "State",
    [
        Panel(
            title="State",
            description="Health of each instance (pdproxy_instance_state). Down: health checks fail. Ejected: "
            "requests fail although health checks succeed. On probation: one trial request is "
            "sent. This is the view of one worker; workers and gateways decide independently.",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=STATES,
            queries=[Query(_gauge("pdproxy_instance_state", over="max"), _LEGEND)],
            runbook="troubleshooting/alerts.md#pdproxyinstancedown",
        ),
        Panel(
            title="Now",
            description="All instances: up (pdproxy_instance_up), requests in flight, finished requests per "
            "second, share of failed requests, estimated tokens in computation and in the KV "
            "cache, failures since the last success.",
            kind="table",
            unit="short",
            lowest=None,
            queries=[
                Query(_gauge("pdproxy_instance_up", over="max"), column="Up", unit="bool_yes_no"),
                Query(_gauge("pdproxy_instance_inflight"), column="In flight", unit="none"),
                Query(_requests(), column="Requests", unit="reqps"),
                Query(
                    share(f"({_FAILED} or 0 * {_requests()})", _requests()),
                    column="Failed",
                    unit="percentunit",
                ),
                Query(_gauge("pdproxy_instance_load_tokens", 'kind="compute"'), column="Computing", unit="short"),
                Query(_gauge("pdproxy_instance_load_tokens", 'kind="kv"'), column="KV", unit="short"),
                Query(_gauge("pdproxy_instance_consecutive_failures", over="max"), column="Failures", unit="none"),
            ],
            runbook="concepts/health.md#ejection",
        ),
    ],
    width=24,
    height=10,
)

_TRAFFIC: Final = Row(
    "Traffic and load",
    [
        Panel(
            title="Requests",
            description="Finished requests of each instance per second (pdproxy_instance_requests_total).",
            unit="reqps",
            queries=[Query(_requests(), _LEGEND)],
        ),
        Panel(
            title="In flight",
            description="Requests in flight at each instance, from all gateways (pdproxy_instance_inflight).",
            unit="none",
            queries=[Query(_gauge("pdproxy_instance_inflight"), _LEGEND)],
        ),
        Panel(
            title="Load: computing",
            description="Estimated tokens in computation at each instance (pdproxy_instance_load_tokens). "
            "`least_tokens` balances them among prefillers.",
            unit="short",
            queries=[Query(_gauge("pdproxy_instance_load_tokens", 'kind="compute"'), _LEGEND)],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Load: KV cache",
            description="Estimated tokens in the KV cache of each instance (pdproxy_instance_load_tokens). "
            "`least_tokens` balances them among decoders.",
            unit="short",
            queries=[Query(_gauge("pdproxy_instance_load_tokens", 'kind="kv"'), _LEGEND)],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Streamed parts of answers",
            description="Parts of answers that each decoder streams per second "
            "(pdproxy_instance_tokens_per_second). Most engines send one token in each part.",
            unit="ops",
            queries=[Query(_gauge("pdproxy_instance_tokens_per_second"), _LEGEND)],
        ),
        Panel(
            title="Share of the KV cache in use",
            description="Estimated tokens in the KV cache of each instance, over the tokens that fit "
            "(pdproxy_instance_load_tokens, pdproxy_instance_kv_capacity_tokens). No data: the engine does not "
            "report its capacity.",
            unit="percentunit",
            queries=[
                Query(
                    share(
                        _gauge("pdproxy_instance_load_tokens", 'kind="kv"'),
                        _gauge("pdproxy_instance_kv_capacity_tokens", over="max"),
                    ),
                    _LEGEND,
                )
            ],
            runbook="operate/status.md#status",
            needs="an engine that reports its KV cache",
        ),
        Panel(
            title="Weight",
            description="Share of requests of each instance, in per cent of its full share "
            "(pdproxy_instance_weight). 0: the instance is disabled or drains. Between: it starts slowly.",
            unit="percent",
            highest=100,
            queries=[Query(_gauge("pdproxy_instance_weight", over="max"), _LEGEND)],
            runbook="concepts/health.md#ejection",
        ),
        Panel(
            title="Working set of prefillers",
            description="Tokens that conversations need in the cache of each prefiller, and the learned maximum, "
            "if there is one (pdproxy_instance_working_set_tokens).",
            unit="short",
            queries=[
                Query(
                    gauge("pdproxy_instance_working_set_tokens", by="role, address, kind", of=INSTANCES, over="max"),
                    "{{address}} {{kind}}",
                )
            ],
            runbook="concepts/working-set.md#observe",
        ),
    ],
    width=12,
)

_TROUBLE: Final = Row(
    "Trouble",
    [
        Panel(
            title="Failures",
            description="Failed requests of each instance per second, by failure "
            "(pdproxy_instance_requests_total). The gateway retries most of them on another "
            "instance.",
            unit="reqps",
            width=12,
            queries=[
                Query(
                    rate("pdproxy_instance_requests_total", 'result!="ok"', by="role, address, result", of=INSTANCES),
                    "{{role}} {{address}} {{result}}",
                )
            ],
            runbook="reference/errors.md#errors",
        ),
        Panel(
            title="Share that failed",
            description="Share of failed requests of each instance (pdproxy_instance_requests_total).",
            unit="percentunit",
            width=12,
            highest=1,
            queries=[Query(share(_FAILED, _requests()), _LEGEND)],
            runbook="concepts/health.md#ejection",
        ),
        Panel(
            title="Ejections",
            width=12,
            description="Ejections of each instance per hour, by cause (pdproxy_instance_ejected_total).",
            unit="none",
            queries=[
                Query(
                    f"sum by (role, address, reason) (increase(pdproxy_instance_ejected_total{{{INSTANCES}}}[1h])) > 0",
                    "{{role}} {{address}} {{reason}}",
                )
            ],
            runbook="troubleshooting/alerts.md#pdproxyinstanceflapping",
        ),
        Panel(
            title="Does not fit",
            width=12,
            description="Healthy instances that are incompatible with the others or with the gateway, by kind "
            "(pdproxy_instance_misfit), for example because of a wrong connector, model or key. "
            "The log has one warning for each.",
            unit="none",
            queries=[
                Query(
                    gauge("pdproxy_instance_misfit", by="role, address, kind", of=INSTANCES, over="max")
                    + ' or label_replace(vector(0), "kind", "none", "", "")',
                    "{{role}} {{address}} {{kind}}",
                )
            ],
            runbook="troubleshooting/alerts.md#pdproxyinstancemisfit",
        ),
        Panel(
            title="Pinned KV",
            description="Orphaned KV caches of each prefiller, which no decoder will fetch "
            "(pdproxy_instance_pinned_kv).",
            unit="none",
            width=12,
            queries=[Query(_gauge("pdproxy_instance_pinned_kv", over="max"), _LEGEND)],
            runbook="concepts/kv-cache.md#orphaned-kv-cache",
        ),
        Panel(
            title="Oldest pinned KV",
            description="Age of the oldest orphaned KV cache of each prefiller "
            "(pdproxy_instance_pinned_kv_oldest_seconds). The engine frees it when its lease ends.",
            unit="s",
            width=12,
            queries=[Query(_gauge("pdproxy_instance_pinned_kv_oldest_seconds", over="max"), _LEGEND)],
            runbook="concepts/kv-cache.md#orphaned-kv-cache",
        ),
    ],
)

INSTANCES_PAGE: Final = Dashboard(
    name="instances",
    title="pdproxy / Instances",
    description="State, traffic, load and failures of each instance.",
    variables=[JOB, GATEWAYS, ROLE, ADDRESS],
    rows=[_STATE, _TRAFFIC, _TROUBLE],
)
