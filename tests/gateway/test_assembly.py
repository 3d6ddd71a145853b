"""Answers that are not streamed: assembled from a stream, passed on, or rejected as invalid."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.common.terms import Action
from proxy.gateway.assembly import StreamAssembly
from proxy.gateway.delivery import Delivery
from proxy.resume.engines import VLLM, WatchLevel
from proxy.resume.seam import Seam, SeamPlan
from proxy.resume.situation import Resumption
from proxy.sim.engine import SimulatedEngine
from proxy.sim.profile import ALL_PROFILES
from proxy.wire.document import join_body
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import Answer, ask, request, until
from tests.canned import CannedEngine, data, http, json_answer
from tests.conftest import Deploy
from tests.gateway.test_delivery import ENGINE, STEPS, THINKING, TOOLS, VERSIONS, call_of, chunk, take

CHOICE = {"index": 0, "text": "y", "finish_reason": "stop"}
PREFILLED = {
    "choices": [CHOICE],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": "r"},
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
}


async def answered(deploy: Deploy, decoded: bytes) -> Answer:
    """Return the client's answer for these bytes of a decoder, without resume."""
    prefiller, decoder = CannedEngine("prefill", [json_answer(PREFILLED)]), CannedEngine("decode", [decoded])
    gateway = await deploy([prefiller], [decoder], retry={"max_attempts": 1}, resume={"mode": "off"})
    # The parameters are the same each time, which only matters to engines.
    return await gateway.ask(request(Api.COMPLETIONS))


async def test_only_corrected_members_of_an_answer_are_changed(deploy: Deploy) -> None:
    text = b'"choices" : [{"index":0,"text":"\\u00fc\\/","finish_reason":"stop","x":1e2}],"created":1.0'
    usage = b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}'
    answer = await answered(
        deploy, http(b'{%b,"kv_transfer_params": {"remote_host":"h"},%b,"last":null}' % (text, usage))
    )
    assert answer.body == b'{%b,%b,"last":null}' % (text, usage.replace(b"8", b"4"))
    assert answer.headers["content-type"].startswith("application/json")


NO_ANSWERS: list[tuple[Any, str]] = [
    (b"[]", "decode_bad_answer"),
    (b"", "decode_bad_answer"),
    (b"<html>", "decode_bad_answer"),
    (b"{}", "decode_bad_answer"),
    (b'{"choices": []}', "decode_bad_answer"),
    (b'{"choices": null}', "decode_bad_answer"),
    (b'{"choices": [{"finish_reason": "stop"}], "choices": []}', "decode_bad_answer"),
    (b'{"choices": [7]}', "decode_bad_answer"),
    (b'{"choices": [{"index": 0, "finish_reason": null}]}', "decode_broken"),
    (b'{"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1}]}', "decode_broken"),
    (b'{"choices": [{"index": 0, "finish_reason": "stop", "stop_reason": "recomputed"}]}', "decode_recomputed"),
]


@pytest.mark.parametrize(("body", "code"), NO_ANSWERS)
async def test_invalid_answer_is_an_error(deploy: Deploy, body: bytes, code: str) -> None:
    answer = await answered(deploy, http(body))
    assert (answer.status, answer.error["code"]) == (502, code)
    assert answer.headers["x-should-retry"] == "false"


async def test_redirect_is_not_followed(deploy: Deploy) -> None:
    answer = await answered(
        deploy, b"HTTP/1.1 307 Elsewhere\r\nLocation: http://10.6.6.6/\r\nContent-Length: 0\r\n\r\n"
    )
    assert (answer.status, answer.error["code"]) == (502, "decode_bad_answer")


@pytest.mark.parametrize("charset", ["", "; charset=latin-1"])
@pytest.mark.parametrize(
    ("kind", "passed_on"),
    [
        ("application/problem+json", "application/problem+json"),
        ("text/html", "text/plain"),
        ("TEXT/HTML ", "text/plain"),
        ("image/svg+xml", "text/plain"),
    ],
)
async def test_error_of_an_engine_keeps_its_body_and_is_not_html(
    deploy: Deploy, kind: str, passed_on: str, charset: str
) -> None:
    body = b"<h1>the context is too long</h1>"
    answer = await answered(deploy, http(body, "422 Unprocessable", kind + charset))
    assert (answer.status, answer.body) == (422, body)
    assert answer.headers["content-type"] == passed_on + charset
    assert answer.headers["x-content-type-options"] == "nosniff"


KEY = 's3cret-engine-"key"'


