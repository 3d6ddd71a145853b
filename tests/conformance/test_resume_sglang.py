"""Exact resume with SGLang: completions are resumed from their token ids, and greedy chats are replayed.

The tables of tests/conformance/test_resume.py are for vLLM's versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import CALL_BEGIN, THINK_END, decode_tokens, render_chat
from tests.conformance.resuming import (
    WITH_USAGE,
    actions,
    after,
    chat,
    completion,
    differences,
    generated,
    in_character,
    past,
    serving,
    story,
    text_of,
    thoughts,
)
from tests.conformance.test_resume import ERROR, MEDIA, RETRIED, SHORT, Row, check, check_resume_error, rows
from tests.deployment import deployed, generations

SGLANG: dict[str, Any] = {"connector": "sglang_bootstrap"}
NOW, OLD = "sglang", "sglang-0.5.16"
GREEDY: dict[str, Any] = {"temperature": 0}
IDS: dict[str, Any] = {"return_token_ids": True}
COUNTED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
FAULTS = ("kill", "reset_after_tokens", "stall_after_tokens", "error_event", "end_without_finish")
TOKENS = "completion_tokens"
EVERYWHERE: dict[str, Any] = {**SGLANG, "fault": "error_event"}
"""A fault after which the gateway does not check whether the engine is down, for many places in a row."""


def of_row(row: tuple[Row, str]) -> set[object]:
    """Return the features of a row: the short suite covers every place, and every fault with every kind of answer."""
    return {(row[0].kind, row[0].where), (row[0].kind, row[0].fault)}


def breaking(kind: str, body: Mapping[str, Any], *places: tuple[str, Any, str]) -> list[tuple[Row, str]]:
    """Return rows for each place with each fault."""
    return rows(kind, body, *[(*place, fault) for place, fault in product(places, FAULTS)], profiles=(NOW,))


# Places and faults

BROKEN = [
    *breaking(
        *("completion", completion(**WITH_USAGE)),
        ("behind the first token", after(1), TOKENS),
        ("in a word", after(10), TOKENS),
        ("in a character", in_character(after(5)), TOKENS),
        ("before the last token", after(39), TOKENS),
    ),
    *breaking(
        *("whole-completion", completion(max_tokens=100)),
        ("early", after(63), "restart"),
        ("late", after(64), TOKENS),
    ),
    *breaking(
        *("greedy-chat", story(**WITH_USAGE, **GREEDY)),
        ("behind the first token", after(1), "replay"),
        ("in reasoning", after(20), "replay"),
        ("in content", after(60), "replay"),
        ("in a call", after(90), "replay"),
        ("at the end", after(136), "replay"),
    ),
]


@pytest.mark.covering("row profile", BROKEN, of_row)
async def test_sglang_answer_is_resumed_at_any_place_after_any_fault(row: Row, profile: str) -> None:
    await check(profile, row, **SGLANG, **(SHORT if row.fault == "stall_after_tokens" else {}))


MATRIX: dict[str, tuple[dict[str, Any], range, str]] = {
    "completion": (completion(**WITH_USAGE), range(1, 40), TOKENS),
    "whole-completion": (completion(max_tokens=100), range(64, 100), TOKENS),
    "greedy-chat": (story(**WITH_USAGE, **GREEDY), range(1, 137), "replay"),
}
"""Kinds of answers, each with the tokens after which it breaks off."""


@pytest.mark.covering(
    "kind tokens", [(kind, n) for kind in MATRIX for n in MATRIX[kind][1]], lambda row: {row[0], row[1] % len(FAULTS)}
)
async def test_sglang_answer_is_resumed_after_every_token_and_again(kind: str, tokens: int) -> None:
    """The faults take turns. Those that stop no engine come twice if enough tokens are left."""
    body, places, does = MATRIX[kind]
    fault = FAULTS[tokens % len(FAULTS)]
    then = 1 + tokens % 9 if fault in ("error_event", "end_without_finish") else None
    if then is not None and does == TOKENS and tokens + then >= places.stop:
        then = None
    times = does if then is None else f"{does}+{does}"
    row = Row(kind, body, f"{tokens}", after(tokens), times, fault, {}, then)
    await check(NOW, row, decoders=3, **SGLANG, **(SHORT if fault == "stall_after_tokens" else {}))


BEGUN = rows(
    *("completion", completion(**WITH_USAGE)),
    *[("before the first token", after(0), RETRIED, fault) for fault in ("kill", "reset_after_tokens", "error_event")],
    profiles=(NOW, OLD),
)


@pytest.mark.covering("row profile", BEGUN)
async def test_answer_without_a_token_is_retried(row: Row, profile: str) -> None:
    await check(profile, row, **SGLANG)


@pytest.mark.parametrize(("fields", "step"), [({}, 1), (IDS, 4), ({"logprobs": 1}, 4)], ids=["text", "ids", "logprobs"])
async def test_completion_is_resumed_after_every_token(fields: dict[str, Any], step: int) -> None:
    body = completion(**WITH_USAGE, **fields)
    assert not await differences(NOW, body, range(1, 40, step), **EVERYWHERE)


async def test_greedy_chat_is_replayed_after_every_token() -> None:
    body = story(**WITH_USAGE, **GREEDY)
    places = range(1, len(generated(body)), 6)
    assert not await differences(NOW, body, places, **EVERYWHERE)


TWICE = rows(
    *("completion", completion(**WITH_USAGE, **IDS)),
    ("in a word, soon", after(10), f"{TOKENS}+{TOKENS}", "error_event", {}, 1),
    ("in a word, in a character", after(10), f"{TOKENS}+{TOKENS}", "error_event", {}, 4),
    ("in a character, later", in_character(after(5)), f"{TOKENS}+{TOKENS}", "reset_after_tokens", {}, 9),
    profiles=(NOW,),
) + rows(
    *("greedy-chat", thoughts(**WITH_USAGE, **GREEDY)),
    ("in reasoning, sooner", after(20), "replay+replay", "end_without_finish", {}, 5),
    ("in reasoning, in content", after(20), "replay+replay", "error_event", {}, 70),
    profiles=(NOW,),
)


@pytest.mark.parametrize(("row", "profile"), TWICE, ids=str)
async def test_sglang_answer_is_resumed_twice(row: Row, profile: str) -> None:
    await check(profile, row, decoders=3, **SGLANG)


# Options of requests

LATE = after(30)
OPTIONS = [
    *rows("ids", completion(**WITH_USAGE, **IDS), ("in a character", in_character(after(5)), TOKENS), profiles=(NOW,)),
    *rows("logprobs", completion(**WITH_USAGE, logprobs=2), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("whole-ids", completion(max_tokens=90, **IDS), ("late", after(70), TOKENS), profiles=(NOW,)),
    *rows("whole-logprobs", completion(max_tokens=90, logprobs=2), ("late", after(70), TOKENS), profiles=(NOW,)),
    *rows("counted", completion(**COUNTED), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("uncounted", completion(stream=True), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("least", completion(**WITH_USAGE, min_tokens=35), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("default", completion(**WITH_USAGE, max_tokens=None), ("early", after(9), TOKENS), profiles=(NOW,)),
    *rows("three", completion(**WITH_USAGE, n=3), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("whole-three", completion(max_tokens=90, n=3), ("late", after(70), TOKENS), profiles=(NOW,)),
    *rows("prompts", completion(**WITH_USAGE, prompt=["What is it?", "Who?"]), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("no-penalty", completion(**WITH_USAGE, presence_penalty=0.0), ("late", LATE, TOKENS), profiles=(NOW,)),
    *rows("chat-counted", thoughts(**COUNTED, **GREEDY), ("late", after(60), "replay"), profiles=(NOW,)),
    *rows("chat-three", thoughts(**WITH_USAGE, **GREEDY, n=3), ("late", after(60), "replay"), profiles=(NOW,)),
    *rows("chat-one-call", story(**WITH_USAGE, **GREEDY, parallel_tool_calls=False), ("late", after(100), "replay")),
]
OPTIONS = [(row, NOW) for row, profile in OPTIONS if profile in (NOW, "v0.33")]


@pytest.mark.parametrize(("row", "profile"), OPTIONS, ids=str)
async def test_sglang_answer_is_resumed_with_any_request_option(row: Row, profile: str) -> None:
    body = {name: value for name, value in row.body.items() if value is not None}
    await check(profile, Row(row.kind, body, row.where, row.place, row.does, "error_event"), **SGLANG)


@pytest.mark.parametrize("engine", [{"tokens_per_step": 3}, {"stream_interval": 8}], ids=["steps", "intervals"])
async def test_chunks_of_several_tokens_are_counted_correctly(engine: dict[str, Any]) -> None:
    """SGLang's overlapped scheduler writes such chunks."""
    body = completion(**WITH_USAGE)
    assert not await differences(NOW, body, range(1, 40, 2), engine=engine, **EVERYWHERE)


