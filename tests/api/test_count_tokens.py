"""POST /v1/messages/count_tokens counts the tokens that the message would have as usage."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from proxy.settings.client_keys import ClientKey
from proxy.sim.engine import SimulatedEngine
from tests.canned import CannedEngine, Received, http, json_answer
from tests.conftest import Deploy
from tests.dialects.messages import PATH as MESSAGES
from tests.dialects.messages import TOOLS, ask, message, question, story
from tests.dialects.responses import PATH as RESPONSES
from tests.dialects.responses import TOOLS as RESPONSE_TOOLS
from tests.dialects.responses import response

PATH = "/v1/messages/count_tokens"


def of(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request without the members about its answer."""
    return {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}


@pytest.mark.parametrize(
    "body", [question(), question(system="Be brief.", tools=TOOLS), story(), question([{"type": "text", "text": "é"}])]
)
async def test_count_equals_the_usage_of_the_message(deploy: Deploy, body: dict[str, Any]) -> None:
    gateway = await deploy()
    usage = message(await ask(gateway, {**body, "max_tokens": 1}))["usage"]
    answer = await ask(gateway, of(body), path=PATH)
    charged = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (answer.status, answer.json) == (200, {"input_tokens": charged})
    assert gateway.metrics("pdproxy_requests_total")[("tokenizer", "200")] == 1


@pytest.mark.parametrize("tools", [[], [*RESPONSE_TOOLS, {"type": "web_search"}]])
async def test_count_equals_the_usage_of_the_response(deploy: Deploy, tools: list[Any]) -> None:
    gateway = await deploy()
    body = {"model": "sim", "input": "What is it?", "instructions": "Be brief.", "tools": tools}
    usage = response(await ask(gateway, {**body, "max_output_tokens": 1}, path=RESPONSES))["usage"]
    answer = await ask(gateway, body, path=f"{RESPONSES}/input_tokens")
    assert (answer.status, answer.json) == (
        200,
        {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]},
    )
    refused = await ask(gateway, {**body, "previous_response_id": "resp_1"}, path=f"{RESPONSES}/input_tokens")
    assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")


async def test_document_counts_as_its_replacement_note(deploy: Deploy) -> None:
    gateway = await deploy()
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}}
    body = question([{"type": "text", "text": "See:"}, pdf])
    usage = message(await ask(gateway, {**body, "max_tokens": 1}))["usage"]
    answer = await ask(gateway, of(body), path=PATH)
    assert answer.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("answered", "status", "words"),
    [
        (http(b'{"error":{"message":"no tokenizer"}}', "500 Error"), 500, "no tokenizer"),
        (
            http(b'{"detail":"Not Found"}', "404 Not Found"),
            502,
            "does not count tokens (/tokenize answered with status",
        ),
        (http(b"<html>", "501 Not Implemented"), 502, "does not count tokens (/tokenize answered with status 501)"),
        (json_answer({"tokens": [1, 2]}), 502, "did not count the tokens (/tokenize answered without `count`)"),
        (json_answer([1]), 502, "did not count the tokens"),
    ],
)
async def test_engine_that_cannot_count_is_reported(deploy: Deploy, answered: bytes, status: int, words: str) -> None:
    """Its instance is healthy, so it would be wrong to say that there is none."""
    gateway = await deploy([CannedEngine("prefill", [answered])], [CannedEngine("decode", [answered])])
    answer = await ask(gateway, of(question()), path=PATH)
    assert answer.status == status
    assert words in answer.json["error"]["message"]


async def test_engine_of_the_other_role_is_queried_too(deploy: Deploy) -> None:
    broken = http(b"{}", "500 Error")
    gateway = await deploy([CannedEngine("prefill", [broken])], [CannedEngine("decode", [json_answer({"count": 42})])])
    answer = await ask(gateway, of(question()), path=PATH)
    assert (answer.status, answer.json) == (200, {"input_tokens": 42})


