"""`GET /admin/status` of a worker: from the facts to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.observe.verdict import StatusBoard
from proxy.process.worker.status import CounterGrowth
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment


async def status_when(gateway: Deployment, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first status that is wanted."""
    async with asyncio.timeout(60):
        while True:
            async with gateway.session.get(gateway.url + "/admin/status") as response:
                assert response.status == 200
                status: dict[str, Any] = await response.json()
            if status["at"] is not None and is_wanted(status):
                return status


def reason(status: dict[str, Any], code: str) -> dict[str, Any] | None:
    return next((each for each in status["reasons"] if each["code"] == code), None)


async def test_status_of_a_gateway_that_serves_is_healthy(gateway: Deployment) -> None:
    assert (await gateway.ask(request(Api.CHAT))).is_done
    status = await status_when(gateway, lambda status: status["state"] == "healthy")
    assert status["reasons"] == []
    async with gateway.session.get(gateway.url + "/metrics") as response:
        assert "pdproxy_status_state 0.0" in (await response.text()).splitlines()


async def test_status_names_the_role_without_an_instance_and_the_instance(deploy: Deploy) -> None:
    gateway = await deploy(health={"interval_seconds": 0.1, "changing_interval_seconds": 0.1})
    await status_when(gateway, lambda status: status["state"] == "healthy")
    decoder = gateway.decoders[0]
    await decoder.kill()
    status = await status_when(gateway, lambda status: status["state"] == "down")
    found = reason(status, "no_instance")
    assert found is not None
    assert found["subject"] == {"kind": "side", "name": "decode"}
    name = f"127.0.0.1:{decoder.port}"
    assert {each["subject"]["name"] for each in status["reasons"] if each["subject"]["kind"] == "instance"} == {name}
    async with gateway.session.get(gateway.url + "/metrics") as response:
        metrics = (await response.text()).splitlines()
    assert 'pdproxy_status_reason{code="no_instance",kind="side",subject="decode"} 1.0' in metrics


async def test_status_and_instances_name_a_pair_that_is_kept_apart(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    pools, quarantine = gateway.worker.pools, gateway.worker.pools.pair_quarantine
    (prefiller,), (decoder, _) = pools.prefill.all_backends(), pools.decode.all_backends()
    assert quarantine is not None
    quarantine.record_failed_handoff(prefiller, decoder)
    assert quarantine.record_failed_handoff(prefiller, decoder)
    status = await status_when(gateway, lambda status: reason(status, "pair_apart") is not None)
    assert status["state"] == "degraded"
    found = reason(status, "pair_apart")
    assert found is not None
    assert found["subject"] == {"kind": "pair", "name": f"{prefiller.name} {decoder.name}"}
    async with gateway.session.get(gateway.url + "/instances") as response:
        apart = {each["address"]: each["apart_from"] for each in (await response.json())["instances"]}
    assert apart[prefiller.name] == [decoder.name]
    assert apart[decoder.name] == [prefiller.name]
    quarantine.record_successful_handoff(prefiller, decoder)


async def test_history_shows_the_tokens_of_the_gateway_and_its_decoders(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.observe.history.STEP_SECONDS", 0.2)
    gateway = await deploy(decoder={"decode_step_ms": 20.0})
    name = f"127.0.0.1:{gateway.decoders[0].port}"
    path = gateway.url + "/metrics/history"
    async with asyncio.timeout(60):
        while True:
            assert (await gateway.ask(request(Api.CHAT, stream=True, max_tokens=100))).is_done
            async with gateway.session.get(path) as response:
                assert response.status == 200
                history = await response.json()
            assert history["names"] == ["tokens_per_second", "in_flight", "queued", "first_token_seconds"]
            if history["instances"].get(name) and any(row[0] and row[3] is not None for row in history["samples"]):
                break


async def test_pace_of_a_removed_instance_is_dropped(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    paces = gateway.worker.upstream.paces_by_name
    kept, removed = (backend.name for backend in gateway.worker.pools.decode.all_backends())
    paces |= {kept: (1, 0.1), removed: (1, 0.1)}
    change = {"type": "decode", "instances": removed}
    async with gateway.session.post(gateway.url + "/instances/remove", json=change) as response:
        assert response.status == 200
    await status_when(gateway, lambda status: removed not in paces)
    assert kept in paces


def test_counters_of_a_replaced_worker_grow_from_zero() -> None:
    growth = CounterGrowth()
    series = ("0", "rejected", "queue_full")
    assert growth.add_values(0.0, {series: 5.0}) == {series[1:]: 5.0}
    assert growth.add_values(2.0, {series: 2.0}) == {series[1:]: 7.0}
    assert growth.add_values(31.0, {series: 2.0}) == {series[1:]: 2.0}


def test_report_of_a_dead_worker_is_erased() -> None:
    board = StatusBoard(2)
    board.publish_report(0, {"at": 1.0, "apart": [("p:1", "d:1", 9.0)]})
    board.publish_report(1, {"at": 2.0, "apart": [("p:1", "d:1", 7.0), ("p:1", "d:2", 3.0)]})
    assert board.quarantined_pairs() == {("p:1", "d:1"): 9.0, ("p:1", "d:2"): 3.0}
    board.erase_report(1)
    assert set(board.latest_reports()) == {0}
    assert board.current_verdict(9.0) == {"state": "healthy", "at": None, "reasons": [], "omitted": 0}