@pytest.mark.parametrize("shows", [False, True])
async def test_stop_string_ends_the_answer_wherever_it_breaks(shows: bool) -> None:
    text = text_of(completion(), 0, 40)
    stop = text[18:27]
    body = completion(stream=True, stop=[stop, "never at all"], no_stop_trim=shows)
    assert not await differences(NOW, body, range(10, 28, 2), **EVERYWHERE)


async def test_only_decoders_return_token_ids_and_keep_the_seed() -> None:
    """The prefiller would return the ids of the prompt, which the gateway does not read."""
    async with serving(NOW, **SGLANG) as gateway:
        gateway.decoders[0].faults.add("kill", tokens=10)
        assert (await gateway.ask(completion(**WITH_USAGE, seed=7))).is_done
        prefills, decodes = generations(*gateway.prefillers), generations(*gateway.decoders)
        assert [seen.body.get("return_token_ids") for seen in prefills] == [None, None]
        assert [seen.body["return_token_ids"] for seen in decodes] == [True, True]
        assert [seen.body["seed"] for seen in decodes] == [7, 7]
        assert len({seen.body["bootstrap_room"] for seen in decodes}) == 2
        assert len({seen.body["rid"] for seen in decodes}) == 2
        assert prefills[1].body["prompt"] == decodes[1].body["prompt"]
        assert (len(decodes[1].body["prompt"]), decodes[1].body["max_tokens"]) == (21, 30)


