"""Whole requests through the gateway: the answer equals that of a single engine, whole, streamed or in units."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.state import EngineState
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, ask, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

PROMPTS = [
    "Hi",
    "Tell me about gardens in the winter",
    "naïve café 日本 🙂",
    " ",
    'a\nb\tc\\d"e\x00f',
    "long " * 2000,
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("text", PROMPTS, ids=ascii)
async def test_answer_equals_that_of_a_single_engine(gateway: Deployment, text: str, api: Api, stream: bool) -> None:
    body = request(api, text, max_tokens=40, stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_of_token_ids_is_served(gateway: Deployment, stream: bool) -> None:
    body = request(Api.COMPLETIONS, prompt=[72, 105, 32], stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert len(generations(*gateway.decoders)) == 1


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"thinking": True}}, {"tools": TOOLS}], ids=["think", "tools"]
)
async def test_reasoning_and_tool_calls_pass_untouched(deploy: Deploy, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"tool_call_parser": "kimi_k2", "eos_after": 8}
    gateway = await deploy(engine=options)
    body = request(Api.CHAT, stream=True, max_tokens=200, **fields)
    answer = await gateway.ask(body)
    async with SimulatedEngine(**options) as engine, aiohttp.ClientSession() as session:
        alone = await ask(session, engine.url, body)
    assert answer.is_done
    assert [event["choices"] for event in answer.events[:-1]] == [event["choices"] for event in alone.events[:-1]]


# Several prompts, several samples

SEVERAL: list[dict[str, Any]] = [
    request(Api.CHAT, n=3),
    request(Api.COMPLETIONS, n=2),
    request(Api.COMPLETIONS, prompt=["one", "two", "three"]),
    request(Api.COMPLETIONS, prompt=["one", "two"], n=2, seed=5),
    request(Api.COMPLETIONS, prompt=[[72, 105], [72, 106]]),
    request(Api.COMPLETIONS, prompt=["alone"]),
    request(Api.COMPLETIONS, prompt=[str(number) for number in range(40)], n=2, max_tokens=2),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", SEVERAL)
async def test_several_samples_equal_those_of_a_single_engine(
    deploy: Deploy, body: dict[str, Any], stream: bool
) -> None:
    gateway = await deploy(2, 3)
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = await gateway.ask(body)
    async with SimulatedEngine() as engine, aiohttp.ClientSession() as session:
        alone = await ask(session, engine.url, body)

    assert answer.is_done
    assert answer.texts == alone.texts
    assert answer.usage == alone.usage
    if stream:
        events = answer.events
        assert events.count("[DONE]") == 1
        assert len({event["id"] for event in events[:-1]}) == 1
        assert sorted(map(_finish, events[:-1])) == sorted(map(_finish, alone.events[:-1]))
    else:
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(len(alone.texts)))
        assert set(answer.json) == set(alone.json) - {"kv_transfer_params"}
    for seen in generations(*gateway.engines):
        assert seen.body.get("n", 1) == 1
        assert isinstance(seen.body.get("prompt", ""), str | list)


def _finish(event: dict[str, Any]) -> tuple[int, str]:
    """Choice and finish reason of a chunk; of the usage chunk nothing."""
    for choice in event["choices"]:
        return choice["index"], choice["finish_reason"] or ""
    return -1, ""


async def test_each_sample_has_the_seed_of_a_single_engine(gateway: Deployment) -> None:
    await gateway.ask(request(Api.COMPLETIONS, prompt=["a", "b"], n=3, seed=7))
    seeds = sorted((seen.body["prompt"], seen.body["seed"]) for seen in generations(*gateway.decoders))
    assert seeds == [(prompt, seed) for prompt in "ab" for seed in (7, 8, 9)]


async def test_usage_of_a_merged_stream_is_sent_only_on_request(gateway: Deployment) -> None:
    answer = await gateway.ask(request(Api.CHAT, n=2, stream=True))
    assert answer.is_done
    assert all(event["choices"] for event in answer.events[:-1])


async def test_units_running_at_a_time_are_limited(deploy: Deploy) -> None:
    gateway = await deploy(fanout={"concurrency": 3}, engine={"decode_step_ms": 1.0})
    peak = 0

    def watch(state: EngineState) -> bool:
        nonlocal peak
        peak = max(peak, state.live)
        return False

    watching = asyncio.create_task(gateway.decoders[0].wait_until(watch))
    answer = await gateway.ask(request(Api.CHAT, n=12, stream=True))
    watching.cancel()
    assert len(answer.texts) == 12
    assert peak == 3


async def test_request_for_too_many_samples_is_rejected(deploy: Deploy) -> None:
    gateway = await deploy(fanout={"max_units": 5})
    answer = await gateway.ask(request(Api.COMPLETIONS, prompt=["a", "b"], n=3))
    assert answer.status == 400
    assert "2 prompts x n=3" in answer.error["message"]
    assert generations(*gateway.engines) == []


@pytest.mark.parametrize("stream", [True, False])
async def test_only_the_failed_unit_is_repeated(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(2, 2)
    gateway.decoders[0].faults.add("reset_before_headers", times=1)
    body = request(Api.COMPLETIONS, prompt=["a", "b", "c", "d"], stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.texts == {n: await answer_alone({**body, "prompt": prompt}) for n, prompt in enumerate("abcd")}
    assert len(generations(*gateway.prefillers)) == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_rejected_unit_ends_the_request(deploy: Deploy, stream: bool) -> None:
    """The engine's words reach the client, and the other units' connections are closed."""
    gateway = await deploy()
    (prefiller,) = gateway.prefillers
    prefiller.faults.add("refuse_status", status=400, skip=3, times=1)
    prefiller.faults.add("hang_before_headers", times=3)
    answer = await gateway.ask(request(Api.CHAT, n=4, stream=stream))
    assert answer.status == 400
    assert answer.error["message"] == "simulated fault"
    await prefiller.wait_until(lambda state: state.disconnects == 3)


async def test_unit_broken_in_mid_stream_breaks_the_request(deploy: Deploy) -> None:
    gateway = await deploy(engine={"decode_step_ms": 1.0}, resume={"mode": "restart-only"})
    (decoder,) = gateway.decoders
    decoder.faults.add("reset_after_tokens", tokens=3, skip=2, times=1)
    answer = await gateway.ask(request(Api.CHAT, n=3, stream=True, max_tokens=100_000))
    assert not answer.is_whole
    assert answer.error["code"] == "decode_broken"
    assert b"[DONE]" not in answer.body
    assert max(answer.texts) == 2
    await decoder.wait_until(lambda state: state.disconnects == 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_frees_the_engines_of_all_units(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(2, 2, engine={"decode_step_ms": 1.0})
    async with gateway.asking(request(Api.CHAT, n=8, stream=stream, max_tokens=100_000)) as client:
        for decoder in gateway.decoders:
            await decoder.wait_until(lambda state: state.live == 4 and state.tokens_generated > 4)
        await client.leave()
        for decoder in gateway.decoders:
            await decoder.wait_until(lambda state: state.disconnects == 4)


# Attempts


@pytest.mark.parametrize(("max_attempts", "asked"), [(1, 1), (2, 4), (3, 4)])
async def test_rejected_request_tries_each_instance_once(deploy: Deploy, max_attempts: int, asked: int) -> None:
    """It comes at no cost, unless there are to be no second attempts."""
    gateway = await deploy(4, retry={"max_attempts": max_attempts}, admission={"wait_seconds": 0.01})
    for prefiller in gateway.prefillers:
        prefiller.faults.add("refuse_status", status=503)
    answer = await gateway.ask(request(Api.CHAT))
    assert answer.status == 503
    assert sorted(len(generations(prefiller)) for prefiller in gateway.prefillers) == [0] * (4 - asked) + [1] * asked


async def test_failures_are_counted_by_role(deploy: Deploy) -> None:
    gateway = await deploy(3, 3)
    # The second attempt goes to the second decoder: it is its turn.
    for engine in (gateway.prefillers[0], gateway.decoders[1]):
        engine.faults.add("refuse_status", status=500)
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.metrics("pdproxy_retries_total") == {("status", "prefill"): 1.0, ("status", "decode"): 1.0}


async def test_client_that_disconnects_between_attempts_ends_them(deploy: Deploy) -> None:
    gateway = await deploy(2, retry={"base_delay_seconds": 3600.0, "max_delay_seconds": 3600.0})
    for prefiller in gateway.prefillers:
        prefiller.faults.add("refuse_status", status=503)
    async with gateway.asking(request(Api.CHAT)) as client:
        await gateway.prefillers[0].wait_until(lambda state: state.finished == 1)
        await until(lambda: not gateway.worker.upstream.busy_connections, "the pause before the second attempt")
        await client.leave()
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")
    assert len(generations(*gateway.prefillers)) == 1


async def test_many_requests_at_once_are_spread_over_all_engines(deploy: Deploy) -> None:
    gateway = await deploy(3, 4)
    bodies = [request(api, f"question {n}", stream=bool(n % 3)) for n, api in enumerate(list(OPENAI_APIS) * 24)]
    answers = await asyncio.gather(*map(gateway.ask, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.is_done
        assert answer.text == await answer_alone(body)
    # Roughly alike: what is freer depends on which answers are back.
    assert min(len(generations(prefiller)) for prefiller in gateway.prefillers) > 48 / 3 / 2
    assert min(len(generations(decoder)) for decoder in gateway.decoders) > 48 / 4 / 2


@pytest.mark.parametrize("stream", [True, False])
async def test_only_decoder_is_tried_again_after_a_lack_of_kv_memory(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1)
    gateway.decoders[0].faults.add("recompute", tokens=0, times=1)
    body = request(Api.CHAT, stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert len(generations(*gateway.prefillers)) == 2


# Requests to engines


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_resumable_answer_is_watched(gateway: Deployment, api: Api, stream: bool) -> None:
    """Streamed, with token ids, whether the client asked for that or not; the prefiller's is not."""
    body = request(api, stream=stream, max_tokens=2 if stream else 33)
    answer = await gateway.ask(body)
    assert answer.is_stream is stream
    assert b'"token_ids":[' not in answer.body
    (decoded,), (prefilled,) = generations(*gateway.decoders), generations(*gateway.prefillers)
    watched = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert {name: value for name, value in decoded.body.items() if name != "kv_transfer_params"} == body | watched
    assert prefilled.body["stream"] is False
    assert "stream_options" not in prefilled.body