@pytest.mark.parametrize(
    ("refusing", "stream"), [("decode in its stream", True), *product(("prefill", "decode"), (True, False))]
)
@pytest.mark.parametrize("api", [*OPENAI_APIS, "messages", "responses"])
async def test_rejection_of_an_engine_does_not_contain_the_engine_key(
    deploy: Deploy, refusing: str, api: Api | str, stream: bool
) -> None:
    quoted = {"error": {"message": f"bad header Authorization: Bearer {KEY}", "code": 422}}
    event = b"data: " + json.dumps(quoted).encode() + b"\n\n"
    refusals = [http(json.dumps(quoted).encode(), "422 Unprocessable")]
    in_stream = [http(event, "200 OK", "text/event-stream")]
    prefiller = CannedEngine("prefill", refusals if refusing == "prefill" else [json_answer(PREFILLED)])
    decoder = CannedEngine("decode", in_stream if refusing == "decode in its stream" else refusals)
    gateway = await deploy(
        [prefiller], [decoder], retry={"max_attempts": 1}, resume={"mode": "off"}, auth={"engine_api_key": KEY}
    )
    body = request(api, stream=stream) if isinstance(api, Api) else FOREIGN[api] | {"stream": stream}
    path = api.path if isinstance(api, Api) else f"/v1/{api}"
    async with gateway.session.post(gateway.url + path, json=body) as response:
        answer = await response.read()
    assert b"bad header Authorization" in answer
    assert b"s3cret" not in answer


FOREIGN: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"model": "m", "input": "Hi"},
}


async def test_retry_after_of_a_busy_engine_is_passed_on(deploy: Deploy) -> None:
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"
    answer = await answered(deploy, busy)
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b"busy", "7")
    assert "x-should-retry" not in answer.headers


# Put together

ASKED: dict[str, dict[str, Any]] = {
    "chat": request(Api.CHAT, "naïve café 日本 🙂", max_tokens=100),
    "completion": request(Api.COMPLETIONS, "naïve café 日本 🙂", max_tokens=100),
    "reasoning": request(Api.CHAT, max_tokens=120, **THINKING),
    "only reasoning": request(Api.CHAT, max_tokens=20, **THINKING),
    "tools": request(Api.CHAT, max_tokens=400, tools=TOOLS),
    "reasoning and tools": request(Api.CHAT, max_tokens=400, tools=TOOLS, **THINKING),
    "no reasoning asked for": request(Api.CHAT, max_tokens=120, include_reasoning=False, **THINKING),
    "stop strings": request(Api.CHAT, max_tokens=60, stop=["garden", " s"]),
    "stop strings of a completion": request(Api.COMPLETIONS, max_tokens=60, stop=["garden", " s"]),
}
SHOWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ids": {"return_token_ids": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "ids and logprobs": {"return_token_ids": True, "logprobs": True},
}


def _is_watched(body: dict[str, Any]) -> bool:
    return VLLM.watch_level(call_of(body), lambda _: True) is WatchLevel.CONTINUE_FROM_IDS


def put_together(body: dict[str, Any], stream: bytes, profile: str = "v0.33") -> Any:
    """Return the assembled answer to a request that is not streamed."""
    whole = StreamAssembly(has_routed_experts=ALL_PROFILES[profile].has_routed_experts)
    delivery = Delivery(call_of(body), is_observed=True, collector=whole)
    assert take(delivery, stream)[0] == b""
    assert not delivery.has_output
    return orjson.loads(orjson.dumps(whole.make_answer_values(delivery)))


def comparable(answer: Any) -> list[tuple[str, Any]]:
    """All members in their order, but what differs from answer to answer and what is for the gateway only."""
    return [(name, value) for name, value in answer.items() if name not in ("id", "created", "kv_transfer_params")]


@pytest.mark.covering(
    "what how steps profile",
    [row for row in product(ASKED, SHOWN, STEPS, VERSIONS) if _is_watched(ASKED[row[0]] | SHOWN[row[1]])],
)
async def test_assembled_answer_equals_that_of_an_engine(what: str, how: str, steps: str, profile: str) -> None:
    asked, shown = ASKED[what], SHOWN[how]
    body = asked | ({**shown, "logprobs": 2} if "logprobs" in shown and "prompt" in asked else shown)
    async with (
        SimulatedEngine(profile_name=profile, **ENGINE, **STEPS[steps]) as engine,
        aiohttp.ClientSession() as session,
    ):
        expected = await ask(session, engine.url, body)
        stream = await ask(
            session, engine.url, orjson.loads(join_body(VLLM.make_observable_call(call_of(body)).make_body({})))
        )
    got = put_together(body, stream.body, profile)
    assert comparable(got) == comparable(expected.json)
    assert list(got["choices"][0]) == list(expected.json["choices"][0])
    assert (got["id"][:5], type(got["created"])) == (expected.json["id"][:5], int)


