"""The request to an engine whose answer can be continued on another one."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.resume.engines import VLLM
from proxy.wire.document import join_body
from proxy.wire.openai import Api
from tests.asking import request
from tests.gateway.test_delivery import CHAT, call_of


@pytest.mark.parametrize("body", [request(Api.CHAT), request(Api.COMPLETIONS)], ids=["chat", "completion"])
def test_observed_answer_is_a_stream_with_ids_and_usage(body: dict[str, Any]) -> None:
    call = VLLM.make_observable_call(call_of(body))
    assert call.stream
    assert orjson.loads(join_body(call.make_body({}))) == {
        **body,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"include_usage": True}),
        ({"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True}),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
    ],
)
def test_clients_options_hold_if_it_asked_for_usage(options: dict[str, Any], expected: dict[str, Any]) -> None:
    call = VLLM.make_observable_call(call_of({**CHAT, "stream_options": options}))
    assert orjson.loads(join_body(call.make_body({})))["stream_options"] == expected


@pytest.mark.parametrize(("value", "is_sent"), [(False, False), (True, True), (None, True)])
def test_reasoning_is_always_asked_for(value: object, is_sent: bool) -> None:
    body = orjson.loads(
        join_body(VLLM.make_observable_call(call_of({**CHAT, "include_reasoning": value})).make_body({}))
    )
    assert ("include_reasoning" in body) is is_sent
