"""Test estimates of the cost of JSON texts."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.weight import (
    LONG_BYTES,
    bound_element_counts,
    count_object_bytes,
    count_weight,
    count_wide_text_bytes,
    estimate_weight,
    is_heavier_json,
    is_light_json,
    parse_weighed_json,
    remove_escapes,
)

VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('a,[{"\\]:é', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a,[{"\\', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def elements(value: Any) -> int:
    """Return the weight of a parsed value, without escapes."""
    if isinstance(value, str):
        return 8
    if isinstance(value, list):
        return 16 + max(0, len(value) - 1) + sum(map(elements, value)) - sum(_is_scalar(item) for item in value)
    if isinstance(value, dict):
        items = list(value.values())
        return 16 + 8 * len(items) + max(0, len(items) - 1) + sum(map(elements, items)) - sum(map(_is_scalar, items))
    return 1


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, str | list | dict)


@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=5), spaces=st.booleans())
def test_weigh_closely_ignores_the_content_of_strings(value: dict[str, Any], spaces: bool) -> None:
    raw = orjson.dumps(value, option=orjson.OPT_INDENT_2 if spaces else None)
    weight = count_weight(raw, 1 << 40)
    assert weight.elements == elements(value) + raw.count(b"\\")
    assert estimate_weight(raw).elements >= weight.elements - raw.count(b"\\")
    text = remove_escapes(raw)
    assert len(text) == len(raw)
    assert text.count(b'"') == weight.quotes


def filled(unit: bytes, size: int = 200_000) -> bytes:
    return b'{"x":[' + unit * (size // len(unit)) + b"0]}"


SMALL = {
    "empty lists": b"[],",
    "empty objects": b"{},",
    "objects": b'{"a":1},',
    "lists in lists": b"[[]],",
    "deep lists": b"[" * 200 + b"]" * 200 + b",",
    "token ids": b"151643,",
    "fractions": b"1.5,",
    "strings": b'"abcd",',
    "objects of fractions": b'{"a":1.5,"b":2.5},',
}


@pytest.mark.parametrize("unit", SMALL.values(), ids=SMALL)
def test_weigh_bounds_memory_before_reading(unit: bytes) -> None:
    raw = filled(unit)
    tracemalloc.start()
    value = parse_weighed_json(raw)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value
    assert taken <= 1.25 * (len(raw) + estimate_weight(raw).memory_bytes)
    assert estimate_weight(raw).memory_bytes <= 3 * taken


@pytest.mark.parametrize("unit", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("size", [2_000, 20_000, 200_000])
def test_object_bytes_bound_memory_after_reading(unit: bytes, size: int) -> None:
    raw = filled(unit, size)
    assert is_light_json(raw, 8 * len(raw))
    assert count_weight(raw, 10**9).elements <= 8 * len(raw)
    tracemalloc.start()
    value = parse_weighed_json(raw)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= 1.25 * (len(raw) + count_object_bytes(raw, value))
    assert count_object_bytes(raw, value) <= 4 * taken


def test_weight_counts_names_that_are_all_different() -> None:
    raw = b"{" + b",".join(b'"%x":0' % number for number in range(50_000)) + b"}"
    tracemalloc.start()
    value = parse_weighed_json(raw)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(value) == 50_000
    assert taken <= 1.25 * (len(raw) + estimate_weight(raw).memory_bytes)


@pytest.mark.parametrize("text", [b"QUJD" * 500_000, b"a, [b] {c}" * 300_000, "日本".encode() * 500_000])
def test_long_text_weighs_little(text: bytes) -> None:
    raw = b'{"messages":[{"role":"user","content":"' + text + b'"}]}'
    assert estimate_weight(raw).elements < 1_000_000
    assert count_weight(raw, 1 << 40).elements == 16 * 3 + 4 * 10 + 1


def test_text_of_many_quotes_is_weighed_closely() -> None:
    raw = orjson.dumps({"prompt": orjson.dumps([{"a": 1}] * 100_000).decode()})
    assert estimate_weight(raw).elements > 2_000_000
    assert count_weight(raw, 4_000_000).elements == 16 + 4 * 4 + raw.count(b"\\")
    assert count_weight(raw, 100).elements > 100


WIDE = {
    "an emoji": "a" * 100_000 + "🙂",
    "an escaped emoji": "a" * 100_000 + "\\ud83d\\ude42",
    "Chinese": "日本語" * 30_000,
    "Latin": "é" * 90_000,
    "a picture beside an emoji": "QUJD" * 20_000 + '","🙂',
}


@pytest.mark.parametrize("text", WIDE.values(), ids=WIDE)
def test_wide_bytes_count_wide_characters(text: str) -> None:
    raw = f'{{"x":[{{"y":["{text}"]}}]}}'.encode()
    tracemalloc.start()
    value = parse_weighed_json(raw)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    told = len(raw) + estimate_weight(raw).memory_bytes + count_wide_text_bytes(raw, value)
    assert taken <= told * 1.01
    assert told <= len(raw) + taken + 2_000


def test_text_with_too_many_values_counts_as_wide() -> None:
    raw = '{"x":["🙂",'.encode() + b"1," * 40_000 + b"0]}"
    assert count_wide_text_bytes(raw, parse_weighed_json(raw)) == 3 * len(raw)
    for spelled, wide in ((b"a", 0), (b"a\\n", 0), (b"\\u00e9", 3)):
        other = raw.replace("🙂".encode(), spelled)
        assert count_wide_text_bytes(other, parse_weighed_json(other)) == wide * len(other)


def test_every_array_and_object_costs_memory_also_if_it_is_empty() -> None:
    raw = b'{"x":[' + b",".join([b"[]"] * 1_000) + b"]}"
    assert count_object_bytes(raw, parse_weighed_json(raw)) == 100 * 1_001 + 120 * 1_002


def test_only_long_texts_are_heavier_than_a_limit() -> None:
    assert not is_heavier_json(filled(b"[],", LONG_BYTES - 100), 1000)
    assert is_heavier_json(filled(b"[],", LONG_BYTES + 100), 1000)
    assert not is_heavier_json(b'{"x":"' + b"[],{}" * LONG_BYTES + b'"}', 1000)


def test_garbage_collector_is_disabled_only_while_reading() -> None:
    looks: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(phase)

    raw = filled(b"[],")
    gc.callbacks.append(note)
    try:
        value = parse_weighed_json(raw)
        while_reading = len(looks)
    finally:
        gc.callbacks.remove(note)
    assert len(value["x"]) > 60_000
    assert while_reading == 0
    assert gc.isenabled()
    with pytest.raises(orjson.JSONDecodeError):
        parse_weighed_json(raw[:-1])
    assert gc.isenabled()


@pytest.mark.parametrize(
    "unit", [b"[],", b"{},", b"1,", b'"",', b'{"a":1},', b'"a, [b] {c}",', b'"\\"",', b"[[1,2],[3]],"]
)
def test_bounds_are_no_less_than_what_a_text_weighs(unit: bytes) -> None:
    raw = filled(unit, 200_000)
    elements, memory_bytes = bound_element_counts(raw)
    assert elements >= estimate_weight(raw).elements
    assert memory_bytes + 140 >= count_weight(raw, 10**9).memory_bytes
