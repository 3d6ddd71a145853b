"""Normalised answers and their differences."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lab.soak.traffic import Unreadable, content, difference
from proxy.sim.engine import SimulatedEngine
from tests.asking import ask
from tests.conformance.resuming import WITH_USAGE, chat, completion, story, thoughts


@pytest.mark.parametrize(
    "body", [chat(), completion(), thoughts(), story(), chat(n=2), completion(return_token_ids=True)]
)
async def test_stream_and_whole_answer_have_equal_content(body: dict[str, Any]) -> None:
    async with SimulatedEngine(tool_call_parser="kimi_k2") as engine, aiohttp.ClientSession() as session:
        whole = content((await ask(session, engine.url, body)).body, stream=False)
        streamed = content((await ask(session, engine.url, body | WITH_USAGE)).body, stream=True)
    assert not difference(streamed, whole)
    assert streamed == whole
    assert whole["choices"][0]["finish"]


def message(content: str = "a b", **fields: Any) -> bytes:
    """Return an answer without a stream."""
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
def test_differences_are_reported(answer: bytes, expected: str) -> None:
    found = difference(content(answer, stream=False), content(message(), stream=False))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_unexpected_usage_is_not_compared() -> None:
    other = content(message(usage=b'{"prompt_tokens":1,"completion_tokens":3}'), stream=False)
    assert difference(other, content(message(), stream=False))
    assert not difference(other, content(message(), stream=False) | {"usage": None})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[1]}'])
def test_unreadable_answers_are_rejected(body: bytes) -> None:
    with pytest.raises(Unreadable):
        content(body, stream=False)
