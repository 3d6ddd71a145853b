"""Requests that wait in the queue give the same results with both readers, and their connections stay fast."""

from __future__ import annotations

from typing import Any, Final

import pytest

from proxy.gateway.request import Request
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.gateway.roads import Roads
from tests.talking import Clients, Line, raw

STREAM: Final = request(Api.CHAT, "waits", stream=True, max_tokens=2)
WHOLE: Final = request(Api.COMPLETIONS, "waits", stream=False, max_tokens=2)
ENDLESS: Final = request(Api.CHAT, "endless", stream=True)
BODIES: Final = pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])


def busy(**admission: Any) -> dict[str, Any]:
    """Return settings with which a decoder writes one answer at a time."""
    limits = {"max_running_decode": 1, "wait_seconds": 5.0, **admission}
    return {"admission": limits, "resume": {"mode": "off"}}


async def occupied(clients: Clients) -> Line:
    """Return the connection of a client whose answer keeps the decoder busy until it disconnects."""
    decoder = clients.gateway.decoders[0]
    decoder.faults.add("stall_after_tokens", times=1, tokens=1)
    line = await clients.connect()
    line.send(raw(ENDLESS, X_Request_Id="r-0"))
    await line.has(b'"finish_reason":null,"tok')
    return line


async def waits(clients: Clients, body: dict[str, Any], number: int = 1) -> Line:
    """Return the connection of a client whose request is queued."""
    line = await clients.connect()
    line.send(raw(body, X_Request_Id=f"r-{number}"))
    await until(lambda: clients.gateway.metrics("pdproxy_queued_requests") == {(): float(number)}, "it waits")
    return line


@BODIES
async def test_queued_request_is_ended_by_a_drain(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        first = await occupied(clients)
        second = await waits(clients, body)
        clients.gateway.worker.drain_manager.cut_off_all()
        await second.answer()
        first.leave()

    # Both end in one moment.
    await roads.take(talk, is_fast=2, is_unordered=True, settings=busy())


@pytest.mark.interpreted
@BODIES
async def test_client_disconnects_right_after_its_request_is_queued(
    deploy: Deploy, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await deploy(1, 1, **busy())
    clients = Clients(gateway)
    first = await occupied(clients)
    start = Request.start_serving

    def start_and_leave(request: Request, *what: Any) -> None:
        start(request, *what)
        request.on_disconnect()
        request.on_disconnect()

    monkeypatch.setattr(Request, "start_serving", start_and_leave)
    second = await clients.connect()
    second.send(raw(body))
    await until(lambda: gateway.metrics("pdproxy_request_end_total"), "its end")
    assert gateway.metrics("pdproxy_request_end_total") == {("CQ",): 1.0}
    assert not any(gateway.metrics("pdproxy_queued_requests").values())
    for line in (first, second):
        line.leave()
    await clients.rest()
