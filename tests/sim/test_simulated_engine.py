"""An engine as a whole: its other endpoints, the OpenAI client, time, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import orjson
import pytest
from openai import AsyncOpenAI

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import THINK_END
from tests.sim.conftest import Client

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}


async def test_openai_client_streams(engine: SimulatedEngine) -> None:
    async with AsyncOpenAI(base_url=engine.url + "/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="sim", max_tokens=40, messages=HELLO["messages"])
        stream = await client.chat.completions.create(
            model="sim",
            max_tokens=40,
            messages=HELLO["messages"],
            stream=True,
            stream_options={"include_usage": True},
        )
        text = ""
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            else:
                assert chunk.usage is not None
                assert chunk.usage.completion_tokens == 40
        assert text == whole.choices[0].message.content
        assert [model.id async for model in client.models.list()] == ["sim"]


async def test_health_version_models_and_load(client: Client, engine: SimulatedEngine) -> None:
    for path in ("/health", "/ping"):
        async with client.session.get(engine.url + path) as response:
            assert (response.status, await response.read()) == (200, b"")
    assert await client.get(engine, "/version") == {"version": "0.30.0"}
    assert (await client.get(engine, "/v1/models"))["data"][0]["max_model_len"] == 131_072
    assert await client.get(engine, "/load") == {"server_load": 0}


async def test_tokenizer_and_its_inverse(client: Client, engine: SimulatedEngine) -> None:
    _, tokens = await client.post(engine, "/tokenize", {"prompt": "naïve"})
    assert tokens == {"count": 6, "max_model_len": 131_072, "tokens": list("naïve".encode()), "token_strs": None}
    _, text = await client.post(engine, "/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "naïve"}
    _, chat = await client.post(engine, "/tokenize", HELLO)
    _, rendered = await client.post(engine, CHAT + "/render", HELLO)
    assert chat["tokens"] == rendered["token_ids"]


async def test_tokenizer_knows_its_markers(client: Client, engine: SimulatedEngine) -> None:
    text = "a</think>b<|im_end|"
    _, tokens = await client.post(engine, "/tokenize", {"prompt": text})
    assert tokens["tokens"] == [97, THINK_END, 98, *b"<|im_end|"]
    _, whole = await client.post(engine, "/detokenize", {"model": "sim", "tokens": tokens["tokens"]})
    assert whole == {"prompt": text}
    _, cut = await client.post(engine, "/detokenize", {"tokens": [97, *"🙂".encode()[:3]]})
    assert cut == {"prompt": "a\ufffd"}
    _, answer = await client.post(engine, "/v1/completions", {"prompt": text, "return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == tokens["tokens"]


async def test_resetting_the_prefix_cache_is_counted(client: Client) -> None:
    async with SimulatedEngine(profile_name="v0.23") as old, SimulatedEngine(profile_name="v0.27") as new:
        assert await client.post(old, "/reset_prefix_cache", None) == (200, None)
        assert await client.post(new, "/reset_prefix_cache", None) == (200, {"success": True})
        assert old.state.prefix_cache_resets == 1


async def test_metrics_have_the_names_of_vllm(client: Client, prefiller: SimulatedEngine) -> None:
    await client.prefill(prefiller, CHAT, HELLO)
    async with client.session.get(prefiller.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    labels = 'engine="0",model_name="sim"'
    assert f"vllm:num_requests_running{{{labels}}} 0" in lines
    assert f"vllm:kv_cache_usage_perc{{{labels}}} 1e-05" in lines
    assert f"vllm:generation_tokens_total{{{labels}}} 1" in lines
    assert f'vllm:request_success_total{{{labels},finished_reason="length"}} 1' in lines


async def test_load_report_is_in_whole_answers_only(client: Client, engine: SimulatedEngine) -> None:
    headers = {"endpoint-load-metrics-format": "json"}
    async with client.session.post(engine.url + CHAT, json=HELLO, headers=headers) as response:
        kind, report = response.headers["endpoint-load-metrics"].split(" ", 1)
        assert kind == "JSON"
        assert orjson.loads(report) == {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}}
    async with client.session.post(engine.url + CHAT, json=HELLO | {"stream": True}, headers=headers) as response:
        assert "endpoint-load-metrics" not in response.headers


async def test_ids_are_those_of_the_request(client: Client) -> None:
    async with SimulatedEngine(request_id_headers=True) as engine:
        async with client.session.post(engine.url + CHAT, json=HELLO, headers={"X-Request-Id": "R"}) as response:
            assert response.headers["X-Request-Id"] == "R"
            assert (await response.json())["id"] == "chatcmpl-R"
        _, answer = await client.post(engine, "/v1/completions", {"prompt": "x", "request_id": "B"})
        assert answer["id"] == "cmpl-B"


async def test_simulated_engine_lists_received_requests(client: Client, engine: SimulatedEngine) -> None:
    await client.post(engine, CHAT, HELLO, X_Request_Id="R")
    (seen,) = (await client.get(engine, "/_mock/state"))["requests"]
    assert (seen["method"], seen["path"], seen["body"]) == ("POST", CHAT, HELLO)
    assert seen["headers"]["x-request-id"] == "R"
    assert engine.requests[0].body == HELLO


async def test_more_than_max_num_seqs_wait_their_turn(client: Client) -> None:
    async with SimulatedEngine(max_num_seqs=1) as engine:
        engine.faults.add("stall_after_tokens", tokens=1, times=1)
        first = asyncio.create_task(client.stream(engine, CHAT, HELLO))
        await engine.wait_until(lambda state: state.tokens_sent == 1)
        second = asyncio.create_task(client.post(engine, CHAT, HELLO))
        await engine.wait_until(lambda state: state.received == 2)
        await engine.wait_until(lambda _: engine.core.scheduler.waiting == 1)
        first.cancel()
        status, _ = await second
        assert status == 200


async def test_tokens_take_their_time(client: Client) -> None:
    async with SimulatedEngine(decode_step_ms=1e9) as engine:
        long = asyncio.create_task(client.post(engine, CHAT, HELLO))
        await engine.wait_until(lambda state: state.tokens_generated == 1)
        # The prefill yields the first token; the others wait for a step.
        status, _ = await client.post(engine, CHAT, HELLO | {"max_tokens": 1})
        assert status == 200
        assert engine.state.tokens_generated == 2
        long.cancel()
        await engine.wait_until(lambda state: state.live == 0)


async def test_prefills_are_computed_one_after_the_other(client: Client) -> None:
    async with SimulatedEngine(prefill_ms_per_1k_tokens=50) as engine:
        answered: list[int] = []

        async def ask(prompt_tokens: int) -> None:
            await client.post(engine, "/v1/completions", {"prompt": [7] * prompt_tokens, "max_tokens": 1})
            answered.append(prompt_tokens)

        long = asyncio.create_task(ask(1000))
        await engine.wait_until(lambda state: state.live == 1)
        await asyncio.gather(long, ask(1))
        assert answered == [1000, 1]


async def test_slow_reader_gets_merged_deltas(client: Client, engine: SimulatedEngine) -> None:
    body = {"prompt": "x", "max_tokens": 60_000, "stream": True}
    async with client.session.post(engine.url + "/v1/completions", json=body) as response:
        await engine.wait_until(lambda state: state.tokens_generated == 60_000)
        text = await response.text()
    events = [orjson.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert sum(len(event["choices"][0]["text"].encode()) for event in events) in range(59_997, 60_001)
    assert len(events) < 60_000


async def test_simulated_engine_leaves_no_state_after_requests() -> None:
    before = asyncio.all_tasks()
    async with SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        decoder.faults.add("stall_after_tokens", tokens=1)
        body = orjson.dumps(HELLO | {"stream": True})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(decoder.host, decoder.port)
        writer.write(head.encode() + body)
        await decoder.wait_until(lambda state: state.tokens_sent == 1)
    assert prefiller.state.live == decoder.state.live == 0
    assert asyncio.all_tasks() == before
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(decoder.host, decoder.port)
    with pytest.raises(ConnectionError):
        await reader.read()
    writer.close()


def test_program_serves_until_told_to_stop() -> None:
    command = [sys.executable, "-c", "import sys; from proxy.sim.engine import main; sys.exit(main(sys.argv[1:]))"]
    with subprocess.Popen([*command, "--role", "prefill"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("simulated prefill engine (v0.30) on http://127.0.0.1:")
        process.terminate()
        assert process.wait(timeout=60) == 0
