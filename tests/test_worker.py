"""One worker: put together, listening, draining, and gone without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from proxy.balancer.backend import Role
from proxy.wire.openai import Api
from tests.asking import answer_alone, read, request, until
from tests.deployment import generations

if TYPE_CHECKING:
    from tests.conftest import Deploy
    from tests.deployment import Deployment


async def test_a_worker_that_stops_accepting_finishes_what_it_began(deploy: Deploy) -> None:
    gateway = await deploy(engine={"decode_step_ms": 1.0})
    body = request(Api.CHAT, stream=True, max_tokens=50)
    await gateway.ask(request(Api.CHAT))  # leaves a connection on which nothing is answered
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        gateway.worker.drain.is_draining = True
        await gateway.stop_accepting()
        async with aiohttp.ClientSession() as another:
            with pytest.raises(aiohttp.ClientConnectorError):
                await another.get(gateway.url + "/livez")
        answer = await read(response)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    with pytest.raises(aiohttp.ClientConnectorError):
        await gateway.session.get(gateway.url + "/livez")  # the idle connection is closed, too


async def test_a_draining_worker_says_so_and_serves_on(gateway: Deployment) -> None:
    gateway.worker.drain.is_draining = True
    async with gateway.session.get(gateway.url + "/readyz") as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
    answer = await gateway.ask(request(Api.CHAT))
    assert answer.is_done
    assert answer.headers["connection"] == "close"


async def test_a_worker_that_ends_cuts_what_runs_and_frees_its_engines(deploy: Deploy) -> None:
    gateway = await deploy(engine={"decode_step_ms": 1.0})
    body = request(Api.CHAT, stream=True, max_tokens=100_000)
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        await gateway.end()
        assert not (await read(response)).is_whole
    await gateway.decoders[0].wait_until(lambda state: state.disconnects == 1)


async def test_a_worker_knows_how_much_it_has_to_do(deploy: Deploy) -> None:
    gateway = await deploy()
    gateway.prefillers[0].faults.add("hang_before_headers")
    async with gateway.asking(request(Api.CHAT)), gateway.asking(request(Api.COMPLETIONS)):
        await gateway.prefillers[0].wait_until(lambda state: state.live == 2)
        assert gateway.worker.drain.in_flight == 2
        assert gateway.metrics("pdproxy_inflight_requests") == {("chat",): 1.0, ("completions",): 1.0}
        async with gateway.session.get(gateway.url + "/healthcheck") as response:
            assert (await response.json())["request_num"] == 2
    await gateway.worker.drain.idle()


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "power_of_two", "random"])
async def test_every_policy_serves(deploy: Deploy, policy: str) -> None:
    gateway = await deploy(3, 3, balance={"prefill_policy": policy, "decode_policy": policy})
    for _ in range(6):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert len(generations(*gateway.decoders)) == 6


async def test_an_unhealthy_engine_gets_no_requests_until_it_is_well(deploy: Deploy) -> None:
    gateway = await deploy(
        2, 1, health={"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "fall": 2, "rise": 2}
    )
    sick, well = gateway.prefillers
    sick.faults.add("refuse_status", path="/health")
    pool = gateway.worker.pools.of(Role.PREFILL)
    await until(lambda: len(pool.eligible()) == 1, "the sick prefiller to be noticed")
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert (len(generations(sick)), len(generations(well))) == (0, 4)
    sick.faults.clear()
    await until(lambda: len(pool.eligible()) == 2, "the prefiller to be well again")
    for _ in range(2):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert len(generations(sick)) == 1


async def test_an_engine_that_refuses_connections_is_left_alone(deploy: Deploy) -> None:
    """After two refusals in a row, without waiting for a health check."""
    gateway = await deploy(2, 1)
    await gateway.prefillers[0].kill()
    for _ in range(8):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.metrics("pdproxy_retries_total") == {("connect", "prefill"): 2.0}


async def test_a_restarted_prefiller_is_used_again(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, health={"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "rise": 1})
    (prefiller,) = gateway.prefillers
    assert (await gateway.ask(request(Api.CHAT))).is_done
    await prefiller.kill()
    pool = gateway.worker.pools.of(Role.PREFILL)
    await until(lambda: not pool.eligible(), "the end of the prefiller to be noticed")
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_prefill")
    await prefiller.start()
    await until(pool.eligible, "the prefiller to be back")
    assert (await gateway.ask(request(Api.CHAT))).is_done
