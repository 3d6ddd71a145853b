"""POST /v1/messages/count_tokens: the tokens that the message would be charged."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from proxy.settings.client_keys import ClientKey
from proxy.sim.engine import SimulatedEngine
from tests.dialects.messages import TOOLS, ask, message, question, story

if TYPE_CHECKING:
    from tests.conftest import Deploy

PATH = "/v1/messages/count_tokens"


def of(body: dict[str, Any]) -> dict[str, Any]:
    """The same without what is said of the answer."""
    return {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}


@pytest.mark.parametrize(
    "body", [question(), question(system="Be brief.", tools=TOOLS), story(), question([{"type": "text", "text": "é"}])]
)
async def test_it_is_what_the_message_is_charged(deploy: Deploy, body: dict[str, Any]) -> None:
    gateway = await deploy()
    usage = message(await ask(gateway, {**body, "max_tokens": 1}))["usage"]
    answer = await ask(gateway, of(body), path=PATH)
    charged = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (answer.status, answer.json) == (200, {"input_tokens": charged})
    assert gateway.metrics("pdproxy_requests_total")[("tokenizer", "200")] == 1


async def test_sglang_counts_by_itself(deploy: Deploy) -> None:
    """Before 0.5.12 its tokenizer takes no chats."""
    engines = [SimulatedEngine(role=role, profile_name="sglang-0.5.11") for role in ("prefill", "decode")]
    gateway = await deploy(engines[:1], engines[1:], connector="sglang_bootstrap")
    answer = await ask(gateway, of(question()), path=PATH)
    assert (answer.status, [*answer.json]) == (200, ["input_tokens"])
    assert answer.json["input_tokens"] > 10
    asked = [seen.path for seen in gateway.prefillers[0].requests if "tok" in seen.path]
    assert asked == ["/tokenize", PATH] or not asked


@pytest.mark.parametrize("answers", [1, 2])
async def test_another_engine_is_asked_where_one_is_lost(deploy: Deploy, answers: int) -> None:
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
async def test_it_is_refused_in_anthropics_words(
    deploy: Deploy, body: Any, headers: dict[str, str], status: int, kind: str
) -> None:
    gateway = await deploy(1, 1, listen={"max_body_bytes": 4096})
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply(replace(gateway.worker.current, client_keys=(key,), slots={"me": 0}))
    answer = await ask(gateway, body, path=PATH, **headers)
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)


async def test_aliases_hold_for_it(deploy: Deploy) -> None:
    gateway = await deploy(models={"aliases": ["claude-*=sim"]})
    assert (await ask(gateway, of(question(model="claude-opus-5")), path=PATH)).status == 200
    [seen] = [seen for seen in gateway.prefillers[0].requests if seen.path == "/tokenize"]
    assert seen.body["model"] == "sim"
