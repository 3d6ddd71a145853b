"""The format of SGLang: chats, completions, its native interface, and its own state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import END
from tests.sim.conftest import Client, simulated_pair

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6}


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(profile_name="sglang", tool_call_parser="kimi_k2") as engine:
        yield engine


async def test_finish_reason_follows_all_text_of_a_chat(client: Client, engine: SimulatedEngine) -> None:
    first, *contents, end, usage, done = await client.stream(
        engine, CHAT, HELLO | {"stream_options": {"include_usage": True}, "rid": "abc"}
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert {event["id"] for event in (first, *contents, end, usage)} == {"abc"}
    assert len(contents) == 6
    assert all(event["choices"][0]["finish_reason"] is None for event in contents)
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["choices"][0]["matched_stop"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


async def test_reasoning_has_another_name_in_sglang(client: Client, engine: SimulatedEngine) -> None:
    body = HELLO | {"max_tokens": 60, "chat_template_kwargs": {"thinking": True}}
    message = (await client.post(engine, CHAT, body))[1]["choices"][0]["message"]
    assert message["reasoning_content"]
    assert "reasoning" not in message
    deltas = [event["choices"][0]["delta"] for event in (await client.stream(engine, CHAT, body))[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


async def test_tools_are_called(client: Client, engine: SimulatedEngine) -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    body = HELLO | {"max_tokens": 200, "tools": tools}
    choice = (await client.post(engine, CHAT, body))[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "find"
    *events, end, _ = await client.stream(engine, CHAT, body)
    assert any("tool_calls" in event["choices"][0]["delta"] for event in events)
    assert end["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_matched_stop_is_the_string_that_ended_an_answer(client: Client, path: str) -> None:
    body = HELLO if path == CHAT else {"prompt": "Hello there"}
    async with SimulatedEngine(profile_name="sglang", first_token_eos=True) as engine:
        choice = (await client.post(engine, path, body))[1]["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", END)
    assert "stop_reason" not in choice


async def test_stop_string_is_the_matched_stop(client: Client, engine: SimulatedEngine) -> None:
    choice = (await client.post(engine, COMPLETIONS, {"prompt": "Hello there", "max_tokens": 40, "stop": " "}))[1]
    assert choice["choices"][0]["matched_stop"] == " "


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_errors_are_flat(client: Client, engine: SimulatedEngine, path: str) -> None:
    status, answer = await client.post(engine, path, {"max_tokens": 5})
    assert status == 400
    assert set(answer) == {"object", "message", "type", "param", "code"}
    assert (answer["object"], answer["type"], answer["code"]) == ("error", "BadRequestError", 400)


async def test_errors_of_the_native_interface_are_not(client: Client, engine: SimulatedEngine) -> None:
    status, answer = await client.post(engine, GENERATE, {})
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "code", "retryable"}


async def test_error_in_a_stream_is_flat_within(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("error_event", tokens=2)
    *_, error, done = await client.stream(engine, CHAT, HELLO)
    assert error["error"]["code"] == 500
    assert error["error"]["object"] == "error"
    assert done == "[DONE]"


async def test_any_model_name_will_do(client: Client, engine: SimulatedEngine) -> None:
    status, answer = await client.post(engine, CHAT, HELLO | {"model": "whatever"})
    assert (status, answer["model"]) == (200, "whatever")


async def test_native_answer(client: Client, engine: SimulatedEngine) -> None:
    body = {"text": "Hello there", "sampling_params": {"max_new_tokens": 6}, "rid": "abc"}
    _, answer = await client.post(engine, GENERATE, body)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert (meta["id"], meta["prompt_tokens"]) == ("abc", len("Hello there"))
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (await client.post(engine, GENERATE, body | {"text": None, "input_ids": [*b"Hello there"]}))[1] == answer


async def test_every_event_of_a_native_stream_has_the_answer_so_far(client: Client, engine: SimulatedEngine) -> None:
    body = {"text": "Hello there", "sampling_params": {"max_new_tokens": 6}, "rid": "abc"}
    *events, done = await client.stream(engine, GENERATE, body)
    assert done == "[DONE]"
    assert [len(event["output_ids"]) for event in events] == [1, 2, 3, 4, 5, 6]
    assert all(later["text"].startswith(event["text"]) for event, later in pairwise(events))
    assert events[-1] == (await client.post(engine, GENERATE, body))[1]


async def test_batch_is_a_list_and_its_events_have_places(client: Client, engine: SimulatedEngine) -> None:
    body: dict[str, Any] = {"text": ["one", "two"], "sampling_params": {"max_new_tokens": 3}}
    _, answers = await client.post(engine, GENERATE, body)
    *events, _ = await client.stream(engine, GENERATE, body)
    for index, answer in enumerate(answers):
        assert [event["text"] for event in events if event["index"] == index][-1] == answer["text"]
    _, (single,) = await client.post(engine, GENERATE, body | {"text": ["one"]})
    assert single["text"] == answers[0]["text"]


async def test_logprobs_of_the_prompt_begin_at_the_requested_place(client: Client, engine: SimulatedEngine) -> None:
    body: dict[str, Any] = {"text": "Hello", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    for start, tokens in ((0, [*b"Hello"]), (2, [*b"llo"]), (-1, [])):
        meta = (await client.post(engine, GENERATE, body | {"logprob_start_len": start}))[1]["meta_info"]
        assert [token for _, token, _ in meta["input_token_logprobs"]] == tokens
        assert len(meta["output_token_logprobs"]) == 3


async def test_decoder_does_not_know_the_logprobs_of_the_prompt(client: Client) -> None:
    async with simulated_pair(profile_name="sglang") as (prefiller, decoder):
        body: dict[str, Any] = {"text": "Hello", "return_logprob": True, "logprob_start_len": 0, "bootstrap_room": 1}
        body |= {"bootstrap_host": prefiller.host, "bootstrap_port": prefiller.bootstrap_port}
        answers = await asyncio.gather(*[client.post(engine, GENERATE, body) for engine in (prefiller, decoder)])
        told = [len(answer["meta_info"]["input_token_logprobs"]) for _, answer in answers]
        assert told == [5, 0]


@pytest.mark.parametrize(
    "path",
    ["/health", "/health_generate", "/ready", "/flush_cache", "/v1/models", "/metrics"],
)
async def test_sglang_engine_serves_its_routes(client: Client, engine: SimulatedEngine, path: str) -> None:
    async with client.session.get(engine.url + path) as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/version", "/load", "/v1/completions/render"])
async def test_sglang_engine_lacks_routes_of_vllm(client: Client, engine: SimulatedEngine, path: str) -> None:
    async with client.session.get(engine.url + path) as response:
        assert response.status == 404


@pytest.mark.parametrize(("role", "mode"), [("both", "null"), ("prefill", "prefill"), ("decode", "decode")])
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_engine_reports_its_role(client: Client, path: str, role: str, mode: str) -> None:
    async with SimulatedEngine(role=role, profile_name="sglang", dp_size=2) as engine:
        info = await client.get(engine, path)
        assert (info["disaggregation_mode"], info["dp_size"]) == (mode, 2)
        assert info["disaggregation_bootstrap_port"] == (engine.bootstrap_port or 8998)
        assert len(info["internal_states"]) == 2
        assert [load["dp_rank"] for load in (await client.get(engine, "/v1/loads"))["loads"]] == [0, 1]
        assert (await client.get(engine, "/get_model_info"))["is_generation"]
