"""Engines that answer 503 or 429 while they pass their health checks."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import orjson
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, read, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

CONNECTORS = (
    *("vllm_pull", "vllm_store", "nixl_push", "mooncake_bootstrap", "ascend_layerwise", "sglang_bootstrap", "plain"),
)
ROLES = [
    (connector, role)
    for connector in CONNECTORS
    for role in ("prefill", "decode")
    if (connector, role) != ("plain", "prefill")
]
# Prompts may be computed for decoders that refuse them afterwards.
STRICT: dict[str, Any] = {"budget_share": 0.0, "budget_least": 1, "budget_wait_seconds": 0.0, "max_attempts": 2}
# The action of a fault, and its fields.
REFUSALS: dict[str, dict[str, Any]] = {
    "503": {"action": "refuse_status", "status": 503},
    "429": {"action": "refuse_status", "status": 429},
    "retired": {"action": "retired"},
    "scaling": {"action": "scaling"},
    "paused": {"action": "paused"},
}


def engines_of(gateway: Deployment, role: str) -> list[SimulatedEngine]:
    return gateway.prefillers if role == "prefill" else gateway.decoders


def refuse(engine: SimulatedEngine, how: str) -> None:
    engine.faults.add(**REFUSALS[how])


def request_count(engine: SimulatedEngine) -> int:
    return len(generations(engine))


def refusal_count(engine: SimulatedEngine) -> int:
    """Return the number of requests that the engine answered 503 because its queue was full."""
    return engine.state.refused


@pytest.mark.fault(104)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("connector", "role"), ROLES)
@pytest.mark.parametrize("how", ["503", "429"])
async def test_no_request_fails_when_some_instances_refuse(
    deploy: Deploy, how: str, connector: str, role: str, stream: bool
) -> None:
    gateway = await deploy(4, 4, connector=connector, retry=STRICT, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    refusing = engines_of(gateway, role)[:2]
    for engine in refusing:
        refuse(engine, how)
    body = request(Api.COMPLETIONS, stream=stream)
    alone = await answer_alone(body)
    for _ in range(4):
        answers = await asyncio.gather(*(gateway.ask(body) for _ in range(6)))
        assert {(answer.status, answer.text) for answer in answers} == {(200, alone)}
    for _ in range(40):
        assert (await gateway.ask(body)).status == 200
    # The requests before the first refusal, and one at the end of each back-off.
    assert max(map(request_count, refusing)) <= 14


@pytest.mark.fault(104)
@pytest.mark.parametrize("how", ["retired", "scaling", "paused"])
async def test_no_request_fails_when_vllm_takes_instances_out_of_service(deploy: Deploy, how: str) -> None:
    gateway = await deploy(2, 4, retry=STRICT, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    for engine in gateway.decoders[:3]:
        refuse(engine, how)
    for _ in range(30):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert max(map(request_count, gateway.decoders[:3])) <= 8


@pytest.mark.fault(104)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_instance_that_keeps_refusing_is_ejected_and_logged(
    deploy: Deploy, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(3, 3, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    refusing = engines_of(gateway, role)[0]
    refuse(refusing, "503")
    ejected = gateway.metrics("pdproxy_instance_ejected_total")
    while not ejected:
        assert (await gateway.ask(request(Api.CHAT))).is_done
        ejected = gateway.metrics("pdproxy_instance_ejected_total")
    assert ejected == {(f"127.0.0.1:{refusing.port}", "refuses", role): 1.0}
    assert request_count(refusing) == 3
    lines = [record.getMessage() for record in caplog.records if "is ejected" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"{role} instance 127.0.0.1:{refusing.port} is ejected: ")
    assert "answered with status 503" in lines[0]
    assert ", while others serve" in lines[0]


@pytest.mark.fault(105)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("connector", "role"), ROLES)
async def test_requests_wait_while_all_instances_of_a_role_refuse(
    deploy: Deploy, connector: str, role: str, stream: bool
) -> None:
    gateway = await deploy(2, 2, connector=connector, retry=STRICT, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    engines = engines_of(gateway, role)
    for engine in engines:
        refuse(engine, "503")
    body = request(Api.COMPLETIONS, stream=stream)
    waiting = [asyncio.create_task(gateway.ask(body)) for _ in range(4)]
    await until(
        lambda: all(map(request_count, engines)) and gateway.worker.request_service.admission_queue.waiting_count,
        "the queue",
        30.0,
    )
    for engine in engines:
        engine.faults.clear()
    alone = await answer_alone(body)
    answers = await asyncio.gather(*waiting)
    assert {(answer.status, answer.text) for answer in answers} == {(200, alone)}
    assert not gateway.metrics("pdproxy_instance_ejected_total")


@pytest.mark.fault(105)
async def test_request_gets_the_refusal_when_its_wait_is_over(deploy: Deploy) -> None:
    gateway = await deploy(2, 2, admission={"wait_seconds": 0.05})
    for engine in gateway.prefillers:
        engine.faults.add("refuse_status", status=429, body={"error": {"message": "full"}})
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["message"]) == (429, "full")
    later = await gateway.ask(request(Api.CHAT))
    assert later.status in (429, 503)


QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5},
}


async def ask_all(gateway: Deployment) -> list[tuple[str, Answer]]:
    """Return the path and the answer of a request to each API, streamed and not."""
    answers = []
    for path, body in QUESTIONS.items():
        for stream in (True, False):
            raw = orjson.dumps({"model": "sim", "stream": stream, **body})
            async with gateway.session.post(gateway.url + path, data=raw) as response:
                answers.append((path, await read(response)))
    return answers


@pytest.mark.fault(150)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [(429, "99999999999999", "3600"), (429, "7", "7"), (503, "-5", None), (503, None, None)],
)
async def test_without_retries_clients_get_the_refusal_at_once(
    deploy: Deploy, status: int, retry_after: str | None, expected: str | None, role: str, is_fast: bool
) -> None:
    gateway = await deploy(
        1,
        1,
        retry={**STRICT, "max_attempts": 1},
        admission={"wait_seconds": 3600.0},
        listen={"fast_path": is_fast},
    )
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    (engine,) = engines_of(gateway, role)
    body = {"error": {"message": "I am full"}}
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    engine.faults.add("refuse_status", status=status, body=body, headers=headers)
    answers = await ask_all(gateway) + await ask_all(gateway)
    for path, answer in answers:
        assert (answer.status, answer.headers.get("retry-after")) == (status, expected)
        if path == "/v1/messages":
            kind = {429: "rate_limit_error", 503: "overloaded_error"}[status]
            assert answer.json == {"type": "error", "error": {"type": kind, "message": "I am full"}}
        else:
            assert answer.json == body
    assert request_count(engine) == len(answers)
    assert not gateway.metrics("pdproxy_queue_waits_total")
    engine.faults.clear()
    assert (await gateway.ask(request(Api.CHAT))).is_done


@pytest.mark.fault(150)
async def test_without_retries_requests_go_to_instances_that_do_not_refuse(deploy: Deploy) -> None:
    gateway = await deploy(1, 3, retry={**STRICT, "max_attempts": 1}, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    refusing = gateway.decoders[0]
    refusing.faults.add("refuse_status", status=429, headers={"Retry-After": "30"})
    statuses = [(await gateway.ask(request(Api.CHAT))).status for _ in range(20)]
    assert statuses.count(429) == request_count(refusing) == 1
    assert statuses.count(200) == 19


@pytest.mark.fault(151)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_do_not_wait_for_a_retry_after_beyond_their_limit(
    deploy: Deploy, role: str, is_fast: bool
) -> None:
    gateway = await deploy(2, 2, retry=STRICT, admission={"wait_seconds": 60.0}, listen={"fast_path": is_fast})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    engines = engines_of(gateway, role)
    for engine, seconds in zip(engines, ("700", "900"), strict=True):
        body = {"error": {"message": "in a while"}}
        engine.faults.add("refuse_status", status=429, body=body, headers={"Retry-After": seconds})
    first = await gateway.ask(request(Api.CHAT))
    assert (first.status, first.headers["retry-after"], first.error["message"]) == (429, "700", "in a while")
    # The gateway knows the refusals by now, and sends no request.
    later = await ask_all(gateway)
    for path, answer in later:
        assert answer.status == 503
        assert 690 < int(answer.headers["retry-after"]) <= 841
        kinds = {"/v1/messages": {"type": "overloaded_error"}}
        assert answer.json["error"].items() >= kinds.get(path, {"code": "all_refuse"}).items()
    assert list(map(request_count, engines)) == [1, 1]
    assert gateway.metrics("pdproxy_rejected_total") == {("all_refuse",): len(later)}
    for engine in engines:  # so that decoders release the KV cache of the first request
        engine.faults.clear()


@pytest.mark.fault(151)
async def test_request_waits_if_one_instance_recovers_in_time(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, retry=STRICT, admission={"wait_seconds": 60.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    for engine, seconds in zip(gateway.decoders, ("700", "1"), strict=True):
        engine.faults.add("refuse_status", status=503, headers={"Retry-After": seconds}, times=1)
    assert (await gateway.ask(request(Api.CHAT))).is_done


@pytest.mark.fault(106)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engines_with_bounded_queues_serve_every_request(deploy: Deploy, role: str) -> None:
    """There are three times as many clients as the engines take at once. Engines start when one is full."""
    bounded: dict[str, Any] = {"max_num_queued_reqs": 4, "decode_step_ms": 2.0, "prefill_ms_per_1k_tokens": 500.0}
    gateway = await deploy(
        2,
        2,
        **{"prefiller" if role == "prefill" else "decoder": bounded},
        admission={"wait_seconds": 60.0, "max_running_prefill": 1000, "max_running_decode": 1000},
    )
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True

    async def client() -> list[int]:
        return [(await gateway.ask(request(Api.CHAT, stream=True))).status for _ in range(6)]

    engines = engines_of(gateway, role)
    with ExitStack() as held:
        for engine in engines:
            held.enter_context(engine.held(prefills=True))
        clients = [asyncio.create_task(client()) for _ in range(24)]
        await until(lambda: any(map(refusal_count, engines)), "a full engine")
    assert await asyncio.gather(*clients) == [[200] * 6] * 24
    assert not gateway.metrics("pdproxy_instance_ejected_total")


@pytest.mark.fault(109)
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("action", ["retract", "exhaust_host_pool"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_sglang_decoder_without_memory_is_not_ejected(
    deploy: Deploy, stream: bool, action: str, tokens: int
) -> None:
    gateway = await deploy(1, 2, connector="sglang_bootstrap", resume={"pressure_seconds": 60.0, "max_attempts": 3})
    gateway.expects_inexact_pins = True
    short, _ = gateway.decoders
    short.faults.add(action, tokens=tokens, times=1)
    body = request(Api.COMPLETIONS, stream=stream, max_tokens=40)
    alone = await answer_alone(body)
    while not short.state.faults_applied:
        answer = await gateway.ask(body)
        assert (answer.status, answer.text) == (200, alone)
    seen = request_count(short)
    for _ in range(4):
        assert (await gateway.ask(body)).status == 200
    assert request_count(short) == seen, "it gets no new requests for a while"
    health = gateway.worker.pools.decode.health
    assert [
        health.health_of(backend).consecutive_failures for backend in gateway.worker.pools.decode.all_backends()
    ] == [0, 0]
    causes = {labels for labels in gateway.metrics("pdproxy_instance_requests_total") if "recomputed" in labels}
    assert len(causes) == 1