async def test_sglang_counts_by_tokenize(deploy: Deploy) -> None:
    """Before 0.5.12 its tokenizer takes no chats."""
    engines = [SimulatedEngine(role=role, profile_name="sglang-0.5.11") for role in ("prefill", "decode")]
    gateway = await deploy(engines[:1], engines[1:], connector="sglang_bootstrap")
    answer = await ask(gateway, of(question()), path=PATH)
    assert (answer.status, [*answer.json]) == (200, ["input_tokens"])
    assert answer.json["input_tokens"] > 10
    asked = [seen.path for seen in gateway.prefillers[0].requests if "tok" in seen.path]
    assert asked == ["/tokenize", PATH] or not asked


async def test_old_sglang_counts_by_its_own_route(deploy: Deploy) -> None:
    def answer(asked: Received) -> list[bytes]:
        if asked.path == PATH:
            return [json_answer({"input_tokens": 42})]
        return [http(b'{"detail":"Not Found"}', "404 Not Found")]

    engines = [CannedEngine(role, answer) for role in ("prefill", "decode")]
    gateway = await deploy(engines[:1], engines[1:], connector="sglang_bootstrap")
    answered = await ask(gateway, of(question()), path=PATH)
    assert (answered.status, answered.json) == (200, {"input_tokens": 42})


@pytest.mark.parametrize("answers", [1, 2])
async def test_another_engine_is_queried_when_one_is_lost(deploy: Deploy, answers: int) -> None:
    gateway = await deploy(2, 1)
    for prefiller in gateway.prefillers[: 3 - answers]:
        await prefiller.kill()
    answer = await ask(gateway, of(question()), path=PATH)
    if answers == 2:
        assert answer.status == 200
    else:
        assert (answer.status, answer.json["error"]["type"]) == (502, "api_error")


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        (b"{", {"X_Api_Key": "mine"}, 400, "invalid_request_error"),
        ({"messages": []}, {"X_Api_Key": "mine"}, 400, "invalid_request_error"),
        (of(question()), {}, 401, "authentication_error"),
        (of(question("x" * 5000)), {"X_Api_Key": "mine"}, 413, "request_too_large"),
    ],
)
async def test_error_of_a_count_has_anthropics_form(
    deploy: Deploy, body: Any, headers: dict[str, str], status: int, kind: str
) -> None:
    gateway = await deploy(1, 1, listen={"max_body_bytes": 4096})
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answer = await ask(gateway, body, path=PATH, **headers)
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)


async def test_count_resolves_aliases(deploy: Deploy) -> None:
    gateway = await deploy(models={"aliases": ["claude-*=sim"]})
    assert (await ask(gateway, of(question(model="claude-opus-5")), path=PATH)).status == 200
    [seen] = [seen for seen in gateway.prefillers[0].requests if seen.path == "/tokenize"]
    assert seen.body["model"] == "sim"


@pytest.mark.parametrize("path", [PATH, f"{RESPONSES}/input_tokens", "/v1/models", "/tokenize", "/v1/embeddings"])
async def test_limits_of_a_key_apply_to_all_queries_of_engines(deploy: Deploy, path: str) -> None:
    gateway = await deploy(1, 1)
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest(), requests_per_minute=2)
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    body: Any = {PATH: of(question()), "/tokenize": {"prompt": "Hi"}, "/v1/models": b""}.get(path, {"input": "Hi"})
    method = "GET" if path == "/v1/models" else "POST"
    codes = [(await ask(gateway, body, method, path, X_Api_Key="mine")).status for _ in range(4)]
    assert codes == [200, 200, 429, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_clients_get_the_request_id(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    good, bad = question(stream=stream), {"messages": 7}
    for path, body, status in (
        (MESSAGES, good, 200),
        (MESSAGES, bad, 400),
        (PATH, of(question()), 200),
        (PATH, bad, 400),
    ):
        answer = await ask(gateway, body, path=path, X_Request_Id="r-1")
        assert (answer.status, answer.headers["request-id"], answer.headers["x-request-id"]) == (status, "r-1", "r-1")
    assert "request-id" not in (await gateway.ask({"model": "sim", "prompt": "Hi", "max_tokens": 1})).headers
