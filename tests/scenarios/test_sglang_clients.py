"""What SGLang's benchmarks and scripts ask of a server besides generating, of a gateway in front of SGLang engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_stopping import is_ready


@pytest.fixture
async def engines() -> AsyncIterator[list[SimulatedEngine]]:
    """Start a prefiller and two decoders."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(SimulatedEngine(role=role, profile_name="sglang", model="kimi"))
            for role in ("prefill", "decode", "decode")
        ]


@pytest.fixture
async def program(engines: list[SimulatedEngine], session: aiohttp.ClientSession) -> AsyncIterator[Program]:
    prefiller, *decoders = engines
    flags = ["--prefill", prefiller.url, str(prefiller.bootstrap_port)]
    for decoder in decoders:
        flags += ["--decode", decoder.url]
    async with gateway("--connector", "auto", *flags) as program:
        assert "connector: auto selects sglang_bootstrap: " in program.output
        await is_ready(session, program.url)
        yield program


async def get(session: aiohttp.ClientSession, program: Program, path: str) -> Any:
    async with session.get(program.url + path) as answer:
        assert answer.status == 200
        return await answer.json()


async def test_client_finds_the_model_and_its_tokenizer(program: Program, session: aiohttp.ClientSession) -> None:
    for path in ("/model_info", "/get_model_info"):
        assert (await get(session, program, path))["tokenizer_path"] == "kimi"


async def test_benchmark_finds_the_engines_behind_it(program: Program, session: aiohttp.ClientSession) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = await get(session, program, path)
        modes = [[engine["disaggregation_mode"] for engine in info[role]] for role in ("prefill", "decode")]
        assert modes == [["prefill"], ["decode", "decode"]]
        assert len(info["internal_states"]) == 2


async def test_router_finds_the_load_of_all(program: Program, session: aiohttp.ClientSession) -> None:
    loads = (await get(session, program, "/v1/loads?include=core"))["loads"]
    assert [(load["dp_rank"], load["role"], load["num_running_reqs"]) for load in loads] == [
        *((0, "prefill", 0), (1, "decode", 0), (2, "decode", 0))
    ]


async def test_benchmark_begins_with_empty_caches(
    program: Program, engines: list[SimulatedEngine], session: aiohttp.ClientSession
) -> None:
    async with session.post(program.url + "/flush_cache", params={"timeout": 60}) as answer:
        assert answer.status == 200
    assert [engine.state.prefix_cache_resets for engine in engines] == [1, 1, 1]


async def test_script_that_waits_for_the_server_sees_it_generate(
    program: Program, session: aiohttp.ClientSession
) -> None:
    assert await get(session, program, "/health_generate") == {"status": "ok"}