# Answers that cannot be resumed

PENALTY: dict[str, Any] = {"repetition_penalty": 1.1}
CUT: tuple[Any, ...] = ("late", LATE, ERROR, "reset_after_tokens")
AGAIN: tuple[Any, ...] = ("late", LATE, "replay", "reset_after_tokens")
NOT_RESUMABLE = [
    *rows("penalty", completion(**WITH_USAGE, **PENALTY), CUT, profiles=(NOW,)),
    *rows("regex", completion(**WITH_USAGE, regex=".*"), CUT, profiles=(NOW,)),
    *rows("stop-regex", completion(**WITH_USAGE, stop_regex="never"), CUT, profiles=(NOW,)),
    *rows("greedy-penalty", completion(**WITH_USAGE, **PENALTY, **GREEDY), AGAIN, profiles=(NOW,)),
    *rows("whole", completion(max_tokens=90, **PENALTY), ("late", after(70), "restart", "kill"), profiles=(NOW,)),
]


@pytest.mark.parametrize(("row", "profile"), NOT_RESUMABLE, ids=str)
async def test_answer_that_would_change_is_replayed_or_fails(row: Row, profile: str) -> None:
    await check(profile, row, **SGLANG)


async def test_resume_error_names_the_unsupported_option() -> None:
    async with serving(NOW, **SGLANG) as gateway:
        gateway.decoders[0].faults.add("kill", tokens=30)
        answer = await gateway.ask(completion(**WITH_USAGE, **PENALTY))
        check_resume_error(gateway, answer, "repetition_penalty")


@pytest.mark.parametrize(
    ("profile", "body"),
    [
        (NOW, chat(**WITH_USAGE)),
        (NOW, chat(**WITH_USAGE, seed=7)),
        (NOW, chat(**WITH_USAGE, **GREEDY, logprobs=True)),
        (NOW, completion(**WITH_USAGE, **GREEDY, echo=True)),
        (OLD, completion(**WITH_USAGE)),
    ],
    ids=["sampled", "seeded", "logprobs", "echo", "old"],
)
async def test_answers_without_enough_information_are_not_watched(profile: str, body: dict[str, Any]) -> None:
    """Chat streams have no token ids, seeds have no effect, and older engines ignore the request for ids."""
    async with serving(profile, **SGLANG) as gateway:
        gateway.decoders[0].faults.add("kill", tokens=30)
        answer = await gateway.ask(body)
        assert answer.error["code"] == "decode_broken"
        assert actions(gateway) == []
        assert all("return_token_ids" not in seen.body for seen in generations(*gateway.engines))


async def test_mixed_versions_use_the_abilities_of_the_oldest() -> None:
    """The next decoder may be the old one, which returns no ids."""
    decoders = [SimulatedEngine(role="decode", profile_name=profile) for profile in (NOW, OLD)]
    prefiller = SimulatedEngine(role="prefill", profile_name=NOW)
    async with deployed([prefiller], [*decoders], **SGLANG) as gateway:
        assert (await gateway.ask(completion(**WITH_USAGE))).is_done
        assert "return_token_ids" not in generations(*gateway.decoders)[0].body


