"""vLLM's NixlPushConnector: both legs at once, as soon as the prefiller's engine is known."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.common.backend import Backend, Role
from proxy.connectors.nixl_push import EnginePlace, EnginePlaces
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.canned import json_answer
from tests.conftest import Deploy
from tests.connectors.meeting import ActingEngine, Exchange, answers, answers_when
from tests.deployment import Deployment, generations

PLACE = {
    "remote_engine_id": "engine-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
    "dcp_size": 1,
}
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "cmpl-x-0-01234567",
    "remote_num_tokens": 9,
    "transfer_mode": "push",
    **PLACE,
}


def prefilled(**changes: Any) -> bytes:
    params = None if changes.get("params", 1) is None else {**PARAMS, **changes}
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
    return json_answer({"choices": choices, "kv_transfer_params": params, "usage": usage})


async def prefills(exchange: Exchange) -> None:
    exchange.write(prefilled())


async def acting(deploy: Deploy, **sections: Any) -> tuple[Deployment, ActingEngine, ActingEngine]:
    prefiller, decoder = ActingEngine("prefill", act=prefills), ActingEngine("decode", act=answers)
    defaults = {"retry": {"max_attempts": 1}, "resume": {"mode": "off"}}
    gateway = await deploy(
        [prefiller], [decoder], connector="nixl_push", knows_push_engines=False, **{**defaults, **sections}
    )
    return gateway, prefiller, decoder


def backend(port: int = 7100) -> Backend:
    return Backend(Role.PREFILL, "10.0.0.1", port, slot=port)


def place(engine: str = "a") -> EnginePlace:
    return EnginePlace(engine, "10.0.0.1", 5600, 1, "cmpl-1")


# Bodies and their order


async def test_second_prompt_goes_to_both_engines_at_once(deploy: Deploy) -> None:
    """The first answer shows the prefiller's engine; afterwards the prefiller answers only if the decoder is there."""
    gateway, prefiller, decoder = await acting(deploy)
    assert (await gateway.ask(request(Api.CHAT))).is_done

    async def prefills_after_decode(exchange: Exchange) -> None:
        await decoder.works(2)
        exchange.write(prefilled())

    prefiller.act, decoder.act = prefills_after_decode, answers_when(lambda: prefiller, 2)
    assert (await gateway.ask(request(Api.CHAT))).is_done
    for prefill, decode in zip(prefiller.received, decoder.received, strict=True):
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
        assert prefill.path == decode.path == Api.CHAT.path
    ids = {decode.headers["x-request-id"] for decode in decoder.received}
    assert len(ids) == 2
    for body in prefiller.bodies:
        assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (1, 1, False)
    first, second = (body["kv_transfer_params"] for body in decoder.bodies)
    expected = {**PLACE, "do_remote_prefill": True, "do_remote_decode": False}
    assert first == {**expected, "remote_request_id": "cmpl-x-0-01234567"}
    # The prefiller's id of the second prompt is not known yet, and that of the first one must not be named again.
    assert second == {**expected, "remote_request_id": decoder.received[1].headers["x-request-id"]}


async def test_legs_name_the_same_data_parallel_rank(deploy: Deploy) -> None:
    gateway, prefiller, decoder = await acting(deploy, balance={"prefill_dp_ranks": 2, "decode_dp_ranks": 2})

    async def prefills_by_rank(exchange: Exchange) -> None:
        rank = exchange.received.headers["x-data-parallel-rank"]
        exchange.write(prefilled(remote_engine_id=f"engine_dp{rank}", remote_port=5600 + int(rank)))

    prefiller.act = prefills_by_rank
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert [seen.headers["x-data-parallel-rank"] for seen in prefiller.received] == ["0", "1", "0", "1"]
    places = [
        (body["kv_transfer_params"]["remote_engine_id"], body["kv_transfer_params"]["remote_port"])
        for body in decoder.bodies
    ]
    assert places == [("engine_dp0", 5600), ("engine_dp1", 5601)] * 2


