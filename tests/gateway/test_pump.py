"""Answers whose tokens are passed on in C are the same in a running gateway."""

from __future__ import annotations

import pytest

from proxy.upstream.connection import EngineConnection
from proxy.upstream.fast_forward import TokenFormat
from proxy.upstream.pump import NativePump
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy

BODY = request(Api.CHAT, "a question", stream=True, max_tokens=60)


@pytest.fixture
def numbers(pump_in_use: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of each stream that a pump has taken over."""
    found: list[int] = []
    add = NativePump.add_stream

    def noted(self: NativePump, connection: EngineConnection, tokens: TokenFormat) -> int:
        found.append(add(self, connection, tokens))
        return found[-1]

    monkeypatch.setattr(NativePump, "add_stream", noted)
    return found


async def test_pumped_answer_equals_that_of_a_single_engine(deploy: Deploy, numbers: list[int]) -> None:
    gateway = await deploy(1, 1)
    answers = [await gateway.ask(BODY | {"return_token_ids": shows_ids}) for shows_ids in (False, True)]
    assert [answer.text for answer in answers] == [await answer_alone(BODY)] * 2
    assert answers[1].body.count(b'"token_ids":[') >= 60
    assert numbers[0] >= 0


@pytest.mark.parametrize("fault", ["reset_after_tokens", "recompute", "abort"])
async def test_pumped_answer_is_resumed_after_each_token(deploy: Deploy, numbers: list[int], fault: str) -> None:
    gateway = await deploy(1, 2, resume={"pressure_seconds": 0.0})
    expected = await answer_alone(BODY)
    for tokens in range(1, 50, 7):
        for decoder in gateway.decoders:
            decoder.faults.clear()
            decoder.faults.add(fault, tokens=tokens, times=1)
        assert (await gateway.ask(BODY)).text == expected
    assert max(numbers) >= 0


async def test_client_of_a_pumped_answer_may_leave(deploy: Deploy, numbers: list[int]) -> None:
    gateway = await deploy(1, 1, engine={"decode_step_ms": 5})
    async with gateway.asking(BODY | {"max_tokens": 2000}) as client:
        await client.has_tokens(30)
        await client.leave()
    await until(lambda: not gateway.metrics("pdproxy_inflight_requests"), "the end of the request")
    assert set(numbers) == {0}


async def test_no_answer_is_pumped_if_the_option_is_off(deploy: Deploy, numbers: list[int]) -> None:
    gateway = await deploy(1, 1, stream={"native_pump": False})
    assert (await gateway.ask(BODY)).text == await answer_alone(BODY)
    assert numbers == []


async def test_answer_with_keep_alive_is_not_pumped(deploy: Deploy, numbers: list[int]) -> None:
    gateway = await deploy(1, 1, stream={"keep_alive_seconds": 30.0})
    assert (await gateway.ask(BODY)).text == await answer_alone(BODY)
    assert set(numbers) == {-1}
