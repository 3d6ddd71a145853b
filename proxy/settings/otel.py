"""Options from OpenTelemetry's environment variables, and the check for its SDK.

Names and meanings: opentelemetry.io/docs/specs/otel, "Environment Variable Specification" and "OTLP Exporter
Configuration". The SDK itself reads all other variables, such as headers, timeouts, certificates and the sampler.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from proxy.settings.mistakes import SettingsError, told
from proxy.settings.sources import Sourced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENDPOINT: Final = "tracing.endpoint"
_FULL: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_BASE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PATH: Final = "v1/traces"
_NEEDED: Final = "opentelemetry.exporter.otlp.proto.http"
_MISSING: Final = "is given, but the extra otel is not installed: pip install 'pdproxy[otel]'"


def from_otel(environ: Mapping[str, str]) -> Iterator[tuple[str, Sourced]]:
    """Return the collector's options if the environment names a collector for traces."""
    if _is(environ, "OTEL_SDK_DISABLED", "true") or _is(environ, "OTEL_TRACES_EXPORTER", "none"):
        return
    if full := environ.get(_FULL, "").strip():
        yield ENDPOINT, Sourced(full, _FULL)
    elif base := environ.get(_BASE, "").strip():
        yield ENDPOINT, Sourced(f"{base.rstrip('/')}/{_PATH}", _BASE)


def without_missing(values: Mapping[str, Sourced]) -> tuple[dict[str, Sourced], tuple[str, ...]]:
    """Return the options without tracing if the SDK is not installed, and warnings.

    Raises SettingsError if the gateway's own options ask for tracing.
    """
    found = values.get(ENDPOINT)
    if found is None or not found.value or is_installed():
        return dict(values), ()
    if found.origin not in (_FULL, _BASE):
        place = f"{found.origin}: {ENDPOINT}" if found.in_file else found.origin
        raise SettingsError(f"{place} {_MISSING}")
    kept = {option: value for option, value in values.items() if option != ENDPOINT}
    return kept, (f"{found.origin} {_MISSING}; nothing is traced",)


def other_protocol(environ: Mapping[str, str]) -> Iterator[str]:
    """Return a sentence about an unsupported protocol."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (value := environ.get(name, "").strip()) and value != "http/protobuf":
            yield f"{name} is {told(value)}, but traces are only sent as http/protobuf (port 4318 of most collectors)"
            return


def is_installed() -> bool:
    """Return whether the extra is installed."""
    try:
        return find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        return False


def _is(environ: Mapping[str, str], name: str, value: str) -> bool:
    return environ.get(name, "").strip().lower() == value
