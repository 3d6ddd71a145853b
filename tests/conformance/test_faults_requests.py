"""Invalid and extreme requests: a 400 or the engine's own answer, without effects on others."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from typing import Any

import orjson
import pytest

from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, read, request, until
from tests.canned import CannedEngine, event_stream, http, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.gateway.test_client_writer import exchange, raw_request

CHAT = Api.CHAT.path
SECRET = "my-secret-prompt"

NO_JSON = {
    "cut off": b'{"prompt": "%b' % SECRET.encode(),
    "nested for ever": b'{"prompt": "%b", "x": %b' % (SECRET.encode(), b"[" * 100_000),
    "nested deeper than parsers go": b'{"prompt": "%b", "x": %b1%b}' % (SECRET.encode(), b"[" * 2000, b"]" * 2000),
    "not UTF-8": b'{"prompt": "%b\xff"}' % SECRET.encode(),
    "UTF-16": f'{{"prompt": "{SECRET}"}}'.encode("utf-16"),
    "byte-order mark": b'\xef\xbb\xbf{"prompt": "%b"}' % SECRET.encode(),
    "no number": b'{"prompt": "%b", "x": nan}' % SECRET.encode(),
    "half of an escape": b'{"prompt": "%b\\ud80"}' % SECRET.encode(),
    "control character": b'{"prompt": "%b\x01"}' % SECRET.encode(),
    "named twice": b'{"prompt": "%b", "n": 1, "\\u006e": 2}' % SECRET.encode(),
    "an array": b'["%b"]' % SECRET.encode(),
    "text": b'"%b"' % SECRET.encode(),
    "nothing": b"",
}


@pytest.mark.fault(24)
@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
async def test_invalid_json_is_rejected_without_quoting_it(gateway: Deployment, body: bytes) -> None:
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert SECRET not in error["message"]
    assert generations(*gateway.engines) == []


@pytest.mark.fault(24)
async def test_million_token_ids_reach_the_engine(gateway: Deployment) -> None:
    body = orjson.dumps({**request(Api.COMPLETIONS), "prompt": [7] * 1_000_000})
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=io.BytesIO(body)) as response:
        answer = await read(response)
    assert (answer.status, "maximum context length" in answer.error["message"]) == (400, True)


@pytest.mark.fault(24)
async def test_deeply_nested_body_is_forwarded_unchanged(deploy: Deploy) -> None:
    engine = CannedEngine("both", [json_answer({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"})
    nested = b"[ " * 900 + b"]" * 900
    body = b'{"prompt": "x", "x": %b}' % nested
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=body) as response:
        assert response.status == 200
    assert b'"x": ' + nested in engine.received[0].body


def filled(unit: bytes, count: int, fields: bytes = b'"prompt": "x"') -> bytes:
    return b'{"model": "sim", "max_tokens": 2, %b, "x": [' % fields + unit * count + b"0]}"


TOO_HEAVY = {
    "empty lists": filled(b"[],", 300_000),
    "empty objects": filled(b"{},", 300_000),
    "objects": filled(b'{"a":1},', 200_000),
    "lists in lists": filled(b"[[]],", 200_000),
    "deep lists": filled(b"[" * 500 + b"]" * 500 + b",", 600),
    "numbers": filled(b"7,", 5_000_000),
    "strings": filled(b'"",', 700_000),
    "names": b"{" + b",".join(b'"%x":0' % number for number in range(600_000)) + b"}",
    "messages": b'{"messages": [' + b",".join([b"{}"] * 300_000) + b"]}",
    "escapes": b'{"prompt": "' + b'\\"' * 5_000_000 + b'"}',
}


@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("body", TOO_HEAVY.values(), ids=TOO_HEAVY)
async def test_body_with_too_many_elements_is_rejected_before_parsing(
    gateway: Deployment, body: bytes, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with gateway.session.post(gateway.url + api.path, data=io.BytesIO(body)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (413, "request_too_large")
    assert "4194304 elements" in error["message"]
    assert generations(*gateway.engines) == []
    assert len([record for record in caplog.records if record.name == "proxy.access"]) == 1
    assert gateway.worker.request_service.admission_queue.buffers.held_bytes == 0


LARGE = {
    "a million token ids": {"prompt": [151643] * 1_000_000},
    "a table as text": {"prompt": "1,[2],{3}\n" * 800_000},
    "JSON as text": {"prompt": json.dumps([{"name": "value", "list": [1, 2]}] * 100_000)},
    "Chinese as ASCII": {"prompt": "日本語" * 300_000},
    "a picture": {"prompt": "x", "picture": "QUJD" * 4_000_000},
    "a vocabulary": {"prompt": "x", "logit_bias": {str(token): -100 for token in range(160_000)}},
}


@pytest.mark.parametrize("fields", LARGE.values(), ids=LARGE)
async def test_large_but_simple_body_is_forwarded_unchanged(deploy: Deploy, fields: dict[str, Any]) -> None:
    engine = CannedEngine("both", [json_answer({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"})
    body = json.dumps({"model": "sim", **fields}).encode()
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=io.BytesIO(body)) as response:
        assert response.status == 200
    assert json.loads(engine.received[0].body) == json.loads(body)


@pytest.mark.parametrize("is_read", [True, False])
async def test_memory_of_parsed_bodies_counts_as_buffered(deploy: Deploy, is_read: bool) -> None:
    """Only parsed members count, and only while the request runs."""
    gateway = await deploy(admission={"max_buffered_bytes": 50_000_000 if is_read else 30_000_000})
    gateway.prefillers[0].faults.add("hang_before_headers")
    body = filled(b"[],", 200_000)[:-1] + ', "y": "🙂%s"}'.encode() % (b"y" * 1_000_000)
    if is_read:
        body = b'{"vllm_xargs":%b,"prompt":"a"}' % body
    url = gateway.url + Api.COMPLETIONS.path
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.session.post(url, data=io.BytesIO(body)))
        await until(lambda: generations(*gateway.prefillers), "the first one to be prefilled")
        held_bytes = gateway.worker.request_service.admission_queue.buffers.held_bytes
        if is_read:
            assert 72 * 200_000 + 4_000_000 < held_bytes < 3 * 72 * 200_000 + 5_000_000
        else:
            assert len(body) <= held_bytes < len(body) + 1_000
        async with gateway.session.post(url, data=io.BytesIO(body)) as second:
            assert (second.status, (await second.json())["error"]["code"]) == (503, "buffers_full")
        first.cancel()
    await until(
        lambda: not gateway.worker.request_service.admission_queue.buffers.held_bytes,
        "the first one's memory to be given back",
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_answer_with_too_many_elements_is_not_parsed(deploy: Deploy, stream: bool) -> None:
    """A whole answer is an error. An event is forwarded unread, like an event with invalid JSON."""
    answer = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    heavy = orjson.dumps(answer)[:-1] + b',"x":[' + b"[]," * 1_000_000 + b"0]}"
    done = b"data: " + orjson.dumps(answer) + b"\n\ndata: [DONE]\n\n"
    pieces = event_stream([b"data: " + heavy + b"\n\n" + done]) if stream else [http(heavy)]
    gateway = await deploy(
        decoders=[CannedEngine("both", pieces)], connector="plain", resume={"mode": "off"}, retry={"max_attempts": 1}
    )
    got = await gateway.ask(request(Api.COMPLETIONS, stream=stream))
    if stream:
        assert got.is_done
        assert heavy in got.body
    else:
        assert (got.status, got.error["code"]) == (502, "decode_bad_answer")


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    "x",
    "",
    [],
    [1],
    [[]],
    {},
    {"a": []},
    "\u0000",
    [None, "x"],
)
FIELDS = (
    *("model", "messages", "prompt", "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("stop", "logprobs", "top_logprobs", "temperature", "seed", "tools", "tool_choice", "stream_options", "user"),
    *("response_format", "return_token_ids", "kv_transfer_params", "request_id", "include_reasoning", "echo", "suffix"),
)


@pytest.mark.fault(25)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_fields_of_any_type_never_cause_an_internal_error(deploy: Deploy, api: Api, stream: bool) -> None:
    """Fields that the gateway does not need reach the engine, whose answer is passed on."""
    answer = b"HTTP/1.1 418 Odd\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nnope"
    gateway = await deploy([CannedEngine("prefill", [answer])], [CannedEngine("decode", [answer])])
    for field in FIELDS:
        for value in ODD_VALUES:
            body = {**request(api, stream=stream), field: value}
            got = await gateway.ask(body)
            assert got.status in (400, 418), (field, value)
            if got.status == 400:
                assert set(got.error) == {"message", "type", "param", "code"}
            else:
                assert got.body == b"nope"


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    "given",
    [b"a b", b"a\tb", b'a"b', b"\xc3\xbc", b"\xff", b"x" * 129, b"x" * 8000, b"", b"a,b", b"{}", b"%0d%0aX-A: 1"],
)
async def test_invalid_request_id_is_replaced_everywhere(
    gateway: Deployment, given: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sent = raw_request(request(Api.CHAT), b"X-Request-Id: " + given, b"Connection: close")
    headers, _ = await exchange(gateway, sent)
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    (line,) = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert line["id"] == headers["x-request-id"]
    ids = {seen.headers["x-request-id"] for seen in generations(*gateway.engines)}
    assert len(ids) == 1, "both legs have the attempt's own id"
    assert re.fullmatch(r"[0-9a-f]{32}", ids.pop())


@pytest.mark.fault(28)
@pytest.mark.parametrize("given", [b"a\r\nX-A: 1", b"a\nX-A: 1", b"a\rX-A: 1", b"a\0b", b"x" * 65536])
async def test_request_id_cannot_inject_a_header(gateway: Deployment, given: bytes) -> None:
    sent = raw_request(request(Api.CHAT), b"X-Request-Id: " + given, b"Connection: close")
    headers, _ = await exchange(gateway, sent)
    assert "x-a" not in headers
    assert "\0" not in headers.get("x-request-id", "")
    assert all("x-a" not in seen.headers for seen in generations(*gateway.engines))


NOWHERE = [
    *(
        "/v1/../v1/chat/completions",
        "/v1/%2e%2e/%2e%2e/instances/add",
        "//instances/add",
    ),
    *("/v1/chat%2fcompletions", "/v1/chat/completions/x", "/V1/chat/completions", "/v1/chat"),
    *("/_mock/faults", "/v1/response", "/v1/chat/completions%00", "/v1/chat/completions;x", "/.env", "/invocations"),
]


@pytest.mark.fault(29)
@pytest.mark.parametrize("path", NOWHERE)
async def test_unknown_route_reaches_no_engine(gateway: Deployment, path: str) -> None:
    sent = raw_request(request(Api.CHAT), b"Connection: close").replace(CHAT.encode(), path.encode(), 1)
    headers, body = await exchange(gateway, sent)
    assert headers["status"].startswith("HTTP/1.1 404")
    assert orjson.loads(body)["error"]["code"] == "not_found"
    assert generations(*gateway.engines) == []


@pytest.mark.fault(29)
@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/"])
async def test_superfluous_slashes_redirect_and_reach_no_engine(gateway: Deployment, path: str) -> None:
    sent = raw_request(request(Api.CHAT), b"Connection: close").replace(CHAT.encode(), path.encode(), 1)
    headers, _ = await exchange(gateway, sent)
    assert headers["status"].startswith("HTTP/1.1 307")
    assert headers["location"] == CHAT
    assert generations(*gateway.engines) == []


@pytest.mark.fault(29)
async def test_host_headers_of_clients_do_not_change_the_engine(gateway: Deployment) -> None:
    sent = raw_request(request(Api.CHAT), b"X-Forwarded-Host: evil", b"Connection: close")
    headers, _ = await exchange(gateway, sent.replace(b"Host: x", b"Host: evil"))
    assert headers["status"] == "HTTP/1.1 200 OK"
    for engine in gateway.engines:
        assert {seen.headers["host"] for seen in generations(engine)} == {f"127.0.0.1:{engine.port}"}


@pytest.mark.fault(46)
async def test_invalid_names_create_no_metric_series(gateway: Deployment) -> None:
    async def odd(number: int) -> None:
        await gateway.ask(
            request(Api.CHAT, model=f"model-{number}", user=f"user-{number}"), x_request_id=f"id-{number}"
        )
        for method in ("GET", "POST", "PUT", "DELETE"):
            async with gateway.session.request(method, f"{gateway.url}/v1/odd-{number}?x={number}") as response:
                await response.read()

    def series() -> set[tuple[Any, ...]]:
        return {
            (sample.name, *sorted(sample.labels.items()))
            for family in gateway.worker.metrics.collect()
            for sample in family.samples
        }

    await odd(0)
    before = series()
    for number in range(1, 30):
        await odd(number)
    assert series() == before


@pytest.mark.fault(51)
async def test_http_10_client_gets_an_error_event_for_a_broken_stream(deploy: Deploy) -> None:
    gateway = await deploy(resume={"mode": "off"})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    body = request(Api.CHAT, stream=True)
    headers, answer = await exchange(gateway, raw_request(body, version=b"1.0"))
    assert "transfer-encoding" not in headers
    assert b"[DONE]" not in answer
    last = answer.strip().split(b"\n\n")[-1]
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_broken"
    assert (await answer_alone(body)).startswith(text_of(answer))


def text_of(stream: bytes) -> str:
    events: list[dict[str, Any]] = [orjson.loads(event[6:]) for event in stream.strip().split(b"\n\n")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if "error" not in event)