@pytest.mark.parametrize("profile", [NOW, OLD])
async def test_resume_depends_on_the_engine_and_not_on_the_connector(profile: str) -> None:
    async with serving(profile, connector="plain") as gateway:
        gateway.decoders[0].faults.add("kill", tokens=10)
        answer = await gateway.ask(completion(**WITH_USAGE))
        assert answer.is_done is (profile == NOW)
        assert actions(gateway) == ([TOKENS] if profile == NOW else [])


# Chats with engines that stream token ids

NEXT = "sglang-chat-ids"
CHAT_TOKENS = "chat_tokens"
BY_IDS = [
    *rows(
        *("chat", story(**WITH_USAGE)),
        ("behind the first token", after(1), CHAT_TOKENS),
        ("in reasoning", after(20), CHAT_TOKENS),
        ("at </think>", past(THINK_END, 1), CHAT_TOKENS),
        ("in content", past(THINK_END, 10), CHAT_TOKENS),
        ("in a character", in_character(past(THINK_END, 1)), CHAT_TOKENS),
        ("at a call", past(CALL_BEGIN, 1), "roll_back"),
        ("in its name", past(CALL_BEGIN, 12), "roll_back"),
        profiles=(NEXT,),
    ),
    *rows(
        *("whole-chat", thoughts()),
        ("early", after(50), "restart"),
        ("late", after(70), CHAT_TOKENS),
        profiles=(NEXT,),
    ),
    *rows("ids", thoughts(**WITH_USAGE, **IDS), ("in reasoning", after(20), CHAT_TOKENS), profiles=(NEXT,)),
    *rows("counted", thoughts(**COUNTED), ("in content", after(60), CHAT_TOKENS), profiles=(NEXT,)),
    *rows("media", chat(**WITH_USAGE, messages=MEDIA), ("in content", after(10), ERROR), profiles=(NEXT,)),
]


@pytest.mark.parametrize(("row", "profile"), BY_IDS, ids=str)
async def test_chat_is_resumed_from_the_token_ids_of_its_stream(row: Row, profile: str) -> None:
    fault = "reset_after_tokens" if row.does == ERROR else "error_event"
    await check(profile, Row(row.kind, row.body, row.where, row.place, row.does, fault), **SGLANG)


async def test_reasoning_is_resumed_after_every_token() -> None:
    """The engine's parser knows its position from the text so far."""
    assert not await differences(NEXT, thoughts(**WITH_USAGE), range(1, 90, 3), **EVERYWHERE)


async def test_engines_are_probed_once_for_token_ids_in_chats() -> None:
    """The gateway sends a probe, and not a client's request."""
    for profile, has_ids in ((NOW, False), (NEXT, True), (OLD, False)):
        async with serving(profile, decoders=1, **SGLANG) as gateway:
            for _ in range(2):
                assert (await gateway.ask(chat(**WITH_USAGE))).is_done
            [decoder] = gateway.decoders
            probes = [seen for seen in decoder.requests if seen.body and seen.body.get("temperature") == -1]
            assert len(probes) == (profile != OLD)
            assert [seen.body.get("return_token_ids", False) for seen in generations(decoder)] == [has_ids] * 2


async def test_resumed_chat_continues_the_last_message() -> None:
    async with serving(NEXT, **SGLANG) as gateway:
        gateway.decoders[0].faults.add("error_event", tokens=60)
        assert (await gateway.ask(thoughts(**WITH_USAGE))).is_done
        first, second = generations(*gateway.decoders)
        assert len(second.body["input_ids"]) == len(render_chat(first.body)) + 60
        assert second.body["max_tokens"] == first.body["max_tokens"] - 60
        message = second.body["messages"][-1]
        assert (message["role"], second.body["continue_final_message"]) == ("assistant", True)
        assert message["content"] == decode_tokens(generated(first.body)[:60], keep_markers=True)
        assert "</think>" in message["content"]
        assert all("return_token_ids" not in seen.body for seen in generations(*gateway.prefillers))


async def test_sglang_engine_that_ignores_input_ids_is_detected() -> None:
    """The engine does not support `input_ids`, as its echoed prompt shows."""
    async with serving(NEXT, decoders=3, **SGLANG) as gateway:
        gateway.decoders[0].faults.add("reset_after_tokens", tokens=60)
        for engine in gateway.engines:
            engine.faults.add("ignore_prompt_ids")
        answer = await gateway.ask(thoughts(**WITH_USAGE))
        check_resume_error(gateway, answer)
