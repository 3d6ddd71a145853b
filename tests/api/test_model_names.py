"""`models.aliases`: clients use one name, engines another, and answers have the name of the client."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.api.passthrough import ROUTES
from proxy.dialects.adjustments import ModelNames
from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, read, request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.dialects import messages, responses

ALIASES = {"aliases": ["gpt-5=sim", "claude-*=sim"]}


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("gpt-5", "kimi"),
        ("claude-sonnet-5", "kimi"),
        ("claude-haiku-5", "small"),
        ("kimi", "kimi"),
        ("small", "small"),
        ("claude-exact", "exact"),
        ("anything", "kimi"),
        ("a=b", "c"),
    ],
)
def test_first_matching_alias_counts_and_served_names_stay(name: str, served: str) -> None:
    names = ModelNames(["claude-haiku-*=small", "claude-*=kimi", "gpt-5=kimi", "claude-exact=exact", "a=b=c", "*=kimi"])
    assert names.engine_name(name) == served


def test_names_stay_without_aliases() -> None:
    assert ModelNames(()).engine_name("anything") == "anything"


@pytest.mark.parametrize("aliases", ["kimi", ["=kimi"], ["gpt="], [7]])
def test_invalid_alias_is_rejected(aliases: Any) -> None:
    with pytest.raises(ValidationError, match="name=served name"):
        Settings.model_validate({"models": {"aliases": aliases}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_answer_has_the_requested_model_name(
    deploy: Deploy, api: Api, samples: int, stream: bool, mode: str
) -> None:
    gateway = await deploy(models=ALIASES, resume={"mode": mode, "repeat_up_to_tokens": 0})
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = request(api, n=samples, **options)
    answer, same = await gateway.ask({**asked, "model": "gpt-5"}), await gateway.ask({**asked, "model": "sim"})
    assert answer.is_done
    assert (answer.texts, answer.usage) == (same.texts, same.usage)
    assert _models(answer) == {"gpt-5"}
    assert _models(same) == {"sim"}
    assert {seen.body["model"] for seen in generations(*gateway.engines)} == {"sim"}


def _models(answer: Answer) -> set[str]:
    told = [event for event in answer.events if event != "[DONE]"] if answer.is_stream else [answer.json]
    return {payload["model"] for payload in told}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_other_dialects_have_the_requested_model_name(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(models=ALIASES)
    asked = {"model": "claude-opus-5", "stream": stream}
    assert messages.message(await messages.ask(gateway, messages.question(**asked)))["model"] == "claude-opus-5"
    assert responses.response(await responses.ask(gateway, responses.question(**asked)))["model"] == "claude-opus-5"


async def test_resumed_answer_keeps_its_model_name(deploy: Deploy) -> None:
    """Resuming needs queries of the tokenizer, too."""
    gateway = await deploy(1, 2, models=ALIASES, resume={"repeat_up_to_tokens": 0})
    for decoder in gateway.decoders:
        decoder.faults.add("recompute", tokens=20, times=1)
    answer = await gateway.ask(request(Api.CHAT, model="gpt-5", stream=True, max_tokens=40))
    assert answer.is_done
    assert _models(answer) == {"gpt-5"}
    assert sum(gateway.metrics("pdproxy_resumes_total").values()) == 1


async def test_aliases_without_wildcards_are_listed(deploy: Deploy) -> None:
    gateway = await deploy(models=ALIASES)
    listed = (await _get(gateway, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["sim", "gpt-5"]
    for name in ("gpt-5", "claude-opus-5", "sim"):
        assert (await _get(gateway, f"/v1/models/{name}")).json["id"] == name
    assert (await _get(gateway, "/v1/models/other")).status == 404


async def _get(gateway: Deployment, path: str) -> Answer:
    async with gateway.session.get(gateway.url + path) as response:
        return await read(response)


@pytest.mark.parametrize(
    "path", [path for group in ("tokenizer", "pooling") for method, path in ROUTES[group] if method == "POST"]
)
async def test_passed_through_request_has_the_engines_model_name(deploy: Deploy, path: str) -> None:
    prefillers = [SimulatedEngine(role="prefill", model=name) for name in ("sim", "small")]
    decoders = [SimulatedEngine(role="decode", model=name) for name in ("sim", "small")]
    gateway = await deploy(prefillers, decoders, models={"aliases": ["text-*=small"]})
    body = b'{ "prompt" : "Hi",  "model": "text-1", "input": ["a", 1.50] }'
    async with gateway.session.post(gateway.url + path, data=body) as answer:
        await answer.read()
    [seen] = [each for engine in prefillers for each in engine.requests if each.path == path]
    assert seen.body == {"prompt": "Hi", "model": "small", "input": ["a", 1.5]}
    assert seen in prefillers[1].requests


async def test_invalid_json_is_passed_through_unchanged(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, models=ALIASES)
    async with gateway.session.post(gateway.url + "/tokenize", data=b'{"model": "gpt-5", "prompt": ') as answer:
        assert answer.status in (400, 422)
    async with gateway.session.post(gateway.url + "/tokenize", data=b'{"model": "gpt-5", "model": "gpt-5"}') as answer:
        assert answer.status == 400
        assert "twice" in (await answer.json())["error"]["message"]
