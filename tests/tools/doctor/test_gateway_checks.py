"""The gateway's own host and configuration: what an operator overlooks there is named."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from proxy.settings import Settings, load_settings
from proxy.tools.doctor.command import _fetch_learned_limits
from proxy.tools.doctor.findings import Finding, Severity
from proxy.tools.doctor.gateway import GatewayHost, check_gateway

PAGE = b"""# TYPE pdproxy_instance_knee gauge
pdproxy_instance_knee{address="10.0.0.2:8200",role="decode"} 8.0
"""
ENGINES = ("--prefill", "127.0.0.1:7100", "--decode", "127.0.0.1:7200")


def check(
    *flags: str, environ: Mapping[str, str] | None = None, cores: int = 4, is_gateway: bool = False
) -> list[Finding]:
    loaded = load_settings([*ENGINES, *flags], {"PROXY_LISTEN__PORT": "0", **(environ or {})})
    return check_gateway(GatewayHost(loaded=loaded, is_gateway=lambda host, port: is_gateway, cores=cores))


def bad(found: list[Finding]) -> list[tuple[str, Severity]]:
    assert all(finding.hint for finding in found if finding.severity > Severity.NOTE)
    return [(finding.check, finding.severity) for finding in found if finding.severity > Severity.NOTE]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_valid_configuration_is_reported() -> None:
    (found,) = check()
    assert found.severity is Severity.OK


@pytest.mark.parametrize("name", ["PROXY_LISTEN_PORT", "PROXY_CONECTOR", "PROXY_WORKER"])
def test_misspelt_environment_variable_is_reported(name: str) -> None:
    found = check(environ={name: "1"})
    assert bad(found) == [("environment", Severity.WARNING)]
    assert name in found[0].words


def test_missing_client_keys_are_reported() -> None:
    assert ("keys", Severity.WARNING) in bad(check("--host", "0.0.0.0"))


def test_port_of_another_program_is_reported(taken_port: int) -> None:
    assert bad(check("--port", str(taken_port))) == [("port", Severity.FAILURE)]


def test_running_gateway_is_no_problem(taken_port: int) -> None:
    found = check("--port", str(taken_port), is_gateway=True)
    assert bad(found) == []
    assert "port" in {finding.check for finding in found}


def test_learned_limits_of_a_running_gateway_are_reported(taken_port: int) -> None:
    loaded = load_settings([*ENGINES, "--port", str(taken_port)], {})
    host = GatewayHost(
        loaded=loaded,
        is_gateway=lambda host, port: True,
        cores=4,
        learned_limits=lambda host, port: {"10.0.0.2:8200": 8} if port == taken_port else {},
    )
    (finding,) = [finding for finding in check_gateway(host) if finding.check == "learned"]
    assert finding.severity is Severity.NOTE
    assert finding.subject == "decode 10.0.0.2:8200"
    assert "at most 8 requests" in finding.words


@pytest.mark.parametrize("page", [b"", PAGE])
def test_learned_limits_are_read_from_the_metrics_of_a_gateway(page: bytes) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.handle_request)
        assert _fetch_learned_limits(Settings(), "127.0.0.1", server.server_port) == (
            {"10.0.0.2:8200": 8} if page else {}
        )
    assert _fetch_learned_limits(Settings(), "127.0.0.1", server.server_port) == {}, "nobody answers"


def test_address_of_another_host_is_reported() -> None:
    found = check("--host", "192.0.2.1", "--port", "1999")
    assert ("port", Severity.FAILURE) in bad(found)


def test_too_few_file_descriptors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert bad(check()) == [("fds", Severity.WARNING)]


def test_more_workers_than_cores_are_reported() -> None:
    assert bad(check("--workers", "4", cores=2)) == [("workers", Severity.WARNING)]


@pytest.mark.parametrize(("mode", "expected"), [(0o644, [("keys", Severity.WARNING)]), (0o600, [])])
def test_world_readable_key_file_is_reported(tmp_path: Path, mode: int, expected: list[tuple[str, Severity]]) -> None:
    path = tmp_path / "admin-key"
    path.write_text("sk-admin")
    path.chmod(mode)
    found = check(environ={"PROXY_AUTH__ADMIN_KEY_FILE": str(path)})
    assert bad(found) == expected
    assert not any("sk-admin" in finding.words + finding.hint for finding in found)


def test_equal_engine_and_admin_keys_are_reported() -> None:
    keys = {"PROXY_AUTH__ADMIN_KEY": "sk-the-same", "OPENAI_API_KEY": "sk-the-same"}
    assert bad(check(environ=keys)) == [("keys", Severity.WARNING)]
