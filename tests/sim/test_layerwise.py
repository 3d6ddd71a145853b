"""The layerwise hand-over: the decoder calls back, and waits until the prefiller has sent everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client, simulated_pair

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6},
    COMPLETIONS: {"prompt": "Hello there", "max_tokens": 6},
}


class Metaserver:
    """A server for the callbacks of decoders. It closes the first `cut` connections, and then answers with `status`."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cut = 0
        self.status = 200
        self.calls = 0
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.calls += 1
        message = await request.json()
        if self.calls <= self.cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.messages.put_nowait(message)
        return web.Response(status=self.status, text="nobody reads this")

    def ask(self, body: dict[str, Any], **params: Any) -> dict[str, Any]:
        asked = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": self.url} | params
        return body | {"kv_transfer_params": asked}


@asynccontextmanager
async def metaserver() -> AsyncIterator[Metaserver]:
    server = Metaserver()
    app = web.Application()
    app.add_routes([web.post("/v1/metaserver", server.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/metaserver"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def setup(**options: Any) -> AsyncIterator[tuple[Metaserver, SimulatedEngine, SimulatedEngine]]:
    """Start a metaserver, a prefiller and a decoder."""
    async with (
        metaserver() as server,
        simulated_pair(protocol="layerwise", **options) as (prefiller, decoder),
    ):
        yield server, prefiller, decoder


def prefill(body: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    return body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": message}


@pytest.mark.parametrize(("path", "name"), [(CHAT, "chatcmpl-abc"), (COMPLETIONS, "cmpl-abc-0")])
async def test_decoder_goes_on_when_all_is_sent(client: Client, path: str, name: str) -> None:
    body = BODIES[path]
    async with SimulatedEngine() as engine:
        expected = (await client.post(engine, path, body))[1]["choices"]
    async with setup() as (server, prefiller, decoder):
        decoding = asyncio.create_task(client.post(decoder, path, server.ask(body), X_Request_Id="abc"))
        message = await server.messages.get()
        assert message["request_id"] == name
        assert decoder.state.waiting_rooms == 1
        status, answer = await client.post(prefiller, path, prefill(body, message), X_Request_Id="abc")
        assert (status, answer["kv_transfer_params"]) == (200, None)
        assert (await decoding)[1]["choices"] == expected
        assert decoder.state.local_prefills == decoder.state.waiting_rooms == 0
        assert not prefiller.pins


async def test_callback_says_what_the_prefiller_needs(client: Client) -> None:
    async with setup(block_size=4) as (server, _, decoder):
        task = asyncio.create_task(client.post(decoder, COMPLETIONS, server.ask(BODIES[COMPLETIONS])))
        message = await server.messages.get()
        assert message == {
            "token_ids": [],
            "request_id": message["request_id"],
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[1, 2, 3]],
            "remote_block_size": [4],
            "remote_engine_id": (await client.get(decoder, "/_mock/state"))["engine_id"],
            "remote_host": decoder.host,
            "remote_port": decoder.port,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await decoder.wait_until(lambda state: state.waiting_rooms == state.live == 0)


async def test_every_prompt_calls_back(client: Client) -> None:
    async with setup() as (server, prefiller, decoder):
        body = {"prompt": ["one", "two"], "max_tokens": 4}
        decoding = asyncio.create_task(client.post(decoder, COMPLETIONS, server.ask(body), X_Request_Id="abc"))
        messages = [await server.messages.get() for _ in range(2)]
        assert {message["request_id"] for message in messages} == {"cmpl-abc-0", "cmpl-abc-1"}
        await client.post(prefiller, COMPLETIONS, prefill({"prompt": "one"}, messages[0]), X_Request_Id="abc")
        await decoder.wait_until(lambda state: state.waiting_rooms == 1)
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await decoder.wait_until(lambda state: state.live == 0)


@pytest.mark.parametrize("status", [404, 500])
async def test_answer_to_a_callback_is_not_looked_at(client: Client, status: int) -> None:
    async with setup() as (server, _, decoder):
        server.status = status
        decoding = asyncio.create_task(client.post(decoder, CHAT, server.ask(BODIES[CHAT])))
        await server.messages.get()
        await client.get(decoder, "/version")
        assert not decoding.done()
        assert (server.calls, decoder.state.waiting_rooms) == (1, 1)
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)


@pytest.mark.parametrize(("cut", "calls", "failed"), [(2, 3, 0), (3, 3, 1)])
async def test_callback_is_tried_three_times(client: Client, cut: int, calls: int, failed: int) -> None:
    async with setup() as (server, prefiller, decoder):
        server.cut = cut
        decoding = asyncio.create_task(client.post(decoder, CHAT, server.ask(BODIES[CHAT]), X_Request_Id="abc"))
        if failed:
            await decoder.wait_until(lambda _: decoder.core.protocol.describe()["calls_failed"] == 1)
            assert decoder.state.waiting_rooms == 1
            decoding.cancel()
        else:
            message = await server.messages.get()
            await client.post(prefiller, CHAT, prefill(BODIES[CHAT], message), X_Request_Id="abc")
        await asyncio.gather(decoding, return_exceptions=True)
        assert server.calls == calls


@pytest.mark.parametrize(("name", "changed"), [("other", {}), ("abc", {"remote_engine_id": "that of before"})])
async def test_prefill_for_another_decoder_is_useless(client: Client, name: str, changed: dict[str, str]) -> None:
    async with setup() as (server, prefiller, decoder):
        decoding = asyncio.create_task(client.post(decoder, CHAT, server.ask(BODIES[CHAT]), X_Request_Id="abc"))
        message = await server.messages.get() | changed
        status, _ = await client.post(prefiller, CHAT, prefill(BODIES[CHAT], message), X_Request_Id=name)
        assert status == 200
        assert (await client.get(decoder, "/_mock/state"))["strays"] == 1
        assert decoder.state.waiting_rooms == 1
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)


async def test_decoder_left_before_it_had_room_does_not_call_back(client: Client) -> None:
    async with setup(metaserver_delay_seconds=3600.0) as (server, _, decoder):
        decoding = asyncio.create_task(client.post(decoder, CHAT, server.ask(BODIES[CHAT])))
        await decoder.wait_until(lambda state: state.waiting_rooms == 1)
        decoding.cancel()
        await decoder.wait_until(lambda state: state.live == 0)
        assert (server.calls, decoder.state.waiting_rooms) == (0, 0)


async def test_prefiller_without_the_number_of_cached_tokens_dies(client: Client) -> None:
    async with SimulatedEngine(role="prefill", protocol="layerwise") as prefiller:
        with pytest.raises(aiohttp.ClientError):
            await client.post(prefiller, CHAT, prefill(BODIES[CHAT], {"do_remote_decode": True}))
        await prefiller.wait_until(lambda state: state.kills == 1)


async def test_prefill_that_is_left_tells_the_decoder_nothing(client: Client) -> None:
    async with setup() as (server, prefiller, decoder):
        decoding = asyncio.create_task(client.post(decoder, CHAT, server.ask(BODIES[CHAT]), X_Request_Id="abc"))
        message = await server.messages.get()
        prefiller.faults.add("stall_after_tokens", tokens=0)
        leg = asyncio.create_task(client.post(prefiller, CHAT, prefill(BODIES[CHAT], message), X_Request_Id="abc"))
        await prefiller.wait_until(lambda state: state.prompt_tokens > 0)
        leg.cancel()
        await prefiller.wait_until(lambda state: state.live == 0)
        assert decoder.state.waiting_rooms == 1
        decoding.cancel()
        await asyncio.gather(leg, decoding, return_exceptions=True)


async def test_virtual_prefill_does_not_wait(client: Client) -> None:
    async with setup() as (server, _, decoder):
        status, _ = await client.post(decoder, CHAT, server.ask(BODIES[CHAT], do_virtual=True))
        assert (status, server.calls) == (200, 0)
