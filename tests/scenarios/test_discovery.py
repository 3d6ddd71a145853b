"""A gateway without configured instances finds them in a file: all of its workers, also after the watching one died."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, request
from tests.fleet.discovery.keepers import groups
from tests.fleet.discovery.test_files import replace_file
from tests.scenarios.program import Program, gateway


async def told(program: Program) -> dict[str, Any]:
    """Return the instances as reported by any worker."""
    async with aiohttp.ClientSession() as session, session.get(program.url + "/instances") as response:
        told: dict[str, Any] = await response.json()
        return told


async def everybody_has(program: Program, *engines: SimulatedEngine) -> None:
    """Wait until every worker reports exactly these engines as enabled and up."""
    expected = {f"127.0.0.1:{engine.port}" for engine in engines}
    async with asyncio.timeout(60):
        while True:
            answers = await asyncio.gather(*(told(program) for _ in range(8)))
            found = [
                {
                    one["address"]
                    for one in answer["instances"]
                    if (one["membership"], one["state"]) == ("enabled", "up")
                }
                for answer in answers
            ]
            if all(addresses == expected for addresses in found):
                return


async def test_all_workers_follow_a_file_also_when_the_one_that_watches_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    (tmp_path / "pdproxy.yaml").write_text("discovery: {files: [engines.yaml]}\nworkers: 2\n", encoding="utf-8")
    async with AsyncExitStack() as stack:
        prefiller = await stack.enter_async_context(SimulatedEngine(role="prefill"))
        one, other, last = [await stack.enter_async_context(SimulatedEngine(role="decode")) for _ in range(3)]
        program = await stack.enter_async_context(
            gateway("--config", str(tmp_path / "pdproxy.yaml"), PROXY_HEALTH__CHANGING_INTERVAL_SECONDS="0.1")
        )
        assert "0 prefillers, 0 decoders, 1 discovery source" in program.output
        await program.says("discovery: source failed.*file:.*engines.yaml: .*no such file")
        replace_file(path, groups(prefiller, one, other))
        await everybody_has(program, prefiller, one, other)
        replace_file(path, groups(prefiller, other))
        await everybody_has(program, prefiller, other)
        body = request(Api.CHAT, max_tokens=3, stream=True)
        async with aiohttp.ClientSession() as session:
            assert (await ask(session, program.url, body)).text == await answer_alone(body)

        (source,) = (await told(program))["sources"]
        assert (source["source"], source["instances"], source["problem"]) == (f"file:{path}", 2, None)
        assert source["failures"] >= 1
        os.kill(program.children()[0], signal.SIGKILL)
        replace_file(path, groups(prefiller, last))
        await everybody_has(program, prefiller, last)
        await program.counts(f'pdproxy_discovery_instances{{source="file:{path}"}} 2.0')
