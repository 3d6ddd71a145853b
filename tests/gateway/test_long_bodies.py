"""Long bodies are read into one buffer, with the same results as with aiohttp's reader."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from proxy.gateway import long_body
from proxy.gateway.fast_connection import FastConnection
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.talking import Clients, raw

if TYPE_CHECKING:
    from tests.conftest import Deploy
    from tests.gateway.roads import Roads
    from tests.talking import Line

LONG_BYTES = 1_200_000
STREAM = request(Api.CHAT, stream=True, user="x" * LONG_BYTES)
WHOLE = request(Api.COMPLETIONS, stream=False, user="é\\" * (LONG_BYTES // 4))
SHORT = request(Api.COMPLETIONS, stream=False)
OFF: dict[str, Any] = {"resume": {"mode": "off"}}


def front_connections(clients: Clients) -> list[FastConnection]:
    """Return the connections that the fast reader reads."""
    return [each for each in clients.gateway.worker.client_listener._connections if isinstance(each, FastConnection)]


async def half_sent(clients: Clients, body: bytes) -> Line:
    """Return a connection after the gateway has received most of a long body."""
    line = await clients.connect()
    line.send(body[:-5])
    await until(lambda: 5 in map(missing_bytes, front_connections(clients)), "all but five bytes")
    return line


def missing_bytes(connection: FastConnection) -> int | None:
    """Return the bytes of a long body that have not arrived. None: no long body is arriving."""
    reader = connection._long_body_reader
    return None if reader is None else reader.head.body_bytes - reader.received_bytes


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_long_requests_stay_on_the_fast_path(roads: Roads, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for _ in range(2):
            await line.ask(body)
            await line.ask(SHORT)

    await roads.take(talk, is_fast=4, settings=OFF)


async def test_requests_behind_a_long_one_are_answered_in_their_order(roads: Roads) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        line.send(raw(SHORT) + raw(STREAM) + raw(SHORT) + raw(WHOLE) + raw(SHORT))
        for _ in range(5):
            await line.answer()

    await roads.take(talk, settings=OFF)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + b"x" * LONG_BYTES,
        b'{"prompt": "' + b"\xff" * LONG_BYTES + b'"}',
        b'{"prompt": "x", "prompt": "' + b"x" * LONG_BYTES + b'"}',
        b"[" + b" " * LONG_BYTES + b"]",
        b'{"prompt": "x", "more": [' + b"[]," * LONG_BYTES + b"0]}",
        b'{"prompt": "x", "max_tokens": -1, "user": "' + b"x" * LONG_BYTES + b'"}',
    ],
    ids=["cut", "not UTF-8", "member twice", "no object", "too many elements", "refused"],
)
async def test_long_bodies_are_rejected_alike(roads: Roads, body: bytes) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        line.send(raw(body, path="/v1/completions", X_Request_Id="r-1"))
        await line.answer()

    await roads.take(talk, settings=OFF)


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": {"max_body_bytes": LONG_BYTES}},
        {"admission": {"max_buffered_bytes": LONG_BYTES // 2}},
        {"listen": {"max_body_elements": 1000}},
    ],
    ids=["body", "buffers", "elements"],
)
async def test_limits_of_long_bodies_are_the_same(roads: Roads, settings: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        line.send(raw(STREAM, X_Request_Id="r-1"))
        await line.answer()

    await roads.take(talk, settings=OFF | settings)


async def test_two_long_bodies_need_room_for_both(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, admission={"max_buffered_bytes": 2 * LONG_BYTES})
    clients = Clients(gateway)
    first = await half_sent(clients, raw(STREAM))
    second = await clients.connect()
    await second.ask(STREAM)
    assert second.received[0][0].split()[1] == "503"
    assert '"code":"buffers_full"' in second.received[0][1]
    first.send(raw(STREAM)[-5:])
    await first.answer()
    assert first.received[0][0].split()[1] == "200"
    clients.leave()


async def test_client_may_leave_in_the_middle_of_a_long_body(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    clients = Clients(gateway)
    line = await half_sent(clients, raw(STREAM))
    assert gateway.worker.drain_manager.in_flight_count == 1
    line.leave()
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")
    assert gateway.worker.request_service.admission_queue.buffers.held_bytes == 0


async def test_long_body_counts_in_a_drain_and_may_be_cut_off(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    clients = Clients(gateway)
    line = await half_sent(clients, raw(STREAM))
    assert gateway.worker.drain_manager.cut_off_all() == 1
    await line.answer()
    head, body, _ = line.received[0]
    assert head.split()[1] == "503"
    assert '"code":"draining"' in body
    await gateway.worker.drain_manager.wait_until_idle()
    clients.leave()


async def test_long_body_is_answered_before_a_drain_ends(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    clients = Clients(gateway)
    line = await half_sent(clients, raw(WHOLE))
    stopping = asyncio.create_task(gateway.worker.client_listener.stop_accepting())
    line.send(raw(WHOLE)[-5:])
    await line.answer()
    await stopping
    assert line.received[0][0].split()[1] == "200"
    assert "Connection: close" in line.received[0][0]
    clients.leave()


@pytest.mark.interpreted
async def test_slow_long_body_goes_to_aiohttp(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await deploy(1, 1)
    clients = Clients(gateway)
    line = await half_sent(clients, raw(STREAM))
    monkeypatch.setattr(long_body, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(long_body, "_BYTES_PER_SECOND", 1)
    gateway.worker.client_listener.close_overdue_connections()
    assert front_connections(clients)  # it may take longer, because much has arrived
    monkeypatch.setattr(long_body, "_BYTES_PER_SECOND", 1 << 62)
    gateway.worker.client_listener.close_overdue_connections()
    assert not front_connections(clients)
    monkeypatch.undo()
    line.send(raw(STREAM)[-5:])
    await line.answer()
    assert line.received[0][0].split()[1] == "200"
    await line.ask(SHORT)
    assert line.received[1][0].split()[1] == "200"
    clients.leave()
