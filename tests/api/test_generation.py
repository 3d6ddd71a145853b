"""The two generation routes as their clients use them, and the records of requests."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI

from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.canned import CannedEngine, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
async def deployment(deploy: Deploy) -> Deployment:
    return await deploy()


@pytest.fixture
async def sdk(deployment: Deployment) -> AsyncIterator[AsyncOpenAI]:
    """Return the OpenAI client with its default retries."""
    async with openai.AsyncOpenAI(base_url=deployment.url + "/v1", api_key="key") as client:
        yield client


# The OpenAI SDK


async def test_sdk_gets_an_answer(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, n=2)
    text = await answer_alone(request(Api.CHAT))
    assert [choice.message.content for choice in answer.choices] == [text, text]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_sdk_streams(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == await answer_alone(request(Api.CHAT))


async def test_sdk_gets_a_complete_answer_when_a_decoder_is_lost(sdk: AsyncOpenAI, deployment: Deployment) -> None:
    deployment.decoders[0].faults.add("reset_after_tokens", tokens=3, times=1)
    stream = await sdk.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == await answer_alone(request(Api.CHAT))


async def test_sdk_raises_when_a_stream_breaks(deploy: Deploy) -> None:
    deployment = await deploy(resume={"mode": "off"})
    deployment.decoders[0].faults.add("reset_after_tokens", tokens=3)
    async with openai.AsyncOpenAI(base_url=deployment.url + "/v1", api_key="key") as sdk:
        stream = await sdk.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in [await anext(stream) for _ in range(4)]]
        assert (await answer_alone(request(Api.CHAT))).startswith("".join(parts))
        with pytest.raises(openai.APIError, match="in the middle of its answer"):
            await anext(stream)


async def test_sdk_raises_the_error_of_the_engine(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.chat.completions.create(model="nonsense", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await sdk.completions.create(model="sim", prompt="x" * 140_000)


async def test_sdk_does_not_retry_permanent_errors(sdk: AsyncOpenAI, deployment: Deployment) -> None:
    deployment.prefillers[0].faults.add("reset_before_headers")
    with pytest.raises(openai.InternalServerError):
        await sdk.chat.completions.create(model="sim", messages=MESSAGES)
    assert deployment.metrics("pdproxy_requests_total") == {("chat", "502"): 1.0}


# Invalid requests

NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": "sim", "model": "sim"}',
    b'{"model": "sim", "messages": [], "stream": "yes"}',
    b'{"model": "sim", "messages": [], "stream": 2}',
    b'{"model": "sim", "messages": [], "n": 0}',
    b'{"model": "sim", "messages": [], "n": "two"}',
    b'{"model": "sim", "messages": [], "stream_options": {}, "stream": false, "stream_options": 1}',
    b'{"model": "sim", "messages": [], "stream_options": {"include_usage": true}}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("body", NO_REQUESTS)
async def test_invalid_request_reaches_no_engine(deployment: Deployment, body: bytes) -> None:
    async with deployment.session.post(deployment.url + Api.CHAT.path, data=body) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert generations(*deployment.engines) == []


async def test_too_large_request_is_rejected(deploy: Deploy) -> None:
    deployment = await deploy(listen={"max_body_bytes": 1000})
    answer = await deployment.ask(request(Api.CHAT, "x" * 2000))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    sentence = "the request body is larger than the 1000 bytes this gateway accepts (listen.max_body_bytes)"
    assert answer.error["message"] == sentence


async def test_other_methods_are_rejected(deployment: Deployment) -> None:
    async with deployment.session.get(deployment.url + Api.CHAT.path) as response:
        assert response.status == 405
        assert (await response.json())["error"]["code"] == "method_not_allowed"


# Large requests, and what is written down

CANARY = "c4n4ry-in-the-"


async def test_eight_megabytes_of_images_reach_both_engines_byte_for_byte(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    image = base64.b64encode(random.Random(1).randbytes(6 * 1024 * 1024)).decode()
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + image}}]
    messages = orjson.dumps([{"role": "user", "content": [{"type": "text", "text": CANARY}, *content]}])
    body = b'{"messages": %b,"model":"sim"}' % messages
    params = {"do_remote_prefill": True, "remote_request_id": "r"}
    choice = {"index": 0, "message": {"content": "a cat"}, "finish_reason": "stop"}
    prefiller = CannedEngine("prefill", [json_answer({"choices": [choice], "kv_transfer_params": params})])
    decoder = CannedEngine("decode", [json_answer({"choices": [choice]})])
    deployment = await deploy([prefiller], [decoder], resume={"mode": "restart-only"})

    async with deployment.session.post(deployment.url + Api.CHAT.path, data=io.BytesIO(body)) as response:
        assert (await response.json())["choices"] == [choice]
    for engine in (prefiller, decoder):
        (received,) = engine.received
        assert received.body.startswith(b'{"messages": %b,"model":"sim",' % messages)
    assert CANARY not in caplog.text
    assert image[:40] not in caplog.text
    assert len(caplog.text) < 10_000


async def test_neither_prompts_nor_answers_nor_keys_are_logged(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    deployment = await deploy(auth={"engine_api_key": CANARY + "engine-key"})
    (prefiller,), (decoder,) = deployment.prefillers, deployment.decoders
    troubles = [
        (decoder, "reset_after_tokens", {"tokens": 3}),
        (decoder, "error_event", {"tokens": 3}),
        (prefiller, "refuse_status", {"status": 400, "body": {"error": CANARY + "engines-words"}}),
        (prefiller, "invalid_json", {}),
        (prefiller, "missing_kv_params", {}),
    ]
    bodies = [
        request(api, CANARY + "prompt", user=CANARY + "user", stream=stream, max_tokens=20)
        for api in OPENAI_APIS
        for stream in (True, False)
    ]
    bodies.append({"prompt": 7, "model": CANARY + "model"})
    bodies.append(request(Api.CHAT, CANARY + "prompt", n=-1))
    said = await answer_alone(bodies[0])
    for engine, action, fields in [(prefiller, "comments", {}), *troubles]:
        assert isinstance(fields, dict)
        engine.faults.add(action, **fields)
        for body in bodies:
            await deployment.ask(body, authorization=f"Bearer {CANARY}client-key")
        engine.faults.clear()
    deployment.expects_pinned = len(prefiller.pins)

    assert caplog.text.count("proxy.access") == (len(troubles) + 1) * len(bodies)
    records = "".join(str(record.__dict__) for record in caplog.records)
    assert CANARY not in records
    assert said not in records


async def test_access_log_has_one_line_with_the_way_of_a_request(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    deployment = await deploy()
    await deployment.ask(request(Api.CHAT, stream=True), x_request_id="mine")
    (line,) = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    ((prefiller,), (decoder,)) = deployment.prefillers, deployment.decoders
    assert (line["id"], line["api"], line["stream"], line["code"], line["term"]) == ("mine", "chat", True, 200, "--")
    assert (line["p"], line["d"]) == (f"127.0.0.1:{prefiller.port}", f"127.0.0.1:{decoder.port}")
    assert (line["units"], line["attempts"], line["tokens_out"], line["error"]) == (1, 1, 8, None)
    assert all(line[name] > 0 for name in ("t_prefill", "t_handoff", "t_first_token", "ttft", "dur", "tokens_in"))


async def test_access_log_shows_the_wait_for_room(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limits = {"max_running_decode": 1, "max_waiting": 2, "wait_seconds": 0.3}
    deployment = await deploy(1, 1, admission=limits, engine={"decode_step_ms": 20.0})
    body = request(Api.CHAT, stream=True, max_tokens=4)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(deployment.ask(body, x_request_id="first"))
        await until(lambda: deployment.metrics("pdproxy_instance_inflight"), "the first request")
        second = group.create_task(deployment.ask(body, x_request_id="second"))
    assert (first.result().status, second.result().status) == (200, 200)
    long = request(Api.CHAT, stream=True, max_tokens=200)
    async with deployment.asking(long) as leaving:
        await leaving.has_tokens(1)
        late = await deployment.ask(body, x_request_id="late")
    assert (late.status, late.error["code"]) == (503, "queue_timeout")
    assert float(late.headers["retry-after-ms"]) >= 1000
    await until(lambda: not deployment.leaks(), "quiet")
    lines = {line["id"]: line for line in (vars(r)["fields"] for r in caplog.records if r.name == "proxy.access")}
    assert lines["first"]["t_queue"] == 0 < lines["second"]["t_queue"]
    assert (lines["late"]["term"], lines["late"]["code"]) == ("PQ", 503)
    assert deployment.metrics("pdproxy_rejected_total") == {("queue_timeout",): 1}


async def test_resume_has_one_log_line_with_cause_and_action(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    deployment = await deploy(1, 2)
    lost, _ = deployment.decoders
    lost.faults.add("recompute", tokens=5)
    answer = await deployment.ask(request(Api.COMPLETIONS, "four", stream=True), x_request_id="mine")
    assert answer.is_done
    (line,) = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.flow.resuming"]
    assert line == {
        "cause": "recomputed",
        "action": "completion_tokens",
        "from": f"127.0.0.1:{lost.port}",
        "kept": 5,
        "prefilled": 4 + 5,
        "resume": 1,
    }
    (access,) = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert (access["id"], access["resumes"], access["attempts"], access["tokens_out"]) == ("mine", 1, 2, 8)
    assert deployment.metrics("pdproxy_resumes_total") == {("completion_tokens", "recomputed"): 1.0}
    assert deployment.metrics("pdproxy_resumed_tokens_total") == {(): 9.0}


ACCOUNTS = [
    # who fails, how, streamed, term, status
    ("prefiller", "refuse_status", True, "SF", 500),
    ("prefiller", "hang_before_headers", True, "sF", 504),
    ("decoder", "refuse_status", True, "SH", 500),
    ("decoder", "error_event", True, "ST", 500),
    ("decoder", "hang_before_headers", False, "sH", 504),
]


@pytest.mark.parametrize(("who", "how", "stream", "term", "status"), ACCOUNTS)
async def test_failure_is_attributed_to_its_stage(
    deploy: Deploy, who: str, how: str, stream: bool, term: str, status: int
) -> None:
    names = ("prefill",) if who == "prefiller" else ("handoff", "first_token", "answer")
    timeouts = {f"{name}_seconds": 0.1 for name in names} if how == "hang_before_headers" else {}
    deployment = await deploy(timeouts=timeouts, kv={"release": "never"})
    (engine,) = deployment.prefillers if who == "prefiller" else deployment.decoders
    engine.faults.add(how, status=500)
    answer = await deployment.ask(request(Api.COMPLETIONS, stream=stream, max_tokens=40))
    deployment.expects_pinned = len(deployment.prefillers[0].pins)
    deployment.expects_inexact_pins = how == "error_event"  # which does not say whether the KV was fetched
    assert answer.status == status
    assert deployment.metrics("pdproxy_request_end_total") == {(term,): 1.0}
    assert deployment.metrics("pdproxy_requests_total") == {("completions", str(status)): 1.0}


async def test_tokens_are_counted_as_engines_report_them(deployment: Deployment) -> None:
    for stream in (True, False):
        await deployment.ask(request(Api.COMPLETIONS, "four", n=2, stream=stream))
    assert deployment.metrics("pdproxy_tokens_total") == {("completion",): 32.0, ("prompt",): 16.0}
