"""Several prompts or samples: split into single units, and merged into one answer again."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.common.errors import BadRequest
from proxy.dialects.base import Unit
from proxy.dialects.call import Call
from proxy.dialects.fanout import MergedStreams, has_single_choice, merge_answers, merge_usage, split_into_units
from proxy.settings import Cost
from proxy.wire.document import join_body
from proxy.wire.openai import Api
from tests.parsing import parse

COST = Cost()


def call_of(api: Api, **fields: Any) -> Call:
    return parse(api, orjson.dumps({"model": "m", **fields}), COST)


def chat(**fields: Any) -> Call:
    return call_of(Api.CHAT, messages=[{"role": "user", "content": "hi"}], **fields)


def completion(prompt: Any, **fields: Any) -> Call:
    return call_of(Api.COMPLETIONS, prompt=prompt, **fields)


def split_up(call: Call) -> list[Unit]:
    return split_into_units(call, COST, max_units=100)


def bodies(units: list[Unit]) -> list[dict[str, Any]]:
    return [json.loads(join_body(unit.call.make_body({}))) for unit in units]


# Split


@pytest.mark.parametrize("call", [chat(), chat(n=1), completion("hi"), completion([1, 2, 3]), completion([])])
def test_one_prompt_with_one_sample_stays_as_it_is(call: Call) -> None:
    (unit,) = split_up(call)
    assert (unit.call, unit.index, unit.is_first_sample) == (call, 0, True)
    assert unit.call.make_body({}) == call.document.make_changed_body({})


def test_samples_become_units_with_one_sample_each() -> None:
    units = split_up(chat(n=3, best_of=3))
    assert [(unit.index, unit.is_first_sample) for unit in units] == [(0, True), (1, False), (2, False)]
    for body in bodies(units):
        assert "n" not in body
        assert "best_of" not in body
        assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_prompts_become_units_with_one_prompt_each() -> None:
    units = split_up(completion(["a", "b" * 400, ""]))
    assert [unit.index for unit in units] == [0, 1, 2]
    assert all(unit.is_first_sample for unit in units)
    assert [body["prompt"] for body in bodies(units)] == ["a", "b" * 400, ""]
    assert [unit.call.prompt_tokens for unit in units] == [1, 100, 1]


def test_prompts_of_token_ids_become_units() -> None:
    units = split_up(completion([[1, 2, 3], [4], []]))
    assert [body["prompt"] for body in bodies(units)] == [[1, 2, 3], [4], []]
    assert [unit.call.prompt_tokens for unit in units] == [3, 1, 1]


def test_list_of_one_prompt_becomes_that_prompt() -> None:
    (unit,) = split_up(completion(["hi"]))
    assert (unit.index, unit.is_first_sample) == (0, True)
    assert bodies([unit]) == [{"model": "m", "prompt": "hi"}]


def test_index_is_prompt_times_n_plus_sample() -> None:
    units = split_up(completion(["a", "b"], n=3))
    assert [unit.index for unit in units] == [0, 1, 2, 3, 4, 5]
    assert [body["prompt"] for body in bodies(units)] == ["a", "a", "a", "b", "b", "b"]
    assert [unit.is_first_sample for unit in units] == [True, False, False, True, False, False]


def test_prompt_of_a_chat_is_not_its_own_business() -> None:
    (unit,) = split_up(chat(prompt=["a", "b"]))
    assert bodies([unit])[0]["prompt"] == ["a", "b"]


def test_samples_of_one_prompt_have_the_cost_of_the_whole_prompt() -> None:
    call = chat(n=2)
    assert [unit.call.prompt_tokens for unit in split_up(call)] == [call.prompt_tokens] * 2


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (7, [7, 8, 9]),
        (0, [0, 1, 2]),
        (-5, [-5, -4, -3]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        (-1, [-1, -1, -1]),  # vLLM: no seed
        (None, [None, None, None]),
        ("7", [7, 8, 9]),
        (7.0, [7, 8, 9]),
    ],
)
def test_sample_i_has_the_seed_plus_i(seed: Any, expected: list[Any]) -> None:
    assert [body["seed"] for body in bodies(split_up(chat(n=3, seed=seed)))] == expected


def test_seed_no_engine_takes_still_makes_a_body() -> None:
    assert bodies(split_up(chat(n=2, seed=2**64 - 1)))[0]["seed"] == 2**64 - 1


def test_every_prompt_begins_with_the_clients_seed() -> None:
    assert [body["seed"] for body in bodies(split_up(completion(["a", "b"], n=2, seed=7)))] == [7, 8, 7, 8]


@pytest.mark.parametrize("call", [chat(n=101), completion(["x"] * 101), completion(["x"] * 51, n=2), chat(n=2**62)])
def test_too_many_units_are_refused(call: Call) -> None:
    with pytest.raises(BadRequest, match="limit of 100"):
        split_up(call)


def test_fanout_makes_the_allowed_number_of_units() -> None:
    assert len(split_up(completion(["x"] * 50, n=2))) == 100


@pytest.mark.parametrize(
    "prompt", [[None], ["a", None], ["a", 1], [[1], ["a"]], [[1, [2]]], [{"a": 1}], [1.5], [[True]]]
)
def test_list_of_invalid_prompts_is_rejected(prompt: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        split_up(completion(prompt))
    assert refusal.value.param == "prompt"


def test_deeply_nested_prompt_is_refused() -> None:
    call = parse(Api.COMPLETIONS, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", COST)
    with pytest.raises(BadRequest):
        split_up(call)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (chat(), True),
        (chat(n=1), True),
        (chat(n=None), True),
        (completion("hi"), True),
        (completion([1, 2, 3]), True),
        (completion([]), True),
        (chat(prompt=["a", "b"]), True),
        (chat(n=2), False),
        (completion(["hi"]), False),
        (completion([[1, 2]]), False),
        (chat(use_beam_search=True), False),
        (completion("hi", best_of=2), False),
    ],
)
def test_one_answer_with_one_sequence_of_tokens(call: Call, expected: bool) -> None:
    assert has_single_choice(call) is expected


# Merge


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def answer(name: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": name, "finish_reason": "stop"}
    return {"id": f"cmpl-{name}", "created": ord(name), "model": "m", "choices": [choice], **more}


def test_answers_are_merged_in_the_order_of_their_units() -> None:
    units = split_up(completion(["a", "b"], n=2))
    merged = json.loads(merge_answers(units, [answer(name, usage=usage(5, 2)) for name in "wxyz"]))
    assert [(choice["index"], choice["text"]) for choice in merged["choices"]] == list(enumerate("wxyz"))
    assert (merged["id"], merged["created"], merged["model"]) == ("cmpl-w", ord("w"), "m")
    assert merged["usage"] == {"prompt_tokens": 10, "total_tokens": 18, "completion_tokens": 8}


def test_metrics_of_one_sequence_are_not_those_of_several() -> None:
    units = split_up(chat(n=2))
    answers = [{**answer(name, usage=usage(5, 2)), "metrics": {"queue_time_ms": 1.5}} for name in "ab"]
    assert json.loads(merge_answers(units, answers))["metrics"] is None
    assert "metrics" not in json.loads(merge_answers(units, [answer("a"), answer("b")]))


def test_answers_without_usage_are_merged_without() -> None:
    units = split_up(chat(n=2))
    assert json.loads(merge_answers(units, [answer("a", usage=usage(5, 2)), answer("b")]))["usage"] is None


def test_tokens_of_a_prompt_count_once_and_those_of_all_answers() -> None:
    units = split_up(completion(["a", "b"], n=2))
    merged = merge_usage(units, [usage(10, 1, 4), usage(10, 2, 8), usage(20, 3, 16), usage(20, 4, 16)])
    assert merged == {
        "prompt_tokens": 30,
        "total_tokens": 40,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 20},
    }


@pytest.mark.parametrize("others", [None, {}])
def test_cached_tokens_are_reported_only_when_all_units_have_them(others: Any) -> None:
    units = split_up(completion(["a", "b"]))
    merged = merge_usage(units, [usage(10, 1, 4), {**usage(10, 2), "prompt_tokens_details": others}])
    assert merged == {"prompt_tokens": 20, "total_tokens": 23, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ([{"reasoning_tokens": 3}, {"reasoning_tokens": 4}], {"reasoning_tokens": 7}),
        ([{"reasoning_tokens": 3}, {"reasoning_tokens": None}], {"reasoning_tokens": 3}),
        ([{"reasoning_tokens": 3}, None], None),
        ([{"reasoning_tokens": 3}, {}], None),
        ([None, None], None),
    ],
)
def test_reasoning_of_all_answers_counts_where_all_tell(details: list[Any], expected: Any) -> None:
    usages = [usage(10, 5) | {"completion_tokens_details": each} for each in details]
    assert merge_usage(split_up(chat(n=2)), usages).get("completion_tokens_details") == expected  # type: ignore[union-attr]


def test_numbers_that_are_missing_count_as_nothing() -> None:
    units = split_up(chat(n=2))
    assert merge_usage(units, [{}, {"completion_tokens": None}]) == {
        "prompt_tokens": 0,
        "total_tokens": 0,
        "completion_tokens": 0,
    }


def test_one_unknown_usage_makes_the_sum_unknown() -> None:
    assert merge_usage(split_up(chat(n=2)), [usage(1, 1), None]) is None


def payload(name: str, content: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    return {"id": f"chatcmpl-{name}", "created": ord(name), "model": "m", "choices": [choice]}


def data_of(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def test_merged_chunks_look_like_those_of_one_stream() -> None:
    first, second = split_up(chat(n=2))
    merged = MergedStreams([first, second], has_usage_chunk=True)
    rewrite_first, rewrite_second = merged.make_unit_rendering(first).render, merged.make_unit_rendering(second).render
    chunks = [
        data_of(rewrite_second(payload("b", "x"))),
        data_of(rewrite_first(payload("a", "y"))),
        data_of(rewrite_second(payload("b", "z"))),
    ]
    assert [(chunk["id"], chunk["created"]) for chunk in chunks] == [("chatcmpl-b", ord("b"))] * 3
    assert [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]["content"]) for chunk in chunks] == [
        (1, "x"),
        (0, "y"),
        (1, "z"),
    ]


def test_rewriting_leaves_the_payload_alone() -> None:
    units = split_up(chat(n=2))
    before = payload("a", "x")
    MergedStreams(units, has_usage_chunk=True).make_unit_rendering(units[1]).render(before)
    assert before == payload("a", "x")


def test_usage_chunk_belongs_to_the_merged_stream() -> None:
    units = split_up(chat(n=2))
    merged = MergedStreams(units, has_usage_chunk=True)
    merged.make_unit_rendering(units[0]).render(payload("a", "x"))
    chunk = data_of(merged.render_final_events([usage(10, 1), usage(10, 2)], payload("b", "y")))
    assert (chunk["id"], chunk["created"], chunk["model"], chunk["choices"]) == ("chatcmpl-a", ord("a"), "m", [])
    assert chunk["usage"] == {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3}


def test_without_all_usages_there_is_no_usage_chunk() -> None:
    units = split_up(chat(n=2))
    assert MergedStreams(units, has_usage_chunk=True).render_final_events([usage(1, 1), None], payload("a", "x")) == b""
