"""Reverse proxies beside the gateway, with the configuration of docs/guides/reverse-proxy.md and with a default one.

The proxies run as another user, like their packages.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import textwrap
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.scenarios.program import gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.scenarios.program import Program

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "reverse-proxy.md"
USER: Final = 65534
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"

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
_CADDY: Final = "{{\nadmin off\nauto_https off\n}}\n{text}\n"

# The frame of each configuration, and the arguments of the proxy.
PROXIES: Final = {
    "nginx": (_NGINX, ("-c", "{file}", "-p", "{folder}")),
    "haproxy": ("{text}\n", ("-db", "-f", "{file}")),
    "caddy": (_CADDY, ("run", "--adapter", "caddyfile", "--config", "{file}")),
}

# The shortest configuration with which each proxy forwards everything.
STOCK: Final = {
    "nginx": "server { listen 8080; location / { proxy_pass http://127.0.0.1:1999; } }",
    "haproxy": "listen all\n mode http\n bind :8080\n timeout connect 5s\n timeout client 50s\n timeout server 50s\n"
    " server one 127.0.0.1:1999",
    "caddy": ":8080 {\n reverse_proxy 127.0.0.1:1999\n}",
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
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- not run: tests/smuggling/.*\n\n((?:    .*\n)+)", text, re.MULTILINE)
    return dict(zip(PROXIES, map(textwrap.dedent, blocks), strict=True))


@asynccontextmanager
async def proxy(name: str, text: str, target: Program) -> AsyncIterator[str]:
    """Run a proxy with this configuration in front of this gateway. Yields its URL."""
    around, words = PROXIES[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = text.replace("127.0.0.1:1999", target.url.removeprefix("http://"))
    text = text.replace(":8080", f"127.0.0.1:{port}" if name == "haproxy" else f":{port}")
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
    with directory_of_user() as folder:
        file = folder / "config"
        file.write_text(around.format(folder=folder, text=text))
        process = subprocess.Popen(  # noqa: ASYNC220 uvloop starts nothing as another user
            [shutil.which(name, path=PATH) or name, *(word.format(file=file, folder=folder) for word in words)],
            env={"HOME": str(folder), "PATH": PATH},
            user=USER,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with process:
            try:
                await until(lambda: process.poll() is not None or _listens(port), f"{name} to listen")
                assert process.returncode is None, f"{name} ended with exit code {process.returncode}"
                yield f"http://127.0.0.1:{port}"
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


async def disable(session: aiohttp.ClientSession, url: str, decoder: SimulatedEngine) -> tuple[int, str]:
    """Request to disable the only decoder. Return the status and the answer."""
    instance = {"type": "decode", "instances": f"127.0.0.1:{decoder.port}"}
    async with session.post(f"{url}/instances/disable", json=instance) as response:
        return response.status, await response.text()


@pytest.mark.fault(141)
async def test_default_proxy_of_another_user_cannot_administer(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    async with aiohttp.ClientSession() as session, proxy(name, STOCK[name], program) as url:
        status, answer = await disable(session, url, decoder)
        assert status == 403
        assert "admin_key_not_configured" in answer
        for path in ("/instances", "/admin/config", "/admin/requests/recent"):
            async with session.get(url + path) as response:
                assert response.status == 403
        for path in ("/readyz", "/metrics", "/healthcheck"):
            async with session.get(url + path) as response:
                assert response.status == 200
        status, _ = await disable(session, program.url, decoder)  # like the operator who started the gateway
        assert status == 200


async def test_trust_local_lets_a_proxy_administer_without_its_header(name: str, decoder: SimulatedEngine) -> None:
    engines = ("--connector", "plain", "--decode", decoder.url)
    async with (
        gateway(*engines, PROXY_ADMIN__TRUST_LOCAL="true") as trusting,
        aiohttp.ClientSession() as session,
        proxy(name, STOCK[name], trusting) as url,
    ):
        await trusting.says("every program on this host may administer")
        status, _ = await disable(session, url, decoder)
        assert status == (403 if name == "caddy" else 200)  # Caddy adds X-Forwarded-For


async def test_documented_proxy_streams_and_forwards_client_routes_only(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    decoder.faults.add("stall_after_tokens", tokens=3)
    async with aiohttp.ClientSession() as session, proxy(name, documented_configurations()[name], program) as url:
        body = request(Api.CHAT, max_tokens=20, stream=True)
        async with session.post(url + Api.CHAT.path, json=body) as response:
            assert response.status == 200
            events = 0
            while events < 3:  # events arrive without waiting for more
                events += (await response.content.readline()).startswith(b"data: ")
        status, _ = await disable(session, url, decoder)
        assert status == 404
        for path in ("/instances", "/admin/config", "/metrics", "/"):
            async with session.get(url + path) as response:
                assert response.status == 404
        for path in ("/readyz", "/v1/models"):
            async with session.get(url + path) as response:
                assert response.status == 200


async def test_client_that_leaves_a_documented_proxy_ends_its_answer(
    name: str, program: Program, decoder: SimulatedEngine
) -> None:
    async with aiohttp.ClientSession() as session, proxy(name, documented_configurations()[name], program) as url:
        body = request(Api.CHAT, max_tokens=50_000, ignore_eos=True, stream=True)
        async with session.post(url + Api.CHAT.path, json=body) as response:
            await response.content.readline()
        await decoder.wait_until(lambda state: not state.live)