@pytest.mark.parametrize("profile", ["v0.18", "v0.33"])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_assembled_answer_has_the_members_of_an_engines_answer(deploy: Deploy, api: Api, profile: str) -> None:
    gateway = await deploy(1, 1, engine={"profile_name": profile}, resume={"repeat_up_to_tokens": 0})
    # Simulated engines report their version after they have passed a health check.
    pool = gateway.worker.pools.decode
    await until(
        lambda: all(pool.health.health_of(backend).engine_facts for backend in pool.all_backends()),
        "the engine's version",
    )
    answer = await gateway.ask(request(api))
    async with SimulatedEngine(profile_name=profile) as engine, aiohttp.ClientSession() as session:
        expected = await ask(session, engine.url, request(api))
    assert list(answer.json) == [name for name in expected.json if name != "kv_transfer_params"]
    assert list(answer.json["choices"][0]) == list(expected.json["choices"][0])
    is_new = profile == "v0.33"
    assert ("metrics" in answer.json, "routed_experts" in answer.json["choices"][0]) == (is_new, is_new)


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
async def test_answer_with_routed_experts_is_not_assembled(deploy: Deploy, is_fast: bool) -> None:
    told = json_answer({"choices": [{**CHOICE, "routed_experts": "AAEC"}], "metrics": {"queue_time_ms": 1.5}})
    prefiller, decoder = CannedEngine("prefill", [json_answer(PREFILLED)]), CannedEngine("decode", [told])
    gateway = await deploy([prefiller], [decoder], resume={"repeat_up_to_tokens": 0}, listen={"fast_path": is_fast})
    answer = await gateway.ask(request(Api.COMPLETIONS, routed_experts_prompt_start=0))
    assert answer.json["choices"][0]["routed_experts"] == "AAEC"
    assert answer.json["metrics"] == {"queue_time_ms": 1.5}
    assert not orjson.loads(decoder.received[0].body).get("stream")


def test_resumed_answer_has_no_metrics_of_its_parts() -> None:
    whole = StreamAssembly(has_routed_experts=True)
    delivery = Delivery(call_of(request(Api.CHAT)), is_observed=True, collector=whole)
    take(delivery, data(_told(7, "a")))
    delivery.prepare_to_continue(
        Resumption(
            Action.CHAT_TOKENS,
            None,
            Seam(SeamPlan(api=Api.CHAT, answer_head=delivery.head, transcript=delivery.transcript, kept_ids=1)),
            1,
        )
    )
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}, "metrics": {"queue_time_ms": 1.5}}
    take(delivery, data(_told(9, "c", "stop")) + data(usage))
    values = whole.make_answer_values(delivery)
    assert (values["metrics"], values["choices"][0]["message"]["content"]) == (None, "ac")


async def test_incomplete_tool_call_equals_that_of_an_engine() -> None:
    """The finish reason is `length`, as in a stream. In a whole answer, an engine would report `tool_calls`."""
    async with SimulatedEngine(profile_name="v0.33", **ENGINE) as engine, aiohttp.ClientSession() as session:
        for max_tokens in range(1, 60):
            body = request(Api.CHAT, max_tokens=max_tokens, tools=TOOLS)
            expected = await ask(session, engine.url, body)
            stream = await ask(
                session, engine.url, orjson.loads(join_body(VLLM.make_observable_call(call_of(body)).make_body({})))
            )
            choice = put_together(body, stream.body)["choices"][0]
            assert choice["message"] == expected.json["choices"][0]["message"]
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_assembled_empty_answer_equals_that_of_an_engine(api: Api) -> None:
    async with SimulatedEngine(first_token_eos=True, **ENGINE) as engine, aiohttp.ClientSession() as session:
        expected = await ask(session, engine.url, request(api))
        stream = await ask(
            session, engine.url, orjson.loads(join_body(VLLM.make_observable_call(call_of(request(api))).make_body({})))
        )
    assert comparable(put_together(request(api), stream.body)) == comparable(expected.json)


def test_tokens_generated_twice_appear_once() -> None:
    """Log probabilities as well as ids: those behind the kept ones come again."""
    whole = StreamAssembly()
    body = request(Api.CHAT, logprobs=True)
    delivery = Delivery(call_of(body), is_observed=True, collector=whole)
    take(delivery, data(_told(7, "a")) + data(_told(8, "")))
    seam = Seam(SeamPlan(api=Api.CHAT, answer_head=delivery.head, transcript=delivery.transcript, kept_ids=1))
    delivery.prepare_to_continue(Resumption(Action.CHAT_TOKENS, None, seam, 1))
    take(delivery, data(_told(9, "c", "stop")))
    choice = whole.make_answer_values(delivery)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "c"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ac", "stop")


def test_restarted_answer_has_nothing_of_the_first_attempt() -> None:
    whole = StreamAssembly()
    delivery = Delivery(call_of(request(Api.CHAT, logprobs=True)), is_observed=True, collector=whole)
    take(delivery, data(_told(7, "a")))
    delivery.restart_answer()
    take(delivery, data(_told(8, "b", "stop")))
    choice = whole.make_answer_values(delivery)["choices"][0]
    assert choice["message"]["content"] == "b"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["b"]


def _told(token: int, text: str, finish: str | None = None) -> dict[str, Any]:
    payload = chunk([token], finish, content=text)
    payload["choices"][0]["logprobs"] = {"content": [{"token": text}]}
    return payload
