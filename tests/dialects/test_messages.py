"""POST /v1/messages: Anthropic's clients are answered as they expect, by engines that know nothing of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.dialects.messages import Messages
from proxy.dialects.messages import make_message as whole_message
from proxy.dialects.requests import parse_body
from proxy.dialects.translated import ChatCompletion
from proxy.settings import Cost
from proxy.settings.client_keys import ClientKey
from proxy.wire.openai import Api
from tests.asking import answer_alone, request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.dialects.messages import TOOLS, ask, message, question, story
from tests.dialects.validators import named_events

PARSERS = {"tool_call_parser": "kimi_k2", "eos_after": 100, "default_max_tokens": 100_000}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_message_has_what_a_chat_would_say(deploy: Deploy, stream: bool, mode: str) -> None:
    gateway = await deploy(1, 1, resume={"mode": mode})
    got = message(await ask(gateway, question("Hello there", stream=stream)))
    text = await answer_alone(request(Api.CHAT, max_tokens=40))
    assert got["content"] == [{"type": "text", "text": text}]
    assert (got["type"], got["role"], got["model"]) == ("message", "assistant", "sim")
    assert (got["stop_reason"], got["stop_sequence"]) == ("max_tokens", None)
    chat = await gateway.ask(request(Api.CHAT, max_tokens=40))
    usage = got["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage["prompt_tokens"]
    assert usage["output_tokens"] == chat.usage["completion_tokens"]
    assert {labels[0] for labels in gateway.metrics("pdproxy_requests_total")} == {"messages", "chat"}


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "mooncake_bootstrap", "sglang_bootstrap", "plain"])
async def test_streamed_or_not_it_is_the_same_with_every_connector(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(1, 1, connector=connector, engine=PARSERS)
    whole, streamed = [message(await ask(gateway, story(stream=stream))) for stream in (False, True)]
    for got in (whole, streamed):
        usage = got.pop("usage")
        got["prompt_tokens"] = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert streamed == whole
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert [(call["id"], call["name"], [*call["input"]]) for call in whole["content"][2:]] == [
        ("functions.find:0", "find", ["q"]),
        ("functions.show:1", "show", ["at"]),
    ]


async def test_message_start_has_the_usage_of_the_prompt(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    for cached in (False, True):
        (_, start), *_, (_, end), _ = named_events(await ask(gateway, question("x" * 600, stream=True)))
        begun, ended = start["message"]["usage"], end["usage"]
        assert {**begun, "output_tokens": 40} == ended
        assert bool(ended["cache_read_input_tokens"]) is cached


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_is_reported(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    text = await answer_alone(request(Api.CHAT, max_tokens=40))
    stop = text.split()[2]
    got = message(await ask(gateway, question("Hello there", stop_sequences=["\n\n", stop], stream=stream)))
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", stop)
    assert got["content"] == [{"type": "text", "text": text[: text.index(stop)]}]


@pytest.mark.parametrize(
    ("finish_reason", "matched", "arguments", "told"),
    [
        ("tool_calls", None, "{}", "tool_use"),
        ("stop", "END", "{}", "tool_use"),
        ("stop", "END", '{"a": "', "stop_sequence"),
        ("tool_calls", "END", '{"a": "', "stop_sequence"),
        ("stop", None, '{"a": "', "max_tokens"),
        ("length", None, '{"a": "', "max_tokens"),
    ],
)
def test_tool_is_to_be_run_only_if_its_call_is_complete(
    finish_reason: str, matched: str | None, arguments: str, told: str
) -> None:
    call = Messages().parse_request(parse_body(orjson.dumps(question("Hi", stop_sequences=["END"]))), Cost(), {})
    use = {"id": "functions.find:0", "function": {"name": "find", "arguments": arguments}}
    choice = {"message": {"tool_calls": [use]}, "finish_reason": finish_reason, "stop_reason": matched}
    got = whole_message(call, ChatCompletion.read_answer({"id": "chatcmpl-1", "choices": [choice]}))
    assert (got["stop_reason"], got["stop_sequence"]) == (told, matched if told == "stop_sequence" else None)


@pytest.mark.parametrize("is_fast", [True, False])
async def test_elements_of_a_translated_body_count_double(deploy: Deploy, is_fast: bool) -> None:
    """It is read twice, and a chat once."""
    gateway = await deploy(1, 1, listen={"max_body_elements": 16_000, "fast_path": is_fast})
    # It has 8,663 elements, and 14,999 by the upper bound of the fast reader.
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "chat_template_kwargs": {"a": [[]] * 500},
    }
    assert (await gateway.ask(body)).status == 200
    rejected = await ask(gateway, body)
    assert (rejected.status, rejected.json["type"]) == (413, "error")


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_without_words_is_an_empty_text(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    text = await answer_alone(request(Api.CHAT, max_tokens=40))
    got = message(await ask(gateway, question("Hello there", stop_sequences=[text[:3]], stream=stream)))
    assert got["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("stream", [False, True])
async def test_call_that_the_limit_cuts_off_has_no_arguments(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    got = message(await ask(gateway, story(max_tokens=95, stream=stream)))
    assert (got["stop_reason"], got["content"][-1]["input"]) == ("max_tokens", {})
    assert got["content"][-1]["type"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_named_tool_ends_in_its_use(deploy: Deploy, stream: bool) -> None:
    """The engine finishes such a chat with "stop"."""
    gateway = await deploy(1, 1, engine=PARSERS)
    got = message(await ask(gateway, story(tool_choice={"type": "tool", "name": "find"}, stream=stream)))
    assert got["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time_if_the_client_wants_it(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, engine=PARSERS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    got = message(await ask(gateway, story(tool_choice=choice, stream=stream)))
    assert [block["name"] for block in got["content"] if block["type"] == "tool_use"] == ["find"]


async def test_engines_get_messages_as_a_chat(gateway: Deployment) -> None:
    """The request has the members that make it resumable, and none that point into the engines' network."""
    body = question(kv_transfer_params={"remote_host": "10.0.0.1"}, metadata={"user_id": "me"}, tools=TOOLS)
    message(await ask(gateway, body))
    [seen] = generations(*gateway.decoders)
    assert seen.body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert (seen.body["max_completion_tokens"], seen.body["tool_choice"], seen.body["user"]) == (40, "auto", "me")
    assert seen.body["kv_transfer_params"].get("remote_host") != "10.0.0.1"


