"""KV from prefiller to decoder: pinned, pulled once, released, expired."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import encode_text
from proxy.sim.profile import ConnectorName
from tests.sim.conftest import Client, simulated_pair

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
ONCE: dict[str, Any] = {"prompt": "once upon ", "max_tokens": 30}
PREFILL: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, ONCE)])
async def test_prefill_then_decode_says_what_one_engine_says(
    client: Client,
    prefiller: SimulatedEngine,
    decoder: SimulatedEngine,
    engine: SimulatedEngine,
    path: str,
    body: dict[str, Any],
) -> None:
    params = await client.prefill(prefiller, path, body)
    assert len(prefiller.pins) == prefiller.state.pinned == 1
    _, answer = await client.post(decoder, path, body | {"kv_transfer_params": params})
    _, alone = await client.post(engine, path, body)
    assert text_of(answer["choices"][0]) == text_of(alone["choices"][0])
    assert answer["kv_transfer_params"] is None
    assert not prefiller.pins
    assert decoder.state.pulls == 1
    assert decoder.state.local_prefills == 0
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1
    async with client.session.get(decoder.url + "/metrics") as response:
        metrics = await response.text()
    assert f'source="external_kv_transfer"}} {prompt_tokens}' in metrics
    assert 'source="local_compute"} 0' in metrics


async def test_params_have_the_shape_of_their_connector(client: Client) -> None:
    async with SimulatedEngine(role="prefill", block_size=4, profile_name="v0.23") as ascend:
        params = await client.prefill(ascend, TEXT, ONCE)
        assert params["remote_block_ids"] == [[1, 2, 3]]
        assert (params["remote_host"], params["remote_port"]) == (ascend.host, ascend.port)
        assert {"remote_ptp_size", "remote_pcp_size", "remote_block_size", "last_token_id"} < set(params)
    async with SimulatedEngine(role="prefill", connector_name="nixl", profile_name="v0.33") as nixl:
        params = await client.prefill(nixl, TEXT, ONCE)
        assert params["remote_num_tokens"] == len(ONCE["prompt"])
        assert {"tp_size", "dcp_size", "pp_size", "transfer_mode"} < set(params)
        assert "remote_ptp_size" not in params


async def test_params_are_good_for_one_pull(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    params = await client.prefill(prefiller, CHAT, HELLO)
    await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
    status, body = await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
    assert status == 500
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    assert body == {"error": error}
    assert decoder.state.pull_failures == 1


async def test_failed_load_is_swallowed_in_streams_up_to_v30(client: Client, prefiller: SimulatedEngine) -> None:
    params = await client.prefill(prefiller, CHAT, HELLO)
    body = HELLO | {"kv_transfer_params": params | {"remote_request_id": "unknown"}}
    async with SimulatedEngine(role="decode", profile_name="v0.30") as old:
        role, done = await client.stream(old, CHAT, body)
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert done == "[DONE]"
        assert await client.stream(old, TEXT, ONCE | {"kv_transfer_params": body["kv_transfer_params"]}) == ["[DONE]"]
    async with SimulatedEngine(role="decode", profile_name="v0.33") as new:
        _, error, _ = await client.stream(new, CHAT, body)
        assert error["error"]["code"] == 500


async def test_decoder_told_to_recompute_computes_what_it_cannot_load(
    client: Client, prefiller: SimulatedEngine, engine: SimulatedEngine
) -> None:
    params = await client.prefill(prefiller, CHAT, HELLO)
    async with SimulatedEngine(role="decode", kv_load_failure_policy="recompute") as decoder:
        lost = HELLO | {"kv_transfer_params": params | {"remote_engine_id": "another"}}
        _, answer = await client.post(decoder, CHAT, lost)
        assert decoder.state.local_prefills == 1
    _, alone = await client.post(engine, CHAT, HELLO)
    assert text_of(answer["choices"][0]) == text_of(alone["choices"][0])


async def test_unpulled_kv_expires(client: Client) -> None:
    async with SimulatedEngine(role="prefill", pin_seconds=0.05) as prefiller:
        await client.prefill(prefiller, CHAT, HELLO)
        assert prefiller.pins
        await prefiller.wait_until(lambda state: state.pinned == 0)
        pins = await client.get(prefiller, "/_mock/pins")
        assert (pins["expired"], pins["pulled"]) == (1, 0)


async def test_without_a_length_finish_there_are_no_params(client: Client) -> None:
    leg = HELLO | PREFILL | {"min_tokens": 0}
    async with SimulatedEngine(role="prefill", first_token_eos=True) as ascend:
        _, answer = await client.post(ascend, CHAT, leg)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"] is None
        assert not ascend.pins
        assert await client.prefill(ascend, CHAT, HELLO), "min_tokens masks the end of text"
    async with SimulatedEngine(role="prefill", first_token_eos=True, connector_name="nixl") as nixl:
        _, answer = await client.post(nixl, CHAT, leg)
        assert answer["kv_transfer_params"]


async def test_several_prompts_pin_what_they_never_report(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    body = {"prompt": ["one ", "two "], "max_tokens": 30}
    params = await client.prefill(prefiller, TEXT, body)
    assert len(prefiller.pins) == 2
    assert (await client.get(prefiller, "/_mock/pins"))["leaked"] == 1
    _, answer = await client.post(decoder, TEXT, body | {"kv_transfer_params": params})
    assert "another prompt" not in answer["choices"][0]["text"]
    assert "another prompt" in answer["choices"][1]["text"]


async def test_kv_of_another_prompt_gives_garbage(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    params = await client.prefill(prefiller, TEXT, ONCE)
    other = {"prompt": "twice upon ", "max_tokens": 30, "kv_transfer_params": params}
    _, answer = await client.post(decoder, TEXT, other)
    assert "another prompt" in answer["choices"][0]["text"]


async def test_incomplete_params_mean_a_local_prefill(client: Client, decoder: SimulatedEngine) -> None:
    for params in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": [[]]}, None):
        status, _ = await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
        assert status == 200
    assert decoder.state.local_prefills == 3
    assert decoder.state.pulls == 0


async def test_late_rejections_release_the_kv_and_early_ones_do_not(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    params = {"kv_transfer_params": await client.prefill(prefiller, CHAT, HELLO)}
    status, _ = await client.post(decoder, CHAT, HELLO | params | {"stream_options": {"include_usage": True}})
    assert status == 400
    assert prefiller.pins
    async with SimulatedEngine(role="decode", profile_name="v0.23") as old:
        status, _ = await client.post(old, CHAT, HELLO | params | {"model": "nope"})
        assert status == 404
        assert prefiller.pins
    status, _ = await client.post(decoder, CHAT, HELLO | params | {"model": "nope"})
    assert status == 404
    assert not prefiller.pins
    assert decoder.state.releases == 1


@pytest.mark.parametrize(
    ("profile_name", "connector_name", "is_released"),
    [
        ("v0.18", "mooncake", False),
        ("v0.18", "nixl", False),
        ("v0.23", "mooncake", False),
        ("v0.23", "nixl", True),
        ("v0.27", "mooncake", False),
        ("v0.27", "nixl", True),
        ("v0.30", "mooncake", True),
        ("v0.30", "mooncake-pull", False),
        ("v0.30", "mooncake-hybrid", False),
        ("v0.33", "nixl", True),
        ("v0.33", "mooncake", True),
        ("v0.33", "mooncake-pull", False),
    ],
)
async def test_rejected_completion_releases_kv_where_the_connector_can(
    client: Client, profile_name: str, connector_name: ConnectorName, is_released: bool
) -> None:
    options: dict[str, Any] = {"profile_name": profile_name, "connector_name": connector_name}
    async with simulated_pair(**options) as (prefiller, decoder):
        params = await client.prefill(prefiller, CHAT, HELLO)
        reject = {"model": "no such model", "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        status, _ = await client.post(decoder, TEXT, reject)
        assert status == 404
        assert (not prefiller.pins) == is_released
        assert decoder.state.releases == is_released


@pytest.mark.parametrize("profile_name", ["v0.23", "v0.30"])
async def test_kv_belongs_to_the_ids_a_chat_was_given(client: Client, profile_name: str) -> None:
    key = "prompt_token_ids" if profile_name == "v0.30" else "_vllm_ascend_recompute_token_ids"
    is_private = profile_name == "v0.23"
    async with simulated_pair(profile_name=profile_name, private_prompt_ids=is_private) as (prefiller, decoder):
        ids = encode_text("once upon ")

        async def decode(params: dict[str, Any]) -> str:
            _, answer = await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
            return text_of(answer["choices"][0])

        async def prefill() -> Any:
            params = PREFILL["kv_transfer_params"] | {key: ids}
            _, answer = await client.post(prefiller, CHAT, HELLO | PREFILL | {"kv_transfer_params": params})
            return answer["kv_transfer_params"]

        _, alone = await client.post(decoder, TEXT, ONCE)
        assert await decode(await prefill() | {key: ids}) == text_of(alone["choices"][0])
        assert "another prompt" in await decode(await prefill())
        params = {"kv_transfer_params": await prefill()}
        _, raw = await client.post(decoder, TEXT, {"prompt": ids, "max_tokens": 30} | params)
        assert raw["choices"][0]["text"] == text_of(alone["choices"][0])


@pytest.mark.parametrize(("profile_name", "is_released"), [("v0.23", False), ("v0.30", True)])
async def test_client_leaving_before_the_transfer_leaks_with_old_versions(
    client: Client, prefiller: SimulatedEngine, profile_name: str, is_released: bool
) -> None:
    async with SimulatedEngine(role="decode", profile_name=profile_name, max_num_seqs=1) as decoder:
        decoder.faults.add("stall_after_tokens", tokens=1, request_id="blocker")
        params = await client.prefill(prefiller, CHAT, HELLO)
        body = HELLO | {"stream": True}
        async with client.session.post(decoder.url + CHAT, json=body, headers={"X-Request-Id": "blocker"}):
            await decoder.wait_until(lambda state: state.tokens_sent == 1)
            async with client.session.post(decoder.url + CHAT, json=body | {"kv_transfer_params": params}):
                assert decoder.core.scheduler.waiting == 1
        await decoder.wait_until(lambda state: state.disconnects == 2 and state.live == 0)
        assert decoder.state.aborted == 2
        assert (not prefiller.pins) == is_released


async def test_client_leaving_during_the_prefill_pins_nothing(client: Client) -> None:
    async with SimulatedEngine(role="prefill", prefill_ms_per_1k_tokens=1e9) as prefiller:
        leg = asyncio.create_task(client.post(prefiller, CHAT, HELLO | PREFILL))
        await prefiller.wait_until(lambda state: state.live == 1)
        leg.cancel()
        await prefiller.wait_until(lambda state: state.aborted == 1 and state.live == 0)
        assert not prefiller.pins


async def test_cached_tokens_come_from_the_prefix_cache(client: Client) -> None:
    async with SimulatedEngine(role="prefill", block_size=4) as prefiller:
        _, first = await client.post(prefiller, TEXT, ONCE | PREFILL)
        _, second = await client.post(prefiller, TEXT, ONCE | PREFILL)
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        await client.post(prefiller, "/reset_prefix_cache", None)
        _, third = await client.post(prefiller, TEXT, ONCE | PREFILL)
        assert third["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_restarted_prefiller_knows_nothing_of_old_kv(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    params = await client.prefill(prefiller, CHAT, HELLO)
    await prefiller.restart()
    assert params["remote_port"] == prefiller.port
    status, _ = await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
    assert status == 500


async def test_nixl_takes_no_notice_of_roles(client: Client) -> None:
    """An engine with the role of a decoder prefills for others, too."""
    async with (
        SimulatedEngine(role="decode", connector_name="nixl") as prefiller,
        SimulatedEngine(role="prefill", connector_name="nixl") as decoder,
    ):
        params = await client.prefill(prefiller, TEXT, ONCE)
        _, alone = await client.post(prefiller, TEXT, ONCE)
        _, answer = await client.post(decoder, TEXT, ONCE | {"kv_transfer_params": params})
        assert text_of(answer["choices"][0]) == text_of(alone["choices"][0])
        assert (decoder.state.pulls, decoder.state.local_prefills, prefiller.pins) == (1, 0, {})


async def test_consumer_of_vllm_ascend_keeps_kv_that_cannot_be_fetched(
    client: Client, decoder: SimulatedEngine
) -> None:
    async with SimulatedEngine(role="decode") as consumer:
        params = await client.prefill(consumer, TEXT, ONCE)
        status, _ = await client.post(decoder, TEXT, ONCE | {"kv_transfer_params": params})
        assert (status, len(consumer.pins), decoder.state.pull_failures) == (500, 1, 1)


async def test_producer_of_vllm_ascend_does_not_survive_a_request_to_fetch_kv(
    client: Client, prefiller: SimulatedEngine
) -> None:
    params = await client.prefill(prefiller, TEXT, ONCE)
    async with SimulatedEngine(role="prefill") as producer:
        with pytest.raises(aiohttp.ClientError):
            await client.post(producer, TEXT, ONCE | {"kv_transfer_params": params})
        assert not producer.is_running
