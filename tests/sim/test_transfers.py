"""The hand-over by transfer ids: both legs at once, and a bootstrap server tells the decoder where the prefiller is."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.options import SimRole
from tests.sim.conftest import Client, simulated_pair

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 6}


pair = partial(simulated_pair, protocol="transfer")


def prefill(transfer_id: str = "xfer-1") -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return BODY | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}


def bootstrap(prefiller: SimulatedEngine) -> str:
    return f"http://{prefiller.host}:{prefiller.bootstrap_port}"


async def engines(client: Client, prefiller: SimulatedEngine) -> dict[str, Any]:
    async with client.session.get(bootstrap(prefiller) + "/query") as response:
        return dict(await response.json())


async def decode(
    client: Client, prefiller: SimulatedEngine, transfer_id: str = "xfer-1", rank: str = "0", **fields: Any
) -> dict[str, Any]:
    known = await engines(client, prefiller)
    params = {"do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": bootstrap(prefiller)}
    params |= {"remote_engine_id": known[rank]["engine_id"], "transfer_id": transfer_id}
    return BODY | {"kv_transfer_params": params | fields}


async def alone(client: Client) -> Any:
    async with SimulatedEngine() as engine:
        return (await client.post(engine, PATH, BODY))[1]["choices"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_legs_meet_whichever_comes_first(client: Client, first: str) -> None:
    async with pair() as (prefiller, decoder):
        body = await decode(client, prefiller)
        if first == "decode":
            decoding = asyncio.create_task(client.post(decoder, PATH, body))
            await decoder.wait_until(lambda state: state.waiting_rooms == 1)
            assert not decoding.done()
        status, answer = await client.post(prefiller, PATH, prefill())
        assert (status, answer["kv_transfer_params"]) == (200, None)
        if first == "prefill":
            assert len(prefiller.pins) == 1
            decoding = asyncio.create_task(client.post(decoder, PATH, body))
        assert (await decoding)[1]["choices"] == await alone(client)
        assert not prefiller.pins
        assert (decoder.state.pulls, decoder.state.waiting_rooms) == (1, 0)


async def test_every_rank_is_an_engine(client: Client) -> None:
    async with pair(dp_size=2) as (prefiller, decoder):
        known = await engines(client, prefiller)
        assert list(known) == ["0", "1"]
        assert known["0"]["engine_id"] != known["1"]["engine_id"]
        await client.post(prefiller, PATH, prefill(), X_data_parallel_rank="1")
        status, _ = await client.post(decoder, PATH, await decode(client, prefiller, rank="1"))
        assert (status, decoder.state.pulls) == (200, 1)
        assert (await client.get(prefiller, "/_mock/state"))["dp_ranks"] == {"1": 1}


async def test_transfer_is_not_found_at_another_rank(client: Client) -> None:
    async with pair(dp_size=2, waiting_seconds=0.05) as (prefiller, decoder):
        await client.post(prefiller, PATH, prefill(), X_data_parallel_rank="1")
        assert (await client.post(decoder, PATH, await decode(client, prefiller, rank="0")))[0] == 500
        assert len(prefiller.pins) == 1


async def test_engine_chooses_a_rank_without_a_request_for_one(client: Client) -> None:
    async with pair(dp_size=2) as (prefiller, _):
        for number in range(4):
            await client.post(prefiller, PATH, prefill(f"xfer-{number}"))
        assert (await client.get(prefiller, "/_mock/state"))["dp_ranks"] == {"0": 2, "1": 2}


@pytest.mark.parametrize("rank", ["2", "-1"])
async def test_rank_out_of_range_is_refused(client: Client, rank: str) -> None:
    async with pair(dp_size=2) as (prefiller, _):
        assert (await client.post(prefiller, PATH, prefill(), X_data_parallel_rank=rank))[0] == 400


async def test_engine_is_another_after_a_restart(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        stale = await decode(client, prefiller)
        port = prefiller.bootstrap_port
        await prefiller.restart()
        assert prefiller.bootstrap_port == port
        await client.post(prefiller, PATH, prefill())
        assert (await client.post(decoder, PATH, stale))[0] == 500
        assert (await client.post(decoder, PATH, await decode(client, prefiller)))[0] == 200


async def test_prefiller_that_is_gone_is_a_failure(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        body = await decode(client, prefiller)
        await prefiller.kill()
        assert (await client.post(decoder, PATH, body))[0] == 500


async def test_decoder_remembers_an_engine_it_has_asked_for(client: Client) -> None:
    """VLLM 0.32 asks the bootstrap server only for engines that are new to the decoder."""
    async with pair() as (prefiller, decoder):
        for number, address in enumerate((None, "http://127.0.0.1:1")):
            body = await decode(client, prefiller, f"xfer-{number}")
            if address is not None:
                body["kv_transfer_params"]["remote_bootstrap_addr"] = address
            await client.post(prefiller, PATH, prefill(f"xfer-{number}"))
            assert (await client.post(decoder, PATH, body))[0] == 200
        assert decoder.state.pulls == 2


async def test_bootstrap_server_that_is_not_there_is_a_failure(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        body = await decode(client, prefiller, remote_bootstrap_addr="http://127.0.0.1:1")
        await client.post(prefiller, PATH, prefill())
        assert (await client.post(decoder, PATH, body))[0] == 500
        assert len(prefiller.pins) == 1


async def test_decoder_gets_no_prompt_that_has_fewer_blocks_than_its_own(client: Client) -> None:
    """At once, and the prefiller keeps its blocks until they expire (vLLM 0.32: "P num blocks less than D")."""
    async with pair(block_size=4) as (prefiller, decoder):
        await client.post(prefiller, PATH, prefill())
        body = await decode(client, prefiller)
        assert (await client.post(decoder, PATH, body | {"prompt": body["prompt"] * 2}))[0] == 500
        assert len(prefiller.pins) == 1


async def test_decoder_waits_for_a_prefill_that_does_not_come(client: Client) -> None:
    async with pair(waiting_seconds=0.05) as (prefiller, decoder):
        assert (await client.post(decoder, PATH, await decode(client, prefiller)))[0] == 500
        assert decoder.state.waiting_rooms == 0


@pytest.mark.parametrize("is_prefilled", [True, False])
async def test_transfer_goes_on_though_its_request_is_left(client: Client, is_prefilled: bool) -> None:
    async with pair() as (prefiller, decoder):
        if is_prefilled:
            decoder.faults.add("slow_load", seconds=3600.0)
            await client.post(prefiller, PATH, prefill())
        decoding = asyncio.create_task(client.post(decoder, PATH, await decode(client, prefiller)))
        await decoder.wait_until(lambda state: state.live == 1 if is_prefilled else state.waiting_rooms == 1)
        decoding.cancel()
        await decoder.wait_until(lambda state: state.releases == 1)
        if not is_prefilled:
            await client.post(prefiller, PATH, prefill())
        assert not prefiller.pins
        assert (await client.get(prefiller, "/_mock/state"))["released"] == 1


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
async def test_decoder_with_missing_parameters_computes_the_prompt(client: Client, missing: str) -> None:
    async with pair() as (prefiller, decoder):
        without: dict[str, Any] = {missing: None}
        body = await decode(client, prefiller, **without)
        assert (await client.post(decoder, PATH, body))[0] == 200
        assert decoder.state.local_prefills == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_does_not_survive_a_request_for_the_other_role(client: Client, role: SimRole) -> None:
    async with pair() as (prefiller, _):
        body = prefill() if role == "decode" else await decode(client, prefiller)
        async with SimulatedEngine(role=role, protocol="transfer") as wrong:
            with pytest.raises(aiohttp.ClientError):
                await client.post(wrong, PATH, body)
            assert not wrong.is_running
