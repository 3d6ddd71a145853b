"""Log lines of the start, and how often they are written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from proxy import __version__
from proxy.common.build_info import IS_COMPILED
from proxy.sim.engine import SimulatedEngine
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_several_workers import everywhere

READY = r"ready: (http://\S+?)(?=[\"\s])"


async def everything_it_says(program: Program) -> list[str]:
    program.signal(signal.SIGTERM)
    await program.ended()
    return program.output.splitlines()


@pytest.mark.parametrize("workers", [1, 3])
async def test_each_instance_and_the_gateway_are_logged_as_up_once(site: Site, workers: int) -> None:
    async with gateway(*site.engines, "--workers", str(workers)) as program:
        url = (await program.says(READY))[1]
        await everywhere(program, "/readyz", status="ok")
        lines = await everything_it_says(program)
    kind = "compiled" if IS_COMPILED else "interpreted"
    assert f"pdproxy {__version__} ({kind}) is starting" in lines[0]
    assert program.output.count("build: interpreted, not compiled: ") == (not IS_COMPILED)
    assert url == program.url
    for text in (f"127.0.0.1:{site.prefiller.port} is up", f"127.0.0.1:{site.decoder.port} is up", "ready: "):
        assert len([line for line in lines if text in line]) == 1, text


@pytest.mark.fault(140)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
async def test_metrics_directory_of_another_program_is_left_alone(
    site: Site, name: str, workers: int, tmp_path: Path
) -> None:
    engines = (*site.engines, "--workers", str(workers))
    for directory in (tmp_path, tmp_path / "missing"):
        async with gateway(*engines, **{name: str(directory)}) as program:
            await program.counts(f"pdproxy_workers {workers}.0")
    assert os.listdir(tmp_path) == []


async def test_gateway_without_decoders_is_not_ready_until_there_is_one(
    prefiller: SimulatedEngine, session: aiohttp.ClientSession, unused_tcp_port: int
) -> None:
    engines = ("--prefill", prefiller.url, "--decode", f"127.0.0.1:{unused_tcp_port}")
    async with gateway(*engines, "--workers", "2", "--host", "0.0.0.0") as program:
        await program.says(f"prefill instance 127.0.0.1:{prefiller.port} is up")
        await program.says("decode instance .* is down")
        assert not re.search(READY, program.output)
        async with SimulatedEngine(role="decode", port=unused_tcp_port):
            url = (await program.says(READY))[1]
            assert url == program.url.replace("0.0.0.0", "127.0.0.1")
            lines = await everything_it_says(program)
    # The status may say the same as the health checks.
    of_decoder = [line for line in lines if "proxy.discovery.prober" in line and "decode instance" in line]
    assert [len([line for line in of_decoder if f"is {state}" in line]) for state in ("down", "up")] == [1, 1]


@pytest.mark.parametrize(
    ("max_connections", "is_told"), [("", True), ("50", False), ("58", True)], ids=["default", "fewer", "more"]
)
async def test_small_limit_of_open_files_is_logged_at_the_start(
    site: Site, max_connections: str, is_told: bool
) -> None:
    engines = (*site.engines, "--workers", "2")
    under = ("bash", "-c", 'ulimit -n 128 && exec "$@"', "bash")
    async with gateway(*engines, under=under, PROXY_LISTEN__MAX_CONNECTIONS=max_connections) as program:
        lines = await everything_it_says(program)
    told = [line for line in lines if "the limit of 128 open files leaves room for 57 client connections" in line]
    assert len(told) == is_told


def test_first_line_waits_for_no_more_than_the_settings() -> None:
    late = "aiohttp", "prometheus_client", "uvloop", "proxy.process.worker", "proxy.sim"
    code = (
        f"import proxy.__main__, proxy.process.supervisor, sys; sys.exit(str(sorted(sys.modules.keys() & {set(late)})))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == "[]\n"


async def test_suspicious_settings_are_logged_once(site: Site) -> None:
    async with gateway(*site.engines, "--workers", "2", PROXY_LISTEN_PORT="8004") as program:
        program.signal(signal.SIGHUP)
        await program.says("reload: applied: requested by SIGHUP")
        program.signal(signal.SIGTERM)
        await program.ended()
    assert program.output.count("PROXY_LISTEN_PORT is no option and is ignored: did you mean PROXY_LISTEN__PORT?") == 1
