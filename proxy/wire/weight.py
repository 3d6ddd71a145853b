"""What a JSON text weighs: how long it takes to read it, and what it becomes in memory. Told before it is read.

Three bytes, `[],`, become a Python object that takes 72 bytes and as long as a kilobyte of a picture does. So the bytes
are counted that elements begin or end with, which is many times as fast as reading them.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, Final, NamedTuple

import orjson

LONG_BYTES: Final = 1024 * 1024
"""To read such a text takes a millisecond or more, whatever it is; a shorter one takes 30 at most."""

MAX_ANSWER_ELEMENTS: Final = 8 * 1024 * 1024
"""More than any engine's answer has, or any event of one. Log probabilities are the most there is: 70 for a token with
those of five others, in OpenAI's form."""

SLIGHT_BYTES: Final = 1024
"""What such a text becomes is no more than a connection itself takes: it need not be weighed."""
# The middle of a long string is looked for in steps of this many bytes.
_STEP_BYTES: Final = 64 * 1024
# What may stand outside of strings.
_NO_STRING: Final = b"0123456789+-.eE,:[]{} \t\r\ntrufalsn"
# How many values are searched for wide strings, in a millisecond or two.
_MAX_LOOKS: Final = 10_000
# A shorter text is no reason to keep the collector from looking, nor to look how wide its strings are.
_MANY_BYTES: Final = 64 * 1024


class Weight(NamedTuple):
    """How often the bytes occur that make a text costly; at least as often as they do outside of strings."""

    commas: int
    quotes: int
    brackets: int
    """Opening brackets, of arrays and objects."""
    escapes: int

    @property
    def elements(self) -> int:
        """The time it takes to read, in units of a number's, which are 30 ns: a string, which may be a name, is 8 and
        an array or an object 16, with what the gateway does about each message or prompt.
        """
        return self.commas + 4 * self.quotes + 16 * self.brackets + self.escapes

    @property
    def memory_bytes(self) -> int:
        """What Python's objects take, besides the text of strings."""
        return 40 * self.commas + 30 * self.quotes + 120 * self.brackets


def weigh(raw: bytes) -> Weight:
    """The most that a text weighs: what is in strings counts as if it were elements, except in long ones."""
    commas = quotes = brackets = escapes = 0
    for start in range(0, len(raw), _STEP_BYTES):
        end = start + _STEP_BYTES
        if is_within_string(raw, start, end):
            continue
        quotes += _count(raw, b'"', start, end)
        escapes += _count(raw, b"\\", start, end)
        commas += raw.count(b",", start, end)
        brackets += _count(raw, b"[", start, end) + _count(raw, b"{", start, end)
    return Weight(commas, quotes, brackets, escapes)


def is_within_string(raw: bytes | bytearray, start: int, end: int) -> bool:
    """Whether a part of a text is the middle of a long string, or of a key: no quote, and no number."""
    return raw.find(b'"', start, end) < 0 and bool(raw[start : min(start + 64, end)].strip(_NO_STRING))


def bounds(raw: bytes) -> tuple[int, int]:
    """The most `elements` and `memory_bytes` that a text can have, in a part of the time that weighing it takes.

    Quotes and escapes are not counted, of which prose has many: each byte might be a quote, and in front of each comma
    are two strings at most.
    """
    commas = raw.count(b",")
    brackets = 0
    for start in range(0, len(raw), _STEP_BYTES):
        end = start + _STEP_BYTES
        brackets += _count(raw, b"[", start, end) + _count(raw, b"{", start, end)
    return commas + 16 * brackets + 4 * len(raw), 100 * commas + 120 * brackets


def is_light(raw: bytes, limit: int) -> bool:
    """Whether a text that can be read has no more elements than that, whatever is in it: two bytes, `[]`, are 16."""
    return 8 * len(raw) <= limit


def weigh_closely(raw: bytes, limit: int) -> Weight:
    """What a text weighs: of what is in strings only the escapes count. Takes several times as long.

    `limit`: elements beyond which it need not be known how many there are.
    """
    escapes = raw.count(b"\\")
    if escapes > limit:
        return Weight(0, 0, 0, escapes)
    text = without_escapes(raw)
    told = Weight(0, text.count(b'"'), 0, escapes)
    if told.elements > limit:
        return told
    outside = b"".join(text.split(b'"')[::2])
    return told._replace(commas=outside.count(b","), brackets=outside.count(b"[") + outside.count(b"{"))


def is_heavier(raw: bytes, limit: int) -> bool:
    """Whether a text has more elements than that, for one that may be `LONG_BYTES` long; a shorter one has not, and who
    reads many need not ask for those.
    """
    return len(raw) > LONG_BYTES and weigh(raw).elements > limit and weigh_closely(raw, limit).elements > limit


def without_escapes(raw: bytes) -> bytes:
    """A text as long as this, in which every quote begins or ends a string."""
    return raw.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in raw else raw


def load(raw: bytes | bytearray | memoryview) -> Any:
    """What `orjson.loads` makes of a text, in a time that does not depend on what else there is.

    Python's collector would look at the same new objects again and again while there come more, and find nothing.
    """
    if len(raw) < _MANY_BYTES or not gc.isenabled():
        return orjson.loads(raw)
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        gc.enable()


def object_bytes(raw: bytes, value: Any) -> int:
    """The most that Python's objects of a text that was read take, besides the text of strings; as `weigh` tells,
    where there is too much to look at.
    """
    members = containers = 0
    left = [value]
    while left:
        item = left.pop()
        containers += 1
        members += len(item)
        if members > _MAX_LOOKS:
            return weigh(raw).memory_bytes
        left += [each for each in (item.values() if isinstance(item, dict) else item) if isinstance(each, dict | list)]
    return 100 * members + 120 * containers


def wide_bytes(raw: bytes, value: Any) -> int:
    """What the strings of a text that was read take beyond a byte for each character.

    Python keeps all characters of a string in as many bytes as the widest of them needs: one emoji makes megabytes four
    times as many. Where there is too much to look at, all of it may be one such string; a short text is not looked at.
    """
    if len(raw) < _MANY_BYTES:
        return 0
    wide = 0
    looks_left = _MAX_LOOKS
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not item.isascii():  # of which a string knows whether it is
                wide += max(0, sys.getsizeof(item) - sys.getsizeof("") - len(item))
        elif isinstance(item, dict | list):
            looks_left -= len(item)
            if looks_left < 0:
                # To look for one byte is many times as fast as for two.
                has_none = raw.isascii() and (b"\\" not in raw or b"\\u" not in raw)
                return 0 if has_none else 3 * len(raw)
            left += item.values() if isinstance(item, dict) else item
    return wide


def _count(raw: bytes, sign: bytes, start: int, end: int) -> int:
    """To look for what is not there takes a tenth of the time of counting it."""
    return raw.count(sign, start, end) if raw.find(sign, start, end) >= 0 else 0
