"""A request of SGLang's own API: what it costs, what is refused, and what the engines get of it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.common.errors import BadRequest
from proxy.dialects.call import MAX_OUTPUT_TOKENS, Call
from proxy.settings import Cost
from proxy.wire import sglang
from proxy.wire.document import join_body
from proxy.wire.openai import Api
from tests.parsing import parse

COST = Cost(bytes_per_token=4, image_tokens=1000, audio_tokens=500, default_output_tokens=256)


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
def test_native_prompt_counts_like_others(fields: dict[str, Any], tokens: int) -> None:
    assert native(**fields).prompt_tokens == tokens


def test_native_call_says_in_its_sampling_params_how_long_its_answer_may_be() -> None:
    assert native(text="a").output_tokens == sglang.DEFAULT_OUTPUT_TOKENS
    assert native(text="a", sampling_params={"max_new_tokens": 7}).output_tokens == 7
    assert native(text="a", sampling_params={"max_new_tokens": 2**40}).output_tokens == MAX_OUTPUT_TOKENS


def test_native_call_reaches_the_engines_without_what_is_internal() -> None:
    call = native(text="a", stream=True, **dict.fromkeys(sglang.RESERVED_FIELDS, 1))
    assert call.stream
    assert (call.api.value, call.api.path) == ("generate", "/generate")
    assert call.headers == {"traceparent": "x"}
    assert orjson.loads(join_body(call.make_body({"rid": "r"}))) == {"text": "a", "stream": True, "rid": "r"}


@pytest.mark.parametrize("many", [False, True])
def test_sampling_parameters_of_sglang_are_numbers_too(many: bool) -> None:
    params = {"max_new_tokens": 10.0, "n": "2", "min_new_tokens": " 3 ", "temperature": 0.5}
    meant = {"max_new_tokens": 10, "n": 2, "min_new_tokens": 3, "temperature": 0.5}
    call = native(text="a", sampling_params=[params] if many else params)
    assert call.output_tokens == 10
    assert json.loads(join_body(call.make_body({})))["sampling_params"] == ([meant] if many else meant)
    assert sglang.read_sample_count(call.values["sampling_params"]) == 2
    with pytest.raises(BadRequest, match="max_new_tokens"):
        native(text="a", sampling_params={"max_new_tokens": "ten"})


def test_native_flag_is_not_guessed_at() -> None:
    with pytest.raises(BadRequest) as refused:
        native(text="a", stream="yes")
    assert refused.value.param == "stream"
