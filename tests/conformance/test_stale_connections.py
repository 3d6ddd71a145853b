"""Connections to engines that are closed in the moment in which they are used again."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from proxy.connectors import CONNECTORS
from proxy.wire.openai import Api
from tests.asking import answer_alone, request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

REQUESTS = 20


async def closing_reused(deploy: Deploy, engines: int, connector: str) -> Deployment:
    gateway = await deploy(engines, engines, connector=connector)
    for engine in gateway.engines:
        engine.faults.add("close_reused")
    gateway.expects_resent = connector == "plain"  # its requests leave no KV cache behind
    gateway.may_stay_pinned = 4 * REQUESTS
    gateway.expects_inexact_pins = True  # nor could decoders always be asked to release KV
    return gateway


@pytest.mark.fault(70)
@pytest.mark.covering("connector shape engines", product(CONNECTORS, ("stream", "whole"), (1, 2)))
async def test_no_request_fails_on_a_connection_closed_at_reuse(
    deploy: Deploy, connector: str, shape: str, engines: int
) -> None:
    stream = shape == "stream"
    gateway = await closing_reused(deploy, engines, connector)
    body = request(Api.CHAT, stream=stream)
    text = await answer_alone(body)
    one_by_one = [await gateway.ask(body) for _ in range(REQUESTS)]
    together = await asyncio.gather(*[gateway.ask(body) for _ in range(REQUESTS)])
    for answer in (*one_by_one, *together):
        assert (answer.status, answer.text) == (200, text)
        assert answer.is_done
    assert gateway.metrics("pdproxy_instance_ejected_total") == {}


@pytest.mark.fault(70)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("fault", "requests"), [("kill", 1), ("reset_before_headers", 2)])
async def test_request_is_resent_once_and_not_after_a_crash(
    deploy: Deploy, role: str, fault: str, requests: int
) -> None:
    """A crash looks like a closed connection if the connection has served before."""
    gateway = await deploy(1, 1, kv={"release": "never"})
    body = request(Api.CHAT)
    assert (await gateway.ask(body)).is_done
    (engine,) = gateway.prefillers if role == "prefill" else gateway.decoders
    before = len(generations(engine))
    engine.faults.add(fault)
    answer = await gateway.ask(body)
    if fault == "kill":
        assert answer.status in (502, 503)
    else:
        assert (answer.status, answer.error["code"]) == (502, f"{role}_reset")
    assert len(generations(engine)) == before + requests
    gateway.may_stay_pinned = 2  # a new attempt begins with a new prefill
    gateway.expects_inexact_pins = True
