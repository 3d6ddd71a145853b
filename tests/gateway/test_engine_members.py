"""Members of engines' answers that are not for clients are removed in any notation."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.wire.document import Document
from proxy.wire.openai import DONE_EVENT, OPENAI_APIS, Api, cut_engine_members
from tests.asking import Answer, read, request
from tests.canned import CannedEngine, event_stream, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects import messages, responses

BODIES: dict[str, dict[str, Any]] = {
    Api.CHAT.path: request(Api.CHAT, max_tokens=40),
    Api.COMPLETIONS.path: request(Api.COMPLETIONS, max_tokens=40),
    messages.PATH: messages.story(),
    responses.PATH: responses.story(),
}
NAMES = (b"transfer_params", b"remote_", b"10.1.2.3")
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "usage in each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "several": {"n": 2},
    "log probabilities": {"logprobs": 1},
    "short": {"max_tokens": 2},
}
SECRET = {"remote_host": "10.1.2.3", "remote_port": 5600, "remote_block_ids": [[4, 5]], "remote_engine_id": "e-1"}
SPELLED = {
    "at the end": b',"kv_transfer_params":%b}',
    "with blanks": b', "kv_transfer_params" : %b }',
    "before the end": b',"kv_transfer_params":%b,"metrics":null}',
    "of encoders": b',"kv_transfer_params":null,"ec_transfer_params":{"hash":%b}}',
}


async def post(gateway: Deployment, path: str, body: dict[str, Any]) -> Answer:
    async with gateway.session.post(gateway.url + path, data=orjson.dumps(body)) as response:
        return await read(response)


def tells_nothing(answer: Answer) -> bool:
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    return not any(name in answer.body for name in NAMES)


@pytest.mark.fault(123)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("mode", ["exact", "restart-only"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_no_answer_contains_kv_transfer_params(deploy: Deploy, stream: bool, mode: str, is_fast: bool) -> None:
    """VLLM 0.33 sends these parameters with `bidirectional_kv_xfer`."""
    decoder = {"bidirectional_kv_xfer": True, "kv_host": "10.1.2.3", "tool_call_parser": "kimi_k2"}
    gateway = await deploy(
        engine={"profile_name": "v0.33"}, decoder=decoder, resume={"mode": mode}, listen={"fast_path": is_fast}
    )
    gateway.may_stay_pinned = 100  # decoders keep the KV cache of each answer
    for path, body in BODIES.items():
        for fields in FIELDS.values() if path in {api.path for api in OPENAI_APIS} else [{}]:
            more = {name: told for name, told in fields.items() if stream or name != "stream_options"}
            if more.get("logprobs") and path == Api.CHAT.path:
                more["logprobs"] = True
            assert tells_nothing(await post(gateway, path, {**body, **more, "stream": stream})), (path, fields)


@pytest.mark.fault(123)
async def test_resumed_answer_does_not_contain_kv_transfer_params(deploy: Deploy) -> None:
    decoder = {"bidirectional_kv_xfer": True, "kv_host": "10.1.2.3"}
    gateway = await deploy(1, 2, engine={"profile_name": "v0.33"}, decoder=decoder)
    gateway.may_stay_pinned = 100  # decoders keep the KV cache of each answer
    for path, body in BODIES.items():
        for stream in (True, False):
            gateway.decoders[0].faults.clear()
            gateway.decoders[0].faults.add("reset_after_tokens", tokens=5, times=1)
            assert tells_nothing(await post(gateway, path, {**body, "stream": stream}))
            await gateway.ask(request(Api.CHAT))  # another turn for the first decoder


@pytest.mark.fault(123)
@pytest.mark.parametrize("spelled", SPELLED.values(), ids=SPELLED)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("at", ["first", "all", "last", "usage"])
async def test_members_for_engines_are_removed_in_any_notation(
    deploy: Deploy, path: str, stream: bool, spelled: bytes, at: str
) -> None:
    is_chat = path != Api.COMPLETIONS.path

    def event(text: str, finish: str | None = None) -> dict[str, Any]:
        told = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"id": "x", "created": 1, "model": "m", "choices": [{"index": 0, **told, "finish_reason": finish}]}

    usage = {"id": "x", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    events = [event("a"), event("b"), event("c"), event("d", "stop"), usage]
    places = {"first": [0], "all": range(5), "last": [3], "usage": [4]}[at]
    params = spelled % orjson.dumps(SECRET)
    written = [
        b"data: " + (orjson.dumps(each)[:-1] + params if place in places else orjson.dumps(each)) + b"\n\n"
        for place, each in enumerate(events)
    ]
    gateway = await deploy(decoders=[CannedEngine("both", event_stream([*written, DONE_EVENT]))], connector="plain")
    body = {**BODIES[path], "stream": stream}
    if stream and path in {api.path for api in OPENAI_APIS}:
        body["stream_options"] = {"include_usage": True}
    answer = await post(gateway, path, body)
    assert tells_nothing(answer)


@pytest.mark.fault(123)
@pytest.mark.parametrize("filling", [0, 100_000])
@pytest.mark.parametrize("spelled", SPELLED.values(), ids=SPELLED)
async def test_body_of_an_engine_is_passed_on_without_engine_members(
    deploy: Deploy, spelled: bytes, filling: int
) -> None:
    choice = {"index": 0, "text": "x" * filling, "finish_reason": "stop"}
    whole = orjson.dumps({"id": "x", "choices": [choice]})[:-1] + spelled % orjson.dumps(SECRET)
    engine = CannedEngine("both", [json_answer(orjson.Fragment(whole))])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"})
    answer = await post(gateway, Api.COMPLETIONS.path, BODIES[Api.COMPLETIONS.path])
    assert tells_nothing(answer)
    assert answer.json["choices"] == [choice]


@pytest.mark.fault(123)
async def test_unreadable_event_with_engine_members_does_not_pass(deploy: Deploy) -> None:
    events = [
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        b'data: {"choices":[,"kv_transfer_params":{"remote_host":"10.1.2.3"}}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n',
    ]
    gateway = await deploy(decoders=[CannedEngine("both", event_stream([*events, DONE_EVENT]))], connector="plain")
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=True))
    assert not any(name in answer.body for name in NAMES)
    assert answer.error["code"] == "decode_bad_answer"


def test_text_that_quotes_the_member_is_kept() -> None:
    text = 'say ,"kv_transfer_params":null and {"kv_transfer_params": {"a": 1}}'
    written = orjson.dumps({"a": text, "kv_transfer_params": None})
    assert cut_engine_members(written) == orjson.dumps({"a": text})
    assert Document(cut_engine_members(orjson.dumps({"a": text, "b": 1, "kv_transfer_params": {}}))).values == {
        "a": text,
        "b": 1,
    }


def test_repeated_engine_member_is_removed_twice() -> None:
    assert cut_engine_members(b'{"kv_transfer_params":{"a":1},"b":2,"kv_transfer_params":{}}') == b'{"b":2}'
