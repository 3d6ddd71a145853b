"""A parsed request: what it costs, and the bytes the engines get."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.common.backend import Load
from proxy.dialects.call import (
    DECODE_OVERHEAD_TOKENS,
    MAX_OUTPUT_TOKENS,
    PREFILL_OVERHEAD_TOKENS,
    Call,
    estimate_text_tokens,
)
from proxy.settings import Cost
from proxy.wire.document import REMOVED, join_body
from proxy.wire.openai import Api
from tests.parsing import parse

COST = Cost(bytes_per_token=4, image_tokens=1000, audio_tokens=500, default_output_tokens=256)


def chat(content: Any = "hi", **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse(Api.CHAT, orjson.dumps(body), COST)


def completion(prompt: Any = "hi", **fields: Any) -> Call:
    return parse(Api.COMPLETIONS, orjson.dumps({"model": "m", "prompt": prompt, **fields}), COST)


# Cost


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("", 1),
        ("a", 1),
        ("abcd", 1),
        ("abcde", 2),
        ("x" * 400, 100),
        ("你好世界", 3),
        ("🙂", 1),
        ([1, 2, 3], 3),
        (["abcd", "abcde"], 3),
        ([[1, 2], [3]], 3),
        ([], 1),
        ([[]], 1),
        (None, 1),
        (7, 1),
        ({"text": "abcd"}, 1),
        ([None, "abcd"], 1),
    ],
)
def test_prompt_counts_its_bytes_or_its_ids(prompt: Any, tokens: int) -> None:
    assert completion(prompt).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ("x" * 40, 10),
        ("你" * 40, 30),
        ([{"type": "text", "text": "x" * 40}], 10),
        ([{"text": "x" * 40}], 10),
        ([{"type": "text"}], 1),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}], 1000),
        ([{"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}}], 500),
        ([{"type": "audio_url", "audio_url": {"url": "http://a/b"}}], 500),
        ([{"type": "video_url", "video_url": {"url": "http://a/b"}}], 1000),
        ([{"type": "text", "text": "x" * 40}, {"type": "image_url"}, {"type": "image_url"}], 2010),
        ([{"type": 7}], 1000),
        (["x" * 40, None], 1),
        (None, 1),
        (7, 1),
        ({"type": "text", "text": "x" * 40}, 1),
    ],
)
def test_message_counts_its_text_and_a_fixed_number_for_media(content: Any, tokens: int) -> None:
    assert chat(content).prompt_tokens == tokens


def test_all_messages_count() -> None:
    messages = [{"role": "system", "content": "x" * 40}, "nonsense", None, {"role": "user", "content": "x" * 80}]
    assert chat(messages=messages).prompt_tokens == 30


@pytest.mark.parametrize("messages", [None, "hello", 7, {}, {"content": "x" * 40}])
def test_messages_that_are_no_list_are_the_engines_business(messages: Any) -> None:
    assert chat(messages=messages).prompt_tokens == 1


def test_tools_count_their_bytes() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 400}}]
    assert chat("x" * 40, tools=tools).prompt_tokens == 10 + len(orjson.dumps(tools)) // 4


def test_deeply_nested_prompts_are_counted_without_recursion() -> None:
    deep = b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert parse(Api.COMPLETIONS, deep, COST).prompt_tokens == 1


def test_replaced_prompt_is_counted_by_the_same_rule() -> None:
    assert estimate_text_tokens("x" * 40, COST) == 10
    assert estimate_text_tokens([1, 2, 3], COST) == 3
    assert estimate_text_tokens("", COST) == 0


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 10}, 10),
        ({"max_completion_tokens": 20}, 20),
        ({"max_completion_tokens": 20, "max_tokens": 10}, 20),
        ({"max_completion_tokens": None, "max_tokens": 10}, 10),
        ({"max_tokens": None}, 256),
        ({"max_tokens": 0}, 256),
        ({"max_tokens": -1}, 256),
        ({"max_tokens": True}, 1),
        ({"max_tokens": "10"}, 10),
        ({"max_tokens": 10.0}, 10),
        ({"max_completion_tokens": " 20 ", "max_tokens": 10}, 20),
        ({"max_tokens": 1e30}, 256),
    ],
)
def test_output_limit_is_the_clients_or_a_guess(fields: dict[str, Any], tokens: int) -> None:
    assert chat(**fields).output_tokens == tokens


@pytest.mark.parametrize("limit", [MAX_OUTPUT_TOKENS + 1, 2**63 - 1, 2**64 - 1])
def test_absurd_limit_weighs_no_more_than_the_longest_answer(limit: int) -> None:
    assert chat(max_tokens=limit).output_tokens == MAX_OUTPUT_TOKENS


def test_loads_follow_from_the_tokens() -> None:
    call = chat("x" * 4000, max_tokens=100)
    assert call.make_pick_request().prefill_load == Load(compute_tokens=1000 + PREFILL_OVERHEAD_TOKENS, kv_tokens=1000)
    assert call.make_pick_request().decode_load == Load(compute_tokens=DECODE_OVERHEAD_TOKENS, kv_tokens=1100)


def test_size_of_a_token_is_configurable() -> None:
    cost = Cost(bytes_per_token=2, default_output_tokens=5)
    call = parse(Api.COMPLETIONS, b'{"prompt": "abcdef"}', cost)
    assert (call.prompt_tokens, call.output_tokens) == (3, 5)


# The bytes the engines get


def test_leg_may_set_a_reserved_field_itself() -> None:
    call = chat(kv_transfer_params={"remote_host": "10.6.6.6"})
    assert json.loads(join_body(call.make_body({"kv_transfer_params": {"ours": 1}})))["kv_transfer_params"] == {
        "ours": 1
    }


def test_changes_of_a_leg_count_more_than_those_of_the_call() -> None:
    call = chat(stream=True, max_tokens=7)
    leg = json.loads(join_body(call.make_body({"stream": False, "stream_options": REMOVED, "max_tokens": 1})))
    assert (leg["stream"], leg["max_tokens"]) == (False, 1)
    assert "stream_options" not in leg


def test_changed_call_adds_to_the_changes_before() -> None:
    call = chat("x" * 40, request_id="mine", n=2)
    changed = call.copy_with_changes({"n": REMOVED}, prompt_tokens=99).copy_with_changes({"seed": 3})
    assert json.loads(join_body(changed.make_body({}))) == {
        "model": "m",
        "messages": call.values["messages"],
        "seed": 3,
    }
    assert changed.prompt_tokens == 99
    assert (call.prompt_tokens, json.loads(join_body(call.make_body({})))["n"]) == (10, 2)


# Members for a continuation


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, []),
        ("END", ["END"]),
        ("", [""]),
        ([], []),
        (["a", "b"], ["a", "b"]),
        (["a", 7, None], ["a"]),
    ],
)
def test_stop_strings_are_read_however_they_are_given(stop: Any, expected: list[str]) -> None:
    assert list(chat(stop=stop).stop_strings) == expected
    assert list(chat().stop_strings) == []


def test_whole_answer_may_be_requested_as_a_stream() -> None:
    call = chat(request_id="mine")
    streamed = call.copy_with_changes({"stream": True, "seed": 3}, stream=True)
    assert streamed.stream
    assert not call.stream
    assert json.loads(join_body(streamed.make_body({}))) == {
        "model": "m",
        "messages": call.values["messages"],
        "stream": True,
        "seed": 3,
    }


def test_changed_call_keeps_what_is_added_to_its_kv_parameters() -> None:
    call = replace(chat(), kv_params={"prompt_token_ids": [1, 2]})
    assert call.copy_with_changes({"seed": 3}).kv_params == {"prompt_token_ids": [1, 2]}
    assert chat().kv_params == {}


def test_call_without_another_prompt_keeps_its_cost() -> None:
    call = chat("x" * 40)
    assert call.copy_with_changes({"seed": 3}).prompt_tokens == 10
    assert call.copy_with_changes({}, prompt_tokens=0).prompt_tokens == 0


@pytest.mark.parametrize(
    ("fields", "shows"),
    [
        ({}, False),
        ({"logprobs": False}, True),  # engines take it for 0
        ({"logprobs": None}, False),
        ({"return_token_ids": True}, True),
        ({"logprobs": True}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_shows_single_tokens(fields: dict[str, Any], shows: bool) -> None:
    assert completion(**fields).shows_token_details is shows
