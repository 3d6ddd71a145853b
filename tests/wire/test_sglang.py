"""SGLang's own shapes: what of a request belongs to which answer, and what of an answer is whose."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.errors import BadRequest
from proxy.wire.sglang import (
    PrefillerMeta,
    count_embeddings,
    is_batch_request,
    needs_prefill_answer,
    read_output_limit,
    read_prompt,
    read_sample_count,
    split_into_items,
    usage_of_event,
)


def changes(values: dict[str, Any]) -> list[dict[str, object]]:
    return [item.changes for item in split_into_items(values, 100)]


# Requests


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [1, 2]}, False),
        ({"input_ids": []}, False),
        ({"input_ids": [[1, 2]]}, True),
        ({"input_embeds": [[0.5]]}, False),
        ({"input_embeds": [[[0.5]]]}, True),
        ({"text": "a", "input_ids": [[1]]}, False),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
        ({"text": "a", "sampling_params": {"n": 2, "beam_width": 4}}, False),
        ({"text": 5}, False),
        ({}, False),
    ],
)
def test_is_batch_matches_answers_that_are_lists(values: dict[str, Any], expected: bool) -> None:
    assert is_batch_request(values) is expected


def test_single_prompt_is_left_as_it_is() -> None:
    assert changes({"text": "a", "sampling_params": {"n": 1}, "logprob_start_len": 3}) == [{}]
    assert changes({"input_ids": [1, 2], "image_data": ["a", "b"]}) == [{}]


def test_lists_beside_a_list_of_prompts_are_shared_out() -> None:
    values = {
        "input_ids": [[1], [2, 3]],
        "sampling_params": [{"top_k": 1}, {"top_k": 2}],
        "image_data": [["x", "y"], None],
        "top_logprobs_num": 5,
        "token_ids_logprob": [7, 8],
        "lora_path": [],
    }
    assert changes(values) == [
        {"input_ids": [1], "sampling_params": {"top_k": 1}, "image_data": ["x", "y"]},
        {"input_ids": [2, 3], "sampling_params": {"top_k": 2}, "image_data": None},
    ]
    assert changes({"text": ["a"], "token_ids_logprob": [[7, 8]]}) == [{"text": "a", "token_ids_logprob": [7, 8]}]


def test_items_have_the_samples_of_each_prompt_in_order() -> None:
    items = split_into_items({"text": ["a", "b"], "sampling_params": {"n": 2, "top_k": 1}}, 4)
    assert [item.changes["text"] for item in items] == ["a", "a", "b", "b"]
    assert all(item.changes["sampling_params"] == {"n": 1, "top_k": 1} for item in items)
    assert [item.is_first_sample for item in items] == [True, False, True, False]


@pytest.mark.parametrize(
    "values",
    [
        {"text": ["a"] * 5},
        {"text": "a", "sampling_params": {"n": 5}},
        {"text": []},
        {"text": ["a", "b"], "return_logprob": [True]},
        {"text": ["a", "b"], "sampling_params": [{"n": 2}, None]},
    ],
)
def test_lists_of_another_length_than_the_prompts_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        split_into_items(values, 4)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "beam_width", "x"]), inner),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    ["text", "input_ids", "input_embeds", "sampling_params", "return_logprob", "token_ids_logprob"]
)


@given(st.dictionaries(_NAMES, _ANY))
def test_any_request_is_split_or_rejected(values: dict[str, Any]) -> None:
    try:
        items = split_into_items(values, 8)
    except BadRequest:
        return
    assert 1 <= len(items) <= 8
    assert len(items) == 1 or is_batch_request(values)
    assert needs_prefill_answer(values) in (True, False)
    assert read_output_limit(values.get("sampling_params")) >= 0
    assert read_sample_count(values.get("sampling_params")) >= 1


def test_answer_has_128_tokens_unless_asked_otherwise() -> None:
    assert [read_output_limit(params) for params in (None, {}, {"max_new_tokens": 5}, [{"max_new_tokens": 0}])] == [
        *(128, 128, 5, 0)
    ]


def test_first_prompt_that_is_there_counts() -> None:
    assert read_prompt({"text": None, "input_ids": [1], "input_embeds": [[0.1]]}) == [1]
    assert read_prompt({}) is None


# Answers


def test_parts_of_the_prefiller_come_first() -> None:
    answer = {"text": "x", "meta_info": {"input_token_logprobs": [1, 2], "input_top_logprobs": [[3]], "id": "p"}}
    parts = PrefillerMeta(orjson.dumps(answer))
    told = {"text": "y", "meta_info": {"input_token_logprobs": [9], "output_token_logprobs": [8], "id": "d"}}
    assert parts.complete_event(told) == {
        "text": "y",
        "meta_info": {"input_token_logprobs": [1, 2, 9], "output_token_logprobs": [8], "id": "d"},
    }
    assert parts.complete_event({"text": "z"}) == {"text": "z"}


def test_first_event_of_a_stream_has_the_parts_of_the_prefiller() -> None:
    events = b"".join(b"data: %b\n\n" % told for told in (b'{"meta_info":{"input_token_logprobs":[1]}}', b"[DONE]"))
    told: dict[str, Any] = {"meta_info": {"input_token_logprobs": []}}
    assert PrefillerMeta(events).complete_event(told) == {"meta_info": {"input_token_logprobs": [1]}}


def test_usage_has_the_openai_format() -> None:
    told: dict[str, Any] = {"meta_info": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3}}
    assert usage_of_event(told) == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert usage_of_event({"text": "x"}) is usage_of_event([]) is None


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"input_embeds": [[0.1, 0.2], [0.3, 0.4]]}, 2),
        ({"input_embeds": [[[0.1], [0.2]], [[0.3]]]}, 3),
        ({"input_embeds": "none"}, None),
        ({}, None),
        ({"text": "x", "input_embeds": [[0.1]]}, None),
        ({"input_ids": [1], "input_embeds": [[0.1]]}, None),
    ],
)
def test_embeddings_count_where_they_are_the_prompt(fields: dict[str, Any], count: int | None) -> None:
    assert count_embeddings(fields) == count
