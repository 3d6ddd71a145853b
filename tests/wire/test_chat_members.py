"""The members of chats' answers, in every form in which engines have been seen to write them."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.chat_members import (
    RAW_ARGUMENTS_MEMBER,
    ControlCharacterEscaper,
    JsonNesting,
    ToolCalls,
    UnreadableMember,
    arguments_as_object,
    read_complete_calls,
    read_text,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def fragment(index: Any = 0, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """Return a fragment of a tool call with these members."""
    function = {"name": name, "arguments": arguments}
    return {
        **({} if index is None else {"index": index}),
        **({} if call_id is None else {"id": call_id}),
        "function": {member: value for member, value in function.items() if value is not None},
    }


def collected(*fragments: dict[str, Any]) -> list[tuple[str, str, str]]:
    calls = ToolCalls()
    for each in fragments:
        calls.add_fragment(each)
    return [(call.id, call.name, call.arguments) for call in calls.calls]


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        pytest.param(
            [
                fragment(0, "a", "f", ""),
                fragment(1, "b", "g", ""),
                fragment(0, arguments="{"),
                fragment(1, arguments="{}"),
                fragment(0, arguments="}"),
            ],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="in turns",
        ),
        pytest.param(
            [fragment(0, None, "f", '{"a":'), fragment(0, None, "f", "1}")], [("", "f", '{"a":1}')], id="name repeated"
        ),
        pytest.param(
            [fragment(0, "x", "f", '{"a":'), fragment(0, "y", "f", "1}")],
            [("x", "f", '{"a":1}')],
            id="another id drawn for each fragment",
        ),
        pytest.param(
            [fragment(0, "x", "f", "{"), fragment(0, "y", None, "}")], [("x", "f", "{}")], id="another id without name"
        ),
        pytest.param(
            [fragment(0, "a", "f", "{}"), fragment(0, "b", "f", "{}")],
            [("a", "f", "{}"), ("b", "f", "{}")],
            id="one index for all",
        ),
        pytest.param(
            [fragment(0, "a", "f"), fragment(0, "b", "f")], [("a", "f", ""), ("b", "f", "")], id="without arguments"
        ),
        pytest.param(
            [fragment(0, None, "f", "{}"), fragment(0, None, "g", "{}")],
            [("", "f", "{}"), ("", "g", "{}")],
            id="neither id nor index distinguishes them",
        ),
        pytest.param(
            [
                fragment(None, "a", "f", "{"),
                fragment(None, "b", "g", "{"),
                fragment(None, "a", None, "}"),
                fragment(None, "b", None, "}"),
            ],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="no index",
        ),
        pytest.param(
            [fragment(None, "a", "f"), fragment(None, None, None, "{}")], [("a", "f", "{}")], id="neither for the rest"
        ),
        pytest.param([fragment(2, "a", "f"), fragment(2, arguments="{}")], [("a", "f", "{}")], id="first index 2"),
        pytest.param([fragment(-1, "a", "f", "{}")], [("a", "f", "{}")], id="index below zero"),
        pytest.param([fragment("0", 7, "f", {"a": 1})], [("7", "f", '{"a":1}')], id="other types"),
        pytest.param([fragment(0, "a"), fragment(0, None, "f", "{}")], [("a", "f", "{}")], id="name later"),
        pytest.param([fragment(0, None, "f", "{"), fragment(0, "a", None, "}")], [("a", "f", "{}")], id="id later"),
    ],
)
def test_tool_calls_collect_fragments_in_every_order(
    fragments: list[dict[str, Any]], expected: list[tuple[str, str, str]]
) -> None:
    assert collected(*fragments) == expected


@pytest.mark.parametrize(
    "told",
    [fragment([0]), fragment(0, {}), fragment(0, "a", 7), {"index": 0, "function": "f"}, fragment(True), fragment(0.5)],
)
def test_tool_calls_reject_what_no_engine_writes(told: dict[str, Any]) -> None:
    with pytest.raises(UnreadableMember):
        collected(told)


def test_tool_calls_are_bounded() -> None:
    with pytest.raises(UnreadableMember):
        collected(*(fragment(index, "a", "f") for index in range(5000)))


@pytest.mark.parametrize("told", ["f", [7], [{"id": "a", "function": None}], [{"function": {"arguments": "{}"}}]])
def test_whole_calls_need_a_name(told: Any) -> None:
    with pytest.raises(UnreadableMember):
        read_complete_calls(told)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("a", "a"),
        (None, ""),
        ([{"type": "text", "text": "a"}, "b", {"text": "c"}], "abc"),
        ({"type": "text", "text": "a"}, "a"),
        ([], ""),
    ],
)
def test_text_of_joins_parts(told: Any, expected: str) -> None:
    assert read_text(told, "content") == expected


@pytest.mark.parametrize("told", [7, True, {}, {"text": 7}, [{"type": "image_url"}]])
def test_text_of_rejects_members_without_text(told: Any) -> None:
    with pytest.raises(UnreadableMember):
        read_text(told, "content")


@given(value=JSON, data=st.data())
def test_json_nesting_is_closed_where_the_text_ends(value: Any, data: st.DataObject) -> None:
    text = json.dumps([value], ensure_ascii=False).encode(errors="surrogatepass")
    nesting, at = JsonNesting(), 0
    while at < len(text):
        assert not nesting.is_closed
        end = data.draw(st.integers(at + 1, len(text)))
        nesting.scan(text[at:end])
        at = end
    assert (nesting.is_closed, nesting.in_string) == (True, False)


@given(value=JSON, data=st.data())
def test_legal_strings_escape_control_characters_in_strings_alone(value: Any, data: st.DataObject) -> None:
    wanted = {"a": value}
    proper = json.dumps(wanted, indent=1, ensure_ascii=False)
    # As models write them: raw, where JSON wants an escape.
    raw = proper.replace("\\n", "\n").replace("\\t", "\t") if "\\\\" not in proper else proper
    written, strings, got, at = bytearray(), None, "", 0
    strings = ControlCharacterEscaper(written)
    while at < len(raw):
        end = data.draw(st.integers(at + 1, len(raw)))
        written += raw[at:end].encode()
        got += strings.escape_text(raw[at:end])
        at = end
    assert json.loads(got) == wanted


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 12345678901234567890}', {"a": 12345678901234567890}),
        ('{"a":"x\ny"}', {"a": "x\ny"}),
        ('{"a":NaN,"b":-Infinity}', {"a": "NaN", "b": "-Infinity"}),
        ("", {}),
        ("null", {}),
        ("[1]", {RAW_ARGUMENTS_MEMBER: "[1]"}),
        ('{"a" "b"', {RAW_ARGUMENTS_MEMBER: '{"a" "b"'}),
        ('{"a":1e999}', {RAW_ARGUMENTS_MEMBER: '{"a":1e999}'}),
        ('{"a":"\\ud83d"}', {"a": "\ud83d"}),
    ],
)
def test_arguments_as_object_lose_nothing(arguments: str, expected: dict[str, Any]) -> None:
    assert json.loads(arguments_as_object(arguments)) == expected


@given(text=st.text(st.characters(codec="utf-8")))
def test_arguments_as_object_are_always_an_object(text: str) -> None:
    assert isinstance(orjson.loads(arguments_as_object(text)), dict)
