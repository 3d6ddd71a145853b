"""Reverse proxies beside the gateway, with the configuration of docs/guides/reverse-proxy.md and with a default one.

The proxies run as another user, like their packages.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import yaml
from yarl import URL

from lab.test_docs import Kind, blocks
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.certificates import Certificates
from tests.scenarios.program import Program, gateway
from tests.smuggling.fronts import ARGUMENTS

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/guides/reverse-proxy.md"
USER: Final = 65534
# scripts/test-smuggling installs Envoy in the first one.
PATH: Final = f"{ROOT}/.venv-envoy/envoy/_bin:/usr/sbin:/usr/bin:/sbin:/bin"

_NGINX: Final = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/log crit;
events {{ worker_connections 64; }}
http {{
access_log off;
client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
{text}
}}
"""
_CADDY: Final = "{{\nadmin off\nauto_https off\ndefault_bind 127.0.0.1\n}}\n{text}\n"

_FRAMES: Final = {"nginx": _NGINX, "haproxy": "{text}\n", "caddy": _CADDY, "envoy": "{text}\n"}
# The frame of each configuration, and the arguments of the proxy.
PROXIES: Final = {name: (frame, ARGUMENTS[name]) for name, frame in _FRAMES.items()}

_STOCK_ENVOY: Final = """
static_resources:
  listeners:
    - address: { socket_address: { address: 127.0.0.1, port_value: 8080 } }
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: all
                route_config:
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes: [{ match: { prefix: / }, route: { cluster: all } }]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: all
      load_assignment:
        cluster_name: all
        endpoints:
          - lb_endpoints:
              - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: 1999 } } }
"""  # noqa: E501

# The shortest configuration with which each proxy forwards everything.
STOCK: Final = {
    "nginx": "server { listen 127.0.0.1:8080; location / { proxy_pass http://127.0.0.1:1999; } }",
    "haproxy": "listen all\n mode http\n bind 127.0.0.1:8080\n timeout connect 5s\n timeout client 50s\n"
    " timeout server 50s\n server one 127.0.0.1:1999",
    "caddy": "http://127.0.0.1:8080 {\n reverse_proxy 127.0.0.1:1999\n}",
    "envoy": _STOCK_ENVOY,
}

# The parts of the page's configurations that a test replaces, with their values. `{port}` is the port of the proxy.
PLACES: Final = {
    "listen 443": "listen 127.0.0.1:{port}",
    "bind :443": "bind 127.0.0.1:{port}",
    "llm.example.com {{": "https://localhost:{port} {{",
    "address: 0.0.0.0, port_value: 443": "address: 127.0.0.1, port_value: {port}",
    "/etc/pdproxy/": "{folder}/",
    "127.0.0.1:1999": "127.0.0.1:{target}",
    "port_value: 1999": "port_value: {target}",
    "127.0.0.1:8080": "127.0.0.1:{port}",
    "port_value: 8080": "port_value: {port}",
}

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a proxy as another user"),
    pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name, marks=pytest.mark.skipif(not shutil.which(name, path=PATH), reason="it is not installed")
            )
            for name in PROXIES
        ],
    ),
]


def documented_configurations() -> dict[str, str]:
    """Return the configurations of the page, by proxy."""
    found = [
        block.text for block in blocks(PAGE.name, PAGE.read_text(encoding="utf-8")) if "smuggling" in block.note_text
    ]
    return dict(zip(("nginx", "caddy", "haproxy", "envoy"), found, strict=True))


@asynccontextmanager
async def proxy(name: str, text: str, target: Program) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Run a proxy with this configuration in front of this gateway. Yields a session for its URL, and the URL."""
    around, words = PROXIES[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with directory_of_user() as folder:
        certificates = Certificates(folder)
        certificate, key = certificates.issue("tls")
        shutil.copy(certificate, folder / "tls.crt")
        (folder / "tls.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
        values = {"port": port, "target": target.url.rpartition(":")[2], "folder": folder}
        for place, value in PLACES.items():
            text = text.replace(place.replace("{{", "{"), value.format(**values))
        file = folder / "config.yaml"  # Envoy reads no other name; the others read any
        file.write_text(around.format(folder=folder, text=text))
        # The directories above an environment of this project may be closed to other users.
        program = shutil.copy(shutil.which(name, path=PATH) or name, folder)
        process = subprocess.Popen(  # noqa: ASYNC220 uvloop starts nothing as another user
            [program, *(word.format(file=file, folder=folder) for word in words)],
            env={"HOME": str(folder), "PATH": PATH},
            user=USER,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with process:
            try:
                await until(lambda: process.poll() is not None or _listens(port), f"{name} to listen")
                assert process.returncode is None, f"{name} ended with exit code {process.returncode}"
                connector = aiohttp.TCPConnector(ssl=certificates.client())
                scheme = "https" if "tls." in text or "tls:" in text else "http"
                url = f"{scheme}://{'localhost' if scheme == 'https' else '127.0.0.1'}:{port}"
                async with aiohttp.ClientSession(url, connector=connector) as session:
                    yield session, url
            finally:
                process.kill()


@contextmanager
def directory_of_user() -> Iterator[Path]:
    """Create a directory that the proxies' user may write."""
    with tempfile.TemporaryDirectory(prefix="pdproxy-") as folder:
        os.chown(folder, USER, USER)
        yield Path(folder)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def decoder() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(role="decode", decode_step_ms=20.0, max_model_len=100_000) as engine:
        yield engine