async def test_prefiller_of_pull_engines_is_rejected_with_a_hint(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, prefiller, _ = await acting(deploy)

    async def prefills_for_pull(exchange: Exchange) -> None:
        exchange.write(prefilled(transfer_mode="pull"))

    prefiller.act = prefills_for_pull
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (502, "prefill_missing_kv")
    assert await gateway.ask(request(Api.CHAT))
    assert sum("set `connector: vllm_pull`" in line for line in caplog.messages) == 1
    assert [labels[1:] for labels in gateway.metrics("pdproxy_instance_misfit")] == [("connector", "prefill")]


# With simulated engines


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
async def test_decoder_gets_the_kv_of_the_prefiller(deploy: Deploy, api: Api, stream: bool, knows: bool) -> None:
    gateway = await deploy(connector="nixl_push", knows_push_engines=knows)
    for number in range(3):
        body = request(api, stream=stream, max_tokens=5 + number)
        answer = await gateway.ask(body)
        assert (answer.is_done, answer.text) == (True, await answer_alone(body))
    (prefiller,), (decoder,) = gateway.prefillers, gateway.decoders
    assert decoder.state.local_prefills == 0
    assert decoder.state.pulls == 3
    assert prefiller.core.protocol.describe()["pulled"] == 3


@pytest.mark.fault(170)
async def test_restarted_prefiller_costs_one_attempt(deploy: Deploy) -> None:
    """The decoder is sent to the engine that was there before the restart, so the attempt is repeated."""
    gateway = await deploy(1, 1, connector="nixl_push")
    body = request(Api.CHAT)
    await gateway.ask(body)
    await gateway.prefillers[0].restart()
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 1, True
    for _ in range(3):
        answer = await gateway.ask(body)
        assert (answer.status, answer.error, answer.text) == (200, None, await answer_alone(body))
    assert len(generations(*gateway.decoders)) <= 5
    assert gateway.decoders[0].state.pull_failures <= 1


async def test_prefiller_that_fails_after_the_transfer_does_not_end_the_answer(deploy: Deploy) -> None:
    gateway = await deploy(connector="nixl_push", engine={"decode_step_ms": 1.0})
    gateway.prefillers[0].faults.add("hang_after_headers")
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 1, True
    body = request(Api.CHAT, stream=True, max_tokens=20)
    answer = await gateway.ask(body)
    assert (answer.is_done, answer.text) == (True, await answer_alone(body))
    assert len(generations(*gateway.decoders)) == 1


async def test_client_that_leaves_frees_a_decoder_that_waits_for_a_prefiller(deploy: Deploy) -> None:
    gateway = await deploy(connector="nixl_push")
    gateway.prefillers[0].faults.add("hang_before_headers")
    decoder = gateway.decoders[0]
    async with gateway.asking(request(Api.CHAT, stream=True)) as client:
        await decoder.wait_until(lambda state: state.waiting_rooms == 1)
        await client.leave()
    await decoder.wait_until(lambda state: state.waiting_rooms == 0)
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")


@pytest.mark.parametrize("on_missing", ["retry_prefill", "error"])
async def test_answer_without_kv_parameters_is_not_waited_for(deploy: Deploy, on_missing: str) -> None:
    gateway = await deploy(connector="nixl_push", kv={"on_missing": on_missing})
    gateway.prefillers[0].faults.add("missing_kv_params")
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (502, "kv_handoff_failed")


# Places of engines


def test_place_is_known_after_the_first_answer() -> None:
    places = EnginePlaces()
    assert places.of(backend(), 0) is None
    places.learn(backend(), 0, place())
    assert places.of(backend(), 0) == place()
    assert places.of(backend(), 1) is None
    assert places.of(backend(7101), 0) is None


def test_place_of_a_restarted_engine_is_known_after_several_equal_answers() -> None:
    places = EnginePlaces()
    places.learn(backend(), 0, place("a"))
    places.learn(backend(), 0, place("b"))
    for _ in range(8):
        assert places.of(backend(), 0) is None
        places.learn(backend(), 0, place("b"))
    assert places.of(backend(), 0) == place("b")


def test_engines_that_take_turns_behind_one_address_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    places = EnginePlaces()
    for _ in range(20):
        places.learn(backend(), 0, place("a"))
        places.learn(backend(), 0, place("b"))
        assert places.of(backend(), 0) is None
    (line,) = caplog.messages
    assert line.startswith("nixl push: legs are sent one after the other: several engines answer behind one address")
    assert "balance.prefill_dp_ranks" in line


def test_distrusted_place_is_known_again_after_one_answer() -> None:
    places = EnginePlaces()
    places.distrust(backend(), 0)
    places.learn(backend(), 0, place())
    places.distrust(backend(), 0)
    assert places.of(backend(), 0) is None
    places.learn(backend(), 0, place())
    assert places.of(backend(), 0) == place()


async def test_push_engines_behind_vllm_pull_are_served_with_a_warning(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(connector="vllm_pull", engine={"protocol": "push"})
    for _ in range(2):
        body = request(Api.CHAT)
        assert (await gateway.ask(body)).text == await answer_alone(body)
    assert sum("set `connector: nixl_push`" in line for line in caplog.messages) == 1
    assert gateway.decoders[0].state.pulls == 2
