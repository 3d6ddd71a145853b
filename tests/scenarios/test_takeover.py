"""Another process takes over from a running gateway, unnoticed by clients, probes and operators."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, ask, request, until
from tests.process.worker.test_service_manager import systemd
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_stopping import is_ready

BODY = request(Api.CHAT, stream=True, max_tokens=40)
STARTED = r"takeover: successor is started: process (\d+)"
# A program that receives the clients' socket in the way of systemd.
ACTIVATED = """\
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "pdproxy.socket"}
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with one connection for each request, because gateways here close idle connections at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


def newest(program: Program) -> int:
    """Return the ID of the last serving process: the first process if there was no takeover."""
    return int((re.findall(r"takeover: complete: process (\d+)", program.output) or [program.pid])[-1])


@asynccontextmanager
async def replaceable(*words: str, **options: Any) -> AsyncIterator[Program]:
    """Run a gateway and the processes that take over from it until the end of the block."""
    async with gateway(*words, **options) as program:
        try:
            yield program
        finally:
            for pid in map(int, re.findall(STARTED, program.output)):
                if is_there(pid):
                    os.kill(pid, signal.SIGKILL)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a zombie no longer counts as a process
        return file.read().rpartition(")")[2].split()[0] != "Z"


async def replace(program: Program) -> int:
    """Have the newest process start one, and wait until that has taken over; the old one."""
    old, count = newest(program), program.output.count("takeover: complete")
    os.kill(old, signal.SIGUSR2)
    await until(lambda: program.output.count("takeover: complete") > count, "a successor")
    return old


