"""The policy `least_load` with real sockets: conversations stay with the prefiller that has their prefix cached."""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from typing import Any

import pytest

from proxy.balancer.pick import GapCounter, LeaseTracker, PickRequest
from proxy.balancer.policies.least_decode_seconds import LeastDecodeSeconds
from proxy.balancer.policies.prefiller import Prefiller
from proxy.common.backend import Backend
from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

BY_SECONDS = {"prefill_policy": "least_load"}
WITH_PREFILLERS = [name for name in CONNECTORS if CONNECTOR_TRAITS[name].needs_prefillers]


def turn(conversation: int, turns: int, stream: bool = False) -> dict[str, Any]:
    """Return the request of a turn: all earlier turns, some thousand tokens each, and a question."""
    messages = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": f"{conversation}.{number} " * 300}
        for number in range(2 * turns + 1)
    ]
    return {"model": "sim", "messages": messages, "max_tokens": 4, "stream": stream}


@pytest.mark.parametrize("connector", WITH_PREFILLERS)
async def test_turns_of_a_conversation_use_the_same_prefiller(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(3, 2, connector=connector, balance=BY_SECONDS)
    for turns in range(3):
        for conversation in range(3):
            assert (await gateway.ask(turn(conversation, turns))).is_done
    by_engine = [
        {seen.body["messages"][0]["content"][:1] for seen in generations(engine)} for engine in gateway.prefillers
    ]
    assert sum(map(len, by_engine)) == 3, "no conversation was on two engines"


def prefiller_records(gateway: Deployment) -> list[Prefiller]:
    """Return the policy's record of each prefiller."""
    pool = gateway.worker.pools.prefill
    policy: Any = pool.policy
    return [policy._prefillers.prefiller_of(backend) for backend in pool.all_backends()]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_decode_policy_receives_start_and_length_of_answers(
    deploy: Deploy, connector: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    def track(policy: LeastDecodeSeconds, backend: Backend, request: PickRequest) -> LeaseTracker:
        return RecordingTracker(policy.load_of_request(backend, request))

    class RecordingTracker(LeaseTracker):
        def record_first_token(self, gap_counter: GapCounter | None = None) -> None:
            events.append("began")

        def record_end(self, served: bool, answer_tokens: int | None) -> None:
            events.append(answer_tokens)

    monkeypatch.setattr(LeastDecodeSeconds, "start_tracker", track)
    gateway = await deploy(1, 1, connector=connector)
    for _ in range(2):
        assert (await gateway.ask(turn(1, 1, stream=stream))).is_done
    assert events == ["began", 4] * 2


async def test_cached_tokens_in_answers_train_the_prefill_policy(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, balance=BY_SECONDS, prefiller={"prefill_ms_per_1k_tokens": 100.0})
    for turns in range(6):
        assert (await gateway.ask(turn(1, turns))).is_done
    policy: Any = gateway.worker.pools.prefill.policy
    (prefiller,) = prefiller_records(gateway)
    assert prefiller.cached_prefixes.hit_trust > 0.85
    for turns in count(6):  # a prompt trains the cost only if the event loop was not late
        if policy._prefillers.prefill_cost.sample_count:
            break
        assert (await gateway.ask(turn(1, turns))).is_done


async def test_access_log_has_prediction_and_result(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gateway = await deploy(1, 1, balance=BY_SECONDS, prefiller={"prefill_ms_per_1k_tokens": 5.0})
    for turns in range(3):
        assert (await gateway.ask(turn(1, turns, stream=turns == 2))).is_done
    lines = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert [line["p_cached"] > 0 for line in lines] == [False, True, True]
    assert all(line["p_seconds"] > 0 < line["t_prefill"] for line in lines)
    hits = gateway.metrics("pdproxy_prefill_hit_tokens_total")
    assert hits[("predicted",)] == sum(line["p_cached"] for line in lines)
    assert hits[("found",)] == sum(line["tokens_cached"] for line in lines) > 0
    assert gateway.metrics("pdproxy_prefill_prediction_ratio_count") == {(): 3.0}


async def test_access_log_has_no_prediction_with_round_robin(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gateway = await deploy(balance={"prefill_policy": "round_robin"})
    assert (await gateway.ask(turn(1, 1))).is_done
    (line,) = [vars(record)["fields"] for record in caplog.records if record.name == "proxy.access"]
    assert "p_seconds" not in line
    assert not gateway.metrics("pdproxy_prefill_prediction_ratio_count")


async def test_requests_queue_in_the_gateway_when_the_engine_is_full(deploy: Deploy) -> None:
    gateway = await deploy(
        1,
        1,
        balance=BY_SECONDS,
        admission={"max_running_prefill": 1, "wait_seconds": 60.0},
        prefiller={"prefill_ms_per_1k_tokens": 5.0, "max_num_seqs": 1},
    )
    gateway.prefillers[0].faults.add("slow_headers", seconds=1.0, times=1)  # until all others wait
    answers = await asyncio.gather(*(gateway.ask(turn(number, 1)) for number in range(8)))
    assert all(answer.is_done for answer in answers)
    assert gateway.metrics("pdproxy_queue_seconds_count")[()] >= 7
    waits = gateway.metrics("pdproxy_queue_waits_total")
    assert waits[("prefill",)] >= 1
    assert sum(waits.values()) == gateway.metrics("pdproxy_queue_seconds_count")[()]


async def test_failed_prefill_leaves_no_prefix_in_the_index(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, balance=BY_SECONDS, retry={"max_attempts": 1})
    gateway.prefillers[0].faults.add("refuse_status", status=500)
    assert (await gateway.ask(turn(1, 2))).status == 500
    assert [len(prefiller.cached_prefixes) for prefiller in prefiller_records(gateway)] == [0]
    assert not any(prefiller.has_prompts_in_flight for prefiller in prefiller_records(gateway))


async def test_queue_is_empty_after_a_queued_client_leaves(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, balance=BY_SECONDS, admission={"max_running_prefill": 1})
    gateway.prefillers[0].faults.add("hang_before_headers")
    async with gateway.asking(turn(1, 1)):
        await gateway.prefillers[0].wait_until(lambda state: state.live == 1)
        async with gateway.asking(turn(2, 1)):
            await until(lambda: gateway.metrics("pdproxy_queued_requests"), "the second one to wait")
    await gateway.worker.drain_manager.wait_until_idle()
    assert not gateway.metrics("pdproxy_queued_requests")


@pytest.mark.parametrize("is_reported", [True, False])
async def test_missing_cache_reports_are_logged_once_for_each_prefiller(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, is_reported: bool
) -> None:
    gateway = await deploy(prefiller={"prompt_tokens_details": is_reported}, balance=BY_SECONDS)
    for _ in range(2):
        for turns in range(4):
            assert (await gateway.ask(turn(1, turns))).is_done
    line = "cached_tokens is not reported"
    logged = [record.getMessage() for record in caplog.records if line in record.getMessage()]
    assert len(logged) == (0 if is_reported else 1)
    assert all(
        "--enable-prompt-tokens-details" in text and text.endswith(f"127.0.0.1:{gateway.prefillers[0].port}")
        for text in logged
    )