# Errors


@pytest.mark.parametrize(
    ("body", "method", "headers", "status", "kind"),
    [
        ({}, "POST", {"X_Api_Key": "mine"}, 400, "invalid_request_error"),
        (b"{", "POST", {"X_Api_Key": "mine"}, 400, "invalid_request_error"),
        (b'{"a": 1, "a": 2}', "POST", {"X_Api_Key": "mine"}, 400, "invalid_request_error"),
        (question(), "POST", {}, 401, "authentication_error"),
        (question(), "POST", {"X_Api_Key": "other"}, 401, "authentication_error"),
        (question(), "GET", {"X_Api_Key": "mine"}, 405, "invalid_request_error"),
        (question("x" * 5000), "POST", {"X_Api_Key": "mine"}, 413, "request_too_large"),
        (question(), "POST", {"X_Api_Key": "mine", "Content_Encoding": "gzip"}, 415, "invalid_request_error"),
        (question(model="other"), "POST", {"X_Api_Key": "mine"}, 404, "not_found_error"),
    ],
)
async def test_errors_have_anthropics_form(
    deploy: Deploy, body: Any, method: str, headers: dict[str, str], status: int, kind: str
) -> None:
    gateway = await deploy(1, 1, listen={"max_body_bytes": 4096})
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answer = await ask(gateway, body, method, **headers)
    assert (answer.status, [*answer.json], answer.json["type"]) == (status, ["type", "error"], "error")
    assert answer.json["error"]["type"] == kind
    assert answer.json["error"]["message"]
    assert answer.headers["content-type"] == "application/json"


async def test_key_is_shown_as_anthropics_clients_do(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answer = await ask(
        gateway, question(), path="/v1/messages?beta=true", X_Api_Key="mine", Anthropic_Version="2023-06-01"
    )
    assert message(answer)["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"), [(422, "invalid_request_error"), (429, "rate_limit_error"), (503, "overloaded_error")]
)
async def test_engine_refusal_keeps_its_message(deploy: Deploy, stream: bool, status: int, kind: str) -> None:
    gateway = await deploy(1, 1, retry={"max_attempts": 1})
    gateway.prefillers[0].faults.add("refuse_status", status=status)
    answer = await ask(gateway, question(stream=stream))
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert "refuse" in answer.json["error"]["message"] or answer.json["error"]["message"]


async def test_missing_backend_is_an_overloaded_error(deploy: Deploy) -> None:
    gateway = await deploy(1, 0)
    answer = await ask(gateway, question())
    assert (answer.status, answer.json["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["retry-after"]


async def test_stream_that_cannot_be_saved_ends_with_an_error_event(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, resume={"mode": "off"})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    answer = await ask(gateway, question(stream=True))
    assert not answer.is_whole
    (name, told) = named_events(answer)[-1]
    assert (name, told["error"]["type"]) == ("error", "api_error")
    assert told["error"]["message"]


async def test_limit_of_a_key_is_a_rate_limit(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest(), requests_per_minute=1)
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answers = [await ask(gateway, question(), X_Api_Key="mine") for _ in range(3)]
    assert (answers[-1].status, answers[-1].json["error"]["type"]) == (429, "rate_limit_error")
    assert answers[-1].headers["retry-after"]
