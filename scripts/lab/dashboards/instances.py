"""State, traffic, load and failures of each instance."""

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


_FAILED: Final = _requests('result!="ok"')

_STATE: Final = Row(
    "State",
    [
        Panel(
            title="State",
            description="What health checks and requests say (pdproxy_instance_state). Down: health checks fail. "
            "Ejected: requests failed although health checks pass. On probation: one request is tried. "
            "Each gateway and worker judges for itself; this is one worker's view.",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=STATES,
            queries=[Query(_gauge("pdproxy_instance_state", over="max"), _LEGEND)],
            runbook="pdproxyinstancedown",
        ),
        Panel(
            title="Now",
            description="All instances at a glance: up (pdproxy_instance_up), requests in flight there, finished "
            "requests per second, share of them that failed, estimated tokens being worked on and held "
            "as KV cache, failures since the last success.",
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
            runbook="health-and-ejection",
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
            description="Requests sent to each instance that ended, per second (pdproxy_instance_requests_total).",
            unit="reqps",
            queries=[Query(_requests(), _LEGEND)],
        ),
        Panel(
            title="In flight",
            description="Requests that each instance works on (pdproxy_instance_inflight), of all gateways.",
            unit="none",
            queries=[Query(_gauge("pdproxy_instance_inflight"), _LEGEND)],
        ),
        Panel(
            title="Load: computing",
            description="Estimated tokens that each instance is working on (pdproxy_instance_load_tokens): what "
            "`least_tokens` levels among prefillers.",
            unit="short",
            queries=[Query(_gauge("pdproxy_instance_load_tokens", 'kind="compute"'), _LEGEND)],
            runbook="how-it-chooses",
        ),
        Panel(
            title="Load: KV cache",
            description="Estimated tokens that each instance holds as KV cache (pdproxy_instance_load_tokens): what "
            "`least_tokens` levels among decoders.",
            unit="short",
            queries=[Query(_gauge("pdproxy_instance_load_tokens", 'kind="kv"'), _LEGEND)],
            runbook="how-it-chooses",
        ),
    ],
    width=12,
)

_TROUBLE: Final = Row(
    "Trouble",
    [
        Panel(
            title="Failures",
            description="Requests that failed at each instance, per second, by failure "
            "(pdproxy_instance_requests_total). The gateway tries most of them again elsewhere.",
            unit="reqps",
            width=12,
            queries=[
                Query(
                    rate("pdproxy_instance_requests_total", 'result!="ok"', by="role, address, result", of=INSTANCES),
                    "{{role}} {{address}} {{result}}",
                )
            ],
            runbook="error-codes",
        ),
        Panel(
            title="Share that failed",
            description="Of the requests sent to each instance (pdproxy_instance_requests_total).",
            unit="percentunit",
            width=12,
            highest=1,
            queries=[Query(share(_FAILED, _requests()), _LEGEND)],
            runbook="health-and-ejection",
        ),
        Panel(
            title="Ejections",
            description="Times an instance was taken out because its requests failed, per hour, by cause "
            "(pdproxy_instance_ejected_total).",
            unit="none",
            queries=[
                Query(
                    f"sum by (role, address, reason) (increase(pdproxy_instance_ejected_total{{{INSTANCES}}}[1h])) > 0",
                    "{{role}} {{address}} {{reason}}",
                )
            ],
            runbook="pdproxyinstanceflapping",
        ),
        Panel(
            title="Does not fit",
            description="Instances that are well and still do not fit the others or the gateway, by kind "
            "(pdproxy_instance_misfit): a wrong connector, model or key. The log has one warning for "
            "each. 0: all fit.",
            unit="none",
            queries=[
                Query(
                    gauge("pdproxy_instance_misfit", by="role, address, kind", of=INSTANCES, over="max")
                    + ' or label_replace(vector(0), "kind", "none", "", "")',
                    "{{role}} {{address}} {{kind}}",
                )
            ],
            runbook="pdproxyinstancemisfit",
        ),
        Panel(
            title="Pinned KV",
            description="KV caches that a prefiller keeps although no decoder will fetch them, and the age of the "
            "oldest (pdproxy_instance_pinned_kv, pdproxy_instance_pinned_kv_oldest_seconds).",
            unit="none",
            queries=[Query(_gauge("pdproxy_instance_pinned_kv", over="max"), _LEGEND)],
            runbook="kv-cache-that-nobody-fetches",
        ),
    ],
)

INSTANCES_PAGE: Final = Dashboard(
    name="instances",
    title="pdproxy / Instances",
    description="Every instance by itself: its state, its traffic, its load and its failures.",
    variables=[JOB, GATEWAYS, ROLE, ADDRESS],
    rows=[_STATE, _TRAFFIC, _TROUBLE],
)
