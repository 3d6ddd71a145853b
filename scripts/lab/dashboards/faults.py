"""Dashboard of failures, their effect on clients, and recovered answers."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import ERROR_SHARE, GATEWAY, GATEWAYS, GENERATES, JOB, gauge, rate

_RESUMES: Final = rate("pdproxy_resumes_total")
_NOT_RESUMED: Final = rate("pdproxy_resume_failures_total")


_CLIENTS: Final = Row(
    "What clients saw",
    [
        Panel(
            title="Failed",
            description="Share of generation requests that ended with a 5xx, or whose answer broke off after its "
            "status had been sent (pdproxy_requests_total, pdproxy_streams_broken_total). Clients that "
            "left do not count.",
            unit="percentunit",
            queries=[Query(ERROR_SHARE, "failed")],
            thresholds={0.001: "orange", 0.0144: "red"},
            runbook="troubleshooting/alerts.md#pdproxyerrorbudgetburnfast",
        ),
        Panel(
            title="5xx",
            description="Answers of generation requests with a 5xx, per second (pdproxy_requests_total).",
            unit="reqps",
            stacked=True,
            queries=[Query(rate("pdproxy_requests_total", f'code=~"5..",{GENERATES}', by="code"), "{{code}}")],
            runbook="reference/errors.md#errors",
        ),
        Panel(
            title="Broken answers",
            description="Answers that ended early after their status had been sent, per second, by side and "
            "reason (pdproxy_streams_broken_total). `client left` is normal.",
            unit="reqps",
            stacked=True,
            queries=[Query(rate("pdproxy_streams_broken_total", by="side, reason"), "{{side}} {{reason}}")],
            runbook="troubleshooting/alerts.md#pdproxyanswerslost",
        ),
    ],
)

_SAVED: Final = Row(
    "What was saved",
    [
        Panel(
            title="Answers continued, by cause",
            description="Answers that lost their decoder and continued on another instance, per second, by "
            "cause (pdproxy_resumes_total). `recomputed`: decoders run out of KV cache; "
            "send them fewer requests, or give them more memory.",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_resumes_total", by="cause") + " > 0", "{{cause}}")],
            runbook="concepts/resume.md#how-it-works",
        ),
        Panel(
            title="… by what was done",
            description="The same by how they were continued (pdproxy_resumes_total).",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_resumes_total", by="action") + " > 0", "{{action}}")],
            runbook="concepts/resume.md#how-it-works",
        ),
        Panel(
            title="Saved and lost",
            description="Answers that continued after a failure, and answers that could not be continued "
            "(pdproxy_resumes_total, pdproxy_resume_failures_total).",
            unit="ops",
            queries=[Query(_RESUMES, "continued"), Query(_NOT_RESUMED, "lost")],
            runbook="troubleshooting/alerts.md#pdproxyanswerslost",
        ),
        Panel(
            title="Prefilled again",
            description="Tokens per second that were prefilled again to continue answers "
            "(pdproxy_resumed_tokens_total).",
            unit="short",
            queries=[Query(rate("pdproxy_resumed_tokens_total"), "tokens")],
            runbook="concepts/resume.md#how-it-works",
        ),
        Panel(
            title="Sent again, by failure",
            description="Retries per second, by role and by cause (pdproxy_retries_total).",
            unit="ops",
            width=8,
            stacked=True,
            queries=[Query(rate("pdproxy_retries_total", by="stage, reason") + " > 0", "{{stage}} {{reason}}")],
            runbook="concepts/failures.md#failures",
        ),
        Panel(
            title="Not sent again",
            description="Requests per second that failed because the retry budget was exhausted "
            "(pdproxy_retry_budget_exhausted_total) or that were stopped because engines went "
            "down while serving them (pdproxy_suspect_requests_total).",
            unit="ops",
            width=8,
            queries=[
                Query(rate("pdproxy_retry_budget_exhausted_total"), "retry budget"),
                Query(rate("pdproxy_suspect_requests_total"), "suspect"),
            ],
            runbook="troubleshooting/alerts.md#pdproxyretrybudgetexhausted",
        ),
        Panel(
            title="Answers requested again without streaming",
            description="Answers per second whose stream lost a tool call or broke its arguments "
            "(pdproxy_whole_answers_repeated_total).",
            unit="ops",
            width=8,
            queries=[Query(rate("pdproxy_whole_answers_repeated_total"), "requested again")],
        ),
    ],
    width=6,
)

_CAUSES: Final = Row(
    "Where it came from",
    [
        Panel(
            title="Ejections",
            description="Ejections of instances per second, by cause (pdproxy_instance_ejected_total).",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_instance_ejected_total", by="role, reason"), "{{role}} {{reason}}")],
            runbook="troubleshooting/alerts.md#pdproxyinstanceflapping",
        ),
        Panel(
            title="Odd engines",
            description="Failed look-ups of instance names, and invalid events in engine streams, per second "
            "(pdproxy_dns_errors_total, pdproxy_sse_bad_events_total).",
            unit="ops",
            queries=[
                Query(rate("pdproxy_dns_errors_total"), "name look-ups"),
                Query(rate("pdproxy_sse_bad_events_total"), "bad events"),
            ],
            runbook="troubleshooting/alerts.md#pdproxynamelookupsfail",
        ),
        Panel(
            title="Odd clients",
            description="Requests that were not valid HTTP (pdproxy_http_parse_errors_total), failed TLS handshakes "
            "(pdproxy_tls_handshake_failures_total), and answers whose client disconnected or stopped reading, per "
            "second (pdproxy_streams_broken_total).",
            unit="ops",
            queries=[
                Query(rate("pdproxy_http_parse_errors_total"), "malformed"),
                Query(rate("pdproxy_tls_handshake_failures_total"), "TLS handshake"),
                Query(rate("pdproxy_streams_broken_total", 'side="client"', by="reason"), "{{reason}}"),
            ],
            runbook="reference/errors.md#errors",
        ),
        Panel(
            title="Canaries",
            description="Canary prompts per second, by result (pdproxy_canaries_total). Enabled by "
            "`doctor.every_seconds`.",
            unit="ops",
            stacked=True,
            queries=[Query(rate("pdproxy_canaries_total", by="result"), "{{result}}")],
            runbook="troubleshooting/alerts.md#pdproxycanaryfails",
        ),
        Panel(
            title="Workers replaced",
            description="Workers per hour that were replaced because they exited or were blocked "
            "(pdproxy_worker_replacements_total).",
            unit="none",
            queries=[
                Query(f"sum by (reason) (increase(pdproxy_worker_replacements_total{{{GATEWAY}}}[1h]))", "{{reason}}")
            ],
            runbook="troubleshooting/alerts.md#pdproxyworkerreplaced",
        ),
        Panel(
            title="Background loops restarted",
            description="Restarts of background loops after an unexpected error, per second "
            "(pdproxy_background_restarts_total). The log has the error.",
            unit="ops",
            queries=[Query(rate("pdproxy_background_restarts_total", by="loop"), "{{loop}}")],
            runbook="troubleshooting/index.md#find-the-cause-of-an-incident",
        ),
        Panel(
            title="Log lines not written",
            description="Log lines per second that were dropped because the log consumer cannot keep up, or "
            "left out because of the rate limit (pdproxy_log_lines_dropped_total, "
            "pdproxy_log_lines_suppressed_total).",
            unit="ops",
            queries=[
                Query(rate("pdproxy_log_lines_dropped_total"), "dropped"),
                Query(rate("pdproxy_log_lines_suppressed_total"), "suppressed"),
            ],
            runbook="troubleshooting/alerts.md#pdproxyloglinesdropped",
        ),
        Panel(
            title="Measures against overload",
            description="Measures against memory shortage (pdproxy_overload_state). 0: none. 1: connections "
            "are closed after each answer. 2: new requests are rejected.",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=[("none", "green"), ("closes connections", "orange"), ("refuses", "red")],
            queries=[Query(gauge("pdproxy_overload_state", by="instance", over="max"), "{{instance}}")],
            runbook="troubleshooting/alerts.md#pdproxyoutofmemory",
        ),
    ],
    width=6,
)

FAULTS: Final = Dashboard(
    name="faults",
    title="pdproxy / Resume and faults",
    description="Failures, their effect on clients, and recovered answers.",
    variables=[JOB, GATEWAYS],
    rows=[_CLIENTS, _SAVED, _CAUSES],
)
