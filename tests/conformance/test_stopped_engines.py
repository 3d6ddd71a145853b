"""Decoders that stop or hang in the middle of answers: clients get the same answers."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conformance.resuming import serving
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects import messages, responses

QUICK: dict[str, Any] = {"silence_seconds": 0.2}
"""Silences are checked soon: an engine that refuses connections after 50 ms."""
PACE: dict[str, Any] = {"decode_step_ms": 5.0}
HOW = ("silent", "abort", "core-dead")
APIS = ("chat", "completions", "messages", "responses")


async def answer_of(gateway: Deployment, api: str, *, stream: bool) -> Any:
    """Return an answer of some hundred tokens in a form that can be compared."""
    match api:
        case "messages":
            return messages.message(await messages.ask(gateway, messages.story(stream=stream)))
        case "responses":
            return responses.response(await responses.ask(gateway, responses.story(stream=stream)))
    answer = await gateway.ask(request(Api(api), "Go on", stream=stream, max_tokens=120))
    assert (answer.status, answer.is_done) == (200, True), answer.error
    return answer.text


async def serving_decoder(gateway: Deployment) -> SimulatedEngine:
    """Return the decoder that has begun to generate."""

    def busy() -> list[SimulatedEngine]:
        return [decoder for decoder in gateway.decoders if decoder.state.live and decoder.state.tokens_generated > 10]

    await until(busy, "tokens")
    return busy()[0]


@pytest.mark.fault(114)
@pytest.mark.covering("how api stream", product(HOW, APIS, (True, False)))
async def test_no_answer_is_lost_when_a_decoder_stops(how: Any, api: str, stream: bool) -> None:
    async with serving("v0.33", engine=PACE, decoders=1) as gateway:
        alone = await answer_of(gateway, api, stream=stream)
    async with serving("v0.33", engine=PACE, health=QUICK) as gateway:
        asking = asyncio.create_task(answer_of(gateway, api, stream=stream))
        await (await serving_decoder(gateway)).stop(how)
        assert await asking == alone


@pytest.mark.fault(114)
@pytest.mark.covering("connector how stream", product(CONNECTORS, HOW, (True, False)))
async def test_no_answer_is_lost_with_any_connector_when_a_decoder_stops(
    deploy: Deploy, connector: str, how: Any, stream: bool
) -> None:
    gateway = await deploy(
        2, 3, connector=connector, engine=PACE, health=QUICK, resume={"repeat_up_to_tokens": 0, "deadline_seconds": 5.0}
    )
    gateway.expects_inexact_pins = True
    gateway.may_stay_pinned = 4
    body = request(Api.COMPLETIONS, "Go on", stream=stream, max_tokens=120, temperature=0)
    alone = await answer_alone(body)
    asking = [asyncio.create_task(gateway.ask(body)) for _ in range(4)]
    await (await serving_decoder(gateway)).stop(how)
    for answer in await asyncio.gather(*asking):
        assert (answer.status, answer.is_done, answer.text) == (200, True, alone)


@pytest.mark.fault(114)
@pytest.mark.parametrize("stream", [True, False])
async def test_answer_without_a_token_is_repeated(stream: bool) -> None:
    """The decoder is stopped before its first token, while it sends nothing."""
    body = request(Api.CHAT, stream=stream)
    async with serving("v0.33", health=QUICK) as gateway:
        gateway.expects_inexact_pins = True
        for decoder in gateway.decoders:
            decoder.faults.add("hang_after_headers", times=1)
        asking = asyncio.create_task(gateway.ask(body))
        await until(lambda: any(decoder.state.live for decoder in gateway.decoders), "the decode leg")
        [decoder] = [decoder for decoder in gateway.decoders if decoder.state.live]
        for other in gateway.decoders:
            other.faults.clear()
        await decoder.stop("silent")
        answer = await asking
        assert (answer.status, answer.is_done) == (200, True)


@pytest.mark.fault(115)
@pytest.mark.covering("api stream", product(APIS, (True, False)))
async def test_no_answer_is_lost_when_the_only_busy_decoder_hangs(api: str, stream: bool) -> None:
    async with serving("v0.33", engine=PACE, decoders=1) as gateway:
        alone = await answer_of(gateway, api, stream=stream)
    async with serving("v0.33", engine=PACE, health=QUICK) as gateway:
        gateway.decoders[0].faults.add("stall_after_tokens", tokens=40)
        answers = await asyncio.gather(*(answer_of(gateway, api, stream=stream) for _ in range(2)))
        assert answers == [alone, alone]
        ((_, cause, role),) = gateway.metrics("pdproxy_instance_ejected_total")
        assert (cause, role) == ("stall", "decode")
