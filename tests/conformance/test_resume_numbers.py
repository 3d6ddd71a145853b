"""Numbers in requests whose answers break off: the next engine gets the rest of each, in any spelling."""

from __future__ import annotations

from itertools import product

import pytest

from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request
from tests.conformance.resuming import WITH_USAGE, thoughts
from tests.conftest import Deploy
from tests.deployment import generations

SPELLED = (10, 10.0, "10", " 10 ", "10.0", "1_0")
LIMITS = [
    (name, api, spelled, shape)
    for name, api in [*product(["max_tokens"], OPENAI_APIS), ("max_completion_tokens", Api.CHAT)]
    for spelled, shape in product(SPELLED, ("stream", "whole"))
]


@pytest.mark.covering("name api spelled shape", LIMITS)
async def test_resumed_answer_has_the_requested_length_in_any_spelling(
    deploy: Deploy, name: str, api: Api, spelled: object, shape: str
) -> None:
    """Engines accept these spellings, so the gateway must subtract from them."""
    stream = shape == "stream"
    gateway = await deploy(1, 2, resume={"repeat_up_to_tokens": 0})
    for decoder in gateway.decoders:
        decoder.faults.add("reset_after_tokens", tokens=3, times=1)
    body = request(api, min_tokens="8", seed=7.0, stream=stream)
    del body["max_tokens"]
    answer = await gateway.ask({**body, name: spelled} | (WITH_USAGE if stream else {}))
    assert answer.is_done
    assert answer.text == await answer_alone({**body, "min_tokens": 8, "seed": 7, name: 10})
    assert answer.usage["completion_tokens"] == 10
    first, *others = generations(*gateway.decoders)
    assert {seen.body[name] for seen in (first, *others)} <= {10, 7, 4}
    assert all(type(seen.body["min_tokens"]) is type(seen.body["seed"]) is int for seen in (first, *others))


async def test_unlimited_thinking_budget_stays_unlimited(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3, times=1)
    gateway.decoders[1].faults.add("reset_after_tokens", tokens=3, times=1)
    await gateway.ask(thoughts(stream=True, thinking_token_budget=-1))
    assert {seen.body["thinking_token_budget"] for seen in generations(*gateway.decoders)} == {-1}
