"""Engines whose health route answers too late because they are busy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import Deployment

PROBED: dict[str, Any] = {"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "timeout_seconds": 0.05}


def probes(engine: SimulatedEngine) -> int:
    return sum(seen.path == "/health" for seen in engine.state.requests)


def state(gateway: Deployment, role: str) -> HealthState:
    pool = gateway.worker.pools.prefill if role == "prefill" else gateway.worker.pools.decode
    return pool.health.health_of(pool.all_backends()[0]).health_state


async def is_ready(gateway: Deployment) -> bool:
    async with gateway.session.get(gateway.url + "/readyz") as answer:
        return answer.status == 200


async def with_slow_health(deploy: Deploy, role: str, **options: Any) -> tuple[Deployment, SimulatedEngine]:
    gateway = await deploy(1, 1, health=PROBED, admission={"wait_seconds": 60.0}, engine=options)
    await until(lambda: state(gateway, role) is HealthState.UP, "the first health check")
    engine = (gateway.prefillers if role == "prefill" else gateway.decoders)[0]
    engine.faults.add("hang_before_headers", path="/health")
    return gateway, engine


@pytest.mark.fault(107)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_last_instance_serves_while_its_health_checks_time_out(deploy: Deploy, role: str) -> None:
    gateway, engine = await with_slow_health(deploy, role)
    begun = probes(engine)
    assert (await gateway.ask(request(Api.CHAT))).status == 200
    while probes(engine) < begun + 8:
        assert (await gateway.ask(request(Api.CHAT))).status == 200
        assert await is_ready(gateway)
    assert state(gateway, role) is HealthState.UP


@pytest.mark.fault(107)
async def test_last_instance_stays_up_during_an_answer(deploy: Deploy) -> None:
    gateway, engine = await with_slow_health(deploy, "decode", decode_step_ms=20.0)
    begun = probes(engine)
    async with gateway.asking(request(Api.CHAT, stream=True, max_tokens=10_000)) as client:
        await client.has_tokens(1)
        await until(lambda: probes(engine) >= begun + 8, "some health checks", 30.0)
        assert state(gateway, "decode") is HealthState.UP
    gateway.expects_inexact_pins = True


@pytest.mark.fault(108)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_wait_for_a_role_with_slow_health_checks(deploy: Deploy, role: str) -> None:
    gateway, engine = await with_slow_health(deploy, role)
    await until(lambda: state(gateway, role) is HealthState.DOWN, "the health checks", 30.0)
    assert await is_ready(gateway)
    waiting = asyncio.create_task(gateway.ask(request(Api.CHAT)))
    await until(lambda: gateway.worker.request_service.admission_queue.waiting_count, "the queue")
    engine.faults.clear()
    assert (await waiting).status == 200


@pytest.mark.fault(108)
async def test_idle_instance_with_slow_health_checks_is_down_if_others_serve(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, health=PROBED)
    await until(lambda: state(gateway, "decode") is HealthState.UP, "the first health check")
    gateway.decoders[0].faults.add("hang_before_headers", path="/health")
    await until(lambda: state(gateway, "decode") is HealthState.DOWN, "the health checks", 30.0)
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert not any(seen.path == Api.CHAT.path for seen in gateway.decoders[0].state.requests)
