"""Decoders whose KV transfer is slow are shown, and get fewer requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

PROMPT = "a sentence of nine words that is said again " * 90


async def slow_pairs(gateway: Deployment, decoder: SimulatedEngine) -> dict[str, Any]:
    """Return the slow pairs of a decoder as GET /instances shows them."""
    async with gateway.session.get(gateway.url + "/instances") as answer:
        shown = (await answer.json())["instances"]
    (pairs,) = (one["slow_from"] for one in shown if one["address"] == f"127.0.0.1:{decoder.port}")
    assert isinstance(pairs, dict)
    return pairs


async def slow_pairs_with_a_slow_link(gateway: Deployment, decoder: SimulatedEngine) -> dict[str, Any]:
    """Slow the KV transfer to a decoder down, and return its slow pairs."""
    decoder.faults.add("slow_load", seconds=0.5)
    for number in range(250):  # the busier the machine, the more samples are dropped
        assert (await gateway.ask(request(Api.CHAT, f"{number} {PROMPT}", stream=True))).is_done
        if pairs := await slow_pairs(gateway, decoder):
            return pairs
    raise AssertionError("the slow pair is not shown")


@pytest.mark.fault(152)
@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap", "mooncake_bootstrap"])
async def test_decoder_with_a_slow_link_is_shown_and_avoided(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(1, 2, connector=connector)
    slow, fast = gateway.decoders
    pairs = await slow_pairs_with_a_slow_link(gateway, slow)
    (prefiller,) = gateway.prefillers
    (details,) = pairs.values()
    assert list(pairs) == [f"127.0.0.1:{prefiller.port}"]
    assert details["seconds"] > 2 * details["ordinary_seconds"]
    assert await slow_pairs(gateway, fast) == {}
    before = len(generations(slow)), len(generations(fast))
    for number in range(6):
        assert (await gateway.ask(request(Api.CHAT, f"later {number} {PROMPT}", stream=True))).is_done
    assert (len(generations(slow)), len(generations(fast))) == (before[0], before[1] + 6)


async def test_slow_pair_is_forgotten_when_its_decoder_goes_down(deploy: Deploy) -> None:
    """Its next process may have another link."""
    gateway = await deploy(1, 2, connector="vllm_pull", health={"interval_seconds": 0.1, "fall": 1})
    slow, _ = gateway.decoders
    await slow_pairs_with_a_slow_link(gateway, slow)
    await slow.kill()
    for _ in range(600):
        if not await slow_pairs(gateway, slow):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the slow pair is still shown")
