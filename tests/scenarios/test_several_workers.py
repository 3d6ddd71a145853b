"""Several workers behind one port are one gateway: one load, one set of instances, one set of metrics."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, read, request, until
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, gateway


@pytest.fixture
async def program(site: Site) -> AsyncIterator[Program]:
    async with gateway(*site.engines, "--workers", "2", "--waiting-retry-interval", "0.1") as program:
        yield program


async def on_new_connections(program: Program, path: str, times: int = 12) -> list[Any]:
    """Return the JSON answers to one request, each on a new connection that any worker may accept."""

    async def get() -> Any:
        async with aiohttp.ClientSession() as session, session.get(program.url + path) as response:
            return await response.json()

    return await asyncio.gather(*(get() for _ in range(times)))


async def everywhere(program: Program, path: str, **expected: Any) -> None:
    """Wait until every worker gives this answer."""
    async with asyncio.timeout(60):
        while True:
            answers = await on_new_connections(program, path)
            if all({name: answer[name] for name in expected} == expected for answer in answers):
                return


async def test_every_worker_reports_the_state_of_an_instance_in_all_workers(
    program: Program, decoder: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    async def states() -> dict[str, Any]:
        async with session.get(program.url + "/instances") as response:
            return {told["address"]: told["states"] for told in (await response.json())["instances"]}

    async def are(expected: dict[str, int]) -> None:
        async with asyncio.timeout(60):
            while (await states())[f"127.0.0.1:{decoder.port}"] != expected:
                pass

    await are({"up": 2})
    await decoder.kill()
    await are({"down": 2})


@pytest.mark.fault(60)
async def test_every_worker_can_cancel_the_wait_for_an_instance(
    program: Program, session: aiohttp.ClientSession
) -> None:
    async with SimulatedEngine(role="decode") as absent:
        address = f"127.0.0.1:{absent.port}"
        absent.faults.add("hang_before_headers", path="/v1/models")
        instance = {"type": "decode", "instances": address}
        async with session.post(program.url + "/instances/add", json=instance) as response:
            assert (await response.json())["joining_decode_instances"] == [address]
        for told in await on_new_connections(program, "/instances"):
            assert [one["address"] for one in told["instances"] if one["membership"] == "joining"] == [address]
        for _ in range(6):  # any worker may accept the connection
            async with (
                aiohttp.ClientSession() as one,
                one.post(program.url + "/instances/add", json=instance) as response,
            ):
                assert (await response.json())["message"] == f"add decode instances: ['{address}']."
        async with (
            aiohttp.ClientSession() as one,
            one.post(program.url + "/instances/remove", json=instance) as response,
        ):
            assert (await response.json())["not_found"] == []
        for told in await on_new_connections(program, "/instances"):
            assert address not in [one["address"] for one in told["instances"]]
    await everywhere(program, "/healthcheck", decode_instances=1)


@pytest.mark.fault(62)
async def test_every_worker_hands_over_what_a_removed_instance_works_on(session: aiohttp.ClientSession) -> None:
    body = request(Api.CHAT, stream=True, max_tokens=150)
    async with AsyncExitStack() as stack:
        prefillers = [await stack.enter_async_context(SimulatedEngine(role="prefill")) for _ in range(2)]
        decoders = [
            await stack.enter_async_context(SimulatedEngine(role="decode", decode_step_ms=10.0)) for _ in range(3)
        ]
        engines = (*("--prefill", *(engine.url for engine in prefillers)), *("--decode", *(e.url for e in decoders)))
        program = await stack.enter_async_context(gateway(*engines, "--workers", "3"))
        leaving = (prefillers[0], decoders[0])

        async def answer() -> str:
            async with aiohttp.ClientSession() as one, one.post(program.url + Api.CHAT.path, json=body) as response:
                return (await read(response)).text

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(answer()) for _ in range(30)]
            await decoders[0].wait_until(lambda state: state.live >= 8)
            await asyncio.gather(*(engine.wait_until(lambda state: not state.live) for engine in prefillers))
            for engine in leaving:
                instance = {"type": engine.options.role, "instances": f"127.0.0.1:{engine.port}", "evacuate_after": 0}
                async with session.post(program.url + "/instances/remove", json=instance) as response:
                    assert response.status == 200
            await everywhere(program, "/healthcheck", prefill_instances=1, decode_instances=2)
            assert not any(engine.state.live for engine in leaving)
            assert not all(task.done() for task in asked)
        assert {task.result() for task in asked} == {await answer_alone(body)}
        async with session.get(program.url + "/instances") as response:
            shown = (await response.json())["instances"]
        assert len(shown) == 3
        for one in shown:
            load = {name: one["load"][name] for name in ("inflight", "running", "compute_tokens", "kv_tokens")}
            assert set(load.values()) == {0}, one
            assert one["load"]["pinned_kv"] == 0
        await until(lambda: not any(engine.pins for engine in prefillers), "the last release of KV")


async def test_load_instances_and_metrics_are_shared(
    program: Program, prefiller: SimulatedEngine, session: aiohttp.ClientSession
) -> None:
    body = request(Api.CHAT, max_tokens=3)
    for _ in range(20):
        async with aiohttp.ClientSession() as one, one.post(program.url + Api.CHAT.path, json=body) as response:
            assert (await read(response)).text == await answer_alone(body)
    await program.counts('pdproxy_requests_total{api="chat",code="200"} 20.0')

    prefiller.faults.add("hang_before_headers")
    async with AsyncExitStack() as stack:
        for _ in range(10):
            client = await stack.enter_async_context(aiohttp.ClientSession())
            stack.push_async_callback(
                cancelled, asyncio.create_task(client.post(program.url + Api.CHAT.path, json=body))
            )
        await prefiller.wait_until(lambda state: state.live == 10)
        await everywhere(program, "/healthcheck", request_num=10)
    await everywhere(program, "/healthcheck", request_num=0)

    async with SimulatedEngine(role="prefill") as another:
        instance = {"type": "prefill", "instances": f"127.0.0.1:{another.port}"}
        async with session.post(program.url + "/instances/add", json=instance) as response:
            assert response.status == 200
        await everywhere(program, "/healthcheck", prefill_instances=2)
        async with session.post(program.url + "/instances/remove", json=instance) as response:
            assert response.status == 200
        await everywhere(program, "/healthcheck", prefill_instances=1)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_left_out_members_are_logged_by_one_worker(program: Program, path: str) -> None:
    asked: dict[str, Any] = {"model": "sim", "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    asked |= (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3} if "messages" in path else {"input": "Hi"}
    )
    await program.counts("pdproxy_workers 2.0")
    first, second = program.children()
    for resting in (first, second):
        os.kill(resting, signal.SIGSTOP)  # so that the other one serves
        stat = Path(f"/proc/{resting}/stat")
        await until(lambda stat=stat: ") T " in stat.read_text(), "the worker to stand still")
        for _ in range(2):
            async with aiohttp.ClientSession() as one, one.post(program.url + path, json=asked) as response:
                assert (await read(response)).status == 200
        os.kill(resting, signal.SIGCONT)
    program.signal(signal.SIGTERM)
    assert await program.ended() == 0
    line = f"path {path}, client key -: tool web_search_20250305"
    assert program.output.count(line) == 1


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.fault(32)
@pytest.mark.fault(140)
async def test_metrics_are_there_again_after_their_files_were_deleted(site: Site, tmp_path: Path) -> None:
    body = request(Api.CHAT, max_tokens=3)
    async with gateway(*site.engines, "--workers", "2", TMPDIR=str(tmp_path)) as program:

        async def ask(times: int) -> None:
            for _ in range(times):
                async with aiohttp.ClientSession() as one, one.post(program.url + Api.CHAT.path, json=body) as response:
                    assert (await read(response)).text == await answer_alone(body)

        await ask(20)
        await program.counts('pdproxy_requests_total{api="chat",code="200"} 20.0')
        for name in os.listdir(tmp_path):
            shutil.rmtree(tmp_path / name)
        await program.counts('pdproxy_requests_total{api="chat",code="200"} 20.0')
        await ask(5)
        await program.counts('pdproxy_requests_total{api="chat",code="200"} 25.0')
        await program.counts("pdproxy_workers 2.0")
        for name in os.listdir(tmp_path):
            shutil.rmtree(tmp_path / name)
        os.kill(program.children()[0], signal.SIGKILL)
        await program.says("ended with code -9")
        await program.counts("pdproxy_workers 2.0")
        program.signal(signal.SIGTERM)
        assert await program.ended() == 0
        assert os.listdir(tmp_path) == []


async def test_scrape_skips_the_empty_file_of_a_starting_worker(site: Site, tmp_path: Path) -> None:
    async with gateway(*site.engines, "--workers", "2", TMPDIR=str(tmp_path)) as program:
        await program.counts("pdproxy_workers 2.0")
        (tmp_path / os.listdir(tmp_path)[0] / "counter_1.db").touch()
        async with site.session.get(f"{program.url}/metrics") as response:
            assert response.status == 200
            assert "pdproxy_workers 2.0" in await response.text()


@pytest.mark.fault(140)
async def test_metrics_say_why_their_directory_cannot_be_created(site: Site, tmp_path: Path) -> None:
    async with gateway(*site.engines, "--workers", "2", TMPDIR=str(tmp_path)) as program:
        await program.counts("pdproxy_workers 2.0")
        directory = tmp_path / os.listdir(tmp_path)[0]
        shutil.rmtree(directory)
        directory.touch()
        await program.says(r"(?s)(metrics: deleted directory cannot be created: .*){2}")
        async with site.session.get(f"{program.url}/metrics") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "metrics_unavailable"
        directory.unlink()
        await program.counts("pdproxy_workers 2.0")
    assert program.output.count("cannot be created") == 2
    assert "Traceback" not in program.output


async def test_only_a_killed_workers_own_answers_break_off(program: Program, decoder: SimulatedEngine) -> None:
    body = request(Api.CHAT, stream=True, max_tokens=600)
    async with AsyncExitStack() as stack:
        answers = []
        for _ in range(16):
            client = await stack.enter_async_context(aiohttp.ClientSession())
            response = await stack.enter_async_context(client.post(program.url + Api.CHAT.path, json=body))
            answers.append(asyncio.create_task(read(response)))
        killed, other = program.children()
        os.kill(killed, signal.SIGKILL)
        for answer in await asyncio.gather(*answers):
            assert answer.is_done or not answer.is_whole
            assert (await answer_alone(body)).startswith(answer.text)
    await everywhere(program, "/healthcheck", request_num=0)
    assert killed not in program.children()
    assert other in program.children()
    await program.counts('pdproxy_inflight_requests{api="chat"} 0.0')


@pytest.mark.fault(32)
async def test_killed_worker_is_replaced_and_its_load_forgotten(program: Program, decoder: SimulatedEngine) -> None:
    workers = program.children()
    assert len(workers) == 2
    decoder.faults.add("stall_after_tokens", tokens=3)
    body = request(Api.CHAT, stream=True)
    async with AsyncExitStack() as stack:
        for _ in range(16):
            client = await stack.enter_async_context(aiohttp.ClientSession())
            await stack.enter_async_context(client.post(program.url + Api.CHAT.path, json=body))
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        await decoder.wait_until(lambda state: state.live == 0)
    await everywhere(program, "/healthcheck", request_num=0)
    decoder.faults.clear()
    async with aiohttp.ClientSession() as client, client.post(program.url + Api.CHAT.path, json=body) as response:
        assert (await read(response)).is_done
    await until(lambda: len(set(program.children()) - set(workers)) == 2, "both workers to be replaced")


@pytest.mark.fault(72)
async def test_frozen_worker_is_replaced_and_its_load_forgotten(site: Site) -> None:
    async with gateway(*site.engines, "--workers", "2", PROXY_WORKER_TIMEOUT_SECONDS="1") as program:
        workers = program.children()
        site.decoder.faults.add("stall_after_tokens", tokens=3)
        body = request(Api.CHAT, stream=True)
        async with AsyncExitStack() as stack:
            for _ in range(16):
                client = await stack.enter_async_context(aiohttp.ClientSession())
                await stack.enter_async_context(client.post(program.url + Api.CHAT.path, json=body))
            os.kill(workers[0], signal.SIGSTOP)
            await program.says(rf"WARNING.*killing a frozen worker.*pid {workers[0]}\)")
            await program.says(rf"worker \d \(pid {workers[0]}\) ended with code -9")
        await everywhere(program, "/healthcheck", request_num=0)
        site.decoder.faults.clear()
        assert workers[0] not in program.children()
        assert workers[1] in program.children()
        assert program.output.count("killing a frozen worker") == 1
        async with aiohttp.ClientSession() as client, client.get(program.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        assert 'pdproxy_worker_replacements_total{reason="frozen"} 1.0' in lines
        assert 'pdproxy_worker_replacements_total{reason="died"} 0.0' in lines


async def test_every_worker_lists_the_requests_of_all_workers(program: Program) -> None:
    names = {f"r{number}" for number in range(12)}

    async def ask(name: str) -> None:
        headers = {"X-Request-Id": name}
        async with (
            aiohttp.ClientSession() as one,
            one.post(program.url + Api.CHAT.path, json=request(Api.CHAT, max_tokens=1), headers=headers) as response,
        ):
            assert response.status == 200

    await asyncio.gather(*map(ask, names))
    async with asyncio.timeout(60):
        while True:  # what others have served is there a moment later
            told = [answer["requests"] for answer in await on_new_connections(program, "/admin/requests/recent")]
            if all({one["id"] for one in requests} == names for requests in told):
                break
    assert all(requests == told[0] for requests in told)
    assert {one["worker"] for one in told[0]} <= {0, 1}
