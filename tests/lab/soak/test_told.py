"""Answers in one form, and what is found to be different."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lab.soak.orders import book, order_number, user_name
from lab.soak.told import Unreadable, told, unlike
from proxy.sim.engine import SimulatedEngine
from tests.asking import ask
from tests.conformance.resuming import WITH_USAGE, chat, completion, story, thoughts


@pytest.mark.parametrize(
    "body", [chat(), completion(), thoughts(), story(), chat(n=2), completion(return_token_ids=True)]
)
async def test_a_stream_says_the_same_as_a_whole_answer(body: dict[str, Any]) -> None:
    async with SimulatedEngine(tool_call_parser="kimi_k2") as engine, aiohttp.ClientSession() as session:
        whole = told((await ask(session, engine.url, body)).body, stream=False)
        streamed = told((await ask(session, engine.url, body | WITH_USAGE)).body, stream=True)
    assert not unlike(streamed, whole)
    assert streamed == whole
    assert whole["choices"][0]["finish"]


def message(content: str = "a b", **fields: Any) -> bytes:
    """A whole answer."""
    usage = b'{"prompt_tokens":1,"completion_tokens":2}'
    choice = b'{"index":%d,"message":{"content":"%b"},"finish_reason":"%b"}' % (
        fields.get("index", 0),
        content.encode(),
        fields.get("finish", "stop").encode(),
    )
    return b'{"choices":[%b],"usage":%b}' % (choice, fields.get("usage", usage))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (message("a c"), "text of choice 0"),
        (message("a b c"), "text of choice 0"),
        (message(finish="length"), "finish of choice 0"),
        (message(index=1), "there are choices [1], not [0]"),
        (message(usage=b'{"prompt_tokens":1,"completion_tokens":3}'), "usage is"),
        (message(), ""),
        (message(usage=b"null"), ""),
    ],
)
def test_differences_are_told(answer: bytes, expected: str) -> None:
    found = unlike(told(answer, stream=False), told(message(), stream=False))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_usage_that_is_not_expected_is_not_compared() -> None:
    other = told(message(usage=b'{"prompt_tokens":1,"completion_tokens":3}'), stream=False)
    assert unlike(other, told(message(), stream=False))
    assert not unlike(other, told(message(), stream=False) | {"usage": None})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[1]}'])
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(Unreadable):
        told(body, stream=False)


async def test_orders_get_the_status_they_deserve_of_an_engine_and_are_the_same_for_a_seed() -> None:
    orders = book(7)
    assert [order.body("x") for order in orders] == [order.body("x") for order in book(7)]
    assert orders != book(8)
    assert {order.status for order in orders} == {200, 400, 404}
    assert any(order.leaves_after_seconds is not None for order in orders)
    assert any(order.units > 1 for order in orders)
    async with SimulatedEngine(tool_call_parser="kimi_k2") as engine, aiohttp.ClientSession() as session:
        for order in (order for order in orders[::10] if order.status == 200):
            async with session.post(engine.url + order.api.path, data=order.body(user_name(1, order))) as response:
                assert response.status == 200
            assert engine.requests[-1].body["user"] == user_name(1, order)
            assert order_number(user_name(1, order)) == order.number
