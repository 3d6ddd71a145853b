"""A store that all engines share: two legs in turn, between which nothing need be said."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import answer_alone, request
from tests.canned import CannedEngine, http, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

BODY = b'{"prompt":\t"Hi \\ud83d\\ude42","max_tokens":5,"min_tokens": 2,"seed":18446744073709551616,"x":"\\/"}'
DECODED = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "y", "finish_reason": "stop"}],
    "kv_transfer_params": {"remote_host": "10.0.0.9"},
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}},
}
STORED = b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":null,"usage":{%b}}'
USAGE = b'"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}'


def canned_pair(prefilled: bytes = STORED % USAGE) -> tuple[CannedEngine, CannedEngine]:
    return CannedEngine("prefill", [http(prefilled)]), CannedEngine("decode", [json_answer(DECODED)])


async def store(deploy: Deploy, prefillers: Any = 1, decoders: Any = 1, **sections: Any) -> Deployment:
    """Deploy with `kv.on_missing: error`, so that a prefill answer without KV parameters is an error."""
    kv = {"on_missing": "error", **sections.pop("kv", {})}
    return await deploy(prefillers, decoders, connector="vllm_store", kv=kv, **sections)


async def post(gateway: Deployment, body: bytes) -> Any:
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=body) as response:
        assert response.status == 200
        return orjson.loads(await response.read())


async def test_prefiller_gets_one_token_and_the_decoder_the_clients_bytes(deploy: Deploy) -> None:
    prefiller, decoder = canned_pair()
    gateway = await store(deploy, [prefiller], [decoder], resume={"mode": "off"})
    answer = await post(gateway, BODY)

    (prefill,), (decode,) = prefiller.received, decoder.received
    asked = orjson.loads(prefill.body)
    assert (asked["max_tokens"], asked["min_tokens"], asked["stream"]) == (1, 1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True  # of another connector beside the store's
    assert decode.body == BODY
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert "kv_transfer_params" not in answer
    assert gateway.metrics("pdproxy_missing_kv_total") == {}


@pytest.mark.parametrize(
    "params",
    [
        b'{"do_remote_prefill":true, "remote_block_ids":[[1,2, 3]],"remote_port":1e3,"x":"\\u00fc"}',
        b'{"ucm.key":[1, 2]}',
    ],
)
async def test_parameters_of_another_connector_reach_the_decoder_and_not_the_client(
    deploy: Deploy, params: bytes
) -> None:
    prefiller, decoder = canned_pair(
        (STORED % USAGE).replace(b'"kv_transfer_params":null', b'"kv_transfer_params":' + params)
    )
    gateway = await store(deploy, [prefiller], [decoder], resume={"mode": "off"})
    assert "kv_transfer_params" not in await post(gateway, BODY)
    assert decoder.received[0].body == BODY[:-1] + b',"kv_transfer_params":' + params + b"}"


@pytest.mark.parametrize("params", [b"{}", b"[]", b"7", b'""'])
async def test_malformed_kv_parameters_count_as_missing(deploy: Deploy, params: bytes) -> None:
    prefiller, decoder = canned_pair((STORED % USAGE).replace(b"null", params))
    gateway = await store(deploy, [prefiller], [decoder], resume={"mode": "off"})
    await post(gateway, BODY)
    assert decoder.received[0].body == BODY


@pytest.mark.parametrize(("told", "seen"), [(USAGE, {"cached_tokens": 4}), (b'"prompt_tokens":9', None)])
async def test_cached_tokens_are_the_prefillers(deploy: Deploy, told: bytes, seen: Any) -> None:
    """The decoder counts what it finds in the store."""
    prefiller, decoder = canned_pair(STORED % told)
    gateway = await store(deploy, [prefiller], [decoder], resume={"mode": "off"})
    assert (await post(gateway, BODY))["usage"]["prompt_tokens_details"] == seen


async def test_parameters_of_a_pull_connector_beside_the_store_are_used(deploy: Deploy) -> None:
    gateway = await store(deploy, engine={"protocol": "pull"})
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.decoders[0].state.pulls == 1


async def test_decoder_computes_blocks_evicted_from_the_store(deploy: Deploy) -> None:
    gateway = await store(deploy, prefiller={"store": None})
    body = request(Api.CHAT)
    assert (await gateway.ask(body)).text == await answer_alone(body)
    assert gateway.decoders[0].state.local_prefills == 1


async def test_prefill_whose_answer_is_lost_keeps_nothing(deploy: Deploy) -> None:
    gateway = await store(deploy, 2, 1)
    gateway.prefillers[0].faults.add("reset_before_headers", times=1)
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.worker.pinned_kv.current_pins() == []
    assert gateway.metrics("pdproxy_instance_pinned_kv") == {}


async def test_decoder_that_refuses_the_connection_costs_no_second_prefill(deploy: Deploy) -> None:
    gateway = await store(deploy, 1, 2)
    await gateway.decoders[0].kill()
    assert (await gateway.ask(request(Api.CHAT, stream=True))).is_done
    assert len(generations(*gateway.prefillers)) == 1


async def test_short_prompts_go_to_a_decoder_alone(deploy: Deploy) -> None:
    gateway = await store(deploy, kv={"prefill_min_tokens": 100})
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert generations(*gateway.prefillers) == []


async def test_requests_for_several_caches_are_refused(deploy: Deploy) -> None:
    gateway = await store(deploy)
    answer = await gateway.ask(request(Api.CHAT, prompt_logprobs=1))
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
    assert generations(*gateway.engines) == []
