"""Dashboard of the configuration, of discovery, and of the other gateways."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Colour, Dashboard, Panel, Query, Row
from lab.dashboards.promql import GATEWAY, GATEWAYS, JOB, gauge, rate

_FAILED_OR_NOT: Final[tuple[tuple[str, Colour], ...]] = (("failed", "red"), ("ok", "green"))
_DISCOVERS: Final = "Requires `discovery` or `kubernetes`."
_NEEDS_DISCOVERY: Final = "discovery"
_SHARES: Final = "Requires `replicas.url`."
_NEEDS_REPLICAS: Final = "replicas.url"


def _age(of: str, by: str) -> str:
    return f"time() - ({gauge(of, by=by, over='max')} > 0)"


_CONFIGURATION: Final = Row(
    "Configuration",
    [
        Panel(
            title="Last reload",
            description="Whether the last reload was applied (pdproxy_config_last_reload_successful). The log has the "
            "reason for a rejection.",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=_FAILED_OR_NOT,
            queries=[Query(gauge("pdproxy_config_last_reload_successful", by="instance", over="min"), "{{instance}}")],
            runbook="troubleshooting/alerts.md#pdproxyreloadfailed",
        ),
        Panel(
            title="Reloads",
            description="Reloads of the configuration per hour, by result (pdproxy_config_reloads_total).",
            unit="none",
            queries=[Query(f"sum by (result) (increase(pdproxy_config_reloads_total{{{GATEWAY}}}[1h]))", "{{result}}")],
            runbook="guides/configuration.md#reload",
        ),
        Panel(
            title="Age",
            description="Age of the configuration in use (pdproxy_config_last_reload_success_timestamp_seconds).",
            unit="s",
            queries=[Query(_age("pdproxy_config_last_reload_success_timestamp_seconds", "instance"), "{{instance}}")],
            runbook="guides/configuration.md#reload",
        ),
        Panel(
            title="Certificates",
            description="Time until the certificate of a section expires "
            "(pdproxy_tls_certificate_expiry_timestamp_seconds). Requires a certificate, for example "
            "`listen.tls_cert`.",
            unit="s",
            lowest=None,
            thresholds={0: "red", 7 * 86_400: "orange", 30 * 86_400: "green"},
            queries=[
                Query(
                    gauge("pdproxy_tls_certificate_expiry_timestamp_seconds", by="instance, section", over="min")
                    + " - time()",
                    "{{instance}} {{section}}",
                )
            ],
            runbook="guides/tls.md#rotate-a-certificate",
            needs="listen.tls_cert",
        ),
    ],
    width=6,
)

_DISCOVERY: Final = Row(
    "Discovery",
    [
        Panel(
            title="Sources",
            description=f"Whether the last reading of a source succeeded (pdproxy_discovery_up). {_DISCOVERS}",
            kind="state-timeline",
            unit="none",
            lowest=None,
            states=_FAILED_OR_NOT,
            queries=[Query(gauge("pdproxy_discovery_up", by="source", over="min"), "{{source}}")],
            runbook="troubleshooting/alerts.md#pdproxydiscoveryfails",
            needs=_NEEDS_DISCOVERY,
        ),
        Panel(
            title="Instances",
            description="Instances in the last reading of a source, the fewest of all gateways "
            f"(pdproxy_discovery_instances). {_DISCOVERS}",
            unit="none",
            queries=[Query(gauge("pdproxy_discovery_instances", by="source", over="min"), "{{source}}")],
            runbook="guides/discovery.md#discovery",
            needs=_NEEDS_DISCOVERY,
        ),
        Panel(
            title="Failed readings",
            description=f"Failed readings of a source per second (pdproxy_discovery_failures_total). {_DISCOVERS}",
            unit="ops",
            queries=[Query(rate("pdproxy_discovery_failures_total", by="source"), "{{source}}")],
            runbook="guides/discovery.md#if-a-source-fails",
            needs=_NEEDS_DISCOVERY,
        ),
        Panel(
            title="Age of the last reading",
            description="Time since the last reading of a source "
            f"(pdproxy_discovery_last_success_timestamp_seconds). A file is read when it has changed. {_DISCOVERS}",
            unit="s",
            queries=[Query(_age("pdproxy_discovery_last_success_timestamp_seconds", "source"), "{{source}}")],
            runbook="guides/discovery.md#if-a-source-fails",
            needs=_NEEDS_DISCOVERY,
        ),
    ],
    width=6,
)

_REPLICAS: Final = Row(
    "Other gateways of the group",
    [
        Panel(
            title="Known gateways",
            description=f"Other gateways whose loads are known (pdproxy_replicas_peers). {_SHARES}",
            unit="none",
            queries=[Query(gauge("pdproxy_replicas_peers", by="instance", over="max"), "{{instance}}")],
            runbook="guides/several-gateways.md#several-gateways",
            needs=_NEEDS_REPLICAS,
        ),
        Panel(
            title="Exchanges",
            description=f"Exchanges with the store per second, by result (pdproxy_replicas_exchanges_total). {_SHARES}",
            unit="ops",
            queries=[Query(rate("pdproxy_replicas_exchanges_total", by="result"), "{{result}}")],
            runbook="guides/several-gateways.md#several-gateways",
            needs=_NEEDS_REPLICAS,
        ),
        Panel(
            title="Last answer of the store",
            description="Time since the last answer of the store "
            f"(pdproxy_replicas_last_exchange_timestamp_seconds). {_SHARES}",
            unit="s",
            queries=[Query(_age("pdproxy_replicas_last_exchange_timestamp_seconds", "instance"), "{{instance}}")],
            runbook="guides/several-gateways.md#several-gateways",
            needs=_NEEDS_REPLICAS,
        ),
        Panel(
            title="Messages",
            description="Messages about changes per second, sent (told) and received (heard) "
            f"(pdproxy_replicas_news_total). {_SHARES}",
            unit="ops",
            queries=[Query(rate("pdproxy_replicas_news_total", by="direction"), "{{direction}}")],
            runbook="guides/several-gateways.md#several-gateways",
            needs=_NEEDS_REPLICAS,
        ),
        Panel(
            title="Bytes of messages",
            description="Bytes of the messages about changes per second, sent (told) and received (heard) "
            f"(pdproxy_replicas_news_bytes_total). {_SHARES}",
            unit="Bps",
            queries=[Query(rate("pdproxy_replicas_news_bytes_total", by="direction"), "{{direction}}")],
            runbook="guides/several-gateways.md#several-gateways",
            needs=_NEEDS_REPLICAS,
        ),
    ],
)

CONFIGURATION: Final = Dashboard(
    name="configuration",
    title="pdproxy / Configuration and discovery",
    description="Reloads, certificates, sources of discovery, and the other gateways of the group.",
    variables=[JOB, GATEWAYS],
    rows=[_CONFIGURATION, _DISCOVERY, _REPLICAS],
)
