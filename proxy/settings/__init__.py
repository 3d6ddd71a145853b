"""All options of the gateway, and their loading: command line > environment > YAML file > default.

`load` is for programs; the models are for their parts.
"""

from proxy.common.endpoints import (
    Endpoint,
    canonical_host,
    connectable_host,
    is_ip_address,
    is_loopback_host,
    parse_endpoints,
    parse_model_names,
    strip_host_brackets,
)
from proxy.settings.client_keys import ClientKey, load_client_keys
from proxy.settings.connectors import CONNECTOR_TRAITS, ConnectorTraits
from proxy.settings.fleet import DnsName, parse_dns_name
from proxy.settings.kinds import DECODE_POLICIES, POLICIES
from proxy.settings.load import LoadedSettings, load_settings, write_yaml
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
from proxy.settings.sources import OPTIONS, SECRET_OPTIONS
from proxy.settings.yaml_file import read_yaml

__all__ = [
    "CONNECTOR_TRAITS",
    "DECODE_POLICIES",
    "MAX_BACKENDS",
    "OPTIONS",
    "POLICIES",
    "SECRET_OPTIONS",
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
    "LoadedSettings",
    "Log",
    "Retry",
    "Settings",
    "SettingsError",
    "Streaming",
    "Timeouts",
    "Tracing",
    "canonical_host",
    "connectable_host",
    "is_ip_address",
    "is_loopback_host",
    "load_client_keys",
    "load_settings",
    "parse_dns_name",
    "parse_endpoints",
    "parse_model_names",
    "read_yaml",
    "strip_host_brackets",
    "write_yaml",
]
