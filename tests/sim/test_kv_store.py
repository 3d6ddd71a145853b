"""The hand-over by a store: nothing is exchanged, and the decoder finds what prefillers have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client, simulated_pair

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 6}
PREFILL = BODY | {"max_tokens": 1, "min_tokens": 1}


async def test_decoder_finds_what_was_prefilled(client: Client, tmp_path: Path) -> None:
    async with (
        SimulatedEngine() as engine,
        simulated_pair(protocol="store", store=str(tmp_path)) as (prefiller, decoder),
    ):
        status, answer = await client.post(prefiller, PATH, PREFILL)
        assert (status, answer["kv_transfer_params"]) == (200, None)
        assert not prefiller.pins
        await prefiller.kill()
        for _ in range(2):
            decoded = (await client.post(decoder, PATH, BODY))[1]
            assert decoded["choices"] == (await client.post(engine, PATH, BODY))[1]["choices"]
        assert (decoder.state.pulls, decoder.state.local_prefills) == (2, 0)


async def test_blocks_absent_from_the_store_are_computed(client: Client, tmp_path: Path) -> None:
    async with SimulatedEngine(role="decode", protocol="store", store=str(tmp_path)) as decoder:
        assert (await client.post(decoder, PATH, BODY))[0] == 200
        assert (decoder.state.pulls, decoder.state.local_prefills) == (0, 1)


async def test_answer_that_ends_before_its_limit_stores_nothing(client: Client, tmp_path: Path) -> None:
    options: dict[str, Any] = {"protocol": "store", "store": str(tmp_path), "first_token_eos": True}
    async with SimulatedEngine(role="prefill", **options) as prefiller:
        await client.post(prefiller, PATH, BODY | {"max_tokens": 1})
        assert prefiller.core.protocol.describe() == {"stored": 0}
        await client.post(prefiller, PATH, PREFILL)
        assert prefiller.core.protocol.describe() == {"stored": 1}


async def test_without_a_store_everybody_computes(client: Client) -> None:
    async with simulated_pair(protocol="store") as (prefiller, decoder):
        await client.post(prefiller, PATH, PREFILL)
        await client.post(decoder, PATH, BODY)
        assert decoder.state.local_prefills == 1
