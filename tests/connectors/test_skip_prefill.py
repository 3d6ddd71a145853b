"""Prompts that a decoder alone finishes sooner go to it without KV parameters, and the outcome is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.settings.model import Kv
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

LONG = "a sentence of nine words that is said again " * 90


def turn(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return request(Api.CHAT, **fields) | {"messages": messages}


async def wanting(deploy: Deploy, decoders: int, skip_prefill: object = True, **sections: Any) -> Deployment:
    """Deploy a gateway with a handoff so slow that a decoder always computes the prompt sooner."""
    gateway = await deploy(1, decoders, kv={"skip_prefill": skip_prefill, "local_max_tokens": 512}, **sections)
    gateway.worker.request_service.connector._local_prefill.handoff_seconds = 1000.0  # type: ignore[attr-defined]
    return gateway


def skipped(gateway: Deployment) -> float:
    return sum(gateway.metrics("pdproxy_prefills_skipped_total").values())


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store"])
@pytest.mark.parametrize("stream", [True, False])
async def test_next_turn_is_left_to_the_decoder_that_has_the_one_before(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, connector: str, stream: bool
) -> None:
    caplog.set_level("INFO")
    gateway = await wanting(deploy, 3, connector=connector)
    first = await gateway.ask(turn(LONG, stream=True))
    body = turn(LONG, first.text, "And then?", stream=stream)
    second = await gateway.ask(body)
    assert (first.is_done, second.is_done) == (True, True)
    assert second.text == await answer_alone(body)
    assert len(generations(*gateway.prefillers)) == 1
    assert skipped(gateway) == 1
    (decoder,) = [engine for engine in gateway.decoders if generations(engine)]
    _, alone = generations(decoder)
    assert "kv_transfer_params" not in alone.body
    lines = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert [(line["p"] == "-", line["kv"] == "local") for line in lines] == [(False, False), (True, True)]


def test_skip_prefill_is_auto_by_default() -> None:
    assert Kv().skip_prefill == "auto"


@pytest.mark.parametrize("skip_prefill", [False, "auto"])
async def test_free_prefiller_computes_prompts_when_the_option_is_off_or_auto(
    deploy: Deploy, skip_prefill: object
) -> None:
    gateway = await wanting(deploy, 3, skip_prefill)
    first = await gateway.ask(turn(LONG, stream=True))
    await gateway.ask(turn(LONG, first.text, "And then?"))
    assert len(generations(*gateway.prefillers)) == 2
    assert skipped(gateway) == 0


async def test_next_turn_does_not_wait_for_a_busy_prefiller(deploy: Deploy) -> None:
    gateway = await wanting(deploy, 1, "auto", admission={"max_running_prefill": 1})
    first = await gateway.ask(turn(LONG, stream=True))
    (prefiller,) = gateway.prefillers
    prefiller.faults.add("hang_before_headers")
    async with asyncio.TaskGroup() as group:
        busy = group.create_task(gateway.ask(turn(f"Other: {LONG}", stream=True)))
        await until(lambda: prefiller.state.live == 1, "the prefiller is busy")
        assert (await gateway.ask(turn(LONG, first.text, "And then?", stream=True))).is_done
        assert prefiller.state.live == 1
        busy.cancel()


async def test_long_prompt_that_no_decoder_has_goes_to_a_prefiller(deploy: Deploy) -> None:
    gateway = await wanting(deploy, 1)
    for start in ("First", "Second"):
        assert (await gateway.ask(turn(f"{start}: {LONG}", stream=True))).is_done
    assert len(generations(*gateway.prefillers)) == 2
    assert (await gateway.ask(turn("Something short", stream=True))).is_done
    assert (len(generations(*gateway.prefillers)), skipped(gateway)) == (2, 1)


async def test_answer_that_loses_the_decoder_goes_on_through_a_prefiller(deploy: Deploy) -> None:
    gateway = await wanting(deploy, 2)
    await gateway.ask(turn(LONG, stream=True))
    (lost,) = [engine for engine in gateway.decoders if generations(engine)]
    lost.faults.add("reset_after_tokens", tokens=20)
    body = turn(LONG, "Yes.", "And then?", stream=True, max_tokens=60)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert len(generations(*gateway.prefillers)) == 2
    assert skipped(gateway) == 1


async def test_request_that_failed_there_goes_the_usual_way(deploy: Deploy) -> None:
    gateway = await wanting(deploy, 2)
    await gateway.ask(turn(LONG, stream=True))
    (sick,) = [engine for engine in gateway.decoders if generations(engine)]
    sick.faults.add("refuse_status", path=Api.CHAT.path, status=500)
    assert (await gateway.ask(turn(LONG, "Yes.", "And then?", stream=True))).is_done
    assert len(generations(*gateway.prefillers)) == 2
    sick.faults.clear()
    assert (await gateway.ask(turn(LONG, "Yes.", "And then?", stream=True))).is_done
    assert len(generations(*gateway.prefillers)) == 3  # decoders compute no prompts for some time


@pytest.mark.parametrize("fast_path", [True, False])
async def test_prefill_times_of_both_roles_are_learned_from_answers(deploy: Deploy, fast_path: bool) -> None:
    gateway = await deploy(1, 1, kv={"skip_prefill": True}, listen={"fast_path": fast_path}, engine={"block_size": 16})
    local = gateway.worker.request_service.connector._local_prefill  # type: ignore[attr-defined]
    gateway.worker.pools.prefill.policy.context.loop_lag_within = lambda began, ended: 0.0
    await gateway.ask(turn(LONG, stream=True))
    assert 0 < local.handoff_seconds < 5
    local.handoff_seconds = 1000.0
    usage = {"stream_options": {"include_usage": True}}
    answer = await gateway.ask(turn(LONG, "Yes.", "And then?", stream=True, **usage))
    assert skipped(gateway) == 1
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] > 800
    (prefixes,) = local._prefixes_by_decoder.values()
    assert prefixes.hit_trust > 0.75  # the decoder's report confirms the expected prefix
    assert local.prefill_cost.sample_count == 1
    assert local.handoff_seconds == 1000.0
