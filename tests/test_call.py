"""A parsed request: what it costs, what is refused, and the bytes the engines get."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from proxy.backend import Load
from proxy.call import DECODE_OVERHEAD_TOKENS, MAX_OUTPUT_TOKENS, PREFILL_OVERHEAD_TOKENS, Call, text_tokens
from proxy.errors import BadRequest
from proxy.settings import Cost
from proxy.wire import sglang
from proxy.wire.document import REMOVED
from proxy.wire.openai import RESERVED_FIELDS, Api
from tests.parsing import parse

COST = Cost(bytes_per_token=4, image_tokens=1000, audio_tokens=500, default_output_tokens=256)


def chat(content: Any = "hi", **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse(Api.CHAT, orjson.dumps(body), COST)


def completion(prompt: Any = "hi", **fields: Any) -> Call:
    return parse(Api.COMPLETIONS, orjson.dumps({"model": "m", "prompt": prompt, **fields}), COST)


# What it costs


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
def test_a_prompt_counts_its_bytes_or_its_ids(prompt: Any, tokens: int) -> None:
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
def test_a_message_counts_its_text_and_a_fixed_number_for_media(content: Any, tokens: int) -> None:
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


def test_a_prompt_of_its_own_is_counted_by_the_same_rule() -> None:
    assert text_tokens("x" * 40, COST) == 10
    assert text_tokens([1, 2, 3], COST) == 3
    assert text_tokens("", COST) == 0


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
def test_the_output_limit_is_the_clients_or_a_guess(fields: dict[str, Any], tokens: int) -> None:
    assert chat(**fields).output_tokens == tokens


@pytest.mark.parametrize("limit", [MAX_OUTPUT_TOKENS + 1, 2**63 - 1, 2**64 - 1])
def test_an_absurd_limit_weighs_no_more_than_the_longest_answer(limit: int) -> None:
    assert chat(max_tokens=limit).output_tokens == MAX_OUTPUT_TOKENS


def test_the_loads_follow_from_the_tokens() -> None:
    call = chat("x" * 4000, max_tokens=100)
    assert call.prefill_load == Load(compute=1000 + PREFILL_OVERHEAD_TOKENS, kv=1000)
    assert call.decode_load == Load(compute=DECODE_OVERHEAD_TOKENS, kv=1100)


def test_the_size_of_a_token_is_configurable() -> None:
    cost = Cost(bytes_per_token=2, default_output_tokens=5)
    call = parse(Api.COMPLETIONS, b'{"prompt": "abcdef"}', cost)
    assert (call.prompt_tokens, call.output_tokens) == (3, 5)


# What is read


def test_stream_n_and_headers_are_read() -> None:
    call = parse(Api.CHAT, b'{"stream": true, "n": 3}', COST, {"traceparent": "00-1"})
    assert (call.stream, call.samples, call.headers) == (True, 3, {"traceparent": "00-1"})
    assert call.api is Api.CHAT


@pytest.mark.parametrize("fields", [{}, {"stream": None, "n": None}, {"stream": False, "n": 1}])
def test_what_is_absent_has_the_defaults_of_the_api(fields: dict[str, Any]) -> None:
    call = chat(**fields)
    assert (call.stream, call.samples, call.include_usage, dict(call.headers)) == (False, 1, False, {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"stream": 2}, "stream"),
        ({"stream": []}, "stream"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": ["include_usage"]}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "false"}}, "include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": "0"}, "n"),
        ({"n": False}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": "1e1"}, "max_tokens"),
        ({"max_tokens": 10.5}, "max_tokens"),
        ({"max_completion_tokens": []}, "max_completion_tokens"),
        ({"min_tokens": {}}, "min_tokens"),
        ({"seed": "0x7"}, "seed"),
        ({"best_of": "1.5"}, "best_of"),
        ({"top_logprobs": "some"}, "top_logprobs"),
        ({"thinking_token_budget": "1 0"}, "thinking_token_budget"),
        ({"echo": "maybe"}, "echo"),
        ({"logprobs": 5}, "logprobs"),
        ({"return_token_ids": []}, "return_token_ids"),
    ],
)
def test_a_field_the_gateway_acts_on_must_have_its_type(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param
    assert refusal.value.status == 400


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"prompt": "my-secret-prompt}', b'{"stream": true, "stream": false}'])
def test_what_is_not_one_plain_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(Api.CHAT, raw, COST)
    assert refusal.value.code == "invalid_json"
    assert "my-secret-prompt" not in refusal.value.message


def test_other_fields_are_the_engines_business() -> None:
    assert chat(temperature="hot", model=7, top_k=[], stop={}).body({})


SPELLINGS = [
    *(
        (10.0, 10),
        ("10", 10),
        (" 10\n", 10),
        ("10.0", 10),
        ("+10", 10),
        ("010", 10),
        ("1_0", 10),
        (True, 1),
        (-1.0, -1),
    ),
    *((2**63, 2**63), (-(2**63), -(2**63)), (str(2**64 - 1), 2**64 - 1), (float(2**62), 2**62), (-0.0, 0)),
]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens", "seed", "thinking_token_budget"])
@pytest.mark.parametrize(("spelled", "meant"), SPELLINGS)
def test_a_number_is_what_engines_take_it_for(name: str, spelled: Any, meant: int) -> None:
    """As the request model of vLLM reads it, which is made with the same library."""

    class Request(BaseModel):
        number: int

    raw = orjson.dumps({"messages": [], name: spelled, "temperature": 1.0})
    assert Request(number=spelled).number == meant
    for text in (raw, b" " + raw):
        call = parse(Api.CHAT, text, COST)
        assert (call.values[name], type(call.values[name])) == (meant, int)
        assert b'"%b":%d' % (name.encode(), meant) in call.body({}).replace(b": ", b":")


@pytest.mark.parametrize("number", [1e19, 1e300, -1e19, "9" * 30])
def test_a_number_of_more_than_64_bits_reaches_the_engine_as_it_is(number: Any) -> None:
    call = chat(max_tokens=number)
    assert json.loads(call.body({}))["max_tokens"] == number
    assert call.output_limit is None


@pytest.mark.parametrize(
    ("spelled", "meant"), [("true", True), ("False", False), ("no", False), (0, False), (1.0, True), ("1", True)]
)
def test_a_flag_is_what_engines_take_it_for(spelled: Any, meant: bool) -> None:
    call = chat(return_token_ids=spelled, logprobs=spelled)
    assert (call.values["return_token_ids"], call.shows_single_tokens) == (meant, meant)
    assert json.loads(call.body({}))["logprobs"] is meant


def test_log_probabilities_of_a_completion_are_a_number_of_them() -> None:
    assert json.loads(completion(logprobs="2").body({}))["logprobs"] == 2
    assert completion(logprobs=0).shows_single_tokens


@pytest.mark.parametrize("many", [False, True])
def test_sampling_parameters_of_sglang_are_numbers_too(many: bool) -> None:
    params = {"max_new_tokens": 10.0, "n": "2", "min_new_tokens": " 3 ", "temperature": 0.5}
    meant = {"max_new_tokens": 10, "n": 2, "min_new_tokens": 3, "temperature": 0.5}
    call = native(text="a", sampling_params=[params] if many else params)
    assert call.output_tokens == 10
    assert json.loads(call.body({}))["sampling_params"] == ([meant] if many else meant)
    assert sglang.samples_of(call.values["sampling_params"]) == 2
    with pytest.raises(BadRequest, match="max_new_tokens"):
        native(text="a", sampling_params={"max_new_tokens": "ten"})


# The bytes the engines get


def test_a_body_nobody_changes_keeps_every_member_as_it_was_written() -> None:
    raw = b'{"messages":[{"role": "user","content":"\\u00fc \\/ "}],"temperature":1.0,"seed":12345678901234567890}'
    assert parse(Api.CHAT, raw, COST).body({}) == raw


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
def test_fields_that_steer_engines_are_removed(name: str) -> None:
    body = chat(**{name: {"remote_host": "10.6.6.6"}}).body({})
    assert name not in json.loads(body)
    assert b"10.6.6.6" not in body


def test_a_reserved_field_is_removed_however_its_name_is_spelled() -> None:
    raw = b'{"kv_transfer_param\\u0073": {"remote_host": "10.6.6.6"}, "prompt": "hi"}'
    assert parse(Api.COMPLETIONS, raw, COST).body({}) == b'{"prompt": "hi"}'


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
def test_they_are_removed_where_vllm_would_read_them_too(name: str) -> None:
    extra = {name: "10.6.6.6", "mine": [1, "two"]}
    assert json.loads(chat(vllm_xargs=extra).body({}))["vllm_xargs"] == {"mine": [1, "two"]}
    assert json.loads(completion(vllm_xargs={name: 1}).body({}))["vllm_xargs"] == {}


@pytest.mark.parametrize("extra", [None, "kv_transfer_params", ["kv_transfer_params"], {}, {"mine": 1}])
def test_other_extra_arguments_are_the_engines_business(extra: Any) -> None:
    assert json.loads(chat(vllm_xargs=extra).body({}))["vllm_xargs"] == extra


def test_a_leg_may_set_a_reserved_field_itself() -> None:
    call = chat(kv_transfer_params={"remote_host": "10.6.6.6"})
    assert json.loads(call.body({"kv_transfer_params": {"ours": 1}}))["kv_transfer_params"] == {"ours": 1}


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_a_stream_always_reports_its_usage_to_the_gateway(options: dict[str, Any]) -> None:
    call = chat(stream=True, **options)
    assert not call.include_usage
    assert json.loads(call.body({}))["stream_options"] == {"include_usage": True}


def test_a_client_that_wants_usage_keeps_its_own_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = chat(stream=True, stream_options=options)
    assert call.include_usage
    assert json.loads(call.body({}))["stream_options"] == options


def test_an_answer_that_is_not_streamed_gets_no_stream_options() -> None:
    assert "stream_options" not in json.loads(chat().body({}))


def test_the_changes_of_a_leg_count_more_than_those_of_the_call() -> None:
    call = chat(stream=True, max_tokens=7)
    leg = json.loads(call.body({"stream": False, "stream_options": REMOVED, "max_tokens": 1}))
    assert (leg["stream"], leg["max_tokens"]) == (False, 1)
    assert "stream_options" not in leg


def test_a_changed_call_adds_to_the_changes_before() -> None:
    call = chat("x" * 40, request_id="mine", n=2)
    changed = call.changed({"n": REMOVED}, prompt_tokens=99).changed({"seed": 3})
    assert json.loads(changed.body({})) == {"model": "m", "messages": call.values["messages"], "seed": 3}
    assert changed.prompt_tokens == 99
    assert (call.prompt_tokens, json.loads(call.body({}))["n"]) == (10, 2)


# What a continuation needs


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
    assert list(chat(stop=stop).stops) == expected
    assert list(chat().stops) == []


def test_an_answer_may_be_streamed_that_nobody_asked_to_be() -> None:
    call = chat(request_id="mine")
    streamed = call.changed({"stream": True, "seed": 3}, stream=True)
    assert streamed.stream
    assert not call.stream
    assert json.loads(streamed.body({})) == {
        "model": "m",
        "messages": call.values["messages"],
        "stream": True,
        "seed": 3,
    }


def test_a_changed_call_keeps_what_is_added_to_its_kv_parameters() -> None:
    call = replace(chat(), kv_params={"prompt_token_ids": [1, 2]})
    assert call.changed({"seed": 3}).kv_params == {"prompt_token_ids": [1, 2]}
    assert chat().kv_params == {}


def test_a_call_without_another_prompt_keeps_its_cost() -> None:
    call = chat("x" * 40)
    assert call.changed({"seed": 3}).prompt_tokens == 10
    assert call.changed({}, prompt_tokens=0).prompt_tokens == 0


# SGLang's own API


def native(**fields: Any) -> Call:
    return parse(Api.GENERATE, orjson.dumps(fields), COST, {"traceparent": "x"})


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"text": "x" * 400}, 100),
        ({"text": ["abcd", "abcde"]}, 3),
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": [[1, 2], [3]]}, 3),
        ({"text": "abcd", "input_ids": [1, 2, 3]}, 1),
        ({"input_embeds": [[0.5] * 64] * 7}, 7),
        ({"input_embeds": [[[0.5] * 64] * 7, [[0.5] * 64]]}, 8),
        ({"text": "abcd", "image_data": "x"}, 1001),
        ({"text": ["a", "b"], "image_data": [["x", "y"], None], "audio_data": ["z"]}, 2502),
        ({"text": 5, "image_data": None}, 1),
        ({}, 1),
    ],
)
def test_a_native_prompt_counts_like_others(fields: dict[str, Any], tokens: int) -> None:
    assert native(**fields).prompt_tokens == tokens


def test_a_native_call_says_in_its_sampling_params_how_long_its_answer_may_be() -> None:
    assert native(text="a").output_tokens == sglang.DEFAULT_OUTPUT_TOKENS
    assert native(text="a", sampling_params={"max_new_tokens": 7}).output_tokens == 7
    assert native(text="a", sampling_params={"max_new_tokens": 2**40}).output_tokens == MAX_OUTPUT_TOKENS


def test_a_native_call_reaches_the_engines_without_what_is_internal() -> None:
    call = native(text="a", stream=True, **dict.fromkeys(sglang.RESERVED_FIELDS, 1))
    assert call.stream
    assert (call.api.value, call.api.path) == ("generate", "/generate")
    assert call.headers == {"traceparent": "x"}
    assert orjson.loads(call.body({"rid": "r"})) == {"text": "a", "stream": True, "rid": "r"}


def test_a_native_flag_is_not_guessed_at() -> None:
    with pytest.raises(BadRequest) as refused:
        native(text="a", stream="yes")
    assert refused.value.param == "stream"
