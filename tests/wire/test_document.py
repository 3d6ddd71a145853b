"""A JSON object that is changed by splicing: what parsers see changes, and nobody else's bytes do."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.document import REMOVED, Document, InvalidDocument

SECRET = "my-secret-prompt"


class Text(NamedTuple):
    """A JSON object as text, with the spelling of each member's value."""

    raw: bytes
    members: dict[str, bytes]


SPACE = st.sampled_from(["", "", " ", "\n", "\t", "\r\n", "  "])
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", '\\"', "}],", "x" * 120 + '"', "a\\" * 60, "\u2028", "🙂", "stream"]
)
NUMBERS = st.sampled_from(["0", "-0", "1e5", "1.50", "-2E-3", str(2**64), str(10**40)]) | st.integers().map(str)


@st.composite
def string_texts(draw: st.DrawFn, text: str) -> str:
    """One of the many spellings of a string."""
    spelling = draw(st.sampled_from(["plain", "ascii", "escaped"]))
    if spelling == "escaped" and text.isascii():
        return '"' + "".join(f"\\u{ord(character):04x}" for character in text) + '"'
    return json.dumps(text, ensure_ascii=spelling == "ascii")


@st.composite
def value_texts(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.sampled_from(["string", "number", "literal", *(["array", "object"] if depth else [])]))
    if kind == "string":
        return draw(string_texts(draw(STRINGS)))
    if kind == "number":
        return draw(NUMBERS)
    if kind == "literal":
        return draw(st.sampled_from(["null", "true", "false"]))
    items = draw(st.lists(value_texts(depth - 1), max_size=3))
    space = draw(SPACE)
    if kind == "array":
        return "[" + space + f"{space},{space}".join(items) + space + "]"
    # Nested objects may repeat a name: only the top level is the gateway's business.
    return "{" + space + f"{space},".join(f'{space}"k"{space}:{space}{item}' for item in items) + space + "}"


@st.composite
def object_texts(draw: st.DrawFn) -> Text:
    values = draw(st.dictionaries(STRINGS, value_texts(), max_size=5))
    members = [
        f"{draw(SPACE)}{draw(string_texts(name))}{draw(SPACE)}:{draw(SPACE)}{value}{draw(SPACE)}"
        for name, value in values.items()
    ]
    text = draw(SPACE) + "{" + (",".join(members) or draw(SPACE)) + "}" + draw(SPACE)
    return Text(text.encode(), {name: value.encode() for name, value in values.items()})


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
NEW_VALUES = st.sampled_from([REMOVED, None, True, 7, -1.5, "new", 'ü"\\', {"a": [1, {"b": None}]}, [], {}]) | STRINGS


@given(text=object_texts())
def test_every_member_is_found_with_its_exact_bytes(text: Text) -> None:
    document = Document(text.raw)
    for name, value in text.members.items():
        assert document.raw_value(name) == value
    assert list(document.values) == list(text.members)


@given(text=object_texts(), added=st.dictionaries(STRINGS, NEW_VALUES, max_size=3), data=st.data())
def test_changes_mean_what_they_mean_for_a_dictionary(text: Text, added: dict[str, Any], data: st.DataObject) -> None:
    changes = {name: data.draw(NEW_VALUES) for name in text.members if data.draw(st.booleans())} | added
    changed = Document(text.raw).with_changes(changes)

    expected = {**json.loads(text.raw), **changes}
    expected = {name: value for name, value in expected.items() if value is not REMOVED}
    assert json.loads(changed) == expected
    assert list(json.loads(changed)) == list(expected)
    for name in text.members.keys() - changes.keys():
        assert Document(changed).raw_value(name) == text.members[name]


@given(text=object_texts())
def test_changes_can_be_changed_again(text: Text) -> None:
    once = Document(text.raw).with_changes({"stream": False})
    assert json.loads(Document(once).with_changes({"stream": REMOVED})) == {
        name: value for name, value in json.loads(text.raw).items() if name != "stream"
    }


def test_order_spelling_and_space_within_members_survive() -> None:
    document = Document(b'{ "b" :  1.0e0 , "a": "\\u0041", "stream":true ,"n":12345678901234567890123 }')
    assert (
        document.with_changes({"stream": False, "new": orjson.Fragment(b'{"x" :1}')})
        == b'{"b" :  1.0e0,"a": "\\u0041","stream":false,"n":12345678901234567890123,"new":{"x" :1}}'
    )


@pytest.mark.parametrize("raw", [b"{}", b" {} ", b"{\n}\n"])
def test_an_empty_object_can_be_added_to(raw: bytes) -> None:
    assert Document(raw).with_changes({}) == b"{}"
    assert Document(raw).with_changes({"a": REMOVED}) == b"{}"
    assert Document(raw).with_changes({"a": 1}) == b'{"a":1}'
    assert Document(raw).raw_value("a") is None


