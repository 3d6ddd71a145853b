"""Both HTTP readers give the same results whatever clients do."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from proxy.gateway.fast_connection import FastConnection
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.gateway.roads import Roads
from tests.talking import Clients, raw

STREAM = request(Api.CHAT, stream=True)
WHOLE = request(Api.COMPLETIONS, stream=False)
OFF: dict[str, Any] = {"resume": {"mode": "off"}}


@pytest.mark.parametrize("connection", ["keep-alive", "close"])  # the fast reader, and aiohttp's
async def test_access_line_has_the_client_behind_trusted_proxies(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, connection: str
) -> None:
    caplog.set_level(logging.INFO)
    for networks in ((), ("10.0.0.0/8",), ("127.0.0.0/8", "10.0.0.0/8")):
        gateway = await deploy(listen={"trusted_proxies": networks})
        forwarded = "198.51.100.1, 192.0.2.7, 10.0.0.2"
        assert (await gateway.ask(WHOLE, x_forwarded_for=forwarded, connection=connection)).status == 200
    lines = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert [line["client"] for line in lines] == ["127.0.0.1", "127.0.0.1", "192.0.2.7"]


async def test_pipelined_requests_are_answered_in_their_order(roads: Roads) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        line.send(raw(STREAM) + raw(WHOLE) + raw(STREAM) + raw(WHOLE))
        for _ in range(4):
            await line.answer()

    await roads.take(talk, settings=OFF)


@pytest.mark.parametrize("at", [1, 20, 80, 120, 200, -1])
async def test_request_in_two_pieces_is_answered(roads: Roads, at: int) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        await line.ask(STREAM)
        whole = raw(STREAM)
        line.send(whole[:at])
        for _ in range(20):
            await asyncio.sleep(0)
        line.send(whole[at:])
        await line.answer()

    await roads.take(talk, settings={})


@pytest.mark.parametrize(
    "odd",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"\r\n\r\n" + raw(WHOLE),
        b"nonsense\r\n\r\n",
        raw(b"{", path="/v1/completions"),
        raw(b"[]", path="/v1/completions"),
        raw(b"", path="/v1/completions"),
        raw(WHOLE, Connection="close"),
        raw(WHOLE, Expect="100-continue2"),
        raw(WHOLE).replace(b"HTTP/1.1", b"HTTP/1.0"),
        raw(WHOLE).replace(b"Host: gateway", b"Host: a/b"),
        raw(WHOLE).replace(b"Content-Length: ", b"Content-Length: -"),
        raw({**WHOLE, "model": "other"}),
        raw({**WHOLE, "max_tokens": -1}),
        raw({**WHOLE, "prompt": [None, "x"]}),
        raw(WHOLE, X_Request_Id="not acceptable"),
        raw(WHOLE, Origin="http://page"),
        raw(WHOLE, Authorization="Bearer k"),
    ],
)
@pytest.mark.parametrize("is_behind", [True, False])
async def test_requests_that_are_not_plain_are_answered_alone_and_pipelined(
    roads: Roads, odd: bytes, is_behind: bool
) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        if is_behind:
            await line.ask(WHOLE, X_Request_Id="r-0")
        line.send(odd.replace(b"gateway\r\n", b"gateway\r\nX-Request-Id: r-1\r\n") if b"X-Req" not in odd else odd)
        await line.answer()
        other = await clients.connect()
        await other.ask(STREAM, X_Request_Id="r-2")

    await roads.take(talk, settings=OFF)


PHASES: list[tuple[str, str, dict[str, Any], Callable[[Deployment], bool]]] = [
    ("prefill", "hang_before_headers", {}, lambda gateway: gateway.prefillers[0].state.live == 1),
    ("prefill", "hang_after_headers", {}, lambda gateway: gateway.prefillers[0].state.faults_applied == 1),
    ("decode", "hang_before_headers", {}, lambda gateway: gateway.decoders[0].state.live == 1),
    ("decode", "stall_after_tokens", {"tokens": 3}, lambda gateway: gateway.decoders[0].state.tokens_generated >= 3),
]


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
@pytest.mark.parametrize(("role", "action", "fields", "is_there"), PHASES)
@pytest.mark.parametrize("how", ["leaves", "drain and cut-off"])
async def test_request_with_two_parallel_legs_ends_in_any_phase(
    roads: Roads,
    body: dict[str, Any],
    role: str,
    action: str,
    fields: dict[str, Any],
    is_there: Callable[[Deployment], bool],
    how: str,
) -> None:
    """The recorded conversations have the same cases for sequential legs."""

    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        engine = gateway.prefillers[0] if role == "prefill" else gateway.decoders[0]
        engine.faults.add(action, times=1, **fields)
        line = await clients.connect()
        line.send(raw(body, X_Request_Id="r-0"))
        await engine.wait_until(lambda _: is_there(gateway))
        if fields.get("tokens") and body is STREAM:
            await line.has(b'"finish_reason":null,"matched_stop')
        if how == "leaves":
            line.leave()
        else:
            gateway.worker.drain_manager.cut_off_all()
            if fields.get("tokens") and body is STREAM:
                await line.is_closed()
            else:
                await line.answer()
        await clients.rest()

    await roads.take(talk, connector="sglang_bootstrap", loses_kv=True, is_fast=1, settings=OFF)


async def test_client_with_a_lost_host_is_detected(deploy: Deploy) -> None:
    gateway = await deploy()
    clients = Clients(gateway)
    line = await clients.connect()
    line.send(raw(request(Api.CHAT, max_tokens=1)))
    await line.answer()
    accepted = [
        each.client_transport
        for each in gc.get_objects()
        if type(each) is FastConnection and not each.client_transport.is_closing()
    ]
    assert accepted
    for transport in accepted:  # inherited from the listening socket
        inherited = transport.get_extra_info("socket")
        assert inherited.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [inherited.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [15, 5, 3]
    line.writer.close()
