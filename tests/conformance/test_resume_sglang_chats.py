"""Chats of Kimi K2 that SGLang gets as completions, because operators have configured their sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import product
from typing import Any, Final

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import ARGUMENT_BEGIN, render_chat
from tests.asking import Answer, until
from tests.conformance.resuming import (
    WITH_USAGE,
    Place,
    actions,
    after,
    chat,
    content_of,
    difference,
    generated,
    in_character,
    past,
    serving,
    story,
    text_of,
    thoughts,
    uninterrupted,
)
from tests.conformance.test_resume import MEDIA
from tests.deployment import Deployment, deployed, generations
from tests.selection.covering import pairs, values

NOW, OLD = "sglang", "sglang-0.5.16"
SAMPLED: dict[str, Any] = {
    "connector": "sglang_bootstrap",
    "sglang": {"chat_sampling": ["temperature=0.6", "top_p=0.95", "top_k=20"]},
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
STREAMED = {"chat": chat(**WITH_USAGE), "thoughts": thoughts(**WITH_USAGE), "story": story(**WITH_USAGE)}


def sampled(profile: str = NOW, **options: Any) -> AbstractAsyncContextManager[Deployment]:
    return serving(profile, **SAMPLED, **options)


def client_content(answer: Answer) -> Any:
    """Return the content of an answer without the members that only the gateway adds."""
    content = content_of(answer)
    for choice in content["choices"].values():
        choice["members"] -= {"token_ids"}
    return content


def paths(gateway: Deployment) -> list[str]:
    return [seen.path for seen in generations(*gateway.decoders)]


@pytest.mark.parametrize("body", STREAMED.values(), ids=STREAMED)
async def test_chat_as_completion_has_the_answer_of_the_chat(body: dict[str, Any]) -> None:
    async with sampled(decoders=1) as gateway:
        answer = await gateway.ask(dict(body))
        assert not difference(client_content(answer), await uninterrupted(NOW, body, connector="sglang_bootstrap"))
        assert paths(gateway) == [COMPLETIONS]


async def test_chat_as_completion_sends_the_configured_sampling() -> None:
    body = thoughts(**WITH_USAGE, top_p=0.5, top_k=None, logprobs=False, seed=7, stop=["never at all"])
    async with sampled(decoders=1) as gateway:
        assert (await gateway.ask(body)).is_done
        [seen], [prefill] = generations(*gateway.decoders), generations(*gateway.prefillers)
        assert seen.body["prompt"] == prefill.body["prompt"] == render_chat(body)
        members = {name: value for name, value in seen.body.items() if not name.startswith(("bootstrap", "rid"))}
        assert members == {
            "model": body["model"],
            "prompt": render_chat(body),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": 90,
            "temperature": 0.6,
            "top_p": 0.5,
            "top_k": 20,
            "seed": 7,
            "stop": ["never at all"],
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        assert "return_token_ids" not in prefill.body


async def test_answer_without_a_limit_may_fill_the_context() -> None:
    body = {name: value for name, value in chat(**WITH_USAGE).items() if name != "max_tokens"}
    async with sampled(decoders=1, engine={"max_model_len": 500}) as gateway:
        assert (await gateway.ask(body)).is_done
        [seen] = generations(*gateway.decoders)
        assert seen.body["max_tokens"] == 500 - len(render_chat(body))


# Resume

FAULTS = ("kill", "reset_after_tokens", "stall_after_tokens", "error_event", "end_without_finish")
ROWS: Final[Mapping[str, tuple[dict[str, Any], Place, str]]] = {
    "behind the first token": (STREAMED["story"], after(1), "raw_tokens"),
    "in reasoning": (STREAMED["story"], after(20), "raw_tokens"),
    "in a character": (STREAMED["story"], in_character(after(20)), "raw_tokens"),
    "in content": (STREAMED["story"], after(60), "raw_tokens"),
    "in arguments": (STREAMED["story"], past(ARGUMENT_BEGIN, 5), "suffix"),
    "whole": (story(), past(ARGUMENT_BEGIN, 5), "suffix"),
    "whole, early": (thoughts(), after(20), "restart"),
    "greedy": (thoughts(**WITH_USAGE, temperature=0), after(60), "raw_tokens"),
    "three": (thoughts(**WITH_USAGE, n=3), after(60), "raw_tokens"),
}


@pytest.mark.covering("row fault", [row for row in product(ROWS, FAULTS) if row != ("three", "kill")], values)
async def test_chat_as_completion_is_resumed(row: str, fault: str) -> None:
    body, place, does = ROWS[row]
    async with sampled(decoders=1) as gateway:
        expected = content_of(await gateway.ask(dict(body)))
    async with sampled(timeouts={"idle_seconds": 0.3}) as gateway:
        gateway.decoders[0].faults.add(fault, tokens=place(generated(body)), times=1)
        assert not difference(content_of(await gateway.ask(dict(body))), expected)
        assert set(actions(gateway)) == {does}
        assert set(paths(gateway)) == {COMPLETIONS}


async def chat_differences(
    body: Mapping[str, Any], places: Iterable[int], *, then: int | None = None
) -> dict[int, str]:
    """Return the differences of an answer that breaks off at each of these places, and again after `then` tokens."""
    found = {}
    async with sampled(decoders=1, resume={"pressure_seconds": 0.0}) as gateway:
        [decoder] = gateway.decoders
        expected = content_of(await gateway.ask(dict(body)))
        for place in places:
            await until(lambda: not gateway.worker.releaser.pending_count, "releases of KV")
            decoder.faults.clear()
            decoder.faults.add("error_event", tokens=place, times=1)
            if then is not None:
                decoder.faults.add("error_event", tokens=then, times=1)
            if wrong := difference(content_of(await gateway.ask(dict(body))), expected):
                found[place] = wrong
    return found


@pytest.mark.covering("name then begin", product(STREAMED, (None, 3), range(21)), lambda row: pairs(row[:2]))
async def test_chat_as_completion_is_resumed_after_every_token(name: str, then: int | None, begin: int) -> None:
    body = STREAMED[name]
    places = range(1 + begin, min(body["max_tokens"], len(generated(body))), 21)
    assert not await chat_differences(body, places, then=then)


async def test_stop_string_ends_the_answer_wherever_it_breaks() -> None:
    stop = text_of(chat(), 18, 27)
    assert not await chat_differences(chat(stream=True, stop=[stop]), range(10, 28, 2))


async def test_messages_are_sent_as_completions() -> None:
    async with sampled(decoders=1) as gateway:
        body = {"model": "sim", "max_tokens": 40, "messages": [{"role": "user", "content": "What is it?"}]}
        async with gateway.session.post(f"{gateway.url}/v1/messages", json=body) as response:
            assert (await response.json())["content"][0]["text"]
        assert paths(gateway) == [COMPLETIONS]


# Requests that stay chats


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"repetition_penalty": 1.1},
        {"separate_reasoning": False},
        {"messages": MEDIA},
    ],
    ids=str,
)
async def test_chat_that_could_not_be_resumed_stays_a_chat(fields: dict[str, Any]) -> None:
    async with sampled(decoders=1) as gateway:
        body = {**chat(stream=True), **fields}
        assert (await gateway.ask(body)).status == 200
        assert paths(gateway) == [CHATS]
        assert not [seen for seen in gateway.prefillers[0].requests if seen.path == "/tokenize"]


@pytest.mark.parametrize(
    ("profile", "engine", "body", "why"),
    [
        (OLD, {}, chat(stream=True), "0.5.17"),
        (NOW, {"tool_call_parser": ""}, chat(stream=True), "--tool-call-parser"),
        (NOW, {"reasoning_parser": ""}, thoughts(stream=True), "--reasoning-parser"),
    ],
    ids=["old", "tools", "reasoning"],
)
async def test_missing_engine_support_is_logged_once(
    profile: str, engine: dict[str, Any], body: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampled(profile, decoders=1, engine=engine) as gateway:
        for _ in range(2):
            assert (await gateway.ask(dict(body))).is_done
        assert paths(gateway) == [CHATS] * 2
    [content] = [record.getMessage() for record in caplog.records if "chat_sampling" in record.getMessage()]
    assert why in content


async def test_concurrent_renderings_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are rendered before they are admitted."""
    many = 17
    async with sampled(decoders=1) as gateway:
        (prefiller,) = gateway.prefillers
        prefiller.faults.add("hang_before_headers", path="/tokenize")

        def render_count() -> int:
            return sum(seen.path == "/tokenize" for seen in prefiller.requests)

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(gateway.ask(chat(stream=True))) for _ in range(many - 1)]
            await until(lambda: render_count() == many - 1, "the allowed renderings")
            assert (await gateway.ask(chat(stream=True))).is_done
            for task in waiting:
                task.cancel()
        assert render_count() == many - 1
        assert paths(gateway) == [CHATS]
        prefiller.faults.clear()
        await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the requests")
        assert (await gateway.ask(chat(stream=True))).is_done
        assert paths(gateway) == [CHATS, COMPLETIONS]
    assert "engines are rendering 16 other chats" in caplog.text


async def test_invalid_chat_gets_the_error_of_the_engine() -> None:
    """Without an answer of the tokenizer, the request stays a chat."""
    async with sampled(decoders=1) as gateway:
        answer = await gateway.ask(chat(messages="no list"))
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = await gateway.ask(chat(messages="no list"))
    assert (answer.status, answer.json) == (expected.status, expected.json)


async def test_vllm_chats_stay_chats() -> None:
    async with deployed(
        [SimulatedEngine(role="prefill")], [SimulatedEngine(role="decode")], sglang=SAMPLED["sglang"]
    ) as gateway:
        assert (await gateway.ask(chat())).is_done
        assert paths(gateway) == [CHATS]


@pytest.mark.parametrize("stream", [True, False])
async def test_resume_depends_on_the_engine_and_not_on_the_connector(stream: bool) -> None:
    options = {**SAMPLED, "connector": "plain"}
    async with serving(NOW, **options) as gateway:
        gateway.decoders[0].faults.add("kill", tokens=70)
        assert (await gateway.ask(thoughts(stream=stream))).is_done
        assert actions(gateway) == ["raw_tokens"]
