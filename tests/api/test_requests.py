"""Ended requests that operators can find: the fields of the access log, each attempt, and no content."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

RECENT = "/admin/requests/recent"
ONE = "/admin/requests"


async def get(gateway: Deployment, path: str, expected: int = 200, /, **query: str) -> Any:
    async with gateway.session.get(gateway.url + path, params=query) as answer:
        told = await answer.json()
        assert answer.status == expected, told
    return told if expected == 200 else told["error"]


async def recent(gateway: Deployment, **query: str) -> list[dict[str, Any]]:
    return list((await get(gateway, RECENT, **query))["requests"])


@pytest.mark.parametrize("stream", [True, False])
async def test_request_is_found_by_its_id_and_engine_id(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(2, 2)
    await gateway.ask(request(Api.CHAT, "Say nothing", stream=stream), x_request_id="mine")
    await gateway.ask(request(Api.CHAT), x_request_id="another")
    [told] = (await get(gateway, ONE, id="mine"))["requests"]
    [prefill] = [seen for seen in generations(*gateway.prefillers) if "Say nothing" in str(seen.body)]
    assert (told["id"], told["api"], told["stream"], told["term"]) == ("mine", "chat", stream, "--")
    assert (told["model"], told["attempts"], told["resumes"], told["worker"]) == ("sim", 1, 0, 0)
    assert told["time"].endswith("Z")
    [attempt] = told["history"]
    assert attempt["p_id"] == attempt["d_id"] == told["p_id"] == prefill.headers["x-request-id"]
    assert attempt["p"] in [f"127.0.0.1:{engine.port}" for engine in gateway.prefillers]
    assert attempt["failure"] is None
    assert not attempt["continues"]
    assert attempt["stages"]["prefill"] >= 0
    assert set(attempt["stages"]) == {"prefill", "handoff", "first_token", "stream"} if stream else {"prefill"}
    for name in (attempt["p_id"], f"chatcmpl-{attempt['d_id']}", f"chatcmpl-{attempt['d_id']}-0a1b2c3d"):
        assert (await get(gateway, ONE, engine_id=name))["requests"] == [told]
    error = await get(gateway, ONE, 404, id="nobody's")
    assert error["code"] == "request_not_kept"


async def test_resumed_answer_shows_each_attempt(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    for decoder in gateway.decoders:
        decoder.faults.add("reset_after_tokens", tokens=3, times=1)
    answer = await gateway.ask(request(Api.CHAT, stream=True), x_request_id="mine")
    assert answer.is_done
    [told] = (await get(gateway, ONE, id="mine"))["requests"]
    first, *further = told["history"]
    assert (told["term"], told["attempts"], told["resumes"]) == ("--", 3, 2)
    assert not first["continues"]
    assert [attempt["continues"] for attempt in further] == [True, True]
    for attempt in (first, further[0]):
        assert (attempt["failure"]["kind"], attempt["failure"]["instance"]) == ("broken", attempt["d"])
    assert further[-1]["failure"] is None
    began = [attempt["began"] for attempt in told["history"]]
    assert began == sorted(began)
    sent = [seen.headers["x-request-id"] for seen in generations(*gateway.decoders)]
    assert {attempt["d_id"] for attempt in told["history"]} == set(sent)


async def test_words_of_an_engine_are_in_the_receipt_the_log_and_the_reason(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "proxy")
    gateway = await deploy(1, 2, health={"eject_after": 1})
    words = "CUDA error: an illegal memory access was encountered"
    bad = gateway.decoders[0]
    bad.faults.add("refuse_status", status=500, path="/v1/chat", body={"error": {"message": words, "code": 500}})
    said = f"decode instance: answered with status 500: {words}"
    while not generations(bad):
        assert (await gateway.ask(request(Api.CHAT), x_request_id="mine")).status == 200
    told = (await get(gateway, ONE, id="mine"))["requests"]
    failures = [attempt["failure"] for one in told for attempt in one["history"] if attempt["failure"]]
    assert failures == [{"kind": "status", "instance": f"127.0.0.1:{bad.port}", "message": said}]
    assert [each for each in warnings_of(caplog) if said in each]
    instances = (await get(gateway, "/instances"))["instances"]
    assert next(one["reason"] for one in instances if one["state"] == "ejected").startswith(said)


async def test_words_are_logged_for_each_ejection(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    """The second ejection comes from a trial, which is charged at once."""
    health = {"eject_after": 1, "eject_seconds": 0.1, "interval_seconds": 0.1, "changing_interval_seconds": 0.1}
    gateway = await deploy(1, 2, health=health)
    bad = gateway.decoders[0]
    words = "CUDA error: an illegal memory access was encountered"
    bad.faults.add("refuse_status", status=500, path="/v1/chat", body={"error": {"message": words}})
    while len(generations(bad)) < 2:
        assert (await gateway.ask(request(Api.CHAT))).status == 200
    ejections = [each for each in warnings_of(caplog) if "is ejected" in each]
    assert len(ejections) >= 2
    assert all(words in each for each in ejections)


@pytest.mark.parametrize("prompt", ["The launch code is 4711-Tango.", [1001, 1002, 1003, 1004]])
async def test_prompt_that_an_engine_quotes_is_in_no_log(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, prompt: str | list[int]
) -> None:
    caplog.set_level(logging.DEBUG, "proxy")
    gateway = await deploy(1, 2, health={"eject_after": 1})
    bad = gateway.decoders[0]
    words = f"CUDA error while computing the launch code is 4711-tango. {str(prompt).strip('[]')}"
    bad.faults.add("refuse_status", status=500, path="/v1/completions", body={"error": {"message": words}})
    while not generations(bad):
        assert (await gateway.ask({"model": "sim", "prompt": prompt, "max_tokens": 4})).status == 200
    lines = "".join(f"{record.getMessage()}{record.__dict__}" for record in caplog.records)
    assert [each for each in warnings_of(caplog) if "answered with status 500" in each]
    assert ("CUDA error while" in lines) == isinstance(prompt, str)
    assert "4711" not in lines
    assert "1002" not in lines


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_mistake_of_a_client_is_no_failure_of_the_instance(deploy: Deploy) -> None:
    gateway = await deploy()
    prefiller = gateway.prefillers[0]
    body = {"error": {"message": "This model's maximum context length is 9 tokens.", "code": 400}}
    prefiller.faults.add("refuse_status", status=400, path="/v1/chat", body=body)
    assert (await gateway.ask(request(Api.CHAT), x_request_id="mine")).status == 400
    [told] = (await get(gateway, ONE, id="mine"))["requests"]
    assert told["error"] == "prefill instance: rejected the request as invalid with status 400"
    said = "This model's maximum context length is 9 tokens"
    assert (
        told["history"][0]["failure"]["message"]
        == f"prefill instance: rejected the request as invalid with status 400: {said}"
    )
    results = gateway.metrics("pdproxy_instance_requests_total")
    assert results[f"127.0.0.1:{prefiller.port}", "invalid_request", "prefill"] == 1


async def test_latest_requests_are_listed_by_filters(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    await gateway.ask(request(Api.CHAT), x_request_id="well")
    gateway.prefillers[0].faults.add("refuse_status", status=400, times=1)
    await gateway.ask(request(Api.CHAT), x_request_id="refused")
    await gateway.ask({"model": "other", "messages": []}, x_request_id="wrong")
    told = await recent(gateway)
    assert [one["id"] for one in told] == ["wrong", "refused", "well"]
    assert [one["id"] for one in await recent(gateway, limit="1")] == ["wrong"]
    assert [one["id"] for one in await recent(gateway, failed="true", model="sim")] == ["refused"]
    assert [one["id"] for one in await recent(gateway, failed="false")] == ["well"]
    assert await recent(gateway, failed="") == await recent(gateway, failed="1") == await recent(gateway, failed="true")
    assert [one["id"] for one in await recent(gateway, model="other")] == ["wrong"]
    prefiller, decoder = (f"127.0.0.1:{engine.port}" for engine in gateway.engines)
    assert [one["id"] for one in await recent(gateway, instance=decoder)] == ["well"]
    assert [one["id"] for one in await recent(gateway, instance=prefiller, failed="true")] == ["wrong", "refused"]
    assert [one["backend"] for one in told] == [prefiller, prefiller, None]
    assert await recent(gateway, instance="127.0.0.1:1") == []
    assert len(await recent(gateway, key="-")) == 3
    assert await recent(gateway, key="team-a") == []


async def test_saved_and_slow_requests_are_found(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    await gateway.ask(request(Api.CHAT, stream=True), x_request_id="well")
    gateway.prefillers[0].faults.add("slow_headers", path="/v1/chat", seconds=0.3, times=1)
    await gateway.ask(request(Api.CHAT, stream=True), x_request_id="slow")
    gateway.decoders[0].faults.add("reset_after_tokens", path="/v1/chat", tokens=3)
    gateway.decoders[1].faults.add("reset_after_tokens", path="/v1/chat", tokens=3, times=1)
    assert (await gateway.ask(request(Api.CHAT, stream=True), x_request_id="saved")).is_done
    gateway.decoders[0].faults.clear()
    gateway.prefillers[0].faults.add("refuse_status", status=400, path="/v1/chat", times=1)
    await gateway.ask(request(Api.CHAT), x_request_id="failed")
    assert [one["id"] for one in await recent(gateway, saved="true")] == ["saved"]
    assert [one["id"] for one in await recent(gateway, saved="false")] == ["failed", "slow", "well"]
    assert "slow" in [one["id"] for one in await recent(gateway, slow="0.3")]
    assert await recent(gateway, slow="3600") == []


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (RECENT, {"slow": "long"}),
        (RECENT, {"slow": "-1"}),
        (RECENT, {"slow": "nan"}),
        (RECENT, {"saved": "maybe"}),
        (RECENT, {"limit": "0"}),
        (RECENT, {"limit": "1001"}),
        (RECENT, {"limit": "9" * 20}),
        (RECENT, {"limit": "-1"}),
        (RECENT, {"failed": "maybe"}),
        (RECENT, {"instanse": "127.0.0.1:1"}),
        (ONE, {}),
        (ONE, {"id": "a", "engine_id": "b"}),
        (ONE, {"instance": "127.0.0.1:1"}),
    ],
)
async def test_invalid_query_is_rejected(deploy: Deploy, path: str, query: dict[str, str]) -> None:
    gateway = await deploy(1, 1)
    assert (await get(gateway, path, 400, **query))["code"] == "invalid_request"


async def test_requests_are_shown_to_administrators_only(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, auth={"admin_key": "an-admin-key"})
    for path in (RECENT, ONE):
        assert (await get(gateway, path, 401))["code"] == "admin_key_required"


async def test_neither_prompt_nor_answer_is_stored(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    answer = await gateway.ask(request(Api.CHAT, "Nobody may read this", stream=True))
    async with gateway.session.get(gateway.url + RECENT) as response:
        told = await response.text()
    assert "Nobody" not in told
    assert not any(word in told for word in answer.text.split() if len(word) > 4)
    assert len(told) < 2000


async def test_request_shows_why_instances_were_chosen(deploy: Deploy) -> None:
    gateway = await deploy(2, 1)
    long = "A long question about everything. " * 200
    for name in ("cold", "warm"):
        await gateway.ask(request(Api.CHAT, long), x_request_id=name)
    cold, warm = [(await get(gateway, ONE, id=name))["requests"][0] for name in ("cold", "warm")]
    assert (cold["p_why"], warm["p_why"], warm["d_why"]) == ("equal", "cached_prefix", "only_candidate")
    choice = warm["history"][0]["choices"]["prefill"]
    assert (choice["policy"], choice["reason"]) == ("least_load", "cached_prefix")
    [chosen] = [row for row in choice["candidates"] if row["instance"] == warm["p"]]
    [other] = [row for row in choice["candidates"] if row["instance"] != warm["p"]]
    assert chosen["cached_tokens"] > other["cached_tokens"] == 0
    assert chosen["wait_seconds"] + chosen["work_seconds"] < other["wait_seconds"] + other["work_seconds"]
    [decoder] = warm["history"][0]["choices"]["decode"]["candidates"]
    assert set(decoder) == {"instance", "running", "token_seconds"}
    counted = gateway.metrics("pdproxy_choices_total")
    assert counted["cached_prefix", "prefill"] == counted["equal", "prefill"] == 1
    assert counted["only_candidate", "decode"] == 2


async def test_repeated_prefill_is_found_by_either_engine_id(deploy: Deploy) -> None:
    gateway = await deploy(2, 1)
    for engine in gateway.prefillers:
        engine.faults.add("missing_kv_params", times=1)
    await gateway.ask(request(Api.CHAT), x_request_id="mine")
    [told] = await recent(gateway)
    [attempt] = told["history"]
    sent = {seen.headers["x-request-id"] for seen in generations(*gateway.prefillers)}
    [left] = attempt["left"]
    assert {left["id"], attempt["p_id"]} == sent
    for name in sent:
        assert (await get(gateway, ONE, engine_id=name))["requests"] == [told]
    assert len(await recent(gateway, instance=left["instance"])) == 1


async def test_request_shows_the_decoder_that_refused_the_connection(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    gone, other = (f"127.0.0.1:{engine.port}" for engine in gateway.decoders)
    await gateway.decoders[0].kill()
    for _ in range(2):  # one of them is the first one's turn
        assert (await gateway.ask(request(Api.CHAT))).is_done
    told = [one for one in await recent(gateway, instance=gone) if one["history"][0]["left"]]
    [attempt] = told[0]["history"]
    assert (attempt["left"], attempt["d"]) == ([{"instance": gone, "id": attempt["d_id"]}], other)
    assert attempt["choices"]["decode"]["reason"] == "only_candidate"


async def test_request_shows_only_the_best_candidates(deploy: Deploy) -> None:
    gateway = await deploy(1, 11)
    await gateway.ask(request(Api.CHAT))
    [told] = await recent(gateway)
    choice = told["history"][0]["choices"]["decode"]
    assert len(choice["candidates"]) == 8
    assert choice["candidates_left_out"] == 3
    assert told["d"] in [row["instance"] for row in choice["candidates"]]
