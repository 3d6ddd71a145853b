"""Reads and writes JSON that orjson rejects, in the same way as Python's parser.

Engines are written in Python. Its parser accepts more than the grammar allows: half of a surrogate pair (an emoji that
was cut in two), `NaN` and `Infinity`, and whole numbers of more than 64 bits. orjson is tried first, because it reads
nearly every text.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

_MAX_INT_DIGITS: Final = 4300
"""Maximum number of digits of a whole number that Python reads. Longer numbers would take quadratic time."""
_MAX_DEPTH: Final = 1000
"""Maximum nesting of arrays and objects, about that of orjson. The limit of Python depends on its version."""
_MAX_WRITTEN_DEPTH: Final = 900
"""The depth that Python 3.11 can write during a request. Later versions write more than engines can read."""


def _parse_digits(digits: str) -> float:
    """Return a whole number as a float, as orjson does for all numbers of more than 64 bits."""
    return int(digits) if len(digits) < _MAX_INT_DIGITS else float(digits)


_decode_strictly: Final = json.JSONDecoder().decode
_decode_like_python: Final = json.JSONDecoder(strict=False).decode
_decode_long_numbers: Final = json.JSONDecoder(strict=False, parse_int=_parse_digits).decode


def loads(raw: bytes) -> Any:
    """Read the JSON text of an engine, whose strings may have control characters.

    Raises orjson.JSONDecodeError if Python cannot read the text either.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            return parse_again(raw)
        except ValueError:
            raise error from None


def parse_again(raw: bytes) -> Any:
    """Parse a JSON text that orjson rejected. Raises ValueError."""
    text = raw.decode("utf-8", "surrogatepass")
    try:
        try:
            value = _decode_like_python(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # a whole number is too long
            value = _decode_long_numbers(text)
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    check_nesting_depth(value)
    return value


def check_nesting_depth(value: Any, max_depth: int = _MAX_DEPTH) -> None:
    """Raise ValueError for a value that is nested too deeply to be written."""
    level = [value]
    for _ in range(max_depth):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    raise ValueError("the text is nested too deeply")


def dumps(value: Any) -> bytes:
    """Write JSON that every parser can read. Half of a surrogate pair becomes an escape.

    Raises orjson.JSONEncodeError for a value that cannot be written, or is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        return _write_python_json(value, error)


def _write_python_json(value: Any, error: Exception) -> bytes:
    try:
        check_nesting_depth(value, _MAX_WRITTEN_DEPTH)
        try:
            text = _encode_like_python(value)
        except ValueError:
            text = _encode_like_python(_replace_infinity(value))
    except (RecursionError, TypeError, ValueError):
        raise error from None
    # A surrogate occurs only in strings. JSON and Python have the same escape for it.
    return text.encode("utf-8", "backslashreplace")


def _replace_fragments(value: Any) -> Any:
    """Return the value of a Fragment, or of another object that only orjson can write."""
    return parse_again(orjson.dumps(value))


_encode_like_python: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_replace_fragments
).encode


def _replace_infinity(value: Any) -> Any:
    """Return the value with null in place of `NaN` and `Infinity`, as orjson writes them."""
    if isinstance(value, dict):
        return {name: _replace_infinity(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encode_utf8(text: str) -> bytes:
    """Encode a text that may have half of a surrogate pair. `replace_surrogates` decodes it."""
    return text.encode("utf-8", "surrogatepass")


def replace_surrogates(written: bytes | bytearray) -> str:
    """Decode bytes that `encode_utf8` encoded."""
    return written.decode("utf-8", "surrogatepass")


# Numbers and flags in another spelling: `10.0`, `"10"`, `"true"`
#
# Engines accept them, because their request models use pydantic in its lax mode. The same library reads them here, so a
# value that it rejects is one that engines reject.

_WHOLE_NUMBER_ADAPTER: Final = TypeAdapter(int)
_FLAG_ADAPTER: Final = TypeAdapter(bool)
# The error of pydantic is not shown, because it quotes the value.
_WRONG_TYPE_MESSAGE: Final = "neither that nor spelled like it"

# orjson reads whole numbers of more than 64 bits as floats, so they are inexact. A number of more than 308 digits
# becomes infinity. Python, and so an engine, rejects it if it has more than 4,300 digits.
_INEXACT_BOUND: Final = float(2**63)


def read_whole_number(value: object) -> object:
    """Read a JSON value as a whole number, as engines do.

    A number of more than 64 bits is unchanged. Raises ValueError for other values.
    """
    if type(value) is int or (isinstance(value, float) and _INEXACT_BOUND <= abs(value) < math.inf):
        return value
    try:
        number = _WHOLE_NUMBER_ADAPTER.validate_python(value)
    except ValidationError:
        raise ValueError(_WRONG_TYPE_MESSAGE) from None
    return number if -(2**63) <= number < 2**64 else value


def read_flag(value: object) -> object:
    """Read a JSON value as a boolean, as engines do. Raises ValueError for any other value."""
    if isinstance(value, bool):
        return value
    try:
        return _FLAG_ADAPTER.validate_python(value)
    except ValidationError:
        raise ValueError(_WRONG_TYPE_MESSAGE) from None
