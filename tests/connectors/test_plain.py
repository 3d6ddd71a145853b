"""Without disaggregation: one leg, in which the engine gets what the client sent."""

from __future__ import annotations

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.canned import CannedEngine, http, json_answer
from tests.conftest import Deploy
from tests.deployment import generations

BODY = b'{"prompt": ["a", "b"],"n": 2,"model" : "sim","seed":18446744073709551616,"echo":true,"logprobs":1,"x":"\\/"}'
ANSWER = {
    "choices": [{"index": 0, "text": "y", "finish_reason": "stop"}],
    "usage": {"prompt_tokens_details": {"cached_tokens": 9}},
}


async def test_engine_gets_the_clients_bytes_and_the_client_the_engines(deploy: Deploy) -> None:
    """Several prompts and samples, too, and what disaggregation cannot do."""
    answer = json_answer(ANSWER)
    engine = CannedEngine("both", [answer])
    gateway = await deploy(decoders=[engine], connector="plain")
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=BODY) as response:
        assert answer.endswith(b"\r\n\r\n" + await response.read())
    assert engine.received[0].body == BODY
    assert len(engine.received[0].headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_cached_tokens_are_the_truth(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(connector="plain", engine={"block_size": 4})
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = request(Api.CHAT, "The same prompt twice", **options)
    await gateway.ask(body)
    assert (await gateway.ask(body)).usage["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_several_samples_are_one_request(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(connector="plain")
    answer = await gateway.ask(request(Api.CHAT, n=3, stream=stream))
    assert answer.is_done
    assert set(answer.texts) == {0, 1, 2}
    assert len(generations(*gateway.decoders)) == 1


async def test_connection_the_engine_closed_while_idle_costs_nothing(deploy: Deploy) -> None:
    """Engines close idle connections after some seconds, and a request may cross that on the wire."""
    engine = CannedEngine("both", [json_answer(ANSWER)], closes=True)
    gateway = await deploy(decoders=[engine], connector="plain", retry={"max_attempts": 1})
    for _ in range(3):
        async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=BODY) as response:
            assert response.status == 200


async def test_data_parallel_ranks_are_taken_in_turn_and_clients_have_no_say(deploy: Deploy) -> None:
    engine = CannedEngine("both", [json_answer(ANSWER)])
    gateway = await deploy(decoders=[engine], connector="plain", balance={"decode_dp_ranks": 3})
    for _ in range(4):
        headers = {"X-data-parallel-rank": "7"}
        async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=BODY, headers=headers) as response:
            await response.read()
    assert [received.headers["x-data-parallel-rank"] for received in engine.received] == ["0", "1", "2", "0"]


async def test_engines_refusal_reaches_the_client_in_its_own_words(deploy: Deploy) -> None:
    refusal = b'{"error":{"message":"no","code":404}}'
    engine = CannedEngine("both", [http(refusal, "404 Not Found")])
    gateway = await deploy(decoders=[engine], connector="plain")
    async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=BODY) as response:
        assert (response.status, await response.read()) == (404, refusal)
