"""Test that changing members of a JSON object keeps the bytes of all others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.wire.document import REMOVED, Document, InvalidDocument, body_length, body_pieces, join_body

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
    text += draw(st.sampled_from(["", " " * 5_000]))  # long ones are read otherwise
    return Text(text.encode(), {name: value.encode() for name, value in values.items()})


SPOILS = [
    *(
        b"",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b",",
        b":",
        b" ",
        b"\n",
        b"\x00",
        b"\xff",
        b"\xc3",
        b"\\ud800",
        b"0",
        b"-",
    ),
    *(b"1e5", b"1e400", b".", b"tru", b"null", b'"a":1,', b'"a":12,"a":1', b'"\\u0061":1,', b"[1,2,]", b"NaN"),
]
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
def test_document_finds_every_member_with_its_exact_bytes(text: Text) -> None:
    document = Document(text.raw)
    for name, value in text.members.items():
        assert document.raw_value(name) == value
    assert list(document.values) == list(text.members)


@given(text=object_texts(), added=st.dictionaries(STRINGS, NEW_VALUES, max_size=3), data=st.data())
def test_document_changes_equal_those_of_a_dictionary(text: Text, added: dict[str, Any], data: st.DataObject) -> None:
    changes = {name: data.draw(NEW_VALUES) for name in text.members if data.draw(st.booleans())} | added
    changed = join_body(Document(text.raw).make_changed_body(changes))

    expected = {**json.loads(text.raw), **changes}
    expected = {name: value for name, value in expected.items() if value is not REMOVED}
    assert json.loads(changed) == expected
    assert list(json.loads(changed)) == list(expected)
    for name in text.members.keys() - changes.keys():
        assert Document(changed).raw_value(name) == text.members[name]


@given(text=object_texts())
def test_changed_document_can_be_changed_again(text: Text) -> None:
    once = join_body(Document(text.raw).make_changed_body({"stream": False}))
    assert json.loads(join_body(Document(once).make_changed_body({"stream": REMOVED}))) == {
        name: value for name, value in json.loads(text.raw).items() if name != "stream"
    }


def test_order_spelling_and_space_within_members_survive() -> None:
    document = Document(b'{ "b" :  1.0e0 , "a": "\\u0041", "stream":true ,"n":12345678901234567890123 }')
    assert (
        document.make_changed_body({"stream": False, "new": orjson.Fragment(b'{"x" :1}')})
        == b'{"b" :  1.0e0 , "a": "\\u0041", "stream":false,"n":12345678901234567890123,"new":{"x" :1}}'
    )


@pytest.mark.parametrize("raw", [b"{}", b" {} ", b"{\n}\n"])
def test_member_can_be_added_to_an_empty_object(raw: bytes) -> None:
    assert Document(raw).make_changed_body({}) == b"{}"
    assert Document(raw).make_changed_body({"a": REMOVED}) == b"{}"
    assert Document(raw).make_changed_body({"a": 1}) == b'{"a":1}'
    assert Document(raw).raw_value("a") is None


def test_all_members_can_be_removed() -> None:
    assert Document(b'{"a": 1, "b": [2]}').make_changed_body({"a": REMOVED, "b": REMOVED}) == b"{}"


def test_escaped_member_name_is_decoded() -> None:
    document = Document(b'{"\\u0073tream": true, "a\\"b": 1}')
    assert document.raw_value("stream") == b"true"
    assert document.raw_value('a"b') == b"1"
    assert document.make_changed_body({"stream": REMOVED}) == b'{"a\\"b": 1}'


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
def test_repeated_member_name_is_rejected(raw: bytes) -> None:
    with pytest.raises(InvalidDocument, match="twice"):
        Document(raw)


def test_repeated_name_in_a_nested_object_is_accepted() -> None:
    raw = b'{"tools": {"a": 1, "a": 2}, "a": "tools"}'
    assert Document(raw).make_changed_body({}) == raw


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
        b'{"temperature": nan, "prompt": "my-secret-prompt"}',
        b'{"temperature": +Infinity, "prompt": "my-secret-prompt"}',
        b'{"temperature": NaN, "prompt": "my-secret-prompt", "temperature": 1}',
        b'{"temperature": NaN, "prompt": "my-secret-prompt",}',
        b'{"temperature": NaN, "prompt": "my-secret-prompt"',
        b'{"temperature": NaN, "prompt": "my-secret-prompt"} {}',
        b'{"temperature": NaN, 7: "my-secret-prompt"}',
        b'{"temperature": NaN "prompt": "my-secret-prompt"}',
        b'{"messages": [{"content": [1, 01]}], "prompt": "my-secret-prompt"}',
        b'{"messages": [{"content": ["my-secret-prompt \\ud800"]}], "x": %b}' % (b"[" * 1500 + b"]" * 1500),
        b'{"messages": [{"content": ["my-secret-prompt \xff"]}]}',
        b'{"n": 01, "prompt": "my-secret-prompt"}',
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
def test_other_than_one_json_object_is_rejected_without_quoting_it(raw: bytes) -> None:
    with pytest.raises(InvalidDocument) as refusal:
        Document(raw)
    assert SECRET not in str(refusal.value)
    assert "the body" in str(refusal.value)


def test_message_for_broken_json_says_where() -> None:
    with pytest.raises(InvalidDocument, match=r"line 2, column \d+"):
        Document(b'{"a": 1,\n  "b": oops}')


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [' + b",".join([b'[[],[],"' + b"x" * 100 + b'"]'] * 100_000) + b"]}",
        b"{" + b",".join(b'"%d": [%s]' % (i, b",".join([b"[]"] * 5_000)) for i in range(60)) + b"}",
        b"{" + b",".join(b'"%d":1' % i for i in range(10_000)) + b"}",
    ],
    ids=["in one value", "over many values", "members"],
)
def test_object_of_very_many_elements_is_changed_like_any_other(raw: bytes) -> None:
    values = json.loads(raw)
    document = Document(raw)
    name = next(iter(values))
    assert json.loads(document.raw_value(name) or b"") == values[name]
    assert document.raw_value("not there") is None
    changed = json.loads(join_body(document.make_changed_body({name: REMOVED, "new": orjson.Fragment(b'{"x" :1}')})))
    del values[name]
    assert changed == values | {"new": {"x": 1}}


def test_object_with_too_many_members_is_rejected() -> None:
    with pytest.raises(InvalidDocument, match="10000 members"):
        Document(b"{" + b",".join(b'"%d":1' % i for i in range(10_001)) + b"}")


@pytest.mark.parametrize(
    "value",
    [b'"' + b"x" * 3_000_000 + b'"', b'"' + b'\\"' * 1_000_000 + b'"', b'"' + b"\\\\" * 1_000_000 + b'"'],
    ids=["plain", "escaped quotes", "escaped backslashes"],
)
@pytest.mark.parametrize("template", [b'{"a":%b,"b":1}', b'{"a":[{"url":%b}],"b":1}', b'{%b:"a","b":1}'])
def test_megabytes_in_one_string_are_accepted(value: bytes, template: bytes) -> None:
    document = Document(template % value)
    assert document.raw_value("b") == b"1"
    assert join_body(document.make_changed_body({"b": REMOVED})) == (template % value).replace(b',"b":1', b"")


def test_long_list_of_token_ids_is_accepted() -> None:
    ids = b"[" + b",".join([b"101"] * 300_000) + b"]"
    assert Document(b'{"prompt":' + ids + b"}").raw_value("prompt") == ids


MANY = ",".join(["[]"] * 20_000)


@pytest.mark.parametrize(
    "number",
    ["18446744073709551616", "-9223372036854775809", "1" + "0" * 30, "9" * 300, "0.12345678901234567890123", "1.50"],
    ids=lambda number: number[:24],
)
@pytest.mark.parametrize("template", ['{ "n": %s, "x": [%s]}', '{ "x": [%s], "y": {"a": [%s]}}'])
def test_number_reaches_the_engine_as_it_was_written(template: str, number: str) -> None:
    raw = (template % ((number, MANY) if template.startswith('{ "n"') else (MANY, number))).encode()
    changed = join_body(Document(raw).make_changed_body({"b": 1}))
    assert changed == b"{" + raw[2:-1] + b',"b":1}'


@pytest.mark.parametrize("number", ["1e400", "-1E+309", "9" * 400])
def test_number_beyond_float_range_passes_in_unread_members(number: str) -> None:
    """Read JSON with the parser of Python, which accepts what orjson rejects."""
    raw = b'{"messages":["%b",%b]}' % (b"x" * 5_000, number.encode())
    document = Document(raw)
    assert document.make_changed_body({}) == raw
    assert document.values["messages"] == json.loads(raw)["messages"]
    assert document.excerpt_member("messages")[0] == document.values["messages"]


@pytest.mark.parametrize("space", [b" " * 200_000, b"\n" * 60_000])
@pytest.mark.parametrize(
    "template",
    [b'{"a":%b1,"b":[1]}', b'{"a":1%b,"b":[1]}', b'{%b"a":1,"b":[1]}', b'{"a":1,"b":[%b1]%b}', b'%b{"a":1,"b":[1]}'],
)
def test_document_accepts_any_whitespace(template: bytes, space: bytes) -> None:
    document = Document(template.replace(b"%b", space))
    assert json.loads(join_body(document.make_changed_body({"c": 2}))) == {"a": 1, "b": [1], "c": 2}
    assert json.loads(document.raw_value("b") or b"") == [1]


def test_number_may_have_any_number_of_digits() -> None:
    raw = b'{"a": 0.' + b"1" * 200_000 + b',"b":[2.' + b"1" * 200_000 + b"]}"
    assert join_body(Document(raw).make_changed_body({})) == raw
    assert dict(Document(raw).values) == {"a": 1 / 9, "b": [19 / 9]}


@pytest.mark.parametrize("distance", [60, 64, 65, 4_000, 4_096, 4_097, 9_000, 20_000])
def test_document_finds_the_end_of_a_long_list(distance: int) -> None:
    for tail in (b"]", b'"]"]', b"[1]]", b'{"]":"}"}]'):
        numbers = b"[" + b"1," * (distance // 2) + (b"1" + tail if tail == b"]" else tail)
        raw = b'{"a": ' + numbers + b', "b": 2}'
        document = Document(raw)
        assert document.raw_value("a") == numbers
        assert document.raw_value("b") == b"2"


@given(texts=st.lists(STRINGS | st.text('"\\', max_size=400), min_size=1, max_size=8))
def test_document_finds_the_end_of_strings_with_escapes(texts: list[str]) -> None:
    many = [*texts, '"' * 3_000, *texts]
    spelled = [json.dumps(text) for text in many]
    raw = ("{" + ", ".join(f'"{index}": {text}' for index, text in enumerate(spelled)) + "}").encode()
    document = Document(raw)
    assert [document.raw_value(str(index)) for index in range(len(many))] == [text.encode() for text in spelled]


def test_too_deeply_nested_object_is_rejected() -> None:
    """Nest a value as deeply as Python nests calls."""
    deep = b"[" * 1100 + b"]" * 1100
    for raw in (b'{"a":%b}' % deep, b'{"a":[{"b":%b}]}' % deep):
        with pytest.raises(InvalidDocument):
            Document(raw)


def test_less_deeply_nested_object_is_accepted() -> None:
    deep = b"[" * 700 + b"]" * 700
    assert Document(b'{"a":%b}' % deep).make_changed_body({"b": 1}) == b'{"a":%b,"b":1}' % deep


@pytest.mark.parametrize("text", ["x", "é", "日", "🙂"])
@pytest.mark.parametrize("broken", [b"", b"\xff", b"\xe6\x97", b"\xed\xa0\x80", b"\xf0\x9f\x99"])
@pytest.mark.parametrize("offset", range(4))
def test_long_text_that_is_not_utf8_is_rejected(text: str, broken: bytes, offset: int) -> None:
    """Also where it is cut to be looked at."""
    raw = b'{"a":"%b%b%b"}' % (b"x" * offset, text.encode() * 400_000, broken)
    if broken:
        with pytest.raises(InvalidDocument):
            Document(raw)
    else:
        assert Document(raw).values["a"] == "x" * offset + text * 400_000


def test_long_object_is_sent_in_pieces_of_the_original() -> None:
    text = b"x" * 100_000
    raw = b'{"model":"m","messages":"%b","stream":true,"seed":7}' % text
    for kind in (bytes, bytearray):
        original = kind(raw)
        body = Document(original).make_changed_body({"stream": False, "n": 1})
        assert join_body(body) == raw.replace(b"true", b"false").replace(b"7}", b'7,"n":1}')
        assert body_length(body) == len(join_body(body))
        longest = max(body_pieces(body), key=len)
        assert isinstance(longest, memoryview)
        assert longest.obj is original
    short = Document(bytearray(b'{"a":1}')).make_changed_body({"b": 2})
    assert (short, type(short), body_pieces(short)) == (b'{"a":1,"b":2}', bytes, (short,))


def test_unused_members_are_not_read() -> None:
    raw = b'{"messages":["%b"],"stop":["a"],"prompt":"%b"}' % (b"x" * 3_000, b"y" * 3_000)
    document = Document(raw)
    values = document.values
    assert document.read_values == [["a"]]
    assert values["prompt"] == values.get("prompt") == "y" * 3_000
    assert document.read_values == [["a"], "y" * 3_000]
    assert document.excerpt_member("messages")[0] == ["x" * 3_000]
    assert document.excerpt_member("prompt")[0] is values["prompt"]
    assert document.excerpt_member("top")[0] is None
    assert values.get("messages") is values["messages"]
    assert list(values) == ["messages", "stop", "prompt"]
    assert ("stop" in values, "top" in values, len(values)) == (True, False, 3)
    assert (values.get("top"), values.get("top", 7)) == (None, 7)
    with pytest.raises(KeyError):
        values["top"]


@pytest.mark.parametrize("length", [1, 5_000])
def test_value_of_a_member_may_differ_from_its_bytes(length: int) -> None:
    raw = b'{ "n":"1","stream":true,"x":"%b"}' % (b"x" * length)
    document = Document(raw)
    document.values.update({"n": 1})
    assert dict(document.values) == {"n": 1, "stream": True, "x": "x" * length}
    assert document.make_changed_body({}) == raw.replace(b" ", b"")


@given(
    values=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=6),
    changes=st.dictionaries(st.text(max_size=4), NEW_VALUES, max_size=4),
    spells=st.sampled_from([orjson.dumps, lambda values: json.dumps(values).encode()]),
)
def test_short_and_long_objects_give_the_same_results(
    values: dict[str, Any], changes: dict[str, Any], spells: Callable[[Any], bytes]
) -> None:
    """A short one may be built and serialised again."""
    short, long = Document(spells(values)), Document(spells({**values, "long": "x" * 5_000}))
    assert isinstance(short.values, dict)
    assert not isinstance(long.values, dict)
    assert dict(short.values) == {name: long.values[name] for name in long.values if name != "long"}
    for name in values:
        assert short.raw_value(name) == long.raw_value(name)
        assert short.is_list_of_prompts(name) == long.is_list_of_prompts(name)
        assert short.excerpt_member(name)[0] == long.excerpt_member(name)[0]
    without = join_body(long.make_changed_body({**changes, "long": REMOVED}))
    assert orjson.loads(join_body(short.make_changed_body(changes))) == orjson.loads(without)


@given(
    values=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=6),
    changes=st.dictionaries(st.text(max_size=4), NEW_VALUES, max_size=4),
)
def test_spelling_of_an_object_makes_no_difference(values: dict[str, Any], changes: dict[str, Any]) -> None:
    plain, spaced = orjson.dumps(values), json.dumps(values).encode()
    told, expected = Document(plain).make_changed_body(changes), Document(spaced).make_changed_body(changes)
    assert orjson.loads(join_body(told)) == orjson.loads(join_body(expected))
    for name in values:
        assert orjson.loads(Document(plain).raw_value(name) or b"") == values[name]
        assert orjson.loads(Document(spaced).raw_value(name) or b"") == values[name]


@given(
    text=st.one_of(object_texts().map(lambda text: text.raw), st.binary(max_size=40)),
    space=st.sampled_from([0, 5_000]),
    data=st.data(),
)
def test_invalid_json_is_rejected_as_by_other_parsers(text: bytes, space: int, data: st.DataObject) -> None:
    """Compare with the parser of Python, which accepts repeated names and reads large numbers exactly."""
    at = data.draw(st.integers(0, len(text)))
    raw = text[:at] + data.draw(st.sampled_from(SPOILS)) + text[at + data.draw(st.integers(0, 3)) :] + b" " * space
    assume(not re.search(rb"[0-9]{19}", raw))
    try:
        values = json.loads(raw.decode())
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict) and len(json.loads(raw, object_pairs_hook=list)) == len(values):
        assert repr(dict(Document(raw).values)) == repr(values)
        return
    with pytest.raises(InvalidDocument):
        Document(raw)
