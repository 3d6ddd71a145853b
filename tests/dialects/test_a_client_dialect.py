"""A further client dialect is one file and one line: served in its own words, and resumed like any other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson
import pytest

from proxy.dialects import DIALECTS
from proxy.process.worker import clients
from proxy.settings.client_keys import ClientKey
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, read, request
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects.echo_chat import EchoChat

PATH = "/v1/echo-chat"
ASKED = {"model": "sim", "say": "Hello there", "tokens": 40}
CHAT = request(Api.CHAT, max_tokens=40)


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "DIALECTS", (*DIALECTS, EchoChat()))


async def ask(gateway: Deployment, body: Any, method: str = "POST", **headers: str) -> Answer:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    async with gateway.session.request(method, gateway.url + PATH, data=raw, headers=headers) as response:
        return await read(response)


def events(answer: Answer) -> list[tuple[str, Any]]:
    """Names and data, the texts of `said` joined."""
    told = []
    for event in answer.body.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = event.split(b"\n")
        told.append((name.removeprefix(b"event: ").decode(), orjson.loads(data.removeprefix(b"data: "))))
    joined: list[tuple[str, Any]] = []
    for name, group in groupby(told, key=lambda each: each[0]):
        each = [data for _, data in group]
        joined.append((name, {"text": "".join(data["text"] for data in each)} if name == "said" else each))
    return joined


def is_complete(answer: Answer, text: str, tokens: int = 40) -> bool:
    """Whether the client got this text, streamed or whole, once and with its end."""
    assert (answer.status, answer.is_whole) == (200, True)
    if not answer.is_stream:
        return answer.json == {"said": text, "reason": "length", "tokens": tokens}
    hello, said, bye = events(answer)
    assert (hello[0], len(hello[1])) == ("hello", 1)
    return (said, bye) == (("said", {"text": text}), ("bye", [{"reason": "length", "tokens": tokens}]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_answer_has_the_dialects_form(deploy: Deploy, stream: bool, mode: str) -> None:
    gateway = await deploy(1, 1, resume={"mode": mode})
    assert is_complete(await ask(gateway, {**ASKED, "stream": stream}), await answer_alone(CHAT))
    asked = {labels[0] for labels in gateway.metrics("pdproxy_requests_total")}
    assert asked == {"echo_chat"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("tokens", [1, 2, 13, 39])
async def test_answer_resumes_when_its_decoder_is_lost(deploy: Deploy, profile: str, stream: bool, tokens: int) -> None:
    """The answer continues as a completion or as a chat of token ids."""
    gateway = await deploy(1, 2, engine={"profile_name": profile}, resume={"repeat_up_to_tokens": 0})
    for decoder in gateway.decoders:
        decoder.faults.add("reset_after_tokens", tokens=tokens, times=1)
    assert is_complete(await ask(gateway, {**ASKED, "stream": stream}), await answer_alone(CHAT))
    assert sum(gateway.metrics("pdproxy_resumes_total").values())


async def test_answer_restarts_when_the_client_has_nothing(deploy: Deploy) -> None:
    """The first decoder opens its stream, so `hello` was written, but not sent."""
    gateway = await deploy(1, 2)
    for decoder in gateway.decoders:
        decoder.faults.add("recompute", tokens=0, times=1)
    answer = await ask(gateway, {**ASKED, "stream": True})
    assert is_complete(answer, await answer_alone(CHAT))


async def test_answer_that_cannot_be_saved_ends_with_an_apology(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, resume={"mode": "off"})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    answer = await ask(gateway, {**ASKED, "stream": True})
    assert not answer.is_whole
    assert [name for name, _ in events(answer)] == ["hello", "said", "sorry"]


@pytest.mark.parametrize(
    ("body", "method", "headers", "status", "kind"),
    [
        ({}, "POST", {"X-Api-Key": "mine"}, 400, "invalid_request"),
        (b"{", "POST", {"X-Api-Key": "mine"}, 400, "invalid_json"),
        (ASKED, "POST", {}, 401, "invalid_api_key"),
        (ASKED, "GET", {"X-Api-Key": "mine"}, 405, "method_not_allowed"),
        (ASKED | {"say": "x" * 5000}, "POST", {"X-Api-Key": "mine"}, 413, "request_too_large"),
        (ASKED, "POST", {"X-Api-Key": "mine", "Content-Encoding": "gzip"}, 415, "content_encoding"),
    ],
)
async def test_errors_have_the_form_of_their_route(
    deploy: Deploy, body: Any, method: str, headers: dict[str, str], status: int, kind: str
) -> None:
    gateway = await deploy(1, 1, listen={"max_body_bytes": 4096})
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest())
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answer = await ask(gateway, body, method, **headers)
    assert (answer.status, answer.json["kind"]) == (status, kind)
    assert [*answer.json] == ["why", "kind"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-pdproxy-error-code"] == kind


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_refusal_has_the_dialects_form(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    gateway.prefillers[0].faults.add("refuse_status", status=422)
    answer = await ask(gateway, {**ASKED, "stream": stream})
    assert (answer.status, [*answer.json]) == (422, ["why", "kind"])
    assert answer.headers["content-type"] == "application/json"


async def test_other_routes_keep_their_words(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    answer = await gateway.ask({"messages": [], "stream": "perhaps"})
    assert (answer.status, answer.error["param"]) == (400, "stream")
