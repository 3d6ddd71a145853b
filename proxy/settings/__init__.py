"""All options of the gateway, and their loading: command line > environment > YAML file > default.

`load` is for programs; the models are for their parts.
"""

from proxy.common.endpoints import (
    Endpoint,
    canonical_host,
    is_literal,
    is_loopback,
    parse_endpoints,
    parse_models,
    plain_host,
    reachable,
)
from proxy.settings.client_keys import ClientKey, load_client_keys
from proxy.settings.connectors import CONNECTOR_TRAITS, ConnectorTraits
from proxy.settings.fleet import DnsName, parse_dns_name
from proxy.settings.kinds import DECODE_POLICIES, POLICIES
from proxy.settings.load import Loaded, load, to_yaml
from proxy.settings.mistakes import SettingsError
from proxy.settings.model import (
    MAX_BACKENDS,
    Admin,
    Admission,
    Auth,
    Balance,
    Cost,
    Drain,
    Fanout,
    HealthChecks,
    Joining,
    Kv,
    Leaving,
    Listen,
    Log,
    Retry,
    Settings,
    Streaming,
    Timeouts,
    Tracing,
)
from proxy.settings.sources import OPTIONS, SECRETS
from proxy.settings.yaml_file import read_yaml

__all__ = [
    "CONNECTOR_TRAITS",
    "DECODE_POLICIES",
    "MAX_BACKENDS",
    "OPTIONS",
    "POLICIES",
    "SECRETS",
    "Admin",
    "Admission",
    "Auth",
    "Balance",
    "ClientKey",
    "ConnectorTraits",
    "Cost",
    "DnsName",
    "Drain",
    "Endpoint",
    "Fanout",
    "HealthChecks",
    "Joining",
    "Kv",
    "Leaving",
    "Listen",
    "Loaded",
    "Log",
    "Retry",
    "Settings",
    "SettingsError",
    "Streaming",
    "Timeouts",
    "Tracing",
    "canonical_host",
    "is_literal",
    "is_loopback",
    "load",
    "load_client_keys",
    "parse_dns_name",
    "parse_endpoints",
    "parse_models",
    "plain_host",
    "reachable",
    "read_yaml",
    "to_yaml",
]
