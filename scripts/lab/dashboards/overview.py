"""Dashboard of health, traffic and latency."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import (
    ERROR_SHARE,
    GATEWAYS,
    GENERATES,
    JOB,
    buckets,
    gauge,
    percentiles,
    quantile,
    rate,
)

_LAG: Final = 0.25
_FIRING: Final = 'count(ALERTS{alertname=~"Pdproxy.+",alertstate="firing"}) or vector(0)'


def _healthy(title: str, role: str) -> Panel:
    up = gauge("pdproxy_instance_up", f'role="{role}"', by="address", over="max")
    return Panel(
        title=title,
        description=f"Healthy instances of role {role} (pdproxy_instance_up). With 0, requests are rejected with 503.",
        kind="stat",
        unit="none",
        queries=[Query(f"sum({up}) or vector(0)")],
        thresholds={0: "red", 1: "green"},
        runbook="troubleshooting/alerts.md#pdproxynohealthyinstance",
    )


_WELL: Final = Row(
    "Is it well?",
    [
        Panel(
            title="Requests",
            description="Finished generation requests per second (pdproxy_requests_total).",
            kind="stat",
            unit="reqps",
            queries=[Query(rate("pdproxy_requests_total", GENERATES))],
        ),
        Panel(
            title="Failed",
            description="Share of generation requests that ended with a 5xx, or whose answer broke off after its "
            "status had been sent (pdproxy_requests_total, pdproxy_streams_broken_total). Clients that "
            "left do not count.",
            kind="stat",
            unit="percentunit",
            decimals=2,
            queries=[Query(ERROR_SHARE)],
            thresholds={0.001: "orange", 0.0144: "red"},
            runbook="troubleshooting/alerts.md#pdproxyerrorbudgetburnfast",
        ),
        Panel(
            title="First token, p95",
            description="95th percentile of the time to the first token of streamed answers "
            "(pdproxy_time_to_first_token_seconds).",
            kind="stat",
            unit="s",
            queries=[Query(quantile(0.95, "pdproxy_time_to_first_token_seconds"))],
            thresholds={5: "orange", 10: "red"},
            runbook="troubleshooting/alerts.md#pdproxyfirsttokenslow",
        ),
        Panel(
            title="Between tokens, p95",
            description="95th percentile of the time between two parts of a streamed answer "
            "(pdproxy_inter_token_seconds, a sample).",
            kind="stat",
            unit="s",
            queries=[Query(quantile(0.95, "pdproxy_inter_token_seconds"))],
            thresholds={0.1: "orange", 0.2: "red"},
        ),
        _healthy("Prefillers up", "prefill"),
        _healthy("Decoders up", "decode"),
        Panel(
            title="Waiting",
            description="Requests in the queue (pdproxy_queued_requests).",
            kind="stat",
            unit="none",
            queries=[Query(gauge("pdproxy_queued_requests"))],
            thresholds={1: "yellow", 100: "orange"},
            runbook="troubleshooting/alerts.md#pdproxyqueuerefuses",
        ),
        Panel(
            title="Alerts",
            description="Firing alerts of configs/prometheus/alerts.yaml, for all gateways.",
            kind="stat",
            unit="none",
            queries=[Query(_FIRING)],
            thresholds={1: "red"},
            runbook="troubleshooting/alerts.md#alerts",
        ),
    ],
    width=3,
    height=4,
)

_STATE: Final = Row(
    "Status",
    [
        Panel(
            title="State",
            description="State of the gateway and its engines, as in `GET /admin/status` (pdproxy_status_state).",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=(("healthy", "green"), ("degraded", "yellow"), ("impaired", "orange"), ("down", "red")),
            queries=[Query(gauge("pdproxy_status_state", by="instance", over="max"), "{{instance}}")],
            runbook="operate/status.md#status",
        ),
        Panel(
            title="Reasons",
            description="Reasons why the gateway is not healthy, with their subjects (pdproxy_status_reason).",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=(("none", "green"), ("holds", "orange")),
            queries=[
                Query(
                    gauge("pdproxy_status_reason", by="code, subject", over="max")
                    + ' or label_replace(vector(0), "code", "no reason", "", "")',
                    "{{code}} {{subject}}",
                )
            ],
            runbook="operate/status.md#status",
        ),
    ],
    width=12,
    height=6,
)

_TRAFFIC: Final = Row(
    "Traffic",
    [
        Panel(
            title="Requests by API",
            description="Finished requests per second (pdproxy_requests_total).",
            unit="reqps",
            queries=[Query(rate("pdproxy_requests_total", by="api") + " > 0", "{{api}}")],
            stacked=True,
        ),
        Panel(
            title="Answers by status",
            description="Answers per second, by HTTP status (pdproxy_requests_total). 499: the client "
            "disconnected before a status was sent. An answer that broke off counts with the "
            "status that was sent.",
            unit="reqps",
            queries=[Query(rate("pdproxy_requests_total", GENERATES, by="code") + " > 0", "{{code}}")],
            stacked=True,
            runbook="reference/errors.md#errors",
        ),
        Panel(
            title="Tokens",
            description="Tokens per second as reported by engines: of prompts, cached, and generated "
            "(pdproxy_tokens_total). They are counted when the request ends.",
            unit="short",
            queries=[Query(rate("pdproxy_tokens_total", by="kind"), "{{kind}}")],
        ),
        Panel(
            title="In flight",
            description="Client requests in flight (pdproxy_inflight_requests).",
            unit="none",
            queries=[Query(gauge("pdproxy_inflight_requests", GENERATES, by="api"), "{{api}}")],
            stacked=True,
            runbook="troubleshooting/alerts.md#pdproxyrequestsstuck",
        ),
        Panel(
            title="How requests ended",
            description="Requests that did not complete normally (`--`), per second, by `term` "
            "(pdproxy_request_end_total). First letter: C, c client, S, s engine, P gateway, K drain; "
            "second: where.",
            unit="reqps",
            queries=[Query(rate("pdproxy_request_end_total", 'term!="--"', by="term") + " > 0", "{{term}}")],
            stacked=True,
            runbook="reference/access-log.md#log",
        ),
        Panel(
            title="Refused",
            description="Requests rejected before an engine was asked, per second, by reason (pdproxy_rejected_total).",
            unit="reqps",
            queries=[Query(rate("pdproxy_rejected_total", by="reason") + " > 0", "{{reason}}")],
            stacked=True,
            runbook="reference/errors.md#errors",
        ),
    ],
)

_LATENCY: Final = Row(
    "Latency, as clients see it",
    [
        Panel(
            title="First token",
            description="Time to the first token of streamed answers (pdproxy_time_to_first_token_seconds).",
            unit="s",
            queries=percentiles("pdproxy_time_to_first_token_seconds"),
            thresholds={10: "red"},
            runbook="troubleshooting/alerts.md#pdproxyfirsttokenslow",
        ),
        Panel(
            title="Between tokens",
            description="Time between two parts of a streamed answer (pdproxy_inter_token_seconds, one in eight).",
            unit="s",
            queries=percentiles("pdproxy_inter_token_seconds"),
        ),
        Panel(
            title="Whole answers",
            description="Time to the end of the answer (pdproxy_request_duration_seconds).",
            unit="s",
            queries=percentiles("pdproxy_request_duration_seconds"),
        ),
        Panel(
            title="First token, how many took how long",
            description="Distribution of the time to first token (pdproxy_time_to_first_token_seconds).",
            kind="heatmap",
            unit="s",
            width=12,
            lowest=None,
            queries=buckets("pdproxy_time_to_first_token_seconds"),
        ),
        Panel(
            title="First token by API, p95",
            description="95th percentile of the time to first token, by API (pdproxy_time_to_first_token_seconds).",
            unit="s",
            width=12,
            queries=[Query(quantile(0.95, "pdproxy_time_to_first_token_seconds", by="api"), "{{api}}")],
        ),
    ],
)

_GATEWAY: Final = Row(
    "The gateway itself",
    [
        Panel(
            title="CPU",
            description="CPU cores in use by all workers (pdproxy_cpu_seconds_total). A worker uses at most "
            "one core. If each worker is near one core, increase `workers`.",
            unit="none",
            queries=[Query(rate("pdproxy_cpu_seconds_total", by="instance"), "{{instance}}")],
        ),
        Panel(
            title="Memory",
            description="Resident memory of all workers (pdproxy_resident_memory_bytes).",
            unit="bytes",
            queries=[Query(gauge("pdproxy_resident_memory_bytes", by="instance"), "{{instance}}")],
        ),
        Panel(
            title="Event loop late",
            description="Maximum delay of the event loop of any worker in the last 15 s "
            "(pdproxy_loop_lag_seconds). All streams of this worker are delayed by this time.",
            unit="s",
            queries=[Query(gauge("pdproxy_loop_lag_seconds", by="instance", over="max"), "{{instance}}")],
            thresholds={_LAG: "red"},
            runbook="troubleshooting/alerts.md#pdproxyeventlooplate",
        ),
        Panel(
            title="Limits",
            description="Used memory as a share of the limit of the container or host, and the highest share "
            "of open files of any worker (pdproxy_memory_share, pdproxy_open_fds_share).",
            unit="percentunit",
            highest=1,
            queries=[
                Query(gauge("pdproxy_memory_share", over="max"), "memory"),
                Query(gauge("pdproxy_open_fds_share", over="max"), "open files"),
            ],
            thresholds={0.8: "orange", 0.92: "red"},
            runbook="troubleshooting/alerts.md#pdproxyoutofmemory",
        ),
        Panel(
            title="Client connections",
            description="Open connections of clients (pdproxy_connections). `listen.max_connections` bounds each "
            "worker's.",
            unit="none",
            queries=[Query(gauge("pdproxy_connections", by="instance"), "{{instance}}")],
        ),
        Panel(
            title="Workers",
            description="Worker processes that serve (pdproxy_workers).",
            unit="none",
            queries=[Query(gauge("pdproxy_workers", by="instance"), "{{instance}}")],
            runbook="troubleshooting/alerts.md#pdproxyworkerreplaced",
        ),
        Panel(
            title="Tokens wait",
            description="Time for which tokens wait for further ones of their stream (pdproxy_gather_seconds, "
            "stream.gather_seconds). Above 0 with `auto`: the workers are near one core. Increase `workers`.",
            unit="s",
            queries=[Query(gauge("pdproxy_gather_seconds", by="instance", over="max"), "{{instance}}")],
        ),
        Panel(
            title="Remembered prefixes",
            description="Keys of prompts' prefixes in memory, of about 110 bytes each (pdproxy_prefix_index_keys).",
            unit="short",
            queries=[Query(gauge("pdproxy_prefix_index_keys", by="instance"), "{{instance}}")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Version",
            description="Versions in use (pdproxy_build_info).",
            kind="table",
            unit="none",
            width=24,
            lowest=None,
            queries=[
                Query(
                    gauge("pdproxy_build_info", by="instance, version, compiled, python, aiohttp", over="max"),
                    column="is",
                )
            ],
        ),
    ],
    width=6,
)

OVERVIEW: Final = Dashboard(
    name="overview",
    title="pdproxy / Overview",
    description="Health, traffic and latency of the gateway.",
    variables=[JOB, GATEWAYS],
    rows=[_WELL, _STATE, _TRAFFIC, _LATENCY, _GATEWAY],
)
