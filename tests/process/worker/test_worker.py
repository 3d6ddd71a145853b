"""One worker: put together, listening, draining, and gone without a trace."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.policies.least_tokens import RandomChoice, RoundRobin
from proxy.common.backend import Backend, Role
from proxy.connectors.releaser import KvTransfer
from proxy.process.configuration import ConfigSnapshot
from proxy.process.worker import engines, process
from proxy.process.worker.process import StopRequest
from proxy.settings import POLICIES, ClientKey, Settings
from proxy.settings.tls import TlsFiles
from proxy.wire.openai import Api
from tests.asking import answer_alone, read, request, until
from tests.certificates import Certificates
from tests.conftest import Deploy
from tests.deployment import Deployment, generations


async def test_worker_that_stops_accepting_finishes_what_it_began(deploy: Deploy) -> None:
    gateway = await deploy(engine={"decode_step_ms": 1.0})
    body = request(Api.CHAT, stream=True, max_tokens=50)
    await gateway.ask(request(Api.CHAT))  # leaves a connection on which nothing is answered
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        gateway.worker.drain_manager.is_draining = True
        await gateway.stop_accepting()
        async with aiohttp.ClientSession() as another:
            with pytest.raises(aiohttp.ClientConnectorError):
                await another.get(gateway.url + "/livez")
        answer = await read(response)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    with pytest.raises(aiohttp.ClientConnectorError):
        await gateway.session.get(gateway.url + "/livez")  # the idle connection is closed, too


async def test_draining_worker_says_so_and_serves_on(gateway: Deployment) -> None:
    gateway.worker.drain_manager.is_draining = True
    gateway.worker.apply_other_decisions()
    async with gateway.session.get(gateway.url + "/readyz") as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
    answer = await gateway.ask(request(Api.CHAT))
    assert answer.is_done
    assert answer.headers["connection"] == "close"


async def test_worker_that_ends_cuts_what_runs_and_frees_its_engines(deploy: Deploy) -> None:
    gateway = await deploy(engine={"decode_step_ms": 1.0})
    body = request(Api.CHAT, stream=True, max_tokens=100_000)
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        await gateway.end()
        assert not (await read(response)).is_whole
    await gateway.decoders[0].wait_until(lambda state: state.disconnects == 1)


async def test_worker_knows_how_much_it_has_to_do(deploy: Deploy) -> None:
    gateway = await deploy()
    gateway.prefillers[0].faults.add("hang_before_headers")
    async with gateway.asking(request(Api.CHAT)), gateway.asking(request(Api.COMPLETIONS)):
        await gateway.prefillers[0].wait_until(lambda state: state.live == 2)
        assert gateway.worker.drain_manager.in_flight_count == 2
        assert gateway.metrics("pdproxy_inflight_requests") == {("chat",): 1.0, ("completions",): 1.0}
        async with gateway.session.get(gateway.url + "/healthcheck") as response:
            assert (await response.json())["request_num"] == 2
    await gateway.worker.drain_manager.wait_until_idle()


@pytest.mark.parametrize("policy", list(POLICIES))
async def test_every_policy_serves(deploy: Deploy, policy: str) -> None:
    gateway = await deploy(3, 3, balance={"prefill_policy": policy, "decode_policy": policy})
    for _ in range(6):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert len(generations(*gateway.decoders)) == 6


@pytest.mark.parametrize(
    ("connector", "seconds"),
    [("vllm_pull", 30.0), ("vllm_store", 30.0), ("plain", 300.0), ("ascend_layerwise", 300.0)],
)
def test_prompt_that_takes_long_is_no_stall_of_its_decoder(connector: Any, seconds: float) -> None:
    assert engines.stall_seconds(Settings(connector=connector)) == seconds


async def test_unhealthy_engine_gets_no_requests_until_it_is_healthy(deploy: Deploy) -> None:
    checks = {"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "fall": 2, "rise": 2}
    gateway = await deploy(2, 1, health={**checks, "slow_start_seconds": 0.0})
    sick, well = gateway.prefillers
    sick.faults.add("refuse_status", path="/health")
    pool = gateway.worker.pools.pool_of(Role.PREFILL)
    await until(lambda: len(pool.eligible_backends()) == 1, "the unhealthy prefiller to be noticed")
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert (len(generations(sick)), len(generations(well))) == (0, 4)
    sick.faults.clear()
    await until(lambda: len(pool.eligible_backends()) == 2, "the prefiller to be well again")
    for _ in range(2):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert len(generations(sick)) == 1


async def test_engine_that_refuses_connections_is_left_alone(deploy: Deploy) -> None:
    """After two refusals in a row, without waiting for a health check."""
    gateway = await deploy(2, 1)
    await gateway.prefillers[0].kill()
    for _ in range(8):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.metrics("pdproxy_retries_total") == {("connect", "prefill"): 2.0}


async def test_restarted_prefiller_is_used_again(deploy: Deploy) -> None:
    health = {"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "rise": 1}
    gateway = await deploy(1, 1, health=health, admission={"wait_seconds": 0.5})
    (prefiller,) = gateway.prefillers
    assert (await gateway.ask(request(Api.CHAT))).is_done
    await prefiller.kill()
    pool = gateway.worker.pools.pool_of(Role.PREFILL)
    await until(lambda: not pool.eligible_backends(), "the end of the prefiller to be noticed")
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_prefill")
    await prefiller.start()
    await until(pool.eligible_backends, "the prefiller to be back")
    assert (await gateway.ask(request(Api.CHAT))).is_done


# Reloading


def changed(gateway: Deployment, client_keys: tuple[ClientKey, ...] = (), **sections: dict[str, Any]) -> ConfigSnapshot:
    """Return the current settings with other options in some sections."""
    current = gateway.worker.current_snapshot
    settings = current.settings.model_dump()
    for name, options in sections.items():
        settings[name] = {**settings[name], **options}
    slots = {key.name: slot for slot, key in enumerate(client_keys)}
    return replace(current, settings=Settings.model_validate(settings), client_keys=client_keys, slots_by_key=slots)


@pytest.mark.parametrize("section", ["listen", "engines"])
async def test_expiry_of_a_certificate_ends_with_its_use(deploy: Deploy, tmp_path: Path, section: str) -> None:
    """Otherwise an alert would come for a certificate without any use."""
    options = {"listen": ("tls_certificate", "tls_key"), "engines": ("client_certificate", "client_key")}[section]
    sections: dict[str, Any] = {section: dict(zip(options, Certificates(tmp_path).issue("good"), strict=True))}
    gateway = await deploy(**sections)

    name = "pdproxy_tls_certificate_expiry_timestamp_seconds"
    assert gateway.metrics(name)[section,] > 0
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, tls_files=TlsFiles()))
    assert math.isnan(gateway.metrics(name)[section,])


async def test_reload_applies_to_the_next_request(gateway: Deployment) -> None:
    decoder = gateway.decoders[0]

    async def status(**fields: Any) -> int:
        return (await gateway.ask(request(Api.CHAT, **fields))).status

    assert await status(n=3) == 200
    gateway.worker.apply_snapshot(changed(gateway, fanout={"max_units": 2}))
    assert await status(n=3) == 400
    gateway.worker.apply_snapshot(changed(gateway, listen={"max_body_bytes": 20}))
    assert await status() == 413
    gateway.worker.apply_snapshot(changed(gateway, listen={"max_body_bytes": 2000}, auth={"engine_api_key": "k-2"}))
    assert await status() == 200
    assert generations(decoder)[-1].headers["authorization"] == "Bearer k-2"
    gateway.worker.apply_snapshot(changed(gateway, listen={"cors_origins": ["*"]}))
    assert (await gateway.ask(request(Api.CHAT), origin="null")).headers["access-control-allow-origin"] == "*"
    key = ClientKey(name="a", key_sha256=hashlib.sha256(b"sk-1").hexdigest())
    gateway.worker.apply_snapshot(changed(gateway, (key,)))
    assert await status() == 401
    assert (await gateway.ask(request(Api.CHAT), authorization="Bearer sk-1")).status == 200
    gateway.worker.apply_snapshot(
        changed(gateway, timeouts={"prefill_seconds": 0.05, "prefill_seconds_per_1k_tokens": 0.0})
    )
    gateway.prefillers[0].faults.add("hang_before_headers")
    assert await status() == 504


async def test_reload_applies_to_connections_single_hops_and_orphaned_kv(gateway: Deployment) -> None:
    worker = gateway.worker
    gateway.worker.apply_snapshot(
        changed(
            gateway,
            timeouts={"connect_seconds": 1.5},
            kv={"pin_seconds": 7.0},
            listen={"max_connections": 1, "max_body_bytes": 20},
        )
    )
    assert worker.upstream._timeouts.connect_seconds == 1.5  # visible only when a host does not answer at all
    (prefiller,) = worker.pools.prefill.all_backends()
    assert worker.releaser.pin_seconds(prefiller, KvTransfer.OTHER) == 7.0
    async with gateway.session.post(gateway.url + "/tokenize", json={"prompt": "a long one"}) as response:
        assert response.status == 413
    async with (
        gateway.session.get(gateway.url + "/livez"),
        aiohttp.ClientSession() as another,
        another.get(gateway.url + "/livez") as response,
    ):
        assert response.status == 503


async def test_reload_applies_to_the_choice_of_backends(gateway: Deployment) -> None:
    worker = gateway.worker
    worker.apply_snapshot(
        changed(
            gateway,
            admission={"max_running_prefill": 3, "max_running_decode": 4},
            balance={"prefill_policy": "round_robin", "decode_policy": "random"},
            health={"fall": 1, "quarantine_after": 1},
            joining={"max_attempts": 1},
        )
    )
    pools = worker.pools
    (prefiller,), (decoder,) = pools.prefill.all_backends(), pools.decode.all_backends()
    assert (pools.prefill.running_limit(prefiller), pools.decode.running_limit(decoder)) == (3, 4)
    assert [type(pool.policy) for pool in (pools.prefill, pools.decode)] == [RoundRobin, RandomChoice]
    assert pools.pair_quarantine.record_failed_handoff(prefiller, decoder)
    transition = worker.health.on_probe(decoder, False, "a test")
    assert transition is not None
    assert transition.new_state is HealthState.DOWN
    assert worker.joiner.join_when_ready(Backend(Role.DECODE, "127.0.0.1", 1))
    await until(lambda: not worker.joiner.joining_instances(Role.DECODE), "the absent instance to be given up at once")


async def test_ejection_is_counted(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    pool = gateway.worker.pools.decode
    stalled = pool.all_backends()[0]
    assert pool.report_stall(stalled)
    assert gateway.metrics("pdproxy_instance_ejected_total") == {(stalled.name, "stall", "decode"): 1.0}


async def test_reload_applies_to_administrators(gateway: Deployment) -> None:
    async def status(key: str) -> int:
        url, headers = gateway.url + "/reset_prefix_cache", {"X-Admin-Key": key}
        async with gateway.session.post(url, headers=headers) as response:
            return response.status

    async def add(instance: str) -> str:
        body, headers = {"type": "decode", "instances": instance}, {"X-Admin-Key": "k-1"}
        async with gateway.session.post(gateway.url + "/instances/add", json=body, headers=headers) as response:
            return (await response.text()) if response.status != 200 else ""

    assert await status("wrong") == 200  # there is none, and this is this host
    gateway.worker.apply_snapshot(changed(gateway, auth={"admin_key": "k-1"}))
    assert (await status("wrong"), await status("k-1")) == (401, 200)
    instance = "127.0.0.2:1"
    gateway.worker.apply_snapshot(changed(gateway, admin={"networks": ["10.0.0.0/8"]}))
    assert "address_not_allowed" in await add(instance)
    gateway.worker.apply_snapshot(changed(gateway, admin={"networks": ["127.0.0.0/8"]}))
    assert await add(instance) == ""


async def test_log_tells_as_much_as_is_applied(gateway: Deployment) -> None:
    logger = logging.getLogger("proxy")
    before = logger.level
    try:
        gateway.worker.apply_snapshot(changed(gateway, log={"level": "ERROR"}))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


# Draining


async def test_drain_tells_every_so_often_how_much_is_left(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_LEFT_EVERY_SECONDS", 0.001)
    caplog.set_level("INFO", "proxy.worker")
    gateway = await deploy(drain={"not_ready_seconds": 0.0})
    gateway.prefillers[0].faults.add("hang_before_headers")
    stop = StopRequest(None, lambda: None)
    try:
        async with gateway.asking(request(Api.CHAT)) as client:
            await until(lambda: gateway.worker.drain_manager.in_flight_count == 1, "the request")
            caplog.clear()
            drain = asyncio.create_task(process._drain(gateway.worker, stop, gateway.stop_accepting))
            await until(lambda: len(caplog.records) >= 5, "some lines")
            await client.leave()
            await drain
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            asyncio.get_running_loop().remove_signal_handler(number)
    lines = [record for record in caplog.records if record.name == process.logger.name]
    assert {(line.getMessage(), vars(line)["fields"]["left"]) for line in lines} == {("draining", 1)}
