"""An event that is told by its bytes is read as a JSON parser would read it, or is not told at all."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.token import Shape
from tests.selection.covering import values

FIRST = ("first", 5)


def event(text: str, token: Any, *, field: str = "content", spaces: bool = False, **more: Any) -> bytes:
    """An event as engines write it."""
    choice = {"index": 0, "delta": {field: text, "reasoning_x": None}, "token_ids": token, "finish_reason": None}
    separators = (", ", ": ") if spaces else (",", ":")
    payload = {"id": "chatcmpl-1", "choices": [choice], **more}
    return b"data: " + json.dumps(payload, separators=separators, ensure_ascii=False).encode() + b"\n\n"


def shape(**fields: Any) -> Shape:
    found = Shape.of(event(*(FIRST[0], [FIRST[1]]), **fields))
    assert found is not None
    return found


@pytest.mark.covering(
    "token text spaces field",
    product(
        (0, 7, 123456, 999_999_999),
        (" token", "a", "ü", "日本", "🙂", "{}[],:", "'", "\u2028"),
        (False, True),
        ("content", "reasoning", "reasoning_content", "text"),
    ),
    values,
)
def test_text_and_id_are_what_json_says(token: int, text: str, spaces: bool, field: str) -> None:
    raw = event(text, [token], field=field, spaces=spaces)
    found = shape(field=field, spaces=spaces).find(raw)
    assert found is not None
    assert (found.text.decode(), found.id) == (text, token)
    without = raw[: found.ids_start] + b"null" + raw[found.ids_end :]
    assert json.loads(without[6:]) == json.loads(event(text, None, field=field)[6:])


@pytest.mark.parametrize(
    "raw",
    [
        event("", [1]),
        event('a "quote"', [1]),
        event("back\\slash", [1]),
        event("line\nend", [1]),
        event("two", [1, 2]),
        event("none", []),
        event("null", None),
        event("negative", [-1]),
        event("too large", [1_000_000_000]),
        event("fraction", [1.5]),
        event("another field", [1], field="reasoning"),
        event("more", [1], usage={"completion_tokens": 1}),
        event("two events", [1]) + event("two events", [1]),
        event("no end", [1])[:-1],
        event("more behind", [1]) + b":",
        event("finished", [1]).replace(b'"finish_reason":null', b'"finish_reason":"stop"'),
        event("raw control", [1]).replace(b"raw control", b"raw\x01control"),
        event("raw line end", [1]).replace(b"raw line", b"raw\nline"),
        b"",
        b"data: [DONE]\n\n",
        b": note\n\n",
    ],
    ids=lambda raw: str(raw[40:90]),
)
def test_what_is_unlike_is_left_to_the_parser(raw: bytes) -> None:
    assert shape().find(raw) is None


@pytest.mark.parametrize(
    "raw",
    [
        event("", [1]),
        event("two", [1, 2]),
        event("no ids", None),
        event('"', [1]),
        event("both", [1]).replace(b'"reasoning_x":null', b'"reasoning":"too"'),
        event("twice", [1], token_ids=[2]),
        b"data: [DONE]\n\n",
        b'data: {"token_ids":[1],"text":"in another order"}\n\n',
    ],
    ids=lambda raw: str(raw[40:90]),
)
def test_an_event_of_another_kind_has_no_shape(raw: bytes) -> None:
    assert Shape.of(raw) is None


TEXT = st.text(max_size=8)
IDS = st.one_of(st.none(), st.lists(st.integers(0, 2**31), max_size=2))


@given(first=TEXT, text=TEXT, ids=IDS, name=st.sampled_from(["content", "reasoning"]), spaces=st.booleans())
def test_whatever_is_told_is_what_json_says(
    first: str, text: str, ids: list[int] | None, name: str, spaces: bool
) -> None:
    known = Shape.of(event(first, [3]))
    raw = event(text, ids, field=name, spaces=spaces)
    found = known.find(raw) if known is not None else None
    if found is not None:
        choice = json.loads(raw[6:])["choices"][0]
        assert (found.text.decode(), [found.id]) == (choice["delta"]["content"], choice["token_ids"])


@given(raw=st.binary(max_size=60), text=TEXT)
def test_no_bytes_at_all_break_it(raw: bytes, text: str) -> None:
    Shape.of(raw)
    known = shape()
    known.find(raw)
    good = event(text, [1])
    for at in range(0, len(good), 7):
        found = known.find(good[:at] + raw + good[at + len(raw) :])
        assert found is None or found.ids_start < found.ids_end
