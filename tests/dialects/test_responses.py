"""POST /v1/responses: OpenAI's clients are answered as they expect, and nothing is kept for them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from proxy.settings.client_keys import ClientKey
from proxy.wire.openai import Api
from tests.asking import answer_alone, request
from tests.canned import CannedEngine, http
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.dialects.responses import PATH, TOOLS, ask, question, response, story
from tests.dialects.validators import named_events

PARSERS = {"tool_call_parser": "kimi_k2", "eos_after": 100, "default_max_tokens": 100_000}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits a file."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_response_has_what_a_chat_would_say(deploy: Deploy, stream: bool, mode: str) -> None:
    gateway = await deploy(1, 1, resume={"mode": mode})
    asked = {"instructions": None, "temperature": 0.5, "metadata": {"a": "b"}, "tools": TOOLS, "tool_choice": "none"}
    got = response(await ask(gateway, question("Hello there", stream=stream, **asked)))
    text = await answer_alone(request(Api.CHAT, max_tokens=40))
    [item] = got["output"]
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert (got["object"], got["model"], got["store"], got["background"]) == ("response", "sim", False, False)
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert {name: got[name] for name in asked} == asked
    chat = await gateway.ask(request(Api.CHAT, max_tokens=40))
    usage = got["usage"]
    counts = [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")]
    assert counts == [chat.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert {labels[0] for labels in gateway.metrics("pdproxy_requests_total")} == {"responses", "chat"}


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "mooncake_bootstrap", "sglang_bootstrap", "plain"])
async def test_streamed_or_not_it_is_the_same_with_every_connector(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(1, 1, connector=connector, engine=PARSERS)
    whole, streamed = [response(await ask(gateway, story(stream=stream))) for stream in (False, True)]
    for got in (whole, streamed):
        got["usage"].pop("input_tokens_details")
    assert streamed == whole
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole["status"] == "completed"
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert [(call["call_id"], call["name"]) for call in whole["output"][2:]] == [
        ("functions.find:0", "find"),
        ("functions.show:1", "show"),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tool_call_has_text_input(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    got = response(await ask(gateway, story(tools=[CUSTOM], stream=stream)))
    call = got["output"][-1]
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "patch", "completed")
    assert call["input"]
    assert "{" not in call["input"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_search_is_a_separate_item(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    search = {"type": "tool_search", "execution": "client", "parameters": TOOLS[0]["parameters"]}
    got = response(await ask(gateway, story(tools=[search], stream=stream)))
    call = got["output"][-1]
    assert (call["type"], call["execution"], call["status"]) == ("tool_search_call", "client", "completed")
    assert call["call_id"].startswith("functions.tool_search:")
    assert call["arguments"] == {"q": "café"}


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_of_a_namespace_is_called_by_both_names(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    space = {"type": "namespace", "name": "agents", "tools": TOOLS}
    got = response(await ask(gateway, story(tools=[space], stream=stream)))
    assert [(call["namespace"], call["name"]) for call in got["output"][-2:]] == [
        ("agents", "find"),
        ("agents", "show"),
    ]
    assert got["tools"] == [space]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_comes_back_from_a_client_that_cannot_read_it(deploy: Deploy, stream: bool) -> None:
    """Codex sends back only the sealed content of reasoning."""
    gateway = await deploy(1, 1, engine=PARSERS)
    first = response(await ask(gateway, story(include=["reasoning.encrypted_content"], stream=stream)))
    thoughts, *_, call, other = first["output"]
    told = thoughts.pop("content")[0]["text"]
    history = [{"role": "user", "content": "What now?"}, {**thoughts, "id": "rs_1"}, call, other]
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "42"} for each in (call, other)]
    response(await ask(gateway, story(input=[*history, *results], stream=stream)))
    _, said, *returned = generations(*gateway.decoders)[-1].body["messages"]
    assert said["reasoning"] == told
    assert [message["content"] for message in returned] == ["42", "42"]


async def test_reasoning_is_sealed_only_on_request(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    assert response(await ask(gateway, story()))["output"][0]["encrypted_content"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_without_words_has_no_items(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    text = await answer_alone(request(Api.CHAT, max_tokens=40))
    got = response(await ask(gateway, question("Hello there", stop=[text[:3]], stream=stream)))
    assert (got["status"], got["output"]) == ("completed", [])


async def test_conversation_name_of_a_client_is_its_session(gateway: Deployment) -> None:
    response(await ask(gateway, question(prompt_cache_key="mine", kv_transfer_params={"remote_host": "10.0.0.1"})))
    [seen] = generations(*gateway.decoders)
    assert (seen.path, seen.body["prompt_cache_key"]) == ("/v1/chat/completions", "mine")
    assert seen.body["kv_transfer_params"].get("remote_host") != "10.0.0.1"


async def test_left_out_members_are_logged_once_for_each_key(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(1, 1)
    keys = {name: ClientKey(name=name, key_sha256=hashlib.sha256(name.encode()).hexdigest()) for name in ("a", "b")}
    slots = {"a": 0, "b": 1}
    gateway.worker.apply_snapshot(
        replace(gateway.worker.current_snapshot, client_keys=tuple(keys.values()), slots_by_key=slots)
    )
    tools = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "bad\nname"}]
    for _ in range(2):
        for name in keys:
            response(await ask(gateway, question(tools=tools), Authorization=f"Bearer {name}"))
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert sorted(told) == [
        f"intake: content left out, as no engine can serve it (logged once): path {PATH}, client key {key}: tool {kind}"
        for key in keys
        for kind in ("image_generation", "of an unknown type", "web_search")
    ]


# Errors


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation as input"),
        ({"background": True}, "background", "leave this out"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "as instructions and input"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "demands a tool of type web_search"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input",
            "items are not stored here: send them in full",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_feature_of_openais_service_is_rejected_with_a_message(
    gateway: Deployment, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    answer = await ask(gateway, question(**fields, stream=stream))
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "invalid_request")
    assert words in answer.error["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_response_is_not_there_afterwards(gateway: Deployment, method: str) -> None:
    answer = await ask(gateway, b"", method, path="/v1/responses/resp_1")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "responses are not stored here" in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too long","code":400}}', "too long"),
        (b"<html>no</html>", "<html>no</html>"),
        (b'{"error":{"message":7}}', "decode instance: rejected the request as invalid with status 400"),
        (b'{"error":true}', "decode instance: rejected the request as invalid with status 400"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b"", "decode instance: rejected the request as invalid with status 400"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_engines_error_is_one_of_this_api(deploy: Deploy, body: bytes, message: str, stream: bool) -> None:
    engine = CannedEngine("both", [http(body, "400 Bad Request", "text/html")])
    gateway = await deploy(decoders=[engine], connector="plain")
    answer = await ask(gateway, question(stream=stream))
    assert (answer.status, answer.error["message"]) == (400, message)
    if message == "too long" and b"object" not in body:
        assert answer.body == body


async def test_key_is_needed_as_everywhere(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    assert (await ask(gateway, question())).error["code"] == "invalid_api_key"
    assert response(await ask(gateway, question(), Authorization="Bearer mine"))["output"]


async def test_stream_that_cannot_be_saved_ends_as_failed(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, resume={"mode": "off"})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    answer = await ask(gateway, question(stream=True))
    assert not answer.is_whole
    (_, created), *_, (_, failed) = named_events(answer)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["id"] == created["response"]["id"]
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["error"]["message"]