@pytest.mark.parametrize(("max_tokens", "is_watched"), [(None, True), (33, True), (32, False), (1, False)])
async def test_short_answer_that_is_not_streamed_is_not_watched(
    gateway: Deployment, max_tokens: int | None, is_watched: bool
) -> None:
    """Repeating such an answer costs little."""
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    body = {**request(Api.CHAT), **fields}
    if max_tokens is None:
        body.pop("max_tokens", None)
    answer = await gateway.ask(body)
    assert answer.text == await answer_alone(body)
    (decoded,) = generations(*gateway.decoders)
    assert bool(decoded.body.get("return_token_ids")) is is_watched


async def test_short_answer_is_repeated_after_its_decoder_is_lost(deploy: Deploy) -> None:
    gateway = await deploy(2, 2)
    body = request(Api.CHAT, max_tokens=20)
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=5, times=1)
    answer = await gateway.ask(body)
    assert (answer.status, answer.text) == (200, await answer_alone(body))


@pytest.mark.parametrize("mode", ["restart-only", "off"])
async def test_no_answer_is_watched_without_resume(deploy: Deploy, mode: str) -> None:
    gateway = await deploy(resume={"mode": mode})
    body = request(Api.CHAT)
    assert (await gateway.ask(body)).is_done
    (decoded,) = generations(*gateway.decoders)
    assert set(decoded.body) == set(body) | {"kv_transfer_params"}


