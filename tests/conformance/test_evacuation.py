"""Evacuation: answers of a removed instance continue on another one when its time is over.

An instance that announces its end by health checks with 503 is evacuated at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment

pytestmark = pytest.mark.fault(62)

LONG: dict[str, Any] = {"max_tokens": 120}


def slow(role: str = "decode") -> SimulatedEngine:
    return SimulatedEngine(role=role, decode_step_ms=10.0)


def name_of(engine: SimulatedEngine) -> str:
    return f"127.0.0.1:{engine.port}"


async def remove(gateway: Deployment, engine: SimulatedEngine, **fields: Any) -> dict[str, Any]:
    instance = {"type": engine.options.role, "instances": name_of(engine), **fields}
    async with gateway.session.post(gateway.url + "/instances/remove", json=instance) as response:
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def instances(gateway: Deployment) -> dict[str, dict[str, Any]]:
    async with gateway.session.get(gateway.url + "/instances") as response:
        return {one["address"]: one for one in (await response.json())["instances"]}


async def has_left(gateway: Deployment, engine: SimulatedEngine) -> None:
    """Wait until the engine is no longer an instance.

    The prober's round, which drops it, runs once in these deployments.
    """
    async with asyncio.timeout(60):
        while name_of(engine) in await instances(gateway):
            gateway.worker.prober.remove_drained_backends()


async def start_requests(gateway: Deployment, *bodies: dict[str, Any]) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(gateway.ask(body)) for body in bodies]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_running_answers_move_before_the_instance_leaves(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(
        2, [slow(), slow(), slow()], resume={"max_attempts": 0}
    )  # limits resumes after failures only
    leaving = gateway.decoders[0]
    body = request(Api.CHAT, stream=stream, **LONG)
    tasks = await start_requests(gateway, *[body] * 12)
    await leaving.wait_until(lambda state: state.live == 4)
    answer = await remove(gateway, leaving, evacuate_after=0)
    assert answer["message"] == f"Instances ['{name_of(leaving)}'] are isolated and waiting to be removed."
    await has_left(gateway, leaving)
    assert not all(task.done() for task in tasks)
    text = await answer_alone(body)
    for task in tasks:
        moved_answer = await task
        assert (moved_answer.is_done, moved_answer.text) == (True, text)
    # Answers without a token are retried, and not resumed.
    counts = [gateway.metrics(f"pdproxy_{name}_total") for name in ("resumes", "retries")]
    moved = [count for metric in counts for labels, count in metric.items() if "removed" in labels]
    assert sum(moved) == 4
    assert not gateway.metrics("pdproxy_instance_ejected_total")


async def test_answers_may_finish_before_the_evacuation_time(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()])
    leaving = gateway.decoders[0]
    body = request(Api.CHAT, stream=True, max_tokens=40)
    tasks = await start_requests(gateway, *[body] * 4)
    await leaving.wait_until(lambda state: state.live == 2)
    await remove(gateway, leaving, evacuate_after=3600)
    instance = (await instances(gateway))[name_of(leaving)]
    assert instance["membership"] == "draining"
    assert 0 < instance["evacuated_in_seconds"] <= 3600
    for task in tasks:
        assert (await task).text == await answer_alone(body)
    await has_left(gateway, leaving)
    assert not gateway.metrics("pdproxy_resumes_total")


async def test_evacuation_time_has_a_default_and_may_be_changed(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()], leaving={"evacuate_after_seconds": 0.0})
    leaving = gateway.decoders[0]
    body = request(Api.CHAT, stream=True, **LONG)
    tasks = await start_requests(gateway, *[body] * 4)
    await leaving.wait_until(lambda state: state.live == 2)
    await remove(gateway, leaving, evacuate_after=None)
    assert (await instances(gateway))[name_of(leaving)]["evacuated_in_seconds"] is None
    await remove(gateway, leaving)
    await has_left(gateway, leaving)
    for task in tasks:
        assert (await task).text == await answer_alone(body)


async def test_passed_through_request_finishes_on_the_leaving_instance(deploy: Deploy) -> None:
    """No other instance can continue it, and it is short. So the instance leaves after its end."""
    gateway = await deploy(2, 1)
    (leaving, _) = gateway.prefillers
    leaving.faults.add("slow_headers", path="/tokenize", seconds=0.3)

    async def tokenize() -> int:
        body = {"model": "sim", "prompt": "Hello"}
        async with gateway.session.post(gateway.url + "/tokenize", json=body) as response:
            return response.status

    tasks = asyncio.create_task(tokenize())
    await until(lambda: any(seen.path == "/tokenize" for seen in leaving.requests), "the request")
    await remove(gateway, leaving, evacuate_after=0)
    await has_left(gateway, leaving)
    assert await tasks == 200
    assert not any(seen.path == "/tokenize" for seen in gateway.prefillers[1].requests)


async def test_prefiller_leaves_while_its_answers_continue(deploy: Deploy) -> None:
    gateway = await deploy(2, [slow(), slow()])
    leaving, other = gateway.prefillers
    body = request(Api.CHAT, stream=True, **LONG)
    tasks = await start_requests(gateway, *[body] * 4)
    await until(lambda: sum(engine.state.live for engine in gateway.decoders) == 4, "four answers")
    await until(lambda: not leaving.pins, "the KV to be fetched")
    leaving.faults.add("hang_before_headers", path=Api.CHAT.path)
    stuck = await start_requests(gateway, *[body] * 2)
    await leaving.wait_until(lambda state: state.live == 1)
    await remove(gateway, leaving, evacuate_after=0)
    await has_left(gateway, leaving)
    assert not any(task.done() for task in tasks)
    for task in (*tasks, *stuck):
        assert (await task).text == await answer_alone(body)
    assert not gateway.metrics("pdproxy_resumes_total")
    assert gateway.metrics("pdproxy_retries_total") == {("removed", "prefill"): 1.0}
    assert other.state.finished >= 2


async def test_last_decoder_is_not_evacuated(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(1, [slow()])
    (last,) = gateway.decoders
    body = request(Api.CHAT, stream=True, max_tokens=60)
    (tasks,) = await start_requests(gateway, body)
    await last.wait_until(lambda state: state.live == 1)
    answer = await remove(gateway, last, evacuate_after=0)
    assert len(answer["warnings"]) == 2  # it is the last one, and is configured
    assert (await tasks).text == await answer_alone(body)
    await has_left(gateway, last)
    lines = [record.getMessage() for record in caplog.records if "evacuated" in record.getMessage()]
    assert lines == [
        f"decode instance {name_of(last)} cannot be evacuated yet: no other instance can continue its answers"
    ]


async def test_evacuation_respects_the_retry_budget(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()], retry={"budget_share": 0.0, "budget_least": 1})
    leaving = gateway.decoders[0]
    body = request(Api.CHAT, stream=True, max_tokens=300)
    tasks = await start_requests(gateway, *[body] * 8)
    await leaving.wait_until(lambda state: state.live == 4)
    await remove(gateway, leaving, evacuate_after=0)
    assert gateway.worker.request_service.retry_budget.waiting_count == 0
    await has_left(gateway, leaving)
    assert gateway.worker.request_service.retry_budget.waiting_count == 0
    for task in tasks:
        assert (await task).text == await answer_alone(body)
    assert not gateway.metrics("pdproxy_retry_budget_exhausted_total")


async def test_evacuated_answer_ends_with_an_error_when_resume_is_off(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()], resume={"mode": "off"})
    leaving = gateway.decoders[0]
    tasks = await start_requests(gateway, *[request(Api.CHAT, stream=True, **LONG)] * 2)
    await until(lambda: all(engine.state.live == 1 for engine in gateway.decoders), "one answer each")
    async with gateway.asking(request(Api.CHAT, stream=True, **LONG)) as client:  # so that tokens are on their way
        await client.has_tokens(3)
    await remove(gateway, leaving, evacuate_after=0)
    await has_left(gateway, leaving)
    assert sorted([(await task).is_whole for task in tasks]) == [False, True]


PROBED: dict[str, Any] = {"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "fall": 3, "rise": 1}


@pytest.mark.parametrize("is_heeded", [True, False], ids=["evacuated", "left alone"])
@pytest.mark.fault(93)
async def test_health_checks_with_503_evacuate_the_instance(deploy: Deploy, is_heeded: bool) -> None:
    gateway = await deploy(2, [slow(), slow()], health=PROBED, leaving={"evacuate_on_503": is_heeded})
    leaving, other = gateway.decoders
    body = request(Api.CHAT, stream=True, **LONG)
    tasks = await start_requests(gateway, *[body] * 6)
    await leaving.wait_until(lambda state: state.live == 3)
    leaving.faults.add("refuse_status", path="/health")
    await until(lambda: is_down(gateway, leaving), "the third health check")
    if is_heeded:
        await leaving.wait_until(lambda state: state.live == 0)
        assert not any(task.done() for task in tasks)
    text = await answer_alone(body)
    assert [(await task).text for task in tasks] == [text] * 6
    assert other.state.finished == (6 if is_heeded else 3)
    assert not gateway.metrics("pdproxy_instance_ejected_total")
    leaving.faults.clear()  # the instance stays
    await until(lambda: not is_down(gateway, leaving), "its return")
    assert not gateway.worker.health.leaving_backends


@pytest.mark.parametrize(
    ("failure", "fields", "times"),
    [
        ("refuse_status", {"status": 503}, 2),
        ("refuse_status", {"status": 500}, None),
        ("hang_before_headers", {}, None),
    ],
    ids=["503 twice", "500", "no answer"],
)
@pytest.mark.fault(93)
async def test_other_health_check_failures_do_not_evacuate(
    deploy: Deploy, failure: str, fields: dict[str, Any], times: int | None
) -> None:
    gateway = await deploy(1, [slow(), slow()], health={**PROBED, "timeout_seconds": 0.5})
    failing = gateway.decoders[0]
    body = request(Api.CHAT, stream=True, **LONG)
    tasks = await start_requests(gateway, *[body] * 4)
    await failing.wait_until(lambda state: state.live == 2)
    failing.faults.add(failure, path="/health", times=times, **fields)
    (fault,) = failing.faults.describe()
    await until(lambda: failing.faults.describe()[0]["fired"] >= 2 if times else is_down(gateway, failing), f"{fault}")
    assert [(await task).text for task in tasks] == [await answer_alone(body)] * 4
    assert not gateway.metrics("pdproxy_resumes_total")
    assert failing.state.finished == 2


def is_down(gateway: Deployment, engine: SimulatedEngine) -> bool:
    (backend,) = [one for one in gateway.worker.pools.decode.all_backends() if one.port == engine.port]
    return gateway.worker.health.health_of(backend).health_state is HealthState.DOWN


@pytest.mark.parametrize("value", ["soon", -1, True, [], 1e300])
async def test_invalid_evacuation_time_is_rejected(deploy: Deploy, value: object) -> None:
    gateway = await deploy(1, 1)
    instance = {"type": "decode", "instances": name_of(gateway.decoders[0]), "evacuate_after": value}
    async with gateway.session.post(gateway.url + "/instances/remove", json=instance) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "evacuate_after"
    assert (await instances(gateway))[name_of(gateway.decoders[0])]["membership"] == "enabled"
