"""Test the shape that the token events of a stream share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.wire.sse import TokenShape


def event(text: str, token: Any, *, field: str = "content", spaces: bool = False, **more: Any) -> bytes:
    """Return an event as engines write it."""
    choice = {"index": 0, "delta": {field: text, "reasoning_x": None}, "token_ids": token, "finish_reason": None}
    separators = (", ", ": ") if spaces else (",", ":")
    payload = {"id": "chatcmpl-1", "choices": [choice], **more}
    return b"data: " + json.dumps(payload, separators=separators, ensure_ascii=False).encode() + b"\n\n"


def pieces(shape: TokenShape | None) -> tuple[bytes | None, ...]:
    assert shape is not None
    return shape.bytes_before_text, shape.bytes_between, shape.bytes_after_id


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "text"])
def test_shape_has_the_bytes_around_text_and_id(field: str, spaces: bool) -> None:
    raw = event("words", [123], field=field, spaces=spaces)
    begin, rest = raw.split(b"words")
    between, end = rest.split(b"123")
    assert pieces(TokenShape.recognise(raw)) == (begin, between, end)
    shape = TokenShape.recognise(raw)
    assert shape is not None
    assert shape.is_reasoning is field.startswith("reasoning")


def test_shape_without_id_has_the_bytes_around_the_text() -> None:
    raw = event("words", None)
    begin, end = raw.split(b"words")
    assert pieces(TokenShape.recognise(raw)) == (begin, None, end)


@pytest.mark.parametrize(
    ("raw", "is_like"),
    [
        (event('"', [7]), True),
        (event("", [1, 2]), True),
        (event("a", None), False),
        (event("a", [7], field="text"), False),
        (event("a", [7], created=1), False),
    ],
)
def test_shape_matches_events_with_other_text_and_id(raw: bytes, is_like: bool) -> None:
    shape = TokenShape.recognise(event("words", [123]))
    assert shape is not None
    assert shape.has_same_frame(raw) is is_like


@pytest.mark.parametrize(
    "raw",
    [
        event("", [1]),
        event("two", [1, 2]),
        event('"', [1]),
        event("both", [1]).replace(b'"reasoning_x":null', b'"reasoning":"too"'),
        event("twice", [1], token_ids=[2]),
        b"data: [DONE]\n\n",
        b'data: {"token_ids":[1],"text":"in another order"}\n\n',
    ],
    ids=lambda raw: str(raw[40:90]),
)
def test_event_without_one_text_has_no_shape(raw: bytes) -> None:
    assert TokenShape.recognise(raw) is None
