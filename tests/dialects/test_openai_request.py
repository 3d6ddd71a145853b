"""A request in OpenAI's words: what is read of it, what is refused, and what the engines get of it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from proxy.common.errors import BadRequest
from proxy.connectors.one_engine import RARE_MEMBERS
from proxy.dialects.call import Call
from proxy.dialects.openai import ChatCompletions, Completions
from proxy.settings import Cost
from proxy.wire.document import join_body
from proxy.wire.openai import ORDINARY_FIELDS, RESERVED_FIELDS, Api
from tests.parsing import parse

COST = Cost()


def chat(content: Any = "hi", **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse(Api.CHAT, orjson.dumps(body), COST)


def completion(prompt: Any = "hi", **fields: Any) -> Call:
    return parse(Api.COMPLETIONS, orjson.dumps({"model": "m", "prompt": prompt, **fields}), COST)


# Members that are read


def test_stream_n_and_headers_are_read() -> None:
    call = parse(Api.CHAT, b'{"stream": true, "n": 3}', COST, {"traceparent": "00-1"})
    assert (call.stream, call.samples_per_prompt, call.headers) == (True, 3, {"traceparent": "00-1"})
    assert call.api is Api.CHAT


@pytest.mark.parametrize("fields", [{}, {"stream": None, "n": None}, {"stream": False, "n": 1}])
def test_absent_members_have_the_defaults_of_the_api(fields: dict[str, Any]) -> None:
    call = chat(**fields)
    assert (call.stream, call.samples_per_prompt, call.include_usage, dict(call.headers)) == (False, 1, False, {})


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
def test_field_the_gateway_acts_on_must_have_its_type(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param
    assert refusal.value.status == 400


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"prompt": "my-secret-prompt}', b'{"stream": true, "stream": false}'])
def test_body_that_is_not_a_plain_json_object_is_rejected(raw: bytes) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(Api.CHAT, raw, COST)
    assert refusal.value.code == "invalid_json"
    assert "my-secret-prompt" not in refusal.value.message


def test_other_fields_are_the_engines_business() -> None:
    assert chat(temperature="hot", model=7, top_k=[], stop={}).make_body({})


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
def test_number_is_what_engines_take_it_for(name: str, spelled: Any, meant: int) -> None:
    """Read a value as vLLM's request model does, which uses the same library."""

    class Request(BaseModel):
        number: int

    raw = orjson.dumps({"messages": [], name: spelled, "temperature": 1.0})
    assert Request(number=spelled).number == meant
    for text in (raw, b" " + raw):
        call = parse(Api.CHAT, text, COST)
        assert (call.values[name], type(call.values[name])) == (meant, int)
        assert b'"%b":%d' % (name.encode(), meant) in join_body(call.make_body({})).replace(b": ", b":")


@pytest.mark.parametrize("number", [1e19, 1e300, -1e19, "9" * 30])
def test_number_of_more_than_64_bits_reaches_the_engine_as_it_is(number: Any) -> None:
    call = chat(max_tokens=number)
    assert json.loads(join_body(call.make_body({})))["max_tokens"] == number
    assert call.output_limit is None


@pytest.mark.parametrize(
    ("spelled", "meant"), [("true", True), ("False", False), ("no", False), (0, False), (1.0, True), ("1", True)]
)
def test_flag_is_what_engines_take_it_for(spelled: Any, meant: bool) -> None:
    call = chat(return_token_ids=spelled, logprobs=spelled)
    assert (call.values["return_token_ids"], call.shows_token_details) == (meant, meant)
    assert json.loads(join_body(call.make_body({})))["logprobs"] is meant


def test_log_probabilities_of_a_completion_are_a_number_of_them() -> None:
    assert json.loads(join_body(completion(logprobs="2").make_body({})))["logprobs"] == 2
    assert completion(logprobs=0).shows_token_details


# The bytes the engines get


def test_unchanged_body_keeps_every_member_as_written() -> None:
    raw = b'{"messages":[{"role": "user","content":"\\u00fc \\/ "}],"temperature":1.0,"seed":12345678901234567890}'
    assert parse(Api.CHAT, raw, COST).make_body({}) == raw


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
def test_fields_that_steer_engines_are_removed(name: str) -> None:
    body = chat(**{name: {"remote_host": "10.6.6.6"}}).make_body({})
    assert name not in json.loads(join_body(body))
    assert b"10.6.6.6" not in body


def test_reserved_field_is_removed_however_its_name_is_spelled() -> None:
    raw = b'{"kv_transfer_param\\u0073": {"remote_host": "10.6.6.6"}, "prompt": "hi"}'
    assert parse(Api.COMPLETIONS, raw, COST).make_body({}) == b'{"prompt": "hi"}'


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
def test_reserved_members_are_removed_from_vllm_xargs(name: str) -> None:
    extra = {name: "10.6.6.6", "mine": [1, "two"]}
    assert json.loads(join_body(chat(vllm_xargs=extra).make_body({})))["vllm_xargs"] == {"mine": [1, "two"]}
    assert json.loads(join_body(completion(vllm_xargs={name: 1}).make_body({})))["vllm_xargs"] == {}


@pytest.mark.parametrize("extra", [None, "kv_transfer_params", ["kv_transfer_params"], {}, {"mine": 1}])
def test_other_extra_arguments_are_the_engines_business(extra: Any) -> None:
    assert json.loads(join_body(chat(vllm_xargs=extra).make_body({})))["vllm_xargs"] == extra


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_stream_always_reports_its_usage_to_the_gateway(options: dict[str, Any]) -> None:
    call = chat(stream=True, **options)
    assert not call.include_usage
    assert json.loads(join_body(call.make_body({})))["stream_options"] == {"include_usage": True}


def test_client_that_wants_usage_keeps_its_own_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = chat(stream=True, stream_options=options)
    assert call.include_usage
    assert json.loads(join_body(call.make_body({})))["stream_options"] == options


def test_members_that_need_checks_are_not_ordinary() -> None:
    read = {*ChatCompletions.readings, *Completions.readings} - {"max_tokens", "max_completion_tokens"}
    rare = read | RESERVED_FIELDS | RARE_MEMBERS | {"vllm_xargs", "include_reasoning", "echo", "prompt_logprobs"}
    assert ORDINARY_FIELDS.isdisjoint(rare)
    assert chat(temperature=1, max_tokens=3).is_ordinary
    assert not any(chat(**{name: None}).is_ordinary for name in sorted(rare))


def test_answer_that_is_not_streamed_gets_no_stream_options() -> None:
    assert "stream_options" not in json.loads(join_body(chat().make_body({})))
