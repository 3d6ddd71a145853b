"""Draining and the settings of plain requests give the same results with both readers."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.gateway.roads import Roads
from tests.talking import Clients, raw

STREAM = request(Api.CHAT, stream=True)
WHOLE = request(Api.COMPLETIONS, stream=False)


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_answer_completes_while_the_gateway_stops_accepting(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        idle, line = await clients.connect(), await clients.connect()
        await idle.ask(body)
        gateway.prefillers[0].faults.add("slow_headers", seconds=0.05, times=1)
        line.send(raw(body))
        await gateway.prefillers[0].wait_until(lambda state: state.live == 1)
        await gateway.stop_accepting()
        await line.answer()
        await line.is_closed()
        await idle.is_closed()

    await roads.take(talk, is_fast=2, settings={"resume": {"mode": "off"}})


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_connections_with_equal_request_ids_all_end(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        lines = [await clients.connect() for _ in range(2)]
        gateway.prefillers[0].faults.add("slow_headers", seconds=1.0, times=2)
        for number, line in enumerate(lines, 1):
            line.send(raw(body, X_Request_Id="r-0"))
            await gateway.prefillers[0].wait_until(lambda state, number=number: state.live == number)
        gateway.worker.drain_manager.is_draining = gateway.worker.client_listener.closes_after_each_answer = (
            True  # as at its end
        )
        for line in lines:
            await line.answer()
            await line.is_closed()

    # A policy that holds no prompt back, so that both are under way at one time.
    settings = {"resume": {"mode": "off"}, "balance": {"prefill_policy": "least_tokens"}}
    await roads.take(talk, is_fast=2, is_unordered=True, settings=settings)
