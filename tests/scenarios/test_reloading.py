"""The configuration is read again while the program serves: all of it or nothing, in all workers, under its streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, read, request
from tests.deployment import generations
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway
from tests.scenarios.test_several_workers import everywhere, on_new_connections
from tests.scenarios.test_stopping import is_ready

BODY = request(Api.CHAT, stream=True, max_tokens=300)


class File:
    """The operator's file, as one edits it."""

    def __init__(self, path: Path, prefiller: SimulatedEngine, decoder: SimulatedEngine) -> None:
        self.path = path
        self.options: dict[str, Any] = {"prefill": [address(prefiller)], "decode": [address(decoder)]}
        self.write()

    def write(self, **options: Any) -> None:
        self.options |= options
        self.path.write_text(yaml.safe_dump(self.options))


def address(engine: SimulatedEngine) -> str:
    return f"127.0.0.1:{engine.port}"


@pytest.fixture
def file(site: Site, tmp_path: Path) -> File:
    return File(tmp_path / "my.yaml", site.prefiller, site.decoder)


@pytest.fixture
async def another() -> AsyncIterator[SimulatedEngine]:
    """One more decoder."""
    async with SimulatedEngine(role="decode") as engine:
        yield engine


async def reload(session: aiohttp.ClientSession, program: Program) -> Any:
    """Return the status and the body of the route's answer."""
    async with session.post(program.url + "/admin/reload") as response:
        return response.status, await response.json()


@pytest.mark.fault(42)
async def test_hangup_changes_instances_and_options_under_a_running_stream(
    file: File, decoder: SimulatedEngine, another: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    async with gateway("--config", str(file.path)) as program:
        await is_ready(session, program.url)
        async with session.post(program.url + Api.CHAT.path, json=BODY) as response:
            await response.content.readline()
            file.write(decode=[address(another)], fanout={"max_units": 2}, timeouts={"idle_seconds": 77.0})
            program.signal(signal.SIGHUP)
            changed = "changed decode, timeouts.idle_seconds, fanout.max_units"
            told = (
                f"reload: applied: requested by SIGHUP: {changed}; added {address(another)}; removed {address(decoder)}"
            )
            await program.says(told)
            refused = await ask(session, program.url, request(Api.CHAT, n=3))
            assert refused.status == 400
            answer = await read(response)
        assert answer.is_done
        assert (await answer_alone(BODY)).endswith(answer.text)
        await is_ready(session, program.url)  # a new instance receives requests only after its first health check
        for _ in range(2):
            assert (await ask(session, program.url, request(Api.CHAT))).status == 200
        assert (len(generations(decoder)), len(generations(another))) == (1, 2)
        await everywhere(program, "/healthcheck", decode_instances=1)


async def test_silent_streams_are_kept_alive_after_a_reload(
    file: File, prefiller: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    stalled = request(Api.CHAT, stream=True)
    prefiller.faults.add("hang_before_headers", path=Api.CHAT.path)
    for fast_path in ("true", "false"):
        async with gateway("--config", str(file.path), PROXY_LISTEN__FAST_PATH=fast_path) as program:
            await is_ready(session, program.url)
            file.write(stream={"keep_alive_after_seconds": 0.01, "keep_alive_seconds": 0.01})
            assert (await reload(session, program))[0] == 200
            async with session.post(program.url + Api.CHAT.path, json=stalled) as response:
                assert response.status == 200
                for _ in range(2):
                    assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            file.write(stream={})


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": "many"}, "{file}: workers must be a valid integer, not 'many'"),
        ({"frobnicate": 1}, "{file}: unknown option frobnicate"),
        ({"listen": {"port": 7}, "connector": "plain", "prefill": []}, "connector cannot change"),
        ({"listen": {"backlog": 7}}, "listen.backlog cannot change while the gateway runs: restart it"),
    ],
)
async def test_mistake_changes_nothing(
    file: File,
    decoder: SimulatedEngine,
    another: SimulatedEngine,
    session: aiohttp.ClientSession,
    options: dict[str, Any],
    sentence: str,
) -> None:
    sentence = sentence.format(file=file.path)
    async with gateway("--config", str(file.path)) as program:
        await is_ready(session, program.url)
        file.write(decode=[address(another)], fanout={"max_units": 2}, **options)
        program.signal(signal.SIGHUP)
        await program.says("reload: rejected, nothing has changed: requested by SIGHUP: ")
        assert sentence in program.output
        status, told = await reload(session, program)
        assert (status, told["error"]["code"]) == (400, "invalid_configuration")
        assert told["error"]["message"].startswith(sentence)
        assert (await ask(session, program.url, request(Api.CHAT, n=3))).status == 200
        assert len(generations(decoder)) == 3
        assert generations(another) == []
        async with session.get(program.url + "/metrics") as response:
            metrics = await response.text()
        assert 'pdproxy_config_reloads_total{result="failed"} 2.0' in metrics
        assert "Traceback" not in program.output


async def test_whichever_worker_is_asked_all_change(
    file: File, decoder: SimulatedEngine, another: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    too_many = request(Api.CHAT, n=3)

    async def all_answer(program: Program, status: int) -> None:
        async with asyncio.timeout(60):
            while True:
                found = await asyncio.gather(*(statuses(program, too_many) for _ in range(12)))
                if set(found) == {status}:
                    return

    async with gateway("--config", str(file.path), "--workers", "2") as program:
        await is_ready(session, program.url)
        await all_answer(program, 200)
        file.write(decode=[address(another)], fanout={"max_units": 2})
        status, told = await reload(session, program)
        assert status == 200
        assert told == {
            "dry_run": False,
            "changed": ["decode", "fanout.max_units"],
            "instances": {"added": [address(another)], "removed": [address(decoder)]},
        }
        await all_answer(program, 400)
        file.write(fanout={"max_units": 5})
        program.signal(signal.SIGHUP)
        await all_answer(program, 200)
        assert program.output.count("reload: applied: requested by SIGHUP") == 1

        # And who comes later begins with the newest.
        workers = program.children()
        file.write(fanout={"max_units": 2})
        assert (await reload(session, program))[0] == 200
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        await all_answer(program, 400)
        answers = await on_new_connections(program, "/healthcheck")
        assert {answer["decode_instances"] for answer in answers} == {1}


async def statuses(program: Program, body: dict[str, Any]) -> int:
    """Return the status of an answer on a new connection, which any worker may accept."""
    async with aiohttp.ClientSession() as session:
        try:
            return (await ask(session, program.url, body)).status
        except aiohttp.ClientConnectionError:  # the worker was killed
            return 0


async def test_client_keys_change_with_their_file(file: File, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: sk-1}]")
    file.write(auth={"client_keys_file": keys.name})

    async def asks(key: str) -> int:
        return (await ask(session, program.url, request(Api.CHAT), authorization=f"Bearer {key}")).status

    async with gateway("--config", str(file.path), "--workers", "2") as program:
        await is_ready(session, program.url)
        assert (await asks("sk-1"), await asks("sk-2")) == (200, 401)
        keys.write_text("keys: [{name: b, key: sk-2}]")
        await program.says("changed auth.client_keys_file")
        async with asyncio.timeout(60):
            while [await asks("sk-1"), await asks("sk-2")] != [401, 200]:
                pass
        keys.write_text("keys: nonsense")
        await program.says("reload: rejected, nothing has changed: requested by a change of the client keys' file")
        assert (await asks("sk-1"), await asks("sk-2")) == (401, 200)