@pytest.fixture
async def program(decoder: SimulatedEngine) -> AsyncIterator[Program]:
    async with (
        SimulatedEngine(role="prefill") as prefiller,
        gateway("--prefill", prefiller.url, "--decode", decoder.url) as program,
    ):
        await program.says("ready: ")
        yield program


async def disable(session: aiohttp.ClientSession, decoder: SimulatedEngine) -> tuple[int, str]:
    """Request to disable the only decoder. Return the status and the answer."""
    instance = {"type": "decode", "instances": f"127.0.0.1:{decoder.port}"}
    async with session.post("/instances/disable", json=instance) as response:
        return response.status, await response.text()


async def status_of(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as response:
        return response.status


@pytest.mark.fault(141)
async def test_default_proxy_of_another_user_cannot_administer(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    async with proxy(name, STOCK[name], program) as (session, _):
        status, answer = await disable(session, decoder)
        assert status == 403
        assert "admin_key_not_configured" in answer
        for path in ("/instances", "/admin/config", "/admin/requests/recent"):
            assert await status_of(session, path) == 403
        for path in ("/readyz", "/metrics", "/healthcheck"):
            assert await status_of(session, path) == 200
    async with aiohttp.ClientSession(program.url) as operator:
        status, _ = await disable(operator, decoder)
        assert status == 200


async def test_trust_local_lets_a_proxy_administer_without_its_header(name: str, decoder: SimulatedEngine) -> None:
    engines = ("--connector", "plain", "--decode", decoder.url)
    async with (
        gateway(*engines, PROXY_ADMIN__TRUST_LOCAL="true") as trusting,
        proxy(name, STOCK[name], trusting) as (session, _),
    ):
        await trusting.says("every program on this host may administer")
        status, _ = await disable(session, decoder)
        assert status == (200 if name in ("nginx", "haproxy") else 403)  # the others add X-Forwarded-For or -Proto


async def test_gateway_of_the_page_serves_administrators_only_on_their_port(
    name: str, decoder: SimulatedEngine, tmp_path: Path
) -> None:
    (block,) = (block for block in blocks(PAGE.name, PAGE.read_text(encoding="utf-8")) if block.kind is Kind.FILE)
    options = yaml.safe_load(block.text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        options["admin"]["port"] = free.getsockname()[1]
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({**options, "decode": [decoder.url]}))
    async with (
        gateway("--config", str(tmp_path / "gateway.yaml")) as program,
        aiohttp.ClientSession(f"http://127.0.0.1:{options['admin']['port']}") as operator,
        proxy(name, STOCK[name], program) as (session, _),
    ):
        for path in ("/instances", "/admin/config", "/metrics"):
            assert await status_of(session, path) == 404
            assert await status_of(operator, path) == 200


async def test_documented_proxy_streams_and_forwards_client_routes_only(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    decoder.faults.add("stall_after_tokens", tokens=3)
    async with proxy(name, documented_configurations()[name], program) as (session, _):
        body = request(Api.CHAT, max_tokens=20, stream=True)
        async with session.post(Api.CHAT.path, json=body) as response:
            assert response.status == 200
            events = 0
            while events < 3:  # events arrive without waiting for more
                events += (await response.content.readline()).startswith(b"data: ")
        status, _ = await disable(session, decoder)
        assert status == 404
        for path in ("/instances", "/admin/config", "/metrics", "/"):
            assert await status_of(session, path) == 404
        for path in ("/readyz", "/v1/models"):
            assert await status_of(session, path) == 200


async def test_paths_with_dots_do_not_lead_to_administration(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    async with proxy(name, documented_configurations()[name], program) as (session, url):
        for path in ("/v1/../instances", "/v1/%2e%2e/instances", "/v1//../../instances"):
            async with session.get(URL(url + path, encoded=True)) as response:
                assert response.status in (400, 404)


async def test_client_that_leaves_a_documented_proxy_ends_its_answer(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    async with proxy(name, documented_configurations()[name], program) as (session, _):
        body = request(Api.CHAT, max_tokens=50_000, ignore_eos=True, stream=True)
        async with session.post(Api.CHAT.path, json=body) as response:
            await response.content.readline()
        await decoder.wait_until(lambda state: not state.live)
