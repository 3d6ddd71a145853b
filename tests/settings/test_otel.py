"""OpenTelemetry's own variables name the collector, as users of other programs expect."""

from __future__ import annotations

import pytest

from proxy.settings import LoadedSettings, SettingsError, load_settings
from proxy.settings import sources as otel_settings

ENGINES = ["--prefill", "p:1", "--decode", "d:1"]
BASE, FULL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def loaded(**environ: str) -> LoadedSettings:
    return load_settings(ENGINES, environ)


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({BASE: "http://c:4318"}, "http://c:4318/v1/traces"),
        ({BASE: "http://c:4318/otlp/"}, "http://c:4318/otlp/v1/traces"),
        ({BASE: "http://c:4318", FULL: "https://other/here"}, "https://other/here"),
        ({BASE: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, None),
        ({BASE: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({BASE: "http://c:4318", "PROXY_TRACING__ENDPOINT": "http://mine/v1/traces"}, "http://mine/v1/traces"),
    ],
)
def test_variables_name_a_collector_unless_an_option_does(environ: dict[str, str], endpoint: str | None) -> None:
    assert loaded(**environ).settings.tracing.endpoint == endpoint


def test_origin_of_the_collector_endpoint_is_its_variable() -> None:
    assert loaded(**{BASE: "http://c:4318"}).origins["tracing.endpoint"] == BASE


@pytest.mark.parametrize("url", ["c:4318", "grpc://c:4317", "http://", "http://a b"])
def test_collector_is_a_url(url: str) -> None:
    with pytest.raises(SettingsError, match=r"PROXY_TRACING__ENDPOINT must be a URL like http://localhost:4318"):
        loaded(PROXY_TRACING__ENDPOINT=url)


def test_another_protocol_is_warned_about() -> None:
    assert loaded(**{BASE: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}).warnings == ()
    (warning,) = loaded(**{BASE: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).warnings
    assert warning.startswith("OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but traces are only sent as http/protobuf")
    assert loaded(OTEL_EXPORTER_OTLP_PROTOCOL="grpc").warnings == ()


def test_tracing_without_the_extra_is_an_error_for_options_and_a_warning_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel_settings, "_OTEL_MODULES", "opentelemetry.not_installed.at_all")
    with pytest.raises(SettingsError) as refused:
        loaded(PROXY_TRACING__ENDPOINT="http://c:4318/v1/traces")
    assert str(refused.value) == (
        "PROXY_TRACING__ENDPOINT is given, but the extra otel is not installed: pip install '.[otel]' in the checkout"
    )
    without = loaded(**{BASE: "http://c:4318"})
    assert without.settings.tracing.endpoint is None
    assert without.warnings == (
        (
            f"{BASE} is given, but the extra otel is not installed: pip install '.[otel]' in the checkout; "
            "nothing is traced"
        ),
    )
