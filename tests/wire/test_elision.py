"""Test excerpts of long JSON texts."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.members import count_text_bytes, excerpt_value
from proxy.wire.weight import LONG_BYTES

KIB = 1024
UNITS = ["x", "QUJD", "é", "日本", "🙂", "a\n", 'say "no" ', "\\", "1, ", " ", "null", "0123456789"]


def lengths(value: Any, length: Any) -> Any:
    """Replace each string in a value by its length."""
    match value:
        case str():
            return length(value)
        case list():
            return [lengths(item, length) for item in value]
        case dict():
            return {name: lengths(item, length) for name, item in value.items()}
    return value


@settings(deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(UNITS), st.integers(0, 300 * KIB)), min_size=1, max_size=6),
    offset=st.integers(0, 9),
)
def test_excerpt_knows_the_exact_length_of_strings(parts: list[tuple[str, int]], offset: int) -> None:
    value = [{"content": unit * (size // len(unit)), "n": [1.5, None, list(range(size // 8))]} for unit, size in parts]
    value.append({"content": "x" * (LONG_BYTES - 100)})
    raw = b" " * offset + orjson.dumps(value) + b", " * offset
    told, length = excerpt_value(raw, offset, len(raw) - 2 * offset)
    assert lengths(told, length) == lengths(value, count_text_bytes)


def test_excerpt_of_a_short_text_is_complete() -> None:
    raw = orjson.dumps(["x" * 900 * KIB])
    assert excerpt_value(raw, 0, len(raw)) == (["x" * 900 * KIB], count_text_bytes)


@pytest.mark.parametrize("unit", [b"1,", b"0.5, ", b" ", b"null,", b"[],"])
def test_excerpt_keeps_everything_between_strings(unit: bytes) -> None:
    raw = b"[" + unit * (2 * LONG_BYTES // len(unit)) + b'0, "x"]'
    assert excerpt_value(raw, 0, len(raw))[0] == orjson.loads(raw)


def test_excerpt_does_not_read_the_middle_of_a_picture() -> None:
    picture = "data:image/png;base64," + "QUJD" * 2 * KIB * KIB
    raw = orjson.dumps([{"type": "image_url", "image_url": {"url": picture}}])
    told, length = excerpt_value(bytearray(raw), 0, len(raw))
    url = told[0]["image_url"]["url"]
    assert told[0]["type"] == "image_url"
    assert len(url) < 128 * KIB
    assert length(url) == len(picture)
