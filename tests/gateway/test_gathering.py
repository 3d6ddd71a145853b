"""Tokens that wait for further ones: when they wait, and that answers stay the same."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any, Literal

import pytest

from proxy.settings import ClientKey, Streaming
from proxy.upstream.connection import EngineConnection
from proxy.upstream.gathering import FIRST_TOKENS, TokenGathering, next_round_seconds
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy

BODY = request(Api.CHAT, "a question", stream=True, max_tokens=60)
SECONDS = 0.005


def after(shares: list[float], wanted: float | Literal["auto"] = "auto", above: float = 0.8) -> list[float]:
    """Return the time between two reads after each of these shares."""
    times = Streaming(gather_seconds=wanted, gather_above_cpu_share=above)
    seconds, found = 0.0, []
    for share in shares:
        seconds = next_round_seconds(seconds, share, times)
        found.append(seconds)
    return found


def test_tokens_wait_longer_the_longer_the_load_lasts() -> None:
    assert after([0.5, 0.8, 0.81, 0.9, 1.0, 0.9]) == [0.0, 0.0, 0.0125, 0.025, 0.05, 0.05]


def test_waiting_continues_while_it_may_be_the_reason_for_the_lower_load() -> None:
    assert after([1.0, 1.0, 0.7, 0.61, 0.59, 0.59, 0.0]) == [0.0125, 0.025, 0.025, 0.025, 0.0125, 0.0, 0.0]


def test_number_of_seconds_holds_at_any_load() -> None:
    assert after([0.0, 1.0], 0.03) == [0.03, 0.03]
    assert after([0.0, 1.0], 0) == [0.0, 0.0]


def test_option_sets_the_share() -> None:
    assert after([0.5, 0.3, 0.1], above=0.4) == [0.0125, 0.0125, 0.0]


class Watched:
    """The connections that waited, and the index of the token after which they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indices: list[int] = []
        add = TokenGathering.add_stream

        def noted(gathering: TokenGathering, stream: EngineConnection) -> None:
            assert stream._passed_tokens is not None
            self.indices.append(stream._passed_tokens.index)
            add(gathering, stream)

        monkeypatch.setattr(TokenGathering, "add_stream", noted)


@pytest.mark.usefixtures("tokens_passed_on_by")
@pytest.mark.parametrize("stream", [True, False])
async def test_answer_is_that_of_a_single_engine(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(
        1, 1, stream={"gather_seconds": SECONDS}, resume={"repeat_up_to_tokens": 0}, engine={"decode_step_ms": 1}
    )
    body = BODY | {"stream": stream}
    for _ in range(3):  # on the same connections
        assert (await gateway.ask(body)).text == await answer_alone(body)


@pytest.mark.usefixtures("tokens_passed_on_by")
@pytest.mark.parametrize("fault", ["reset_after_tokens", "recompute", "abort"])
async def test_answer_is_resumed_after_each_token(deploy: Deploy, fault: str) -> None:
    gateway = await deploy(
        1, 2, stream={"gather_seconds": SECONDS}, resume={"pressure_seconds": 0.0}, engine={"decode_step_ms": 1}
    )
    expected = await answer_alone(BODY)
    for tokens in range(1, 50, 9):
        for decoder in gateway.decoders:
            decoder.faults.clear()
            decoder.faults.add(fault, tokens=tokens, times=1)
        assert (await gateway.ask(BODY)).text == expected


@pytest.mark.interpreted
@pytest.mark.parametrize("listen", [{}, {"fast_path": False}])
@pytest.mark.parametrize("keep_alive", [None, 30.0])
async def test_first_tokens_never_wait(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, listen: dict[str, Any], keep_alive: float | None
) -> None:
    watched = Watched(monkeypatch)
    stream = {"gather_seconds": SECONDS, "keep_alive_seconds": keep_alive}
    gateway = await deploy(1, 1, listen=listen, stream=stream, engine={"decode_step_ms": 1})
    assert (await gateway.ask(BODY)).text == await answer_alone(BODY)
    assert watched.indices
    assert min(watched.indices) >= FIRST_TOKENS


@pytest.mark.interpreted
@pytest.mark.usefixtures("tokens_passed_on_by")
async def test_tokens_for_a_key_that_declines_never_wait(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    pumped: list[EngineConnection] = []
    monkeypatch.setattr(EngineConnection, "_begin_pumping", lambda connection, tokens: pumped.append(connection))
    gateway = await deploy(1, 1, stream={"gather_seconds": SECONDS}, engine={"decode_step_ms": 1})
    key = ClientKey(name="me", key_sha256=hashlib.sha256(b"mine").hexdigest(), gather_tokens=False)
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"me": 0}))
    answer = await gateway.ask(BODY, Authorization="Bearer mine")
    assert answer.text == await answer_alone(BODY)
    assert (watched.indices, pumped) == ([], [])


@pytest.mark.interpreted
@pytest.mark.usefixtures("pump_in_use")
async def test_first_tokens_leave_the_pump_when_waiting_begins(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await deploy(1, 1, stream={"gather_seconds": 0, "keep_alive_seconds": None})
    decoder = gateway.decoders[0]
    decoder.faults.add("stall_after_tokens", times=2, tokens=4)
    decoder.faults.add("stall_after_tokens", times=1, skip=2, tokens=20)
    upstream = gateway.worker.upstream

    def pumped() -> int:
        return sum(connection._pumped >= 0 for connection in upstream._busy)

    async with gateway.asking(BODY) as first, gateway.asking(BODY) as second:
        await first.has_tokens(4)
        await second.has_tokens(4)
        async with gateway.asking(BODY) as third:
            await third.has_tokens(20)
            await until(lambda: pumped() == 3, "three streams in the pump")
            upstream.set_gathering(1.0, Streaming(gather_seconds=SECONDS))
            assert pumped() == 1
            upstream.set_gathering(0.0, Streaming(gather_seconds=0))


@pytest.mark.usefixtures("tokens_passed_on_by")
async def test_client_may_leave_while_tokens_wait(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, stream={"gather_seconds": 0.05}, engine={"decode_step_ms": 1})
    async with gateway.asking(BODY | {"max_tokens": 2000}) as client:
        await client.has_tokens(30)
        await client.leave()
    await until(lambda: not gateway.metrics("pdproxy_inflight_requests"), "the end of the request")


class Stream:
    """A stream that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def stop_waiting(self) -> None:
        self.reads += 1


async def test_many_streams_are_read_once_in_a_round() -> None:
    gathering = TokenGathering(asyncio.get_running_loop(), None)
    streams = [Stream() for _ in range(200)]
    gathering.set_round_seconds(SECONDS)
    for stream in streams:
        gathering.add_stream(stream)
    await until(lambda: all(stream.reads for stream in streams), "a round")
    assert {stream.reads for stream in streams} == {1}
    gathering.add_stream(streams[0])
    gathering.set_round_seconds(0.0)
    assert streams[0].reads == 2
