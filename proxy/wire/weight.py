"""Estimates the time to parse a JSON text, and the memory of its objects, before it is parsed.

Three bytes, `[],`, become a Python object of 72 bytes that takes as long to read as a kilobyte of a picture. So the
estimate counts the bytes with which elements begin or end. That is many times faster than reading the text.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, Final, NamedTuple

import orjson

LONG_BYTES: Final = 1024 * 1024
"""The length in bytes from which a text takes at least a millisecond to parse. Shorter texts take at most 30 ms."""

MAX_ANSWER_ELEMENTS: Final = 8 * 1024 * 1024
"""A number of elements that no answer of an engine, or event of one, reaches.

Log probabilities have the most: in the format of OpenAI 70 elements for a token with five alternatives.
"""

ALWAYS_LIGHT_BYTES: Final = 1024
"""Maximum length in bytes of a text that is not weighed, because it takes no more memory than a connection."""
# Texts are searched for the middles of long strings in steps of this size.
_STEP_BYTES: Final = 64 * 1024
# Characters of JSON outside of strings.
_CHARACTERS_OUTSIDE_STRINGS: Final = b"0123456789+-.eE,:[]{} \t\r\ntrufalsn"
# How many values are searched for wide strings. The search takes a millisecond or two.
_MAX_SEARCHED_VALUES: Final = 10_000
# For a shorter text the garbage collector stays enabled, and the width of its strings is not checked.
_MANY_BYTES: Final = 64 * 1024


class JsonWeight(NamedTuple):
    """Upper bounds of how often a JSON text has the bytes that make it costly to parse."""

    commas: int
    quotes: int
    brackets: int
    """Opening brackets of arrays and objects."""
    escapes: int

    @property
    def elements(self) -> int:
        """The time to parse the text, in units of 30 ns, which is the time of one number.

        A string or name counts 8, an array or object 16. This includes the work of the gateway on messages and prompts.
        """
        return self.commas + 4 * self.quotes + 16 * self.brackets + self.escapes

    @property
    def memory_bytes(self) -> int:
        """The memory of the Python objects in bytes, without the text of strings."""
        return 40 * self.commas + 30 * self.quotes + 120 * self.brackets


def estimate_weight(raw: bytes) -> JsonWeight:
    """Return an upper bound of a JSON text's weight. Bytes in the middle of long strings are not counted."""
    commas = quotes = brackets = escapes = 0
    for start in range(0, len(raw), _STEP_BYTES):
        end = start + _STEP_BYTES
        if is_within_string(raw, start, end):
            continue
        quotes += _count_sign(raw, b'"', start, end)
        escapes += _count_sign(raw, b"\\", start, end)
        commas += raw.count(b",", start, end)
        brackets += _count_sign(raw, b"[", start, end) + _count_sign(raw, b"{", start, end)
    return JsonWeight(commas, quotes, brackets, escapes)


def is_within_string(raw: bytes | bytearray, start: int, end: int) -> bool:
    """Return whether a part of a text is inside one long string or key."""
    return raw.find(b'"', start, end) < 0 and bool(raw[start : min(start + 64, end)].strip(_CHARACTERS_OUTSIDE_STRINGS))


def bound_element_counts(raw: bytes) -> tuple[int, int]:
    """Return upper bounds of `elements` and `memory_bytes`. This is faster than `estimate_weight`.

    Quotes and escapes, which are frequent in prose, are not counted. Each byte may be a quote, and at most two strings
    are before each comma.
    """
    commas = raw.count(b",")
    brackets = 0
    for start in range(0, len(raw), _STEP_BYTES):
        end = start + _STEP_BYTES
        brackets += _count_sign(raw, b"[", start, end) + _count_sign(raw, b"{", start, end)
    return commas + 16 * brackets + 4 * len(raw), 100 * commas + 120 * brackets


def is_light_json(raw: bytes, limit: int) -> bool:
    """Return whether a text is too short to have more than `limit` elements.

    The smallest text per element is an empty list, whose two bytes count as 16 elements.
    """
    return 8 * len(raw) <= limit


def count_weight(raw: bytes, limit: int) -> JsonWeight:
    """Return the weight of a text. In strings, only escapes are counted. Slower than `estimate_weight`.

    Counting may stop when there are more elements than `limit`.
    """
    escapes = raw.count(b"\\")
    if escapes > limit:
        return JsonWeight(0, 0, 0, escapes)
    text = remove_escapes(raw)
    weight = JsonWeight(0, text.count(b'"'), 0, escapes)
    if weight.elements > limit:
        return weight
    outside = b"".join(text.split(b'"')[::2])
    return weight._replace(commas=outside.count(b","), brackets=outside.count(b"[") + outside.count(b"{"))


def is_heavier_json(raw: bytes, limit: int) -> bool:
    """Return whether a text has more elements than `limit`. A text of at most `LONG_BYTES` never counts as heavier.

    Callers that read many texts need not check short ones.
    """
    return len(raw) > LONG_BYTES and estimate_weight(raw).elements > limit and count_weight(raw, limit).elements > limit


def remove_escapes(raw: bytes) -> bytes:
    """Return a text of the same length in which every quote is the beginning or the end of a string."""
    return raw.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in raw else raw


def parse_weighed_json(raw: bytes | bytearray | memoryview) -> Any:
    """Read a text with `orjson.loads` while the garbage collector is disabled.

    Otherwise the collector would scan the growing number of new objects again and again, and find no garbage.
    """
    if len(raw) < _MANY_BYTES or not gc.isenabled():
        return orjson.loads(raw)
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        gc.enable()


def count_object_bytes(raw: bytes, value: Any) -> int:
    """Return an upper bound of the memory of the Python objects of a text, without the text of strings.

    A text with too many objects to count is weighed instead.
    """
    members = containers = 0
    left = [value]
    while left:
        item = left.pop()
        containers += 1
        members += len(item)
        if members > _MAX_SEARCHED_VALUES:
            return estimate_weight(raw).memory_bytes
        left += [each for each in (item.values() if isinstance(item, dict) else item) if isinstance(each, dict | list)]
    return 100 * members + 120 * containers


def count_wide_text_bytes(raw: bytes, value: Any) -> int:
    """Return the additional memory in bytes of strings whose characters need more than one byte.

    Python stores all characters of a string with the width of the widest one, so one emoji makes a string four times
    as large. A text with too many objects counts as one such string. A short text counts as 0.
    """
    if len(raw) < _MANY_BYTES:
        return 0
    wide = 0
    looks_left = _MAX_SEARCHED_VALUES
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not item.isascii():
                wide += max(0, sys.getsizeof(item) - sys.getsizeof("") - len(item))
        elif isinstance(item, dict | list):
            looks_left -= len(item)
            if looks_left < 0:
                # Searching one byte is many times faster than searching two.
                has_none = raw.isascii() and (b"\\" not in raw or b"\\u" not in raw)
                return 0 if has_none else 3 * len(raw)
            left += item.values() if isinstance(item, dict) else item
    return wide


def _count_sign(raw: bytes, sign: bytes, start: int, end: int) -> int:
    """Count how often a byte occurs in a part of a JSON text."""
    return raw.count(sign, start, end) if raw.find(sign, start, end) >= 0 else 0