def test_everything_can_be_removed() -> None:
    assert Document(b'{"a": 1, "b": [2]}').with_changes({"a": REMOVED, "b": REMOVED}) == b"{}"


def test_an_escaped_name_is_the_name_it_spells() -> None:
    document = Document(b'{"\\u0073tream": true, "a\\"b": 1}')
    assert document.raw_value("stream") == b"true"
    assert document.raw_value('a"b') == b"1"
    assert document.with_changes({"stream": REMOVED}) == b'{"a\\"b": 1}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": 1, "a": 1}',
        b'{"stream": false, "b": {}, "stream": true}',
        b'{"stream": false, "\\u0073tream": true}',
        b'{"\\u0073tream": false, "str\\u0065am": true}',
        b'{"/": 1, "\\/": 1}',
        '{"é": 1, "\\u00e9": 1}'.encode(),
        b'{"": 1, "": 2}',
    ],
)
def test_a_name_that_stands_twice_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidDocument, match="twice"):
        Document(raw)


def test_a_name_may_stand_twice_further_down() -> None:
    raw = b'{"tools": {"a": 1, "a": 2}, "a": "tools"}'
    assert Document(raw).with_changes({}) == raw.replace(b', "a": "', b',"a": "')


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b'{"prompt": "my-secret-prompt"',
        b'{"prompt": "my-secret-prompt",}',
        b'{"prompt": "my-secret-prompt"} {}',
        b"{'prompt': 'my-secret-prompt'}",
        b'{"prompt": my-secret-prompt}',
        b'{"prompt": "my-secret-prompt\n"}',
        b'{"prompt": "my-secret-prompt\\x"}',
        b'{"temperature": NaN, "prompt": "my-secret-prompt"}',
        b'{"temperature": -Infinity, "prompt": "my-secret-prompt"}',
        b'{"temperature": 1e400, "prompt": "my-secret-prompt"}',
        b'{"n": 01, "prompt": "my-secret-prompt"}',
        b'{"prompt": "my-secret-prompt \\ud800"}',
        b'{"prompt": "my-secret-prompt \\udc00\\ud800"}',
        b'{"prompt": "my-secret-prompt \xed\xa0\x80"}',
        b'{"prompt": "my-secret-prompt \xff"}',
        b'\xef\xbb\xbf{"prompt": "my-secret-prompt"}',
        '{"prompt": "my-secret-prompt"}'.encode("utf-16"),
        b'{"a":' + b"[" * 2000 + b'"my-secret-prompt"' + b"]" * 2000 + b"}",
        b'["my-secret-prompt"]',
        b'"my-secret-prompt"',
        b"null",
        b"1",
    ],
    ids=lambda raw: raw[:40].decode("latin-1"),
)
def test_what_is_not_one_json_object_is_refused_without_repeating_it(raw: bytes) -> None:
    with pytest.raises(InvalidDocument) as refusal:
        Document(raw)
    assert SECRET not in str(refusal.value)
    assert "the body" in str(refusal.value)


def test_the_message_for_broken_json_says_where() -> None:
    with pytest.raises(InvalidDocument, match=r"line 2, column \d+"):
        Document(b'{"a": 1,\n  "b": oops}')


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [' + b",".join([b'[[],[],"' + b"x" * 100 + b'"]'] * 100_000) + b"]}",
        b"{" + b",".join(b'"%d": [%s]' % (i, b",".join([b"[]"] * 5_000)) for i in range(60)) + b"}",
        b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
    ],
    ids=["in one value", "over many values", "members"],
)
def test_an_object_of_very_many_elements_is_changed_by_its_values(raw: bytes) -> None:
    values = json.loads(raw)
    document = Document(raw)
    name = next(iter(values))
    assert json.loads(document.raw_value(name) or b"") == values[name]
    assert document.raw_value("not there") is None
    changed = json.loads(document.with_changes({name: REMOVED, "new": orjson.Fragment(b'{"x" :1}')}))
    del values[name]
    assert changed == values | {"new": {"x": 1}}


@pytest.mark.parametrize(
    "value",
    [b'"' + b"x" * 3_000_000 + b'"', b'"' + b'\\"' * 1_000_000 + b'"', b'"' + b"\\\\" * 1_000_000 + b'"'],
    ids=["plain", "escaped quotes", "escaped backslashes"],
)
@pytest.mark.parametrize("template", [b'{"a":%b,"b":1}', b'{"a":[{"url":%b}],"b":1}', b'{%b:"a","b":1}'])
def test_megabytes_in_one_string_are_no_flood(value: bytes, template: bytes) -> None:
    document = Document(template % value)
    assert document.raw_value("b") == b"1"
    assert document.with_changes({"b": REMOVED}) == (template % value).replace(b',"b":1', b"")


