"""Requests that only Python's JSON parser accepts reach the engines, which use that parser, unchanged."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import Answer, read
from tests.canned import CannedEngine, Received, event_stream, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects import messages, responses

CUT = "cut \ud83d"
LONE_SURROGATES = {
    "first half": b"cut \\ud83d",
    "second half": b"\\ude00 cut",
    "capitals": b"\\uD83D and on",
    "wrong order": b"\\ude00\\ud83d",
    "twice": b"\\ud83d \\ud83d",
    "beside others": '日 \\ud83d 🙂 "'.replace('"', '\\"').encode(),
}
LENGTHS = {"short": 0, "long": 20_000, "very long": 1_500_000}
KV_PARAMETERS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1]}


def answer(received: Received) -> list[bytes]:
    """Return any answer to a request, streamed if the request asks for a stream."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if b'"stream":true' in received.body.replace(b" ", b""):
        last = b"data: " + orjson.dumps({"choices": [{**choice, "text": "a", "delta": {"content": "a"}}]}) + b"\n\n"
        return event_stream([last, b"data: [DONE]\n\n"])
    whole = {**choice, "text": "a", "message": {"role": "assistant", "content": "a"}}
    return [json_answer({"choices": [whole], "kv_transfer_params": KV_PARAMETERS})]


async def deploy_pair(deploy: Deploy, **sections: Any) -> tuple[CannedEngine, CannedEngine, Deployment]:
    prefiller, decoder = CannedEngine("prefill", answer), CannedEngine("decode", answer)
    return prefiller, decoder, await deploy([prefiller], [decoder], connector="vllm_pull", **sections)


async def post(gateway: Deployment, path: str, body: bytes) -> Answer:
    async with gateway.session.post(gateway.url + path, data=io.BytesIO(body)) as response:
        return await read(response)


def parse(received: Received) -> Any:
    """Parse a body like an engine."""
    return json.loads(received.body)


@pytest.mark.fault(122)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("mode", ["exact", "off"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("written", LONE_SURROGATES.values(), ids=LONE_SURROGATES)
async def test_lone_surrogate_reaches_both_engines_unchanged(
    deploy: Deploy, written: bytes, stream: bytes, mode: str, is_fast: bool
) -> None:
    prefiller, decoder, gateway = await deploy_pair(deploy, resume={"mode": mode}, listen={"fast_path": is_fast})
    content = b'"messages": [{"role": "user",  "content": "%b"}]' % written
    for member in (b"", b', "max_tokens": 4'):
        body = b'{"model": "sim", "stream": %b, %b%b}' % (stream, content, member)
        assert (await post(gateway, Api.CHAT.path, body)).status == 200
    assert [content in received.body for engine in (prefiller, decoder) for received in engine.received] == [True] * 4


@pytest.mark.fault(122)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("member", ["messages", "user", "\ud83d", "model"])
async def test_lone_surrogate_in_any_member_reaches_the_engines(deploy: Deploy, member: str, length: int) -> None:
    prefiller, decoder, gateway = await deploy_pair(deploy)
    members = [{"role": "user", "content": "x" * length + (CUT if member == "messages" else "")}]
    body = {"model": "sim", "messages": members, **({} if member == "messages" else {member: CUT})}
    assert (await post(gateway, Api.CHAT.path, json.dumps(body).encode())).status == 200
    for engine in (prefiller, decoder):
        [received] = engine.received
        assert {name: parse(received)[name] for name in body} == body


@pytest.mark.fault(122)
async def test_lone_surrogate_survives_splitting_a_request(deploy: Deploy) -> None:
    _, decoder, gateway = await deploy_pair(deploy, models={"aliases": ["other=sim"]})
    body = {"model": "other", "prompt": ["a", CUT], "n": 2}
    assert (await post(gateway, Api.COMPLETIONS.path, json.dumps(body).encode())).status == 200
    assert sorted(parse(received)["prompt"] for received in decoder.received) == ["a", "a", CUT, CUT]
    assert {parse(received)["model"] for received in decoder.received} == {"sim"}


@pytest.mark.fault(122)
@pytest.mark.parametrize("stream", [True, False])
async def test_lone_surrogate_survives_translation(deploy: Deploy, stream: bool) -> None:
    use = {"type": "tool_use", "id": "a", "name": "find", "input": {CUT: CUT}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": CUT}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": CUT, "signature": "s"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": CUT}]},
    ]
    items = [{"role": "user", "content": CUT}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": CUT}]
    for path, body in (
        (messages.PATH, messages.question(system=CUT, stream=stream) | {"messages": history}),
        (responses.PATH, responses.question(items, instructions=CUT, stream=stream)),
    ):
        prefiller, decoder, gateway = await deploy_pair(deploy)
        given = await post(gateway, path, json.dumps(body).encode())
        assert given.status == 200, given.body
        for engine in (prefiller, decoder):
            members = parse(engine.received[0])["messages"]
            assert [message.get("content") for message in members][:2] == [CUT, CUT]
            assert CUT in str(members[2:]) or "\\ud83d" in str(members[2:])


@pytest.mark.fault(122)
async def test_tokens_of_a_message_with_a_lone_surrogate_are_counted(deploy: Deploy) -> None:
    engine = CannedEngine("both", [json_answer({"count": 7})])
    gateway = await deploy(decoders=[engine], connector="plain")
    given = await post(gateway, messages.PATH + "/count_tokens", json.dumps(messages.question(CUT)).encode())
    assert (given.status, given.json) == (200, {"input_tokens": 7})
    assert parse(engine.received[0])["messages"][0]["content"] == CUT


@pytest.mark.fault(122)
@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-" + b"7" * 30])
@pytest.mark.parametrize("length", [0, 20_000])
async def test_numbers_outside_json_reach_the_engines(deploy: Deploy, number: bytes, length: int) -> None:
    prefiller, decoder, gateway = await deploy_pair(deploy)
    members = b'"x": [%b], "temperature": %b' % (number, number)
    body = b'{"prompt": "%b", %b}' % (b"x" * length, members)
    assert (await post(gateway, Api.COMPLETIONS.path, body)).status == 200
    assert all(members in engine.received[0].body for engine in (prefiller, decoder))


@pytest.mark.fault(122)
@pytest.mark.parametrize("name", ["max_tokens", "n", "stream", "seed", "logprobs", "priority"])
@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000])
@pytest.mark.parametrize("length", [0, 20_000])
async def test_numbers_outside_json_in_known_fields_cause_no_error(
    deploy: Deploy, name: str, number: bytes, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, gateway = await deploy_pair(deploy)
    body = b'{"prompt": "%b", "%b": %b}' % (b"x" * length, name.encode(), number)
    given = await post(gateway, Api.COMPLETIONS.path, body)
    assert given.status in (200, 400)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
