"""Changes of a JSON object by splicing, compared with Python's parser."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

import orjson

from proxy.wire.document import REMOVED, Document, InvalidDocument, join_body
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    "a" "stream" "model" "messages" "prompt" "kv_transfer_params" "" : , \x20:\x20 true null NaN -Infinity 1e400
    -0.0 18446744073709551616 1.50 1E+5 01 [1,2] {"a":1} [[ ]] {"b":[ ]} [*40 ]*40 [*260 ]*260 \\u0061
    \\ud83d\\ude42 \\ud800 \\" \\\\ \\n "\\u0061" "\\\\" \xc3\xbc \xff \xed\xa0\x80 \xef\xbb\xbf \xe2\x80\xa8
    x*100 \\*70 a*9000
    """
)

# The first byte selects one of these changes.
_CHANGES: tuple[dict[str, object], ...] = (
    {},
    {"stream": True},
    {"a": REMOVED},
    {"a": {"b": [1, None]}, "new": orjson.Fragment(b'{"x" :1}')},
    {"": 'ü"\\\n', "stream": REMOVED, "a": False},
    {"model": REMOVED, "messages": REMOVED, "prompt": [1, 2], "kv_transfer_params": {"a": "b"}},
)
_DEPTH = 200  # what every parser reads and orjson writes


def check_documents(data: bytes) -> None:
    """Check that splicing changes an object as a dictionary would, and no other bytes, or raises InvalidDocument."""
    changes, raw = _CHANGES[(data[0] if data else 0) % len(_CHANGES)], spelled(data[1:], WORDS)
    try:
        document = Document(raw)
    except InvalidDocument as error:
        text = str(error)
        assert text.isascii()
        assert len(text) < 80, "the message must not hold the body"
        assert not _must_be_accepted(raw)
        return
    try:
        values = _spelled(raw)
    except RecursionError:
        return  # too deep for Python's parser
    assert not _names_twice(raw)
    assert list(document.values) == list(values)
    for name, value in values.items():
        found = document.raw_value(name) or b""
        assert _spelled(found) == value
        assert found in raw
        assert repr(document.values[name]) == repr(json.loads(found)) or not _is_exact(found)
    changed = join_body(document.make_changed_body(changes))
    expected = _with_changes(values, changes)
    assert _spelled(changed) == expected
    assert list(_spelled(changed)) == list(expected)
    if _is_shallow(raw):
        again = join_body(Document(changed).make_changed_body({"stream": REMOVED}))
        assert _spelled(again) == _with_changes(expected, {"stream": REMOVED})


def _is_exact(raw: bytes) -> bool:
    """Return whether all parsers agree. Some read integers of more than 64 bits as fractions."""
    return re.search(rb"[0-9]{19}", raw) is None


def _spelled(raw: bytes) -> Any:
    """Parse with Python's parser. Numbers keep their spelling."""
    return json.loads(raw.decode(), parse_int=_Number, parse_float=_Number, parse_constant=_Number)


class _Number(str):
    __slots__ = ()


def _with_changes(values: dict[str, Any], changes: dict[str, object]) -> dict[str, Any]:
    new = {name: value if value is REMOVED else _spelled(orjson.dumps(value)) for name, value in changes.items()}
    return {name: value for name, value in {**values, **new}.items() if value is not REMOVED}


def _must_be_accepted(raw: bytes) -> bool:
    """Return whether every parser reads one object of moderate depth with different names."""
    if not _is_shallow(raw):
        return False
    try:
        pairs = json.loads(
            raw.decode(), object_pairs_hook=_Pairs, parse_constant=_refuse, parse_float=_finite, parse_int=_finite
        )
        json.dumps(pairs, ensure_ascii=False).encode()  # half a surrogate pair has no bytes
    except (ValueError, RecursionError):
        return False
    return isinstance(pairs, _Pairs) and len({name for name, _ in pairs}) == len(pairs)


def _names_twice(raw: bytes) -> bool:
    pairs = json.loads(raw.decode(), object_pairs_hook=_Pairs)
    return len({name for name, _ in pairs}) < len(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The members of an object, as written."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _is_shallow(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") < _DEPTH