def test_a_long_list_of_token_ids_is_no_flood() -> None:
    ids = b"[" + b",".join([b"101"] * 300_000) + b"]"
    assert Document(b'{"prompt":' + ids + b"}").raw_value("prompt") == ids


MANY = b",".join([b"[]"] * 20_000)


@pytest.mark.parametrize(
    "number",
    [str(2**64), str(-(2**63) - 1), "1" + "0" * 30, "9" * 300, "-" + "9" * 20],
    ids=lambda number: number[:24],
)
@pytest.mark.parametrize("template", ['{ "n": %s, "x": [%s]}', '{ "x": [%s], "y": {"a": [%s]}}'])
def test_a_number_that_would_reach_the_engine_as_another_one_is_refused(template: str, number: str) -> None:
    raw = (template % ((number, MANY.decode()) if template.startswith('{ "n"') else (MANY.decode(), number))).encode()
    with pytest.raises(InvalidDocument, match="64 bits"):
        Document(raw)


@pytest.mark.parametrize(
    "value",
    [str(2**64 - 1), str(-(2**63)), "0.12345678901234567890123", "1.5e300", '"123456789012345678901234"', '"\\\\"'],
)
def test_a_number_that_reaches_the_engine_as_it_is_passes_among_very_many_elements(value: str) -> None:
    raw = f'{{ "n": {value}, "s": "\\\\", "t": "\\" 18446744073709551617, \\"", "x": [{MANY.decode()}]}}'.encode()
    assert json.loads(Document(raw).with_changes({})) == json.loads(raw)


@pytest.mark.parametrize("space", [b" " * 200_000, b"\n" * 60_000])
@pytest.mark.parametrize(
    "template",
    [b'{"a":%b1,"b":[1]}', b'{"a":1%b,"b":[1]}', b'{%b"a":1,"b":[1]}', b'{"a":1,"b":[%b1]%b}', b'%b{"a":1,"b":[1]}'],
)
def test_any_amount_of_space_may_stand_anywhere(template: bytes, space: bytes) -> None:
    document = Document(template.replace(b"%b", space))
    assert json.loads(document.with_changes({"c": 2})) == {"a": 1, "b": [1], "c": 2}
    assert json.loads(document.raw_value("b") or b"") == [1]


def test_a_number_may_have_any_number_of_digits() -> None:
    raw = b'{"a": 0.' + b"1" * 200_000 + b',"b":[2.' + b"1" * 200_000 + b"]}"
    assert json.loads(Document(raw).with_changes({})) == {"a": 1 / 9, "b": [19 / 9]}


@pytest.mark.parametrize("distance", [60, 64, 65, 4_000, 4_096, 4_097, 9_000, 20_000])
def test_the_end_of_a_list_is_found_however_far_it_is(distance: int) -> None:
    for tail in (b"]", b'"]"]', b"[1]]", b'{"]":"}"}]'):
        numbers = b"[" + b"1," * (distance // 2) + (b"1" + tail if tail == b"]" else tail)
        raw = b'{"a": ' + numbers + b', "b": 2}'
        document = Document(raw)
        assert document.raw_value("a") == numbers
        assert document.raw_value("b") == b"2"


@given(texts=st.lists(STRINGS | st.text('"\\', max_size=400), min_size=1, max_size=8))
def test_strings_end_where_they_do_however_many_escapes_they_have(texts: list[str]) -> None:
    many = [*texts, '"' * 3_000, *texts]
    spelled = [json.dumps(text) for text in many]
    raw = ("{" + ", ".join(f'"{index}": {text}' for index, text in enumerate(spelled)) + "}").encode()
    document = Document(raw)
    assert [document.raw_value(str(index)) for index in range(len(many))] == [text.encode() for text in spelled]


def test_an_object_of_very_many_elements_that_is_nested_too_deeply_is_refused() -> None:
    raw = b'{ "a": ' + b"[" * 300 + b"]" * 300 + b', "b": [' + b",".join([b"[]"] * 20_000) + b"]}"
    with pytest.raises(InvalidDocument, match="too deeply"):
        Document(raw)


@given(
    values=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=6),
    changes=st.dictionaries(st.text(max_size=4), NEW_VALUES, max_size=4),
)
def test_how_an_object_is_spelled_makes_no_difference(values: dict[str, Any], changes: dict[str, Any]) -> None:
    plain, spaced = orjson.dumps(values), b" " + orjson.dumps(values)
    assert Document(plain).with_changes(changes) == Document(spaced).with_changes(changes)
    for name in values:
        assert Document(plain).raw_value(name) == Document(spaced).raw_value(name)