NOT_WATCHED: list[dict[str, Any]] = [
    # vLLM refuses them with `stream`, and without prompt text with `return_token_ids`.
    request(Api.CHAT, prompt_logprobs=1),
    request(Api.COMPLETIONS, prompt_logprobs=1),
    request(Api.COMPLETIONS, echo=True),
    request(Api.COMPLETIONS, echo=True, stream=True),
    # One stream, but several sequences.
    request(Api.CHAT, n=2),
    request(Api.COMPLETIONS, best_of=2),
    request(Api.COMPLETIONS, use_beam_search=True),
    request(Api.COMPLETIONS, prompt=["a", "b"]),
    request(Api.CHAT, include_reasoning=False, logprobs=True),
    # It would begin behind the reasoning, which is not hidden then (vLLM `resolve_reasoning_ended`).
    request(Api.CHAT, include_reasoning=False, response_format={"type": "json_object"}),
]


@pytest.mark.parametrize("body", NOT_WATCHED, ids=str)
async def test_answer_that_watching_would_change_is_not_watched(deploy: Deploy, body: dict[str, Any]) -> None:
    gateway = await deploy(connector="plain")
    assert (await gateway.ask(body)).is_done
    (seen,) = generations(*gateway.decoders)
    assert {name: value for name, value in seen.body.items() if name != "stream_options"} == body


# Going on


