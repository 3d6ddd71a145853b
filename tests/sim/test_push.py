"""The push protocol: a decoder registers with the prefiller's engine, which writes the KV cache when it is computed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client, simulated_pair

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "once upon ", "max_tokens": 6}
PREFILL: dict[str, Any] = BODY | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


pair = partial(simulated_pair, protocol="push")


def decode(prefiller: SimulatedEngine, **changes: Any) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": prefiller.core.protocol.describe()["engine_id"],
        "remote_request_id": "x",
        "remote_host": prefiller.host,
        "remote_port": prefiller.port,
        "tp_size": 1,
    }
    return BODY | {"kv_transfer_params": {name: value for name, value in (params | changes).items() if value}}


@pytest.mark.parametrize("decoder_first", [True, False])
async def test_kv_arrives_in_either_order(client: Client, decoder_first: bool) -> None:
    async with SimulatedEngine() as engine, pair() as (prefiller, decoder):
        _, alone = await client.post(engine, PATH, BODY)
        headers = {"X-Request-Id": "one"}
        if decoder_first:
            waiting = asyncio.create_task(client.post(decoder, PATH, decode(prefiller), **headers))
            await decoder.wait_until(lambda state: state.waiting_rooms == 1)
            await client.post(prefiller, PATH, PREFILL, **headers)
            status, answer = await waiting
        else:
            await client.post(prefiller, PATH, PREFILL, **headers)
            assert len(prefiller.pins) == 1
            status, answer = await client.post(decoder, PATH, decode(prefiller), **headers)
        assert (status, answer["choices"][0]["text"]) == (200, alone["choices"][0]["text"])
        assert not prefiller.pins
        assert (decoder.state.pulls, decoder.state.local_prefills) == (1, 0)


async def test_answer_names_the_engine_and_the_mode(client: Client) -> None:
    async with pair() as (prefiller, _):
        _, answer = await client.post(prefiller, PATH, PREFILL)
        params = answer["kv_transfer_params"]
        assert (params["transfer_mode"], params["remote_host"]) == ("push", prefiller.host)
        assert params["remote_engine_id"] == prefiller.core.protocol.describe()["engine_id"]


async def test_another_engine_id_fails_the_load(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        status, _ = await client.post(decoder, PATH, decode(prefiller, remote_engine_id="gone"))
        assert (status, decoder.state.pull_failures) == (500, 1)


async def test_missing_member_ends_the_decoder(client: Client) -> None:
    """VLLM reads the members without a check (vllm-project/vllm#56585)."""
    async with pair() as (prefiller, decoder):
        with pytest.raises(aiohttp.ClientError):
            await client.post(decoder, PATH, decode(prefiller, remote_request_id=None))
        await decoder.wait_until(lambda state: state.kills == 1)


async def test_registration_outlives_its_request(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        headers = {"X-Request-Id": "one"}
        waiting = asyncio.create_task(client.post(decoder, PATH, decode(prefiller), **headers))
        await prefiller.wait_until(lambda _: prefiller.core.protocol.describe()["registered"] == 1)
        waiting.cancel()
        await decoder.wait_until(lambda state: state.waiting_rooms == 0)
        await client.post(prefiller, PATH, PREFILL, **headers)
        assert not prefiller.pins
