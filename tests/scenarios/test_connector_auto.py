"""Connector `auto`: the program asks its engines what they are before it serves, once for all workers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway, refused


async def test_engines_decide_for_all_workers_and_it_is_one_line(site: Site) -> None:
    async with gateway("--connector", "auto", *site.engines, "--workers", "2") as program:
        body = request(Api.CHAT, max_tokens=3)
        assert (await ask(site.session, program.url, body)).text == await answer_alone(body)
        assert program.output.count("connector: auto selects vllm_pull:") == 1
        assert ", connector vllm_pull, " in program.output


async def test_reload_keeps_what_was_found_and_takes_the_same_by_its_name(site: Site, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"

    def write(connector: str) -> None:
        config.write_text(
            f"connector: {connector}\nprefill: ['{site.prefiller.url}']\ndecode: ['{site.decoder.url}']\n"
        )

    write("auto")
    async with gateway("--config", str(config)) as program:
        for again in ("auto", "vllm_pull"):
            write(again)
            program.output = ""
            program.signal(signal.SIGHUP)
            await program.says("reload: applied: requested by SIGHUP: nothing has changed")
        write("sglang_bootstrap")
        program.signal(signal.SIGHUP)
        await program.says("connector cannot change while the gateway runs")


async def test_engines_of_two_kinds_are_one_sentence(decoder: SimulatedEngine) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "sglang"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as other:
        name = f"127.0.0.1:{other.port}"
        code, output = await refused(*("--connector", "auto", "--prefill", name, "--decode", decoder.url))
    assert code == 2
    assert f"{name} is SGLang and 127.0.0.1:{decoder.port} is vLLM" in output
    assert "Traceback" not in output


async def test_engines_that_never_answer_are_one_sentence(decoder: SimulatedEngine) -> None:
    down = f"127.0.0.1:{unused_port()}"
    flags = ("--connector", "auto", "--prefill", down, "--decode", decoder.url, "--waiting-retry-interval", "0.01")
    code, output = await refused(*flags)
    assert code == 1
    *_, last = output.splitlines()
    assert last == (
        f"pdproxy: error: connector auto: no prefill instance says what it is; {down}: cannot connect (connection "
        "refused). To start without asking the engines, set the option connector to a name"
    )


async def test_stop_signal_ends_the_asking(decoder: SimulatedEngine) -> None:
    asked = asyncio.Event()

    async def models(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as silent:
        flags = ("--connector", "auto", "--prefill", f"127.0.0.1:{silent.port}", "--decode", decoder.url)
        code, output = await refused(*flags, stop_when=asked)
    assert code == -signal.SIGTERM
    assert "Traceback" not in output