@pytest.mark.parametrize("stream", [True, False])
async def test_only_the_broken_unit_is_resumed(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 2)
    for decoder in gateway.decoders:
        decoder.faults.add("reset_after_tokens", tokens=70, times=1)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = request(Api.COMPLETIONS, prompt=["a", "b", "c"], max_tokens=90, **options)
    answer = await gateway.ask(body)
    async with SimulatedEngine() as engine, aiohttp.ClientSession() as session:
        alone = await ask(session, engine.url, body)
    assert answer.is_done
    assert answer.texts == alone.texts
    assert {name: answer.usage[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: alone.usage[name] for name in ("prompt_tokens", "completion_tokens")
    }
    assert gateway.metrics("pdproxy_resumes_total") == {("completion_tokens", "broken"): 2.0}


@pytest.mark.parametrize("stream", [True, False])
async def test_error_of_an_answer_that_cannot_be_resumed_has_the_reason(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 2, resume={"max_attempts": 1})
    for decoder in gateway.decoders:
        decoder.faults.add("recompute", tokens=70)
    answer = await gateway.ask(request(Api.COMPLETIONS, max_tokens=1000, stream=stream))
    assert answer.status == (200 if stream else 503)
    assert answer.is_whole is not stream
    assert answer.error["code"] == "decode_recomputed"
    assert answer.error["message"].endswith("the answer could not be resumed: it broke off 2 times")
    assert stream or answer.headers["retry-after"] == "1"
    assert gateway.metrics("pdproxy_resume_failures_total") == {("recomputed",): 1.0}


@pytest.mark.parametrize("health", [{"rise": 1, "interval_seconds": 0.05}, {}], ids=["probed", "not probed"])
async def test_answer_waits_for_an_instance_that_can_resume_it(deploy: Deploy, health: dict[str, Any]) -> None:
    """The only decoder crashes and returns, after more refused connections than a retry allows."""
    gateway = await deploy(connector="plain", resume={"deadline_seconds": 5.0}, health=health)
    (decoder,) = gateway.decoders
    decoder.faults.add("kill", tokens=5, times=1)
    asking = asyncio.create_task(gateway.ask(request(Api.COMPLETIONS, max_tokens=20, stream=True)))
    await decoder.wait_until(lambda state: state.kills == 1)
    refused = ("127.0.0.1:" + str(decoder.port), "connect", "decode")
    if not health:
        most = gateway.worker.settings.retry.max_attempts
        await until(lambda: gateway.metrics("pdproxy_instance_requests_total").get(refused, 0) > most, "refusals")
    await decoder.start()
    answer = await asking
    assert answer.is_done
    assert answer.text == await answer_alone(request(Api.COMPLETIONS, max_tokens=20))


async def test_wait_for_an_instance_is_limited(deploy: Deploy) -> None:
    gateway = await deploy(connector="plain", resume={"deadline_seconds": 0.3})
    (decoder,) = gateway.decoders
    decoder.faults.add("kill", tokens=5, times=1)
    answer = await gateway.ask(request(Api.COMPLETIONS, max_tokens=20, stream=True))
    assert not answer.is_whole
    assert answer.error["message"].endswith("the answer could not be resumed: no instance could continue it")
    assert answer.texts[0] == (await answer_alone(request(Api.COMPLETIONS, max_tokens=20)))[: len(answer.texts[0])]


async def test_wait_for_an_instance_ends_when_the_client_disconnects(deploy: Deploy) -> None:
    gateway = await deploy(connector="plain", resume={"deadline_seconds": 3600.0})
    (decoder,) = gateway.decoders
    decoder.faults.add("kill", tokens=5, times=1)
    async with gateway.asking(request(Api.COMPLETIONS, max_tokens=20, stream=True)) as client:
        await client.has_tokens(3)
        await decoder.wait_until(lambda state: state.kills == 1)
        await client.leave()
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_of_a_crashed_engine_are_repeated_a_few_at_a_time(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 2, retry={"budget_share": 0.0, "budget_least": 2})
    dying, other = gateway.decoders
    dying.faults.add("hang_before_headers", path="chat")
    body = request(Api.CHAT, stream=stream, max_tokens=8)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(gateway.ask(body)) for _ in range(20)]
        await until(lambda: len(generations(dying)) + len(generations(other)) == 20, "all requests")
        assert generations(dying)
        await dying.kill()
    text = await answer_alone(body)
    assert [(task.result().status, task.result().text) for task in asking] == [(200, text)] * 20
    assert len(generations(other)) == 20
    assert gateway.metrics("pdproxy_retry_budget_exhausted_total") == {}


async def test_wait_for_a_second_attempt_is_limited(deploy: Deploy) -> None:
    gateway = await deploy(
        1, 2, retry={"budget_share": 0.0, "budget_least": 1, "budget_wait_seconds": 0.0, "max_attempts": 2}
    )
    gateway.decoders[0].faults.add("refuse_status", path="chat", status=500)
    gateway.decoders[1].faults.add("slow_headers", path="chat", seconds=0.3)
    body = request(Api.CHAT, stream=True)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(gateway.ask(body)) for _ in range(8)]
    statuses = sorted(task.result().status for task in asking)
    assert set(statuses) == {200, 500}
    assert gateway.metrics("pdproxy_retry_budget_exhausted_total") == {(): statuses.count(500)}
