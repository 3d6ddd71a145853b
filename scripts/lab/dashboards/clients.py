"""Dashboard of client keys and models."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import GATEWAYS, JOB, gauge, quantile, rate

_KEYS_FILE: Final = "Requires `auth.client_keys_file`."
_NEEDS_KEYS: Final = "auth.client_keys_file"

_KEYS: Final = Row(
    "Client keys",
    [
        Panel(
            title="Requests",
            description=f"Generation requests of each key per second (pdproxy_key_requests_total). {_KEYS_FILE}",
            unit="reqps",
            stacked=True,
            queries=[Query(rate("pdproxy_key_requests_total", by="key"), "{{key}}")],
            runbook="guides/client-keys.md#metrics",
            needs=_NEEDS_KEYS,
        ),
        Panel(
            title="In flight",
            description="Requests of each key in flight (pdproxy_key_inflight_requests). A key with most of them "
            f"makes the others wait. {_KEYS_FILE}",
            unit="none",
            stacked=True,
            queries=[Query(gauge("pdproxy_key_inflight_requests", by="key"), "{{key}}")],
            runbook="operate/status.md#status",
            needs=_NEEDS_KEYS,
        ),
        Panel(
            title="Not answered",
            description="Requests of each key per second that failed, were rejected, exceeded a limit, or were "
            f"left by their client (pdproxy_key_requests_total). {_KEYS_FILE}",
            unit="reqps",
            stacked=True,
            queries=[Query(rate("pdproxy_key_requests_total", 'result!="ok"', by="key, result"), "{{key}} {{result}}")],
            runbook="guides/client-keys.md#rate-limits",
            needs=_NEEDS_KEYS,
        ),
        Panel(
            title="Tokens",
            description="Tokens of each key per second: of prompts, cached, and generated "
            f"(pdproxy_key_tokens_total). {_KEYS_FILE}",
            unit="short",
            queries=[Query(rate("pdproxy_key_tokens_total", by="key, kind"), "{{key}} {{kind}}")],
            runbook="guides/client-keys.md#metrics",
            needs=_NEEDS_KEYS,
        ),
        Panel(
            title="First token, p95",
            description="95th percentile of the time to the first token, by key "
            f"(pdproxy_key_time_to_first_token_seconds). {_KEYS_FILE}",
            unit="s",
            queries=[Query(quantile(0.95, "pdproxy_key_time_to_first_token_seconds", by="key"), "{{key}}")],
            runbook="troubleshooting/alerts.md#pdproxyfirsttokenslow",
            needs=_NEEDS_KEYS,
        ),
        Panel(
            title="Time of engines",
            description="Seconds per second that engines of each role spent on the requests of a key "
            f"(pdproxy_key_engine_seconds_total). {_KEYS_FILE}",
            unit="none",
            queries=[Query(rate("pdproxy_key_engine_seconds_total", by="key, role"), "{{key}} {{role}}")],
            runbook="guides/client-keys.md#metrics",
            needs=_NEEDS_KEYS,
        ),
    ],
)

_MODELS: Final = Row(
    "Models",
    [
        Panel(
            title="Instances by model",
            description="Instances that may get requests for a model or an adapter, by role (pdproxy_model_instances).",
            unit="none",
            queries=[Query(gauge("pdproxy_model_instances", by="model, role", over="max"), "{{model}} {{role}}")],
            runbook="guides/models.md#metrics-and-operation",
        ),
        Panel(
            title="Requests by model",
            description="Generation requests per second, by model and status (pdproxy_model_requests_total). No data: "
            "all instances serve the same models.",
            unit="reqps",
            queries=[Query(rate("pdproxy_model_requests_total", by="model, code"), "{{model}} {{code}}")],
            runbook="guides/models.md#metrics-and-operation",
            needs="several models",
        ),
    ],
    width=12,
)

CLIENTS: Final = Dashboard(
    name="clients",
    title="pdproxy / Clients and models",
    description="Requests, tokens and limits of each client key, and requests of each model.",
    variables=[JOB, GATEWAYS],
    rows=[_KEYS, _MODELS],
)