async def look(url: str, failures: list[str]) -> None:
    """Send the request on a new connection."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            await response.read()
            if response.status != 200:
                failures.append(f"{url} is {response.status}")
    except aiohttp.ClientError as error:
        failures.append(f"{url}: {error!r}")


@pytest.mark.fault(95)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_takeover_is_invisible_to_clients_and_operators(
    site: Site, pytestconfig: pytest.Config, workers: str
) -> None:
    ports = {"PROXY_ADMIN__PORT": "0", "PROXY_ADMIN__PROBE_PORT": "0"}
    words = (*site.engines, "--workers", workers)
    answers: list[Answer] = []
    failures: list[str] = []
    is_over = False

    async def client(program: Program, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not is_over:
                answers.append(await ask(session, program.url, BODY))

    async def onlooker(url: str) -> None:
        while not is_over:
            await look(url, failures)
            await asyncio.sleep(0.01)

    # Idle connections are closed after this long, and a request may be under way just then, as with any server.
    async with replaceable(*words, PROXY_DRAIN__NOT_READY_SECONDS="5", **ports) as program:
        places = [(await program.says(rf"{name} on (\S+?:\d+)"))[1] for name in ("operators", "probes")]
        await replace(program)  # from here on all workers are ready
        urls = [f"{program.url}/readyz", *(f"http://{place}/readyz" for place in places), f"http://{places[0]}/metrics"]
        tasks = [asyncio.create_task(client(program, keeps=bool(number % 2))) for number in range(8)]
        tasks += [asyncio.create_task(onlooker(url)) for url in urls]
        for _ in range(10 if pytestconfig.getoption("full") else 2):
            await replace(program)
        is_over = True
        await asyncio.gather(*tasks)
    text = await answer_alone(BODY)
    assert {(answer.status, answer.is_done, answer.text) for answer in answers} == {(200, True, text)}
    assert not failures
    assert "ERROR" not in program.output


async def test_connection_serves_one_more_request_after_a_takeover(site: Site) -> None:
    """Its last answer had begun before, and did not say that it would be the last."""
    long = request(Api.CHAT, stream=True, max_tokens=3000)
    async with (
        replaceable(*site.engines, PROXY_DRAIN__NOT_READY_SECONDS="1") as program,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session,
    ):
        await is_ready(session, program.url)
        async with session.post(program.url + Api.CHAT.path, json=long) as response:
            await response.content.readline()
            old = await replace(program)
            assert b"[DONE]" in await response.read()  # which takes longer than idle connections are kept
            assert "Connection" not in response.headers
        # At once, on the same connection.
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            assert response.headers["Connection"] == "close"
            assert b"[DONE]" in await response.read()
        await until(lambda: not is_there(old), "the end of the old process")


async def test_changes_at_run_time_survive_a_takeover(site: Site) -> None:
    async def instances() -> list[tuple[str, str, int]]:
        async with site.session.get(program.url + "/instances") as response:
            told = (await response.json())["instances"]
        return [(one["address"], one["membership"], one["weight"]) for one in told]

    def address(engine: SimulatedEngine) -> str:
        return f"127.0.0.1:{engine.port}"

    async with replaceable("--prefill", site.prefiller.url, "--decode", "127.0.0.1:1") as program:
        changes = [
            ("add", {"type": "decode", "instances": address(site.decoder)}),
            ("remove", {"type": "decode", "instances": "127.0.0.1:1"}),
            ("weight", {"type": "prefill", "instances": address(site.prefiller), "weight": 70}),
        ]
        for what, body in changes:
            async with site.session.post(f"{program.url}/instances/{what}", json=body) as response:
                assert response.status == 200
            if what == "add":
                await program.says("is added")
        await is_ready(site.session, program.url)
        before = await instances()
        assert before == [(address(site.prefiller), "enabled", 70), (address(site.decoder), "enabled", 100)]
        old = await replace(program)
        await until(lambda: not is_there(old), "the end of the old process")
        assert await instances() == before
        assert (await ask(site.session, program.url, BODY)).is_done


async def test_one_that_does_not_come_up_changes_nothing(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"prefill: ['{site.prefiller.url}']\ndecode: ['{site.decoder.url}']\n")
    async with replaceable("--config", str(path)) as program:
        await is_ready(site.session, program.url)
        path.write_text("frobnicate: 1")
        program.signal(signal.SIGUSR2)
        await program.says(r"takeover: failed, this process goes on serving: successor process \d+ has ended")
        assert "unknown option frobnicate" in program.output
        assert (await ask(site.session, program.url, BODY)).is_done
        path.write_text(f"prefill: ['{site.prefiller.url}']\ndecode: ['{site.decoder.url}']\n")
        old = await replace(program)
        await until(lambda: not is_there(old), "the end of the old process")
        assert (await ask(site.session, program.url, BODY)).is_done


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_stopping_gateway_also_stops_the_process_that_takes_over(
    site: Site, tmp_path: Path, workers: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"prefill: ['{site.prefiller.url}']\ndecode: ['{site.decoder.url}']\n")
    async with replaceable("--config", str(path), "--workers", workers) as program:
        path.write_text(f"prefill: ['{site.prefiller.url}']\ndecode: ['127.0.0.1:1']\n")  # with which it never is ready
        await program.says("ready: ")
        program.signal(signal.SIGUSR2)
        new = int((await program.says(STARTED))[1])
        program.signal(signal.SIGTERM)
        assert await program.ended() == 0
        await until(lambda: not is_there(new), "the end of the new one")
        assert f"takeover: successor stopped, because this process stops: process {new}" in program.output


async def test_systemd_opens_the_port_and_hears_who_serves_now(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    under = (sys.executable, "-c", ACTIVATED)
    words = (*site.engines, "--workers", "2")
    with systemd(path) as hear:
        async with replaceable(*words, under=under, NOTIFY_SOCKET=path) as program:
            await is_ready(site.session, program.url)
            await replace(program)
            assert (await ask(site.session, program.url, BODY)).is_done
            told = ""
            while "MAINPID" not in told:
                told = await asyncio.to_thread(hear)
                assert "STOPPING" not in told
            assert told == f"READY=1\nMAINPID={newest(program)}\nSTATUS=listening"
            os.kill(newest(program), signal.SIGTERM)
            while "STOPPING" not in told:
                told = await asyncio.to_thread(hear)
