"""Texts that orjson refuses, read and written as Python does."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.document import Document, InvalidDocument, join_body
from proxy.wire.python_json import dumps, loads

ANY_TEXT = st.text(st.characters(), max_size=6)
ODD_TEXT = st.lists(ANY_TEXT | st.sampled_from(["\ud83d", "\ude00", "\ud83d\ude00", '"', "\\", "日"])).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXT, inner, max_size=3),
    max_leaves=6,
)


def halves_joined(value: Any) -> Any:
    """Read text as every parser does: two halves in a row are one character."""
    return json.loads(json.dumps(value))


@given(value=VALUES.filter(lambda value: "inf" not in repr(value)))
def test_dumps_writes_json_that_any_parser_reads(value: Any) -> None:
    written = dumps(value)
    written.decode()
    assert json.loads(written) == halves_joined(value)
    assert loads(written) == pytest.approx(halves_joined(value)) if isinstance(value, float) else True


def test_infinity_is_written_as_null() -> None:
    assert dumps({"a": "\ud83d", "b": [math.inf, math.nan]}) == b'{"a":"\\ud83d","b":[null,null]}'


def test_fragment_beside_half_a_pair_is_written() -> None:
    assert dumps({"a": "\ud83d", "b": orjson.Fragment(b"[1, 2]")}) == b'{"a":"\\ud83d","b":[1,2]}'


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, ["\ud83d", object()]])
def test_dumps_rejects_values_that_json_does_not_have(value: Any) -> None:
    with pytest.raises(orjson.JSONEncodeError):
        dumps(value)


@pytest.mark.parametrize(("depth", "is_written"), [(880, True), (910, False), (100_000, False)])
def test_maximum_depth_is_the_same_with_each_python(depth: int, is_written: bool) -> None:
    value: Any = "\ud83d"
    for _ in range(depth):
        value = [value]
    if is_written:
        assert dumps(value) == b"[" * depth + b'"\\ud83d"' + b"]" * depth
    else:
        with pytest.raises(orjson.JSONEncodeError):
            dumps(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'"\\ud83d"', "\ud83d"),
        (b'"\xed\xa0\xbd"', "\ud83d"),
        (b'"a\tb\n"', "a\tb\n"),
        (b"[1e999, -Infinity]", [math.inf, -math.inf]),
        (b"[NaN, %b]" % (b"9" * 5000), None),
        (b"[NaN, %b]" % (b"9" * 40), None),
    ],
)
def test_loads_reads_the_json_of_engines(text: bytes, value: Any) -> None:
    read = loads(text)
    assert value is None or read == value


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"[" * 100_000, b"[" * 1500 + b"]" * 1500, b"nan", b"'a'"])
def test_loads_rejects_invalid_json(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


BLANKS = st.text(" \t\r\n", max_size=2)


@given(members=st.dictionaries(ODD_TEXT, VALUES, max_size=4), data=st.data(), filling=st.sampled_from([0, 5000]))
def test_members_beside_half_a_pair_keep_their_bytes(
    members: dict[str, Any], data: st.DataObject, filling: int
) -> None:
    members = {halves_joined(name): halves_joined(value) for name, value in members.items()}
    members |= {"\ud83d": "\ude00", "filling": "日" * filling}
    spelled = {
        name: json.dumps(value, ensure_ascii=data.draw(st.booleans()) or "\ud83d" in repr(value))
        for name, value in members.items()
    }
    spelled = {
        name: text if text.isascii() else json.dumps(members[name], ensure_ascii=not filling)
        for name, text in spelled.items()
    }
    spelled = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in spelled.items()}

    def blanks() -> str:
        return data.draw(BLANKS)

    told = ",".join(
        f"{blanks()}{json.dumps(name)}{blanks()}:{blanks()}{text}{blanks()}" for name, text in spelled.items()
    )
    raw = f"{blanks()}{{{told}}}{blanks()}".encode()
    document = Document(raw)
    assert dict(document.values) == members
    for name, text in spelled.items():
        assert document.raw_value(name) == text.encode()
    changed = join_body(document.make_changed_body({"\ud83d": "\ud83d", "new": 1}))
    assert json.loads(changed) == {**members, "\ud83d": "\ud83d", "new": 1}


def test_repeated_member_name_is_rejected() -> None:
    with pytest.raises(InvalidDocument, match="twice"):
        Document(b'{"a": "\\ud83d", "b": 1, "\\u0062": 2}')


def test_more_members_than_any_client_sends_are_refused() -> None:
    raw = b'{"a": "\\ud83d"' + b"".join(b', "%d": 1' % number for number in range(20_000)) + b"}"
    with pytest.raises(InvalidDocument, match="more than"):
        Document(raw)
