"""Where instances serve several models, requests come to the same on both roads, and plain ones are on the fast one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.talking import raw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.deployment import Deployment
    from tests.fast_path.roads import Roads
    from tests.talking import Clients

BODIES = pytest.mark.parametrize(
    "body",
    [request(Api.CHAT, stream=True, max_tokens=4), request(Api.COMPLETIONS, stream=False, max_tokens=4)],
    ids=["stream", "whole"],
)


def two_models() -> tuple[Sequence[SimulatedEngine], Sequence[SimulatedEngine]]:
    """One prefiller and one decoder of each."""
    prefillers = [SimulatedEngine(role="prefill", model=model) for model in "ab"]
    return prefillers, [SimulatedEngine(role="decode", model=model) for model in "ab"]


async def known(gateway: Deployment) -> None:
    """The engines have told what they serve."""
    pools = gateway.worker.pools
    await until(lambda: pools.decode.eligible() and gateway.worker.lanes.models.is_mixed, "the engines' models")


async def without_a_decoder(gateway: Deployment) -> None:
    """For model b."""
    await known(gateway)
    decoders, health = gateway.worker.pools.decode.backends(), gateway.worker.health
    for _ in range(10):
        health.on_probe(decoders[1], False, "it is down")


@BODIES
async def test_each_goes_where_its_model_is_served(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number, model in enumerate(("a", "b", "x", None, "b")):
            await line.ask({**body, "model": model}, X_Request_Id=f"r-{number}")

    course = await roads.take(talk, engines=two_models, before=known, is_fast=3, resume={"mode": "off"})
    assert [len(asked) for asked in course.asked[:4]] == [1, 2, 1, 2]
    assert course.metrics["pdproxy_model_requests_total [('code', '200'), ('model', 'b')]"] == 2


@BODIES
async def test_a_request_without_a_model_may_have_an_alias(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number, model in enumerate((None, "", "b")):
            await line.ask({**body, "model": model}, X_Request_Id=f"r-{number}")

    options: dict[str, Any] = {"resume": {"mode": "off"}, "models": {"aliases": ["*=b"]}}
    course = await roads.take(talk, engines=two_models, before=known, is_fast=3, **options)
    assert [len(asked) for asked in course.asked[:4]] == [0, 3, 0, 3]


@BODIES
async def test_nobody_for_one_model_is_told_alike(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number, model in enumerate("ba"):
            await line.ask({**body, "model": model}, X_Request_Id=f"r-{number}")

    options: dict[str, Any] = {"resume": {"mode": "off"}, "admission": {"wait_seconds": 0.05}}
    course = await roads.take(talk, engines=two_models, before=without_a_decoder, is_fast=2, **options)
    ((_, told, _), (head, _, _)) = course.answers[0]
    assert "no healthy decode instance is available for model 'b'" in told
    assert head.startswith("HTTP/1.1 200")


@BODIES
async def test_one_model_waits_and_the_other_does_not(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        gateway.decoders[0].faults.add("stall_after_tokens", times=1, tokens=1)
        first, second, third = [await clients.connect() for _ in range(3)]
        first.send(raw(request(Api.CHAT, "endless", model="a", stream=True), X_Request_Id="r-0"))
        await first.has(b'"finish_reason":null,"tok')
        second.send(raw({**body, "model": "a"}, X_Request_Id="r-1"))
        await until(lambda: gateway.metrics("pdproxy_queued_requests") == {(): 1.0}, "it waits")
        await third.ask({**body, "model": "b"}, X_Request_Id="r-2")
        first.leave()
        await second.answer()

    admission = {"max_running_decode": 1, "wait_seconds": 5.0}
    await roads.take(talk, engines=two_models, before=known, is_fast=3, admission=admission, resume={"mode": "off"})
