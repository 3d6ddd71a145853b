"""Answers without faults: every connector, both endpoints, streamed and not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.wire.openai import Api
from tests.asking import answer_alone, request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

BODIES: dict[str, dict[str, Any]] = {
    "chat": request(Api.CHAT),
    "completion": request(Api.COMPLETIONS),
    "samples": request(Api.CHAT, n=3),
    "prompts": request(Api.COMPLETIONS, prompt=["one", "two", "three"]),
    "ids": request(Api.COMPLETIONS, prompt=[*b"Hello there"]),
    "one-token": request(Api.CHAT, max_tokens=1),
}
UNITS = {"samples": 3, "prompts": 3}


@pytest.mark.covering("connector kind shape", product(CONNECTORS, BODIES, ("stream", "whole")))
async def test_answer_is_complete_and_its_kv_cache_is_transferred(
    deploy: Deploy, connector: str, kind: str, shape: str
) -> None:
    stream = shape == "stream"
    gateway = await deploy(2, 2, connector=connector)
    body = BODIES[kind] | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})

    answer = await gateway.ask(body)

    assert answer.status == 200
    assert answer.is_done
    assert answer.texts == dict(enumerate(await texts_of(BODIES[kind])))
    assert answer.usage["completion_tokens"] == body["max_tokens"] * UNITS.get(kind, 1)
    check_kv_transfers(gateway, connector, 1 if connector == "plain" else UNITS.get(kind, 1))


async def texts_of(body: dict[str, Any]) -> list[str]:
    """Return the texts that a single engine generates for each prompt and sample."""
    single = {name: value for name, value in body.items() if name != "n"}
    if body is BODIES["prompts"]:
        return [await answer_alone(single | {"prompt": prompt}) for prompt in body["prompt"]]
    return [await answer_alone(single)] * body.get("n", 1)


def check_kv_transfers(gateway: Deployment, connector: str, units: int) -> None:
    """Check that each unit was prefilled once, and that no decoder computed a prompt."""
    assert len(generations(*gateway.decoders)) == units
    if connector == "plain":
        return
    assert len(generations(*gateway.prefillers)) == units
    assert sum(decoder.state.pulls for decoder in gateway.decoders) == units
    assert not any(engine.state.local_prefills for engine in gateway.decoders)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_restarted_engine_serves_again(deploy: Deploy, connector: str, role: str) -> None:
    """A restarted engine has a new identity for its partners. Earlier facts about it must not be used."""
    gateway = await deploy(2, 2, connector=connector)
    body = request(Api.CHAT)
    assert (await gateway.ask(body)).status == 200
    for engine in gateway.prefillers if role == "prefill" else gateway.decoders:
        if engine.state.finished:
            await engine.restart()
    # A decoder that was sent to the previous engine does not fetch the KV cache of the new one.
    gateway.may_stay_pinned = 1 if connector == "mooncake_bootstrap" else 0
    answer = await gateway.ask(body)
    assert (answer.status, answer.text) == (200, await answer_alone(body))


async def test_decoder_that_never_calls_back_times_out(deploy: Deploy) -> None:
    """The decoder does not call back, so the prefiller gets no request."""
    gateway = await deploy(
        connector="ascend_layerwise",
        decoder={"metaserver_delay_seconds": 3600.0},
        layerwise={"callback_seconds": 0.05},
    )
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (504, "decode_timeout")
    assert not generations(*gateway.prefillers)
