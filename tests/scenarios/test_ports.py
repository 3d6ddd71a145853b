"""Separate ports for administration and probes: the clients' port then serves neither."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import ask, read, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_stopping import DRAINING, is_ready, refuses_connections

PROBES = ("/livez", "/readyz", "/health", "/healthz", "/ping", "/healthcheck", "/version")
LOOKING = ("/metrics", "/instances")
CHANGING = ("/instances/add", "/instances/remove", "/reset_prefix_cache", "/admin/reload")


@pytest.fixture(params=["1", "2"])
async def program(site: Site, request: pytest.FixtureRequest) -> AsyncIterator[Program]:
    engines = (*site.engines, "--workers", request.param)
    async with gateway(*engines, PROXY_ADMIN__PORT="0", PROXY_ADMIN__PROBE_PORT="0") as program:
        await is_ready(site.session, program.url)
        yield program


async def admin_url(program: Program) -> str:
    return "http://" + (await program.says(r"operators on (\S+:\d+),"))[1]


async def probe_url(program: Program) -> str:
    return "http://" + (await program.says(r"probes on (\S+:\d+),"))[1]


async def status(session: aiohttp.ClientSession, method: str, url: str) -> int:
    async with session.request(method, url) as response:
        return response.status


async def test_each_port_has_its_own_routes(program: Program, session: aiohttp.ClientSession) -> None:
    admin, probes = await admin_url(program), await probe_url(program)
    for url in (program.url, admin):
        assert {path: await status(session, "GET", url + path) for path in PROBES} == dict.fromkeys(PROBES, 200)
    for path in LOOKING:
        assert await status(session, "GET", program.url + path) == 404
        assert await status(session, "GET", admin + path) == 200
    for path in CHANGING:
        assert await status(session, "POST", program.url + path) == 404
        assert await status(session, "POST", admin + path) == (400 if path.startswith("/instances") else 200)
    assert (await ask(session, program.url, request(Api.CHAT))).is_done
    assert await status(session, "POST", admin + Api.CHAT.path) == 404
    browser = {"Accept": "text/html"}
    for url, kind in ((program.url, "application/json"), (admin, "text/html")):
        async with session.get(url + "/", headers=browser) as answer:
            assert (answer.status, answer.content_type) == (200, kind), "the status page is for operators"
    async with asyncio.timeout(60):
        while await status(session, "GET", probes + "/readyz") != 200:
            pass
    assert await status(session, "GET", probes + "/metrics") == 404


async def test_start_logs_open_and_closed_ports(site: Site) -> None:
    engines = ("--host", "0.0.0.0", *site.engines)
    async with gateway(*engines) as program:
        await program.says("administration closed")
        await program.says("every client that can reach 0.0.0.0 is served")
        await program.says("administration is closed")
        url = program.url.replace("0.0.0.0", "127.0.0.1")
        assert await status(site.session, "GET", url + "/instances") == 403
        assert await status(site.session, "POST", url + "/instances/add") == 403
        assert await status(site.session, "GET", url + "/metrics") == 200
    async with gateway(*engines, PROXY_ADMIN__PORT="0") as program:
        await program.says("administration from this host only")
        assert await status(site.session, "GET", await admin_url(program) + "/instances") == 200
        assert "administration is closed" not in program.output


async def test_operators_are_served_while_clients_are_not_any_more(
    program: Program, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    admin, probes = await admin_url(program), await probe_url(program)
    decoder.faults.add("stall_after_tokens", tokens=3)
    async with session.post(program.url + Api.CHAT.path, json=request(Api.CHAT, stream=True)) as response:
        await response.content.readline()
        program.signal(signal.SIGTERM)
        await program.says(DRAINING)
        await refuses_connections(program)
        for url in (admin, probes):
            assert await status(session, "GET", url + "/livez") == 200
            async with asyncio.timeout(60):
                while await status(session, "GET", url + "/readyz") != 503:
                    pass
        async with session.get(admin + "/metrics") as metrics:
            assert 'pdproxy_inflight_requests{api="chat"} 1.0' in await metrics.text()
        program.signal(signal.SIGTERM)
        assert not (await read(response)).is_whole
    assert await program.ended() == 128 + signal.SIGTERM


async def test_health_command_finds_the_port_for_probes(site: Site, unused_tcp_port: int) -> None:
    environment = {"PROXY_ADMIN__PROBE_PORT": str(unused_tcp_port)}

    async def health() -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "health"),
            cwd=Path(__file__).parents[2],
            env={"PATH": "", **environment},
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait()

    assert await health() == 1
    async with gateway(*site.engines, **environment):
        assert await health() == 0
